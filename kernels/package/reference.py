"""Each kernel as plain torch: the definition that faster versions are tested against, and the CPU path.

Shape suffixes: N scored tokens, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""A row with this target has log-probability, entropy and gradient 0, whatever its hidden state holds."""


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    chunk: int = 1024,
    *,
    softcap: float | None = None,
    entropy_grad: bool = False,
    grad_rows_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(z), and the entropy in nats.

        z = cap(hidden · weightᵀ) / temperature      cap(x) = x, or softcap · tanh(x / softcap)
        logprob = z[target] - logsumexp(z)           entropy = -Σ p · log p with p = softmax(z)
        ∂ logprob / ∂ z = onehot(target) - p         ∂ entropy / ∂ z = -p · (log p + entropy)

    Rows are worked on `chunk` at a time, so that [N, V] logits never exist. The derivatives are formed in
    the forward pass, while a chunk's probabilities are at hand: 4·N·H·V FLOPs, nothing recomputed; 6·N·H·V
    with `entropy_grad`.

    hidden_NH: [N, H]. weight_VH: [V, H], frozen: no gradient is formed for it. targets_N: [N] int64.
    temperature: above 0, one for all or [N]. grad_rows_N: [N] bool; where False the row is a constant.
    Returns logprobs [N], differentiable in `hidden_NH`, and entropies [N], differentiable only with
    `entropy_grad`. Both are float32, or float64 for float64 input; so is the arithmetic, whatever the type
    of the operands.
    Raises ValueError if the weight wants a gradient, or shapes or devices do not fit each other.
    """
    check_operands(hidden_NH, weight_VH, targets_N)
    apply: Any = _LinearLogprob.apply
    with torch.autocast(hidden_NH.device.type, enabled=False):
        logprobs_N, entropy_N = apply(
            hidden_NH, weight_VH, targets_N, temperature, chunk, softcap, entropy_grad, grad_rows_N
        )
    return logprobs_N, entropy_N


def check_operands(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> None:
    """Kernels read addresses: what does not fit would be read beyond its end."""
    if weight_VH.requires_grad:
        raise ValueError("linear_logprob is for a frozen head: weight_VH.requires_grad must be False")
    found = hidden_NH.shape, weight_VH.shape, targets_N.shape
    if hidden_NH.ndim != 2 or found != (found[0], (*weight_VH.shape[:1], found[0][1]), found[0][:1]):
        raise ValueError(
            "hidden_NH, weight_VH and targets_N are "
            f"{', '.join(str(tuple(shape)) for shape in found)}; they must be (N, H), (V, H) and (N,)"
        )
    if not hidden_NH.device == weight_VH.device == targets_N.device:
        raise ValueError(
            f"hidden_NH is on {hidden_NH.device}, weight_VH on {weight_VH.device}, targets_N on "
            f"{targets_N.device}; move them to one device"
        )


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature: float | Tensor,
        chunk: int,
        softcap: float | None,
        entropy_grad: bool,
        grad_rows_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        weight_VH = weight_VH.to(dtype)
        count = hidden_NH.shape[0]
        temperature_N = torch.as_tensor(temperature, dtype=dtype, device=hidden_NH.device).expand(count)
        logprobs_N = hidden_NH.new_empty(count, dtype=dtype)
        entropy_N = torch.empty_like(logprobs_N)
        wanted = ctx.needs_input_grad[0]
        slope_NH = torch.empty_like(hidden_NH, dtype=dtype) if wanted else None
        entropy_slope_NH = torch.empty_like(hidden_NH, dtype=dtype) if wanted and entropy_grad else None
        for first in range(0, count, chunk):
            rows = slice(first, first + chunk)
            live = targets_N[rows, None] != IGNORE_INDEX
            target = torch.where(live, targets_N[rows, None], 0)
            logits = torch.where(live, hidden_NH[rows].to(dtype), 0.0) @ weight_VH.T
            tanh = (logits / softcap).tanh_() if softcap is not None else None
            if tanh is not None and softcap is not None:
                logits = tanh * softcap
            log_probs = torch.log_softmax(logits / temperature_N[rows, None], dim=-1)
            logprobs_N[rows] = torch.where(live, log_probs.gather(1, target), 0.0)[:, 0]
            probs = log_probs.exp_()
            entr = torch.special.entr(probs)
            entropy = entr.sum(dim=-1, keepdim=True)
            entropy_N[rows] = torch.where(live, entropy, 0.0)[:, 0]
            if slope_NH is None:
                continue
            factor = live / temperature_N[rows, None]
            if grad_rows_N is not None:
                factor = factor * grad_rows_N[rows, None].to(factor.device)
            if tanh is not None:
                factor = factor * (1 - tanh * tanh)
            if entropy_slope_NH is not None:
                entropy_slope_NH[rows] = ((entr - probs * entropy) * factor) @ weight_VH
            # 1 - p of the target as the sum of the others: exact where p is nearly 1.
            others = probs.scatter_(1, target, 0.0).sum(dim=-1, keepdim=True)
            slope_NH[rows] = (probs.neg_().scatter_(1, target, others) * factor) @ weight_VH
        ctx.save_for_backward(slope_NH, entropy_slope_NH)
        ctx.hidden_dtype = hidden_NH.dtype
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope_NH, entropy_slope_NH = ctx.saved_tensors
        grad_hidden_NH = grads[0][:, None] * slope_NH
        if entropy_slope_NH is not None:
            grad_hidden_NH += grads[1][:, None] * entropy_slope_NH
        return grad_hidden_NH.to(ctx.hidden_dtype), *[None] * 7
