"""The policy loss, one function per term. Everything is per token, in the dtype of its input.

With π the policy that is trained, and π_old the one that its ratio is to: the behaviour policy μ that sampled
the token, or a proximal policy (`weights.py`):

    log-ratio    x = log π - log π_old, clamped; by token, or by sequence (GSPO)
    surrogate    a loss per token from x and the advantage A: PPO clip, dual clip, CISPO, REINFORCE
    divergence   k1, k2, k3 from log π - log π_ref, with π_ref the base model
    aggregation  from a loss per token to the loss of the batch

Suffixes: N loss tokens of a micro-batch, S completions in it.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log ratio| is clamped here: beyond it e^x says nothing but overflow. Clamped tokens get no gradient."""


def log_ratio(logprobs_N: Tensor, behaviour_logprobs_N: Tensor) -> Tensor:
    """log π - log μ, clamped to ±20; [N]."""
    return (logprobs_N - behaviour_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(values_N: Tensor, sequence_N: Tensor, lengths_S: Tensor) -> Tensor:
    """At each token the mean of `values_N` over its completion; [N].

    sequence_N: [N] int64 in [0, S), the completion of each token. lengths_S: [S] its loss tokens.
    """
    sums_S = torch.zeros(len(lengths_S), dtype=values_N.dtype, device=values_N.device)
    return (sums_S.index_add(0, sequence_N, values_N) / lengths_S)[sequence_N]


def sequence_log_ratio(log_ratio_N: Tensor, sequence_N: Tensor, lengths_S: Tensor) -> Tensor:
    """The log of the completion's geometric mean ratio s = exp(mean x), once per token; [N].

    GSPO-token (arXiv 2507.18071, eq. 13 and 14): sg[mean x] + x - sg[x]. The value is the completion's, the
    gradient the token's own, so that ∇s = s·∇log π of that token. Averaged over a completion whose tokens
    share one advantage this is GSPO's gradient (its eq. 10), and it stays defined where they do not.
    """
    mean_N = sequence_means(log_ratio_N.detach(), sequence_N, lengths_S)
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


def kl_k1(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """log π - log π_ref; [N]. This and the next two estimate KL(π‖π_ref) from tokens of π
    (joschu.net/blog/kl-approx.html).

    Unbiased, with the largest spread. Not a loss: its gradient is ∇log π, whose mean over π is 0.
    """
    return log_ratio(logprobs_N, reference_logprobs_N)


def kl_k2(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """(log π - log π_ref)² / 2; [N]. A biased value, but the mean of its gradient over π is ∇KL(π‖π_ref)."""
    return log_ratio(logprobs_N, reference_logprobs_N).square() / 2


def kl_k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """e^y - 1 - y with y = log π_ref - log π; [N]. GRPO's (arXiv 2402.03300, eq. 4).

    Unbiased and never negative. The mean of its gradient over π is ∇KL(π_ref‖π), the other way round.
    """
    y_N = log_ratio(reference_logprobs_N, logprobs_N)
    return y_N.expm1() - y_N


def token_mean(loss_N: Tensor, loss_tokens: int) -> Tensor:
    """Σ loss / loss_tokens; a scalar. DAPO (arXiv 2503.14476, section 3.3).

    `loss_tokens` counts the loss tokens of the whole batch, before anything is masked or clipped away, so
    that the gradient depends neither on the split into micro-batches nor on how much was masked.
    """
    return loss_N.sum() / loss_tokens


def sequence_mean(loss_N: Tensor, sequence_N: Tensor, lengths_S: Tensor, sequences: int) -> Tensor:
    """Σ over completions of the mean over their tokens / sequences; a scalar. GRPO (arXiv 2402.03300, eq. 3).

    `sequences` and `lengths_S` count before masking, the former over the whole batch. Tokens of a long
    completion count less each.
    """
    return (loss_N / lengths_S[sequence_N]).sum() / sequences


def constant_mean(loss_N: Tensor, sequences: int, max_tokens: int) -> Tensor:
    """Σ loss / (sequences·max_tokens); a scalar. Dr. GRPO (arXiv 2503.20783, section 3.2).

    Up to the constant, the mean over completions of sums over their tokens: no length is favoured.
    """
    return loss_N.sum() / (sequences * max_tokens)
