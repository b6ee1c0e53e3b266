"""Each kernel as plain torch: the definition that faster versions are tested against, and the CPU path.

Shape suffixes: N scored tokens, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor


def linear_logprob(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden · weightᵀ / temperature), and the entropy in nats.

        z = hidden · weightᵀ / temperature      logprob = z[target] - logsumexp(z)
        entropy = -Σ softmax(z) · log softmax(z)
        ∂ logprob / ∂ hidden = (weight[target] - softmax(z) · weight) / temperature

    Rows are worked on `chunk` at a time, so that [N, V] logits never exist. The derivative is formed in
    the forward pass, while a chunk's probabilities are at hand: 4·N·H·V FLOPs, nothing recomputed.

    hidden_NH: [N, H]. weight_VH: [V, H], frozen: no gradient is formed for it. targets_N: [N] int64.
    Returns logprobs [N], differentiable in `hidden_NH`, and entropies [N], which are not. Both are
    float32, or float64 for float64 input; so is the arithmetic, whatever the type of the operands.
    Raises ValueError if the weight wants a gradient.
    """
    if weight_VH.requires_grad:
        raise ValueError("linear_logprob is for a frozen head: weight_VH.requires_grad must be False")
    apply: Any = _LinearLogprob.apply
    logprobs_N, entropy_N = apply(hidden_NH, weight_VH, targets_N, temperature, chunk)
    return logprobs_N, entropy_N


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        weight_VH = weight_VH.to(dtype)
        logprobs_N = hidden_NH.new_empty(hidden_NH.shape[0], dtype=dtype)
        entropy_N = torch.empty_like(logprobs_N)
        slope_NH = torch.empty_like(hidden_NH, dtype=dtype) if ctx.needs_input_grad[0] else None
        for first in range(0, hidden_NH.shape[0], chunk):
            rows = slice(first, first + chunk)
            targets = targets_N[rows]
            log_softmax = torch.log_softmax((hidden_NH[rows].to(dtype) @ weight_VH.T) / temperature, dim=-1)
            logprobs_N[rows] = log_softmax.gather(1, targets[:, None])[:, 0]
            probs = log_softmax.exp_()
            entropy_N[rows] = torch.special.entr(probs).sum(dim=-1)
            if slope_NH is not None:
                slope_NH[rows] = (weight_VH[targets] - probs @ weight_VH) / temperature
        ctx.slope_NH = slope_NH
        ctx.hidden_dtype = hidden_NH.dtype
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_NH = (grads[0][:, None] * ctx.slope_NH).to(ctx.hidden_dtype)
        return grad_hidden_NH, None, None, None, None
