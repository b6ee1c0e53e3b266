"""`linear_logprob` for a bfloat16 head on a GPU.

The first GEMM and the pass over its logits: `logprob_hopper`, or cuBLAS and `logprob_triton`. The second: cuBLAS.

Shape suffixes: N rows, H hidden size, V vocabulary, C columns of the logits that exist at once.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from bucketrl.kernels import logprob_triton as kernels
from bucketrl.kernels.logprob_plan import Plan, is_hopper, plan_for
from bucketrl.kernels.reference import check_operands
from bucketrl.kernels.triton_here import on_device_of

CUT_OFF = 9.3e-10
"""What a sum of H products on Hopper's tensor cores loses of itself, divided by H: they cut off and never round.

Measured on an H200 with normal operands, cuBLAS' GEMM and ours alike: 8.9e-10 at H 2048, 9.4e-10 at 4096, 9.6e-10
at 8192 (1.4e-9 where a few hidden dimensions are 30 times the others). All logits shrink but the target's, which is
exact, and its log-probability is too high: by 2.5e-5 at H 4096 and a standard deviation of 2.5, made good 1.4e-6.
"""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    softcap: float | None = None,
    entropy_grad: bool = False,
    grad_rows_N: Tensor | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.linear_logprob` for bfloat16 operands; the same arguments, results and errors.

    plan: by default the fastest that is seen to be right here. `grad_rows_N` on the CPU keeps the host from
    waiting for the GPU. Kept for backward: [N, H] bfloat16, for the rows that want a gradient; twice that with
    `entropy_grad`. Raises NotImplementedError for `entropy_grad` under a softcap.
    """
    check_operands(hidden_NH, weight_VH, targets_N)
    if entropy_grad and softcap is not None:
        raise NotImplementedError("entropy_grad under a softcap: use reference.linear_logprob")
    apply: Any = _LinearLogprob.apply
    with torch.autocast(hidden_NH.device.type, enabled=False), on_device_of(hidden_NH):
        logprobs_N, entropy_N = apply(
            hidden_NH, weight_VH, targets_N, temperature, softcap, entropy_grad, grad_rows_N, plan
        )
    return logprobs_N, entropy_N


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature: float | Tensor,
        softcap: float | None,
        entropy_grad: bool,
        grad_rows_N: Tensor | None,
        plan: Plan | None,
    ) -> tuple[Tensor, Tensor]:
        count, device = hidden_NH.shape[0], hidden_NH.device
        wanting = count if ctx.needs_input_grad[0] else 0
        order = None
        if isinstance(temperature, Tensor):
            inverse_N = (1.0 / temperature.to(device, torch.float32)).expand(count)
        else:
            inverse_N = torch.full((count,), 1.0 / temperature, dtype=torch.float32, device=device)
        hidden_NH = hidden_NH if hidden_NH.stride(1) == 1 else hidden_NH.contiguous()
        if grad_rows_N is not None and wanting:
            wanting = int(grad_rows_N.sum())
            order = torch.argsort(~grad_rows_N, stable=True).to(device, non_blocking=True)
            hidden_NH, targets_N, inverse_N = hidden_NH[order], targets_N[order], inverse_N[order]
        logprobs_N = torch.empty(count, dtype=torch.float32, device=device)
        entropy_N = torch.empty_like(logprobs_N)
        slopes = [
            torch.empty(wanting, hidden_NH.shape[1], dtype=hidden_NH.dtype, device=device)
            for _ in range((1 + entropy_grad) if ctx.needs_input_grad[0] else 0)
        ]
        plan = plan_for(plan, hidden_NH, weight_VH, softcap)
        scratch = _Scratch(hidden_NH, weight_VH, plan, with_gradient=bool(slopes))
        bounds = [(0, wanting, slopes), (wanting, count, [])]
        for start, stop, wanted in bounds:
            for first in range(start, stop, scratch.rows):
                rows = slice(first, min(first + scratch.rows, stop))
                scratch.work(
                    hidden_NH[rows],
                    targets_N[rows].contiguous(),
                    inverse_N[rows].contiguous(),
                    softcap,
                    (logprobs_N[rows], entropy_N[rows]),
                    [slope[rows] for slope in wanted],
                )
        if order is not None:
            logprobs_N = torch.empty_like(logprobs_N).index_copy_(0, order, logprobs_N)
            entropy_N = torch.empty_like(entropy_N).index_copy_(0, order, entropy_N)
            order = order[:wanting]
        ctx.save_for_backward(order, *slopes)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        order, *slopes = ctx.saved_tensors
        chosen = [(grad if order is None else grad[order]).float().contiguous() for grad in grads]
        grad_hidden_NH = torch.empty_like(slopes[0])
        scale_rows(list(zip(chosen, slopes, strict=False)), grad_hidden_NH)
        if order is not None:
            full = grad_hidden_NH.new_zeros(len(grads[0]), grad_hidden_NH.shape[1])
            grad_hidden_NH = full.index_copy_(0, order, grad_hidden_NH)
        return grad_hidden_NH, *[None] * 7


class _Scratch:
    """The buffers of one call, used again by each chunk of rows."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, plan: Plan, with_gradient: bool) -> None:
        self._weight_VH = weight_VH
        self._plan = plan
        self._made_good = 1.0 + (CUT_OFF * hidden_NH.shape[1] if is_hopper(hidden_NH.device) else 0.0)
        count, vocabulary = hidden_NH.shape[0], weight_VH.shape[0]
        self._columns = plan.columns or vocabulary
        self.rows = max(1, min(count, 32768, plan.rows(vocabulary)))
        self._tiles = triton.cdiv(vocabulary, plan.block)
        new = weight_VH.new_empty
        logits = self.rows * min(self._columns, vocabulary) if plan.first == "cublas" else 0
        self._logits = new(logits, dtype=torch.float32)
        # Rows that start on 16 bytes, for the GEMM.
        self._exp = new(self.rows if with_gradient else 1, triton.cdiv(vocabulary, 8) * 8)[:, :vocabulary]
        self._sums = new(3, self._tiles, self.rows, dtype=torch.float32)
        self._per_row = new(3, self.rows, dtype=torch.float32)

    def work(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        inverse_N: Tensor,
        softcap: float | None,
        results: tuple[Tensor, Tensor],
        slopes: list[Tensor],
    ) -> None:
        """Fills `results` and `slopes`: of the log-probability, and of the entropy if there are two."""
        count, size = hidden_NH.shape
        weight_VH, plan = self._weight_VH, self._plan
        vocabulary = weight_VH.shape[0]
        exp_NV, (anchor, total, weighted) = self._exp[:count], self._sums
        target_N, scale_N, mean_N = self._per_row
        cap = {"softcap": softcap or 1.0, "HAS_CAP": softcap is not None}
        store = {"STORE": bool(slopes), "BLOCK": plan.block}
        kernels.target_logits[(count,)](
            hidden_NH, weight_VH, targets_N, inverse_N, target_N, size, vocabulary,
            hidden_NH.stride(0), weight_VH.stride(0), **cap, BH=min(4096, triton.next_power_of_2(size)),
        )  # fmt: skip
        form = {"cublas": self._by_cublas, "triton": self._by_triton, "hopper": self._by_hopper}[plan.first]
        form(hidden_NH, targets_N, inverse_N * self._made_good, target_N, exp_NV, cap | store)
        kernels.finish_rows[(count,)](
            targets_N, inverse_N, target_N, exp_NV, anchor, total, weighted, *results, scale_N, mean_N,
            vocabulary, self._tiles, self.rows, exp_NV.stride(0), **cap, **store,
            BK=triton.next_power_of_2(self._tiles),
        )  # fmt: skip
        for order, slope_NH in enumerate(slopes):
            if order == 1:
                kernels.entropy_tile[(self._tiles, count)](
                    targets_N, inverse_N, *results, scale_N, mean_N, exp_NV, vocabulary, exp_NV.stride(0),
                    BLOCK=plan.block, num_warps=plan.warps,
                )  # fmt: skip
            product_NH = torch.empty_like(slope_NH, dtype=torch.float32)
            _matmul(exp_NV, weight_VH, product_NH)
            scale_rows([(scale_N, product_NH)], slope_NH)

    def _by_cublas(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        inverse_N: Tensor,
        target_N: Tensor,
        exp_NV: Tensor,
        switches: dict[str, Any],
    ) -> None:
        count, (vocabulary, _), plan = len(hidden_NH), self._weight_VH.shape, self._plan
        for first in range(0, vocabulary, self._columns):
            width = min(self._columns, vocabulary - first)
            logits_NC = self._logits[: count * width].view(count, width)
            _matmul(hidden_NH, self._weight_VH[first : first + width].T, logits_NC)
            kernels.exp_tile[(triton.cdiv(width, plan.block), count)](
                logits_NC, targets_N, inverse_N, target_N, exp_NV, *self._sums, first, vocabulary,
                width, self.rows, width, exp_NV.stride(0), **switches, num_warps=plan.warps,
            )  # fmt: skip

    def _by_triton(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        inverse_N: Tensor,
        target_N: Tensor,
        exp_NV: Tensor,
        switches: dict[str, Any],
    ) -> None:
        (count, size), plan, cuda = hidden_NH.shape, self._plan, hidden_NH.is_cuda
        depth = 64
        tiles = triton.cdiv(count, plan.rows_per_tile) * self._tiles
        programs = min(tiles, plan.resident * _multiprocessors(hidden_NH.device)) if cuda else tiles
        describe = TensorDescriptor.from_tensor
        kernels.gemm_exp[(programs,)](
            describe(hidden_NH, [plan.rows_per_tile, depth]),
            describe(self._weight_VH, [plan.block, depth]),
            describe(exp_NV, [plan.rows_per_tile, plan.block // 2]),
            targets_N, inverse_N, target_N, *self._sums, count, self._weight_VH.shape[0], size, self.rows,
            **switches, DOT=tl.bfloat16 if cuda else tl.float32, PROGRAMS=programs, BM=plan.rows_per_tile,
            BK=depth, GROUP=16, num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip

    def _by_hopper(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        inverse_N: Tensor,
        target_N: Tensor,
        exp_NV: Tensor,
        switches: dict[str, Any],
    ) -> None:
        # Needs Gluon, which not every Triton has.
        from bucketrl.kernels import logprob_hopper

        logprob_hopper.gemm_exp(
            hidden_NH, self._weight_VH, targets_N, inverse_N, target_N, exp_NV, self._sums,
            store=switches["STORE"], programs=_multiprocessors(hidden_NH.device),
        )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left · right, never rounded below float32."""
    if left.is_cuda:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        torch.mm(left.float(), right.float(), out=out)


def scale_rows(terms: list[tuple[Tensor, Tensor]], out_NH: Tensor) -> None:
    """out = Σ factor[:, None] · matrix over one or two terms, in float32, rounded once."""
    count, size = out_NH.shape
    (factor, matrix), (factor2, matrix2) = terms[0], terms[-1]
    if count:
        kernels.scale_rows[(count,)](
            matrix, factor, matrix2, factor2, out_NH, size, matrix.stride(0), out_NH.stride(0),
            TWO=len(terms) == 2, BH=min(4096, triton.next_power_of_2(size)),
        )  # fmt: skip
