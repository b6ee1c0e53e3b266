"""The policy loss, its gradients, and the group advantage: by one kernel on a GPU, by plain torch elsewhere."""

from typing import Literal

import torch
from torch import Tensor

from bucketrl.kernels import policy_reference
from bucketrl.kernels.policy_reference import STATS, Objective
from bucketrl.kernels.triton_here import triton_is_here

__all__ = ["STATS", "Objective", "group_advantage", "packed_policy_grad", "packed_policy_loss"]


def packed_policy_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_B: Tensor,
    cu_seqlens: Tensor,
    norm: float | Tensor,
    *,
    mask_N: Tensor | None = None,
    proximal_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
    weights_B: Tensor | None = None,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """`policy_reference.packed_policy_loss`; the arithmetic of the kernel is float32.

    Raises ValueError for an input that is not as long as `logprobs_N`, or as the sequences are many.
    """
    _check(
        (len(logprobs_N), {"behaviour_N": behaviour_N, "mask_N": mask_N, "proximal_N": proximal_N,
                           "reference_N": reference_N, "entropy_N": entropy_N}),
        (len(cu_seqlens) - 1, {"advantages_B": advantages_B, "weights_B": weights_B}),
    )  # fmt: skip
    if not _has_kernel(logprobs_N):
        return policy_reference.packed_policy_loss(
            logprobs_N, behaviour_N, advantages_B, cu_seqlens, norm, mask_N=mask_N, proximal_N=proximal_N,
            reference_N=reference_N, entropy_N=entropy_N, weights_B=weights_B, objective=objective,
        )  # fmt: skip
    from bucketrl.kernels import policy_cuda

    results: tuple[Tensor, Tensor] = policy_cuda.packed_policy_loss(
        logprobs_N,
        entropy_N,
        (behaviour_N, advantages_B, cu_seqlens, norm),
        (mask_N, proximal_N, reference_N, weights_B),
        objective,
    )
    return results


def packed_policy_grad(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_B: Tensor,
    cu_seqlens: Tensor,
    norm: float | Tensor,
    *,
    mask_N: Tensor | None = None,
    proximal_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
    weights_B: Tensor | None = None,
    objective: Objective,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`policy_reference.packed_policy_grad`; the arguments and errors are those of `packed_policy_loss`."""
    _check(
        (len(logprobs_N), {"behaviour_N": behaviour_N, "mask_N": mask_N, "proximal_N": proximal_N,
                           "reference_N": reference_N, "entropy_N": entropy_N}),
        (len(cu_seqlens) - 1, {"advantages_B": advantages_B, "weights_B": weights_B}),
    )  # fmt: skip
    if not _has_kernel(logprobs_N):
        reference: tuple[Tensor, Tensor, Tensor | None, Tensor] = policy_reference.packed_policy_grad(
            logprobs_N, behaviour_N, advantages_B, cu_seqlens, norm, mask_N=mask_N, proximal_N=proximal_N,
            reference_N=reference_N, entropy_N=entropy_N, weights_B=weights_B, objective=objective,
        )  # fmt: skip
        return reference
    from bucketrl.kernels import policy_cuda

    results: tuple[Tensor, Tensor, Tensor | None, Tensor] = policy_cuda.packed_policy_grad(
        logprobs_N,
        entropy_N,
        (behaviour_N, advantages_B, cu_seqlens, norm),
        (mask_N, proximal_N, reference_N, weights_B),
        objective,
    )
    return results


def group_advantage(
    rewards_B: Tensor, cu_groups: Tensor, scale: Literal["none", "group", "batch"] = "none"
) -> tuple[Tensor, Tensor]:
    """`policy_reference.group_advantage`, without a wait for the GPU."""
    if not _has_kernel(rewards_B):
        return policy_reference.group_advantage(rewards_B, cu_groups, scale)
    from bucketrl.kernels import policy_cuda

    return policy_cuda.group_advantage(rewards_B, cu_groups, scale)


def _check(*kinds: tuple[int, dict[str, Tensor | None]]) -> None:
    """Kernels read addresses: what is too short would be read beyond its end."""
    for size, inputs in kinds:
        for name, value in inputs.items():
            if value is not None and value.shape != (size,):
                raise ValueError(f"{name} is {tuple(value.shape)}; expected ({size},)")


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and triton_is_here()
