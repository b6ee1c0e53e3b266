"""`packed_policy_loss` and `group_advantage` on a GPU, by `policy_triton`. The host reads nothing back."""

from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bucketrl.kernels import policy_triton as kernels
from bucketrl.kernels.policy_reference import STATS, Objective
from bucketrl.kernels.triton_here import on_device_of

BLOCK = 128
"""Tokens per program of one warp, whose sums need no barrier."""
WAYS = 32
"""Of the search for a block's first sequence: one for each thread of the warp."""
ALIGNMENT = 16
"""Bytes: whether a pointer is a multiple is part of what Triton compiles a kernel for."""

_compiled: dict[tuple[Hashable, ...], Any] = {}
"""Kernels by all that they were compiled for: `_launch`."""
_work: dict[tuple[torch.device, int], Tensor] = {}
"""By device and stream: `_work_for`."""


Results = tuple[Tensor, Tensor, Tensor | None, Tensor]
Required = tuple[Tensor, Tensor, Tensor, float | Tensor]
"""behaviour, advantages, cu_seqlens, norm."""
Optional = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""mask, proximal, reference, weights."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_policy_loss(
    logprobs_N: Tensor, entropy_N: Tensor | None, required: Required, optional: Optional, objective: Objective
) -> tuple[Tensor, Tensor]:
    """`policy_reference.packed_policy_loss`."""
    apply: Any = _PolicyLoss.apply
    with on_device_of(logprobs_N):
        loss, stats = apply(logprobs_N, entropy_N, required, optional, objective)
    return loss, stats


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_policy_grad(
    logprobs_N: Tensor, entropy_N: Tensor | None, required: Required, optional: Optional, objective: Objective
) -> Results:
    """`policy_reference.packed_policy_grad`."""
    with on_device_of(logprobs_N):
        loss, grad_N, grad_entropy_N, stats = _launch_all(
            logprobs_N, entropy_N, required, optional, objective
        )
    if logprobs_N.dtype is not torch.float32:
        grad_N = grad_N.to(logprobs_N.dtype)
    if entropy_N is not None and grad_entropy_N is not None:
        grad_entropy_N = grad_entropy_N.to(entropy_N.dtype)
    return loss, grad_N, grad_entropy_N, stats


def _launch_all(
    logprobs_N: Tensor, entropy_N: Tensor | None, required: Required, optional: Optional, objective: Objective
) -> Results:
    """Loss, gradients and statistics, float32.

    Launches and allocations are what a call takes its time for. So there is no launch that adds the blocks up: the
    last one to end does it. Means over sequences take a launch of their own.
    """
    behaviour_N, advantages_B, cu_seqlens, norm = required
    mask_N, proximal_N, reference_N, weights_B = optional
    count, sequences = logprobs_N.shape[0], cu_seqlens.shape[0] - 1
    logprobs = _plain(logprobs_N)
    inputs = (
        cu_seqlens.contiguous(), logprobs, _plain(behaviour_N), _plain(advantages_B),
        None if mask_N is None else mask_N.contiguous(), _given(proximal_N), _given(reference_N),
        _given(entropy_N), _given(weights_B),
    )  # fmt: skip
    norm_tensor = _plain(norm) if isinstance(norm, Tensor) else None
    scale = 1.0 / norm if not isinstance(norm, Tensor) and norm > 0 else 0.0
    means = None
    if objective.by_sequence:
        means = logprobs.new_empty(max(1, sequences), 2)
        if sequences:
            _launch(kernels.sequence_means, sequences, 4, (*inputs, means), (count,), (1024,))
    blocks = max(1, -(-count // BLOCK))
    grad_N = torch.empty_like(logprobs)
    grad_entropy_N = None if entropy_N is None else torch.empty_like(logprobs)
    stats, loss = logprobs.new_empty(len(STATS)), logprobs.new_empty(())
    span = 1
    while span < sequences:
        span *= WAYS
    work = _work_for(blocks, logprobs.device)
    _launch(
        kernels.policy_loss, blocks, 1,
        (*inputs, means, norm_tensor, grad_N, grad_entropy_N, work, stats, loss),
        (scale, count, sequences, span), (objective, BLOCK, WAYS),
    )  # fmt: skip
    return loss, grad_N, grad_entropy_N, stats


def _work_for(blocks: int, device: torch.device) -> Tensor:
    """Memory for the counter of blocks that have ended, which is 0, and for their partial sums.

    A launch leaves the counter at 0, and the launches of a stream run one after the other: they share theirs, as
    cuBLAS's do. What a graph is replayed beside is not known, so each of its launches gets its own.
    """
    size = (1 + blocks) * len(STATS)
    stream = _stream(device)
    if stream is None:
        return torch.zeros(size, device=device, dtype=torch.float32)
    found = _work.get((device, stream))
    if found is None or found.shape[0] < size:
        found = _work[device, stream] = torch.zeros(size, device=device, dtype=torch.float32)
    return found


def _stream(device: torch.device) -> int | None:
    """The current one; None if it is being captured into a graph."""
    captured = torch.cuda.is_current_stream_capturing()
    return None if captured else torch._C._cuda_getCurrentRawStream(device.index)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs_N: Tensor,
        entropy_N: Tensor | None,
        required: Required,
        optional: Optional,
        objective: Objective,
    ) -> tuple[Tensor, Tensor]:
        loss, grad_N, grad_entropy_N, stats = _launch_all(
            logprobs_N, entropy_N, required, optional, objective
        )
        ctx.save_for_backward(grad_N, grad_entropy_N)
        ctx.dtypes = logprobs_N.dtype, None if entropy_N is None else entropy_N.dtype
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)  # else zeros are made for the statistics
        return loss, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        results = [
            (grad_N * grads[0]).to(dtype) if wanted and grads[0] is not None else None
            for grad_N, dtype, wanted in zip(
                ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True
            )
        ]
        return *results, None, None, None


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous float32. Operations that would change nothing take the host as long as others."""
    return tensor if tensor.dtype is torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def _given(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _plain(tensor)


def _launch(
    kernel: Any,
    programs: int,
    warps: int,
    tensors: tuple[Tensor, *tuple[Tensor | None, ...]],
    numbers: tuple[float, ...],
    constants: tuple[Hashable, ...],
) -> None:
    """`kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps)`; it does not specialise on `numbers`.

    Triton works out anew at each call which compiled form of the kernel the arguments ask for, which takes longer
    than to launch it. Here that form is kept and launched as in Triton's tutorial on the fused softmax, with
    addresses: about each tensor Triton would ask the driver.
    """
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    kinds = [None if tensor is None else (tensor.dtype, tensor.device) for tensor in tensors]
    aligned = [address % ALIGNMENT == 0 for address in addresses]
    form = (kernel, constants, *kinds, *aligned)
    found = _compiled.get(form)
    if found is None:
        _compiled[form] = kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps)
    else:
        found[(programs, 1, 1)](*addresses, *numbers, *constants)


def group_advantage(
    rewards_B: Tensor, cu_groups: Tensor, scale: Literal["none", "group", "batch"]
) -> tuple[Tensor, Tensor]:
    """`policy_reference.group_advantage`."""
    groups = len(cu_groups) - 1
    rewards_B, cu_groups = rewards_B.contiguous().float(), cu_groups.contiguous()
    advantages_B = torch.zeros_like(rewards_B)
    flat_G = torch.empty(groups, dtype=torch.int8, device=rewards_B.device)
    if groups:
        moments = rewards_B.new_empty(groups, 4)
        with on_device_of(rewards_B):
            kernels.group_moments[(groups,)](rewards_B, cu_groups, moments, BT=128)
            kernels.group_advantages[(groups,)](
                rewards_B, cu_groups, moments, advantages_B, flat_G, groups, BATCH=scale == "batch",
                GROUP=scale == "group", BT=128,
            )  # fmt: skip
    return advantages_B, flat_G.view(torch.bool)
