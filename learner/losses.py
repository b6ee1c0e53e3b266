"""The policy loss, one function per term. Everything is per token; N is the number of loss tokens.

With π the policy that is trained and μ the behaviour policy that sampled the token:

    log_ratio   x = log π - log μ, clamped
    ppo_clip    -min(eˣ·A, clip(eˣ, 1 - low, 1 + high)·A)
    token_mean  Σ / (loss tokens of the whole batch)
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log ratio| is clamped here: beyond it e^x says nothing but overflow. Clamped tokens get no gradient."""


def log_ratio(logprobs_N: Tensor, behaviour_logprobs_N: Tensor) -> Tensor:
    """log π - log μ, clamped to ±20; [N]."""
    return (logprobs_N - behaviour_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(log_ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) with r = exp(log_ratio); [N].

    PPO (arXiv 1707.06347, eq. 7) with DAPO's asymmetric bounds (arXiv 2503.14476, section 3.1), around
    the behaviour policy: right for one optimizer step per batch, and a trust region for stale tokens.
    """
    ratio = log_ratio_N.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages_N, clipped * advantages_N)


def token_mean(loss_N: Tensor, loss_tokens: int) -> Tensor:
    """Σ loss / loss_tokens; a scalar.

    `loss_tokens` counts the loss tokens of the whole batch, before anything is masked or clipped away, so
    that the gradient depends neither on the split into micro-batches nor on how much was masked.
    """
    return loss_N.sum() / loss_tokens
