"""How `logprob_cuda` cuts its work, and what it does where nobody says."""

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from bucketrl.kernels.reference import IGNORE_INDEX

logger = logging.getLogger(__name__)

HOPPER_BLOCK = 256
"""Columns of a tile of the Hopper kernel."""
HOPPER_TRITON = (3, 6)
"""The oldest Triton whose Gluon compiles the Hopper kernel."""
HOPPER_TOLERANCE = 0.01
"""Relative to the norm of a row's results; bfloat16 rounding is 0.004, a misplaced tile 0.1 and more."""


@dataclass(frozen=True)
class Plan:
    """How the work is cut. Results differ between plans by rounding only."""

    first: Literal["cublas", "triton", "hopper"] = "cublas"
    """What forms E: cuBLAS and a pass over the logits, or one kernel of ours, whose logits stay in registers.

    "hopper" is the same kernel as "triton", for one kind of GPU; "triton" does what it cannot: a softcap."""
    columns: int = 0
    """Columns of float32 logits that exist at once; a few thousand stay in the L2 cache. 0: all of them."""
    workspace_bytes: int = 2 << 30
    """For the logits and E of one chunk of rows."""
    block: int = 4096
    """Columns per program of the pass over the logits, or of a tile of our GEMM. Divides `columns`."""
    warps: int = 8
    rows_per_tile: int = 128
    stages: int = 3
    resident: int = 1
    """Programs of "triton" on one multiprocessor: two hide each other's ends of tiles."""

    def __post_init__(self) -> None:
        if self.columns % self.block:
            raise ValueError(f"columns is {self.columns}; it must be a multiple of block, {self.block}")
        if self.first == "hopper" and self.block != HOPPER_BLOCK:
            raise ValueError(f'block is {self.block}; with first="hopper" it must be {HOPPER_BLOCK}')

    def rows(self, vocabulary: int) -> int:
        """Rows of a chunk: a power of two, so that the GEMMs' tiles are full."""
        logits = 4 * (self.columns or vocabulary) if self.first == "cublas" else 0
        return 1 << max(0, (self.workspace_bytes // (2 * vocabulary + logits)).bit_length() - 1)


HOPPER = Plan(first="hopper", block=HOPPER_BLOCK, stages=4)


def plan_for(plan: Plan | None, hidden_NH: Tensor, weight_VH: Tensor, softcap: float | None) -> Plan:
    """`plan`, or the fastest that is seen to be right here, as far as these operands can have it."""
    device = hidden_NH.device
    if not _has_descriptors(hidden_NH, weight_VH):
        return replace(plan, first="cublas") if plan else Plan()
    hopper = softcap is None and is_hopper(device)
    if plan is None:
        return HOPPER if hopper and hopper_is_right(device) else Plan()
    return replace(plan, first="triton") if plan.first == "hopper" and not hopper else plan


def _has_descriptors(*matrices: Tensor) -> bool:
    """Whether our GEMM can read these: Hopper and later, rows that start on 16 bytes and do not overlap."""
    device = matrices[0].device
    return all(
        matrix.stride(0) % 8 == 0 and matrix.stride(0) >= matrix.shape[1] and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    ) and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0))


def is_hopper(device: torch.device) -> bool:
    """Blackwell is not: it has other instructions for the same."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def hopper_is_right(device: torch.device) -> bool:
    """Whether the Hopper kernel compiles here and gives what it should: tried once for each device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "linear_logprob tries its kernel at the first call: make one before a graph's capture"
        )
    try:
        error = hopper_error(device)
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel, and what is returned here is kept
    except Exception as problem:  # noqa: BLE001 Gluon is experimental: whatever fails, cuBLAS is as good
        reason = f"{type(problem).__name__}: {problem}"[:300]
        logger.warning("no Hopper kernel for the output head (%s): cuBLAS instead, which is slower", reason)
        return False
    if not error <= HOPPER_TOLERANCE:
        logger.warning(
            "the Hopper kernel for the output head is wrong here (by %.2g): cuBLAS instead, which is slower",
            error,
        )
        return False
    return True


def hopper_error(device: torch.device) -> float:
    """The largest relative error of a row of the Hopper kernel's results against float64.

    Of E, the anchors, Σ E and Σ E (z - anchor), over ragged tiles of rows and columns, several for each program;
    one row is ignored, the anchor of another would overflow.
    """
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < HOPPER_TRITON:
        raise RuntimeError(
            f"Triton is {triton.__version__}; want {'.'.join(map(str, HOPPER_TRITON))} or later"
        )
    from bucketrl.kernels import logprob_hopper

    rows, size, vocabulary, tiles = 200, 328, 1000, 4
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)

    hidden_NH, weight_VH = normal(rows, size), normal(vocabulary, size).mul_(3 / size**0.5).bfloat16()
    hidden_NH[1] *= 30
    hidden_NH = hidden_NH.bfloat16()
    targets_N = torch.arange(0, 5 * rows, 5, device=device)
    inverse_N = torch.linspace(0.5, 2.0, rows, dtype=torch.float32, device=device)
    logits_NV = (hidden_NH.double() @ weight_VH.double().T) * inverse_N[:, None]
    targets_N[0] = IGNORE_INDEX
    target_N = logits_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0].float()
    exp_NV = hidden_NH.new_full((rows, vocabulary), torch.nan)
    sums_3KN = target_N.new_full((3, tiles, rows), torch.nan)
    logprob_hopper.gemm_exp(
        hidden_NH, weight_VH, targets_N, inverse_N, target_N, exp_NV, sums_3KN, store=True, programs=3
    )
    column_V = torch.arange(vocabulary, device=device)
    own_NV = (column_V == targets_N[:, None]) | (targets_N == IGNORE_INDEX)[:, None]
    missing = tiles * HOPPER_BLOCK - vocabulary
    z_NKB = pad(logits_NV, (0, missing), value=-torch.inf).view(rows, tiles, HOPPER_BLOCK)
    top_NK, low_N1 = z_NKB.amax(2), target_N.double()[:, None]
    anchor_NK = torch.where(top_NK > low_N1 + 60.0, top_NK, low_N1)
    d_NKB = z_NKB - anchor_NK[:, :, None]
    e_NKB = d_NKB.exp().masked_fill(pad(own_NV, (0, missing)).view_as(d_NKB), 0.0)
    want = [
        e_NKB.flatten(1)[:, :vocabulary],
        anchor_NK,
        e_NKB.sum(2),
        (e_NKB * d_NKB.clamp(min=-1e4)).sum(2),
    ]
    errors = [
        (found - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)
        for found, exact in zip([exp_NV, *sums_3KN.mT], want, strict=True)
    ]
    return float(torch.stack(errors).max())
