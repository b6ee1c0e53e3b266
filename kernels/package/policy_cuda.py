"""`packed_policy_loss` and `group_advantage` on a GPU, by `policy_triton`. The host reads nothing back."""

from typing import Any, Literal

import torch
import triton
from torch import Tensor

from bucketrl.kernels import policy_triton as kernels
from bucketrl.kernels.policy_reference import STATS, Objective

BLOCK = 512
"""Tokens per program."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    required: tuple[Tensor, Tensor, Tensor, Tensor],
    optional: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """`policy_reference.packed_policy_loss`.

    required: behaviour, advantages, cu_seqlens, norm. optional: mask, proximal, reference, weights.
    """
    apply: Any = _PolicyLoss.apply
    loss, stats = apply(logprobs_N, entropy_N, required, optional, objective)
    return loss, stats


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs_N: Tensor,
        entropy_N: Tensor | None,
        required: tuple[Tensor, Tensor, Tensor, Tensor],
        optional: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        objective: Objective,
    ) -> tuple[Tensor, Tensor]:
        o, count = objective, logprobs_N.shape[0]
        logprobs, behaviour, advantages, norm = (
            tensor.contiguous().float() for tensor in (logprobs_N, *required[:2], required[3])
        )
        cu_seqlens = required[2].contiguous()
        sequences = len(cu_seqlens) - 1
        mask = None if optional[0] is None else optional[0].contiguous().view(torch.uint8)
        given = {"MASK": mask}
        for name, value in zip(
            ("PROX", "REF", "ENT", "WEIGHT"), (optional[1], optional[2], entropy_N, optional[3]), strict=True
        ):
            given[name] = None if value is None else value.contiguous().float()
        pointers = [logprobs if value is None else value for value in given.values()]
        has = {f"HAS_{name}": value is not None for name, value in given.items()}
        blocks = triton.cdiv(count, BLOCK)
        grad_N, grad_entropy_N = torch.empty_like(logprobs), torch.empty_like(logprobs)
        part, stats = logprobs.new_empty(blocks, len(STATS)), logprobs.new_empty(len(STATS))
        loss, mean_B = logprobs.new_empty(()), logprobs.new_empty(max(1, sequences))
        if o.kind == "gspo" and sequences:
            kernels.sequence_means[(sequences,)](
                cu_seqlens, logprobs, behaviour, advantages, *pointers, mean_B, **has, BT=BLOCK
            )
        if blocks:
            low, high = o.correction_mask or (0.0, 0.0)
            kernels.policy_loss[(blocks,)](
                logprobs, behaviour, advantages, cu_seqlens, norm, *pointers, mean_B, grad_N, grad_entropy_N,
                part, count, sequences, sequences.bit_length(), o.clip_low, o.clip_high, o.dual_clip or 0.0,
                o.correction_cap or 0.0, low, high, o.kl_coef, o.entropy_coef,
                KIND=o.kind, KL=o.kl_kind, HAS_DUAL=o.dual_clip is not None,
                HAS_CAP=o.correction_cap is not None, HAS_BAND=o.correction_mask is not None, **has, BT=BLOCK,
            )  # fmt: skip
        kernels.add_blocks[(len(STATS),)](part, loss, stats, blocks, BB=64)
        ctx.save_for_backward(grad_N, grad_entropy_N)
        ctx.dtypes = logprobs_N.dtype, None if entropy_N is None else entropy_N.dtype
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results = [
            (grad_N * grads[0]).to(dtype) if wanted and dtype is not None else None
            for grad_N, dtype, wanted in zip(
                ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True
            )
        ]
        return *results, None, None, None


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
        kernels.group_moments[(groups,)](rewards_B, cu_groups, moments, BT=128)
        kernels.group_advantages[(groups,)](
            rewards_B, cu_groups, moments, advantages_B, flat_G, groups, BATCH=scale == "batch",
            GROUP=scale == "group", BT=128,
        )  # fmt: skip
    return advantages_B, flat_G.view(torch.bool)
