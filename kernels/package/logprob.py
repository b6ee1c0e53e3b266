"""`linear_logprob`: the output head of a frozen model, from hidden states to log-probabilities and back."""

import torch
from torch import Tensor

from bucketrl.kernels import reference
from bucketrl.kernels.triton_here import triton_is_here

EAGER_LOGITS_BYTES = 64 << 20
"""Size of the float32 logits that exist at once where plain torch does the work."""


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    *,
    softcap: float | None = None,
    entropy_grad: bool = False,
    grad_rows_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.linear_logprob`, by the fastest way that these operands have; same results up to rounding.

    bfloat16 on an NVIDIA GPU with Triton: `logprob_cuda`. Anything else: plain torch, `chunk` rows at a
    time. Both keep the logits in float32.

    hidden_NH: [N, H]. weight_VH: [V, H], frozen. targets_N: [N] int64; -100 is ignored. temperature: above 0, one
    for all or [N]. grad_rows_N: [N] bool. All on one device, but for `grad_rows_N`, which may be on the CPU.
    Returns log-probabilities [N], differentiable once in `hidden_NH`, and entropies [N] in nats; float32, or
    float64 for float64 input.
    Raises ValueError if the weight wants a gradient, or shapes or devices do not fit each other.
    """
    if _has_kernel(hidden_NH, weight_VH) and not (entropy_grad and softcap is not None):
        from bucketrl.kernels import logprob_cuda

        results: tuple[Tensor, Tensor] = logprob_cuda.linear_logprob(
            hidden_NH,
            weight_VH,
            targets_N,
            temperature,
            softcap=softcap,
            entropy_grad=entropy_grad,
            grad_rows_N=grad_rows_N,
        )
        return results
    return reference.linear_logprob(
        hidden_NH,
        weight_VH,
        targets_N,
        temperature,
        chunk or max(1, EAGER_LOGITS_BYTES // (4 * weight_VH.shape[0])),
        softcap=softcap,
        entropy_grad=entropy_grad,
        grad_rows_N=grad_rows_N,
    )


def _has_kernel(hidden_NH: Tensor, weight_VH: Tensor) -> bool:
    return (
        hidden_NH.is_cuda
        and hidden_NH.dtype == weight_VH.dtype == torch.bfloat16
        and weight_VH.stride(1) == 1
        and triton_is_here()
        and torch.cuda.get_device_capability(hidden_NH.device) >= (8, 0)
    )
