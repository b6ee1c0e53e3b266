"""The policy loss on packed tokens and the group advantage as plain torch: the definition, and the CPU path.

Shape suffixes: N scored tokens, B sequences, G groups of sequences.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Every log ratio is clamped here before its exponential. A clamped token gets no gradient through it."""
STD_EPSILON = 1e-4
"""Added to a standard deviation that divides, as in TRL."""

STATS = (
    "loss", "tokens", "dropped", "ratio", "ratio_squared", "clipped_low", "clipped_high", "dual_clipped",
    "corrected", "correction", "k1", "k3", "reference_kl", "entropy", "ratio_max", "ratio_min",
)  # fmt: skip
"""What `packed_policy_loss` counts: sums over live tokens, but for the two extremes. `ratio` is π/μ; `dropped`
counts unmasked tokens that held something not finite; `corrected` those whose π_prox/μ was capped or masked."""


@dataclass(frozen=True)
class Objective:
    """Which loss. r = π/π_prox, where π_prox is μ, the behaviour policy, if no proximal policy is given.

    ppo        -min(r·A, clip(r)·A)                                 arXiv 1707.06347; asymmetric: 2503.14476
    gspo       the same with each token's log r replaced by its sequence's mean; the gradient goes to the
               sequence's tokens alike ("GSPO-token")               arXiv 2507.18071, section 4.3
    cispo      -stop(min(r, 1 + clip_high))·A·log π                 arXiv 2506.13585, section 3.1
    reinforce  -A·log π
    """

    kind: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """For A < 0 the loss is at most -dual_clip·A (arXiv 1912.09729); above 1; ppo and gspo."""
    correction_cap: float | None = None
    """π_prox/μ, which weights each token, is truncated here (TIS)."""
    correction_mask: tuple[float, float] | None = None
    """Tokens whose π_prox/μ is outside get weight 0 (IcePop; with 0 as the lower end, MIS)."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """With d = log π_ref - log π: -d, d²/2, eᵈ - d - 1."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1, or None")


def packed_policy_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_B: Tensor,
    cu_seqlens: Tensor,
    norm: Tensor,
    *,
    mask_N: Tensor | None = None,
    proximal_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
    weights_B: Tensor | None = None,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """Σ over live tokens of weight · (π_prox/μ · objective + kl_coef · KL - entropy_coef · entropy), over norm.

    logprobs_N: [N] log π in nats; the loss is differentiable in it, and in `entropy_N` [N]. behaviour_N,
    proximal_N, reference_N: [N]. advantages_B, weights_B: [B]. cu_seqlens: [B + 1] int, where the
    sequences begin; tokens after the last are not looked at. mask_N: [N] bool. norm: a scalar on the same
    device, the loss tokens of the whole batch; 0 makes the loss 0.
    A token is live if it is not masked and all that concerns it is finite. Others are selected out before
    any arithmetic: NaN in them reaches neither the loss nor a gradient.
    Returns the loss, and the `STATS` [16], without gradient.
    """
    o = objective
    count, zero = logprobs_N.shape[0], logprobs_N.new_zeros(())
    index_N = torch.arange(count, device=logprobs_N.device)
    sequence_N = torch.searchsorted(cu_seqlens, index_N, right=True) - 1
    unmasked = (index_N < cu_seqlens[-1]) & (sequence_N >= 0)
    if mask_N is not None:
        unmasked = unmasked & mask_N.bool()
    sequence_N = sequence_N.clamp(0, max(0, len(advantages_B) - 1))
    empty = len(advantages_B) == 0
    given: dict[str, Tensor] = {
        "logprob": logprobs_N,
        "behaviour": behaviour_N,
        "advantage": zero.expand(count) if empty else advantages_B[sequence_N],
    }
    optional = {"proximal": proximal_N, "reference": reference_N, "entropy": entropy_N}
    given |= {name: value for name, value in optional.items() if value is not None}
    if weights_B is not None and not empty:
        given["weight"] = weights_B[sequence_N]
    live = unmasked & torch.stack([value.detach().isfinite() for value in given.values()]).all(dim=0)
    safe = {name: torch.where(live, value, zero) for name, value in given.items()}
    logprob, behaviour, advantage = safe["logprob"], safe["behaviour"], safe["advantage"]
    proximal = safe.get("proximal", behaviour)
    weight = safe.get("weight", torch.ones_like(logprob)) * live

    log_ratio = (logprob - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if o.kind == "gspo":
        sums = logprob.new_zeros(len(advantages_B) + 1).index_add(0, sequence_N, log_ratio.detach() * live)
        sizes = logprob.new_zeros(len(advantages_B) + 1).index_add(0, sequence_N, live.to(logprob.dtype))
        log_ratio = log_ratio - log_ratio.detach() + (sums / sizes.clamp(min=1))[sequence_N]
    ratio = log_ratio.exp()
    low = high = dual = torch.zeros_like(live)
    if o.kind in ("ppo", "gspo"):
        clipped = ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        low = (ratio < 1 - o.clip_low) & (advantage < 0)
        high = (ratio > 1 + o.clip_high) & (advantage > 0)
        if o.dual_clip is not None:
            dual = (ratio > o.dual_clip) & (advantage < 0)
            gain = torch.where(dual, o.dual_clip * advantage, gain)
    elif o.kind == "cispo":
        high = ratio > 1 + o.clip_high
        gain = ratio.detach().clamp(max=1 + o.clip_high) * advantage * logprob
    else:
        gain = advantage * logprob

    raw = (proximal - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    correction, corrected = raw, torch.zeros_like(live)
    if o.correction_cap is not None:
        correction, corrected = raw.clamp(max=o.correction_cap), raw > o.correction_cap
    if o.correction_mask is not None:
        outside = (raw < o.correction_mask[0]) | (raw > o.correction_mask[1])
        correction, corrected = torch.where(outside, zero, correction), corrected | outside
    per_token = -correction * gain
    kl = torch.zeros_like(logprob)
    if "reference" in safe:
        d = (safe["reference"] - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[o.kl_kind]
        per_token = per_token + o.kl_coef * kl
    if "entropy" in safe:
        per_token = per_token - o.entropy_coef * safe["entropy"]
    total = (weight * per_token).sum()
    loss = torch.where(norm > 0, total / norm.clamp(min=1e-30), zero)

    with torch.no_grad():
        drift = (logprob - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        drift_ratio = drift.exp()
        some = live.any()
        sums_of = [
            live, unmasked & ~live, drift_ratio * live, drift_ratio**2 * live, low & live, high & live,
            dual & live, corrected & live, correction * live, -drift * live, (drift_ratio - 1 - drift) * live,
            kl * live, safe.get("entropy", zero.expand(count)) * live,
        ]  # fmt: skip
        extremes = [torch.where(live, drift_ratio, -1.0), torch.where(live, drift_ratio, torch.inf)]
        one = drift_ratio.new_ones(1)
        extreme = [torch.cat([extremes[0], -one]).max(), torch.cat([extremes[1], one * torch.inf]).min()]
        stats = torch.stack(
            [loss.detach(), *(value.sum().to(loss.dtype) for value in sums_of)]
            + [torch.where(some, value, zero) for value in extreme]
        )
    return loss, stats


def group_advantage(
    rewards_B: Tensor, cu_groups: Tensor, scale: Literal["none", "group", "batch"] = "none"
) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of its group, and by choice over a standard deviation (n - 1) + 1e-4.

    none: Dr. GRPO (arXiv 2503.20783). group: GRPO (arXiv 2402.03300). batch: the standard deviation of all
    rewards (arXiv 2508.08221).
    rewards_B: [B] float32. cu_groups: [G + 1] int, where the groups begin. A reward that is not finite counts
    for nothing and has advantage 0.
    Returns advantages [B] and [G] bool: whether a group has no two different finite rewards, so that its
    advantages are all exactly 0.
    """
    advantages_B = torch.zeros_like(rewards_B)
    bounds = cu_groups.tolist()
    flat_G = torch.ones(len(bounds) - 1, dtype=torch.bool, device=rewards_B.device)
    finite_B = rewards_B.isfinite()
    for group, (first, stop) in enumerate(pairwise(bounds)):
        members, finite = rewards_B[first:stop], finite_B[first:stop]
        valid = members[finite]
        if len(valid) < 2 or bool(valid.min() == valid.max()):
            continue
        flat_G[group] = False
        divisor = valid.std() + STD_EPSILON if scale == "group" else 1.0
        advantages_B[first:stop] = torch.where(finite, members - valid.mean(), 0.0) / divisor
    if scale == "batch" and int(finite_B[: bounds[-1]].sum()) > 1:
        advantages_B /= rewards_B[: bounds[-1]][finite_B[: bounds[-1]]].std() + STD_EPSILON
    return advantages_B, flat_G
