"""The policy loss, one function per term. Everything is per token, in the dtype of its input.

With μ the behaviour policy that sampled the token, π the policy that is trained, and π_prox a proximal policy:

    log-ratio    x = log π - log π_prox, or - log μ; clamped; by token, or by sequence (GSPO)
    surrogate    a loss per token from x and the advantage A: PPO clip, dual clip, CISPO, REINFORCE
    weight       w = π_prox / μ, or π / μ, without gradient; by token, or by sequence; truncated, masked, or both
    divergence   k1, k2, k3 from log π - log π_ref, with π_ref a reference model

What is masked or truncated never shortens the batch: denominators are counted before.
Suffixes: N tokens, B sequences.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log ratio| is clamped here: beyond it e^x says nothing but overflow. Clamped tokens get no gradient."""


def log_ratio(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """log π - log μ, clamped to ±20; [N]."""
    return (logprobs_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(values_N: Tensor, sequence_N: Tensor, lengths_B: Tensor) -> Tensor:
    """At each token the mean of `values_N` over its sequence; [N].

    sequence_N: [N] int64 in [0, B), the sequence of each token. lengths_B: [B] its tokens. The mean of log ratios
    is the log of the geometric mean: a product of ratios grows with the length (trl #5814), so none is formed.
    """
    sums_B = torch.zeros(len(lengths_B), dtype=values_N.dtype, device=values_N.device)
    return (sums_B.index_add(0, sequence_N, values_N) / lengths_B)[sequence_N]


def sequence_log_ratio(log_ratio_N: Tensor, sequence_N: Tensor, lengths_B: Tensor) -> Tensor:
    """The log of the sequence's geometric mean ratio s = exp(mean x), once per token; [N].

    GSPO-token (arXiv 2507.18071, eq. 13 and 14): sg[mean x] + x - sg[x]. The value is the sequence's, the
    gradient the token's own, so that ∇s = s·∇log π of that token. Averaged over a sequence whose tokens
    share one advantage this is GSPO's gradient (its eq. 10), and it stays defined where they do not.
    """
    mean_N = sequence_means(log_ratio_N.detach(), sequence_N, lengths_B)
    return mean_N + (log_ratio_N - log_ratio_N.detach())


def ppo_clip(log_ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) with r = exp(log_ratio); [N].

    PPO (arXiv 1707.06347, eq. 7) with DAPO's asymmetric bounds (arXiv 2503.14476, section 3.1). Around the
    behaviour policy it is right for one optimizer step per batch, and a trust region for stale tokens.
    """
    ratio = log_ratio_N.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages_N, clipped * advantages_N)


def dual_clip(loss_N: Tensor, advantages_N: Tensor, bound: float) -> Tensor:
    """min(loss, -bound·A) where A < 0, else `loss`; [N]. `loss_N` is that of `ppo_clip`, `bound` > 1.

    Dual-clip PPO (arXiv 1912.09729): a token that became `bound` times as likely against the wish of its
    negative advantage has no gradient any more, where PPO's would grow with the ratio.
    """
    return torch.where(advantages_N < 0, torch.minimum(loss_N, -bound * advantages_N), loss_N)


def cispo(log_ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, clip_high: float) -> Tensor:
    """-sg[min(r, 1 + clip_high)]·A·log π; [N].

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5) without a lower bound, as there: the weight is clipped,
    the token never loses its gradient.
    """
    weight = log_ratio_N.detach().exp().clamp(max=1.0 + clip_high)
    return -weight * advantages_N * logprobs_N


def reinforce(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """-A·log π; [N]. The gradient of the expected reward on policy (Williams, 1992); off policy it is to be
    multiplied by an importance weight."""
    return -advantages_N * logprobs_N


def truncated(log_weight_N: Tensor, cap: float) -> Tensor:
    """min(w, cap); [N]. Truncated importance sampling (TIS): V-trace (arXiv 1802.01561, section 4.1), AIPO
    (LlamaRL, arXiv 2505.24034), with cap 2 in most systems of today."""
    return log_weight_N.exp().clamp(max=cap)


def inside(log_weight_N: Tensor, low: float, high: float) -> Tensor:
    """Whether low <= w <= high; [N] bool.

    By token the band of IcePop (Ring-1T, arXiv 2510.18855), by sequence the mask on the geometric mean (MIS;
    yingru.notion.site, "When Speed Kills Stability"; SkyRL's geometric mask).
    """
    weight_N = log_weight_N.exp()
    return (weight_N >= low) & (weight_N <= high)


def kl_k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """log π - log π_ref; [N]. This and the next two estimate KL(π‖π_ref) from tokens of π
    (joschu.net/blog/kl-approx.html).

    Unbiased, with the largest spread. Not a loss: its gradient is ∇log π, whose mean over π is 0.
    """
    return log_ratio(logprobs_N, reference_N)


def kl_k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """(log π - log π_ref)² / 2; [N]. A biased value, but the mean of its gradient over π is ∇KL(π‖π_ref)."""
    return log_ratio(logprobs_N, reference_N).square() / 2


def kl_k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """e^y - 1 - y with y = log π_ref - log π; [N]. GRPO's (arXiv 2402.03300, eq. 4).

    Unbiased and never negative. The mean of its gradient over π is ∇KL(π_ref‖π), the other way round.
    """
    y_N = log_ratio(reference_N, logprobs_N)
    return y_N.expm1() - y_N
