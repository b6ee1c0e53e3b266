"""The policy loss on packed tokens and the group advantage as plain torch: the definition, and the CPU path.

Shape suffixes: N scored tokens, B sequences, G groups of sequences.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from bucketrl.kernels import policy_terms as terms

STD_EPSILON = 1e-4
"""Added to a standard deviation that divides, as in TRL."""

STATS = (
    "loss", "tokens", "dropped", "ratio", "ratio_squared", "clipped_low", "clipped_high", "dual_clipped",
    "corrected", "correction", "k1", "k3", "reference_kl", "entropy", "ratio_max", "ratio_min",
)  # fmt: skip
"""What `packed_policy_loss` counts: sums over live tokens, but for the two extremes. `ratio` is π/μ, and so are k1
and k3 of KL(μ‖π); `dropped` counts unmasked tokens that held something not finite; `corrected` those whose
importance weight was truncated or masked, `correction` is what is left of it."""

Level = Literal["none", "token", "sequence"]


@dataclass(frozen=True)
class Objective:
    """Which loss; the terms are in `policy_terms`. Its names are those of a run's `[algorithm]`."""

    surrogate: Literal["ppo_clip", "cispo", "reinforce"] = "ppo_clip"
    ratio_level: Literal["token", "sequence"] = "token"
    """Of the surrogate's ratio: to the proximal policy if one is given, else to the behaviour policy."""
    clip_low: float = 0.2
    """ppo_clip."""
    clip_high: float = 0.28
    """ppo_clip and cispo."""
    dual_clip: float | None = None
    """Above 1; ppo_clip."""
    importance_weight: Level = "none"
    """π_prox/μ, or π/μ without a proximal policy, multiplies the surrogate."""
    importance_cap: float = 2.0
    """The weight is truncated here."""
    importance_mask: Level = "none"
    """The surrogate is 0 where that quotient is not in the following band."""
    importance_mask_low: float = 0.5
    importance_mask_high: float = 5.0
    kl_coefficient: float = 0.0
    """Of the divergence from the reference, if one is given."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: float = 0.0
    """Of the entropy, if it is given; subtracted."""

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be above 1, or None")

    @property
    def by_sequence(self) -> bool:
        """Whether a mean over a sequence is part of it."""
        return "sequence" in (self.ratio_level, self.importance_weight, self.importance_mask)


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
    """Σ over live tokens of weight · (w · surrogate + kl_coefficient · KL - entropy_coefficient · entropy) / norm.

    logprobs_N: [N] log π in nats; the loss is differentiable in it, and in `entropy_N` [N]. behaviour_N,
    proximal_N, reference_N: [N] log μ, log π_prox, log π_ref. advantages_B, weights_B: [B]. cu_seqlens: [B + 1]
    int, where the sequences begin; tokens after the last are not looked at. mask_N: [N] bool. norm: that of the
    whole batch; 0 makes the loss 0. A tensor is a scalar on the same device.
    Arithmetic and results are float32, or float64 for float64 `logprobs_N`; a gradient has its input's type.
    A token is live if it is not masked and all that concerns it is finite. Others are selected out before
    any arithmetic: NaN in them reaches neither the loss nor a gradient.
    Returns the loss, and the `STATS` [16], without gradient.
    """
    o = objective
    dtype = torch.promote_types(logprobs_N.dtype, torch.float32)
    count, sequences, zero = logprobs_N.shape[0], len(advantages_B), logprobs_N.new_zeros((), dtype=dtype)
    index_N = torch.arange(count, device=logprobs_N.device)
    sequence_N = torch.searchsorted(cu_seqlens, index_N, right=True) - 1
    unmasked = (index_N < cu_seqlens[-1]) & (sequence_N >= 0)
    if mask_N is not None:
        unmasked = unmasked & mask_N.bool()
    sequence_N = sequence_N.clamp(0, max(0, sequences - 1))
    of_sequence = {"advantage": advantages_B} | ({} if weights_B is None else {"weight": weights_B})
    optional = {"proximal": proximal_N, "reference": reference_N, "entropy": entropy_N}
    given = {"logprob": logprobs_N, "behaviour": behaviour_N}
    given |= {name: value for name, value in optional.items() if value is not None}
    for name, value in of_sequence.items():
        given[name] = value[sequence_N] if sequences else zero.expand(count)
    live = unmasked & torch.stack([value.detach().isfinite() for value in given.values()]).all(dim=0)
    safe = {name: torch.where(live, value.to(dtype), zero) for name, value in given.items()}
    logprob, behaviour, advantage = safe["logprob"], safe["behaviour"], safe["advantage"]
    proximal = safe.get("proximal")
    lengths_B = zero.new_zeros(max(1, sequences)).index_add(0, sequence_N, live.to(zero.dtype)).clamp(min=1)

    log_ratio = terms.log_ratio(logprob, behaviour if proximal is None else proximal)
    if o.ratio_level == "sequence":
        log_ratio = terms.sequence_log_ratio(log_ratio, sequence_N, lengths_B)
    ratio = log_ratio.detach().exp()
    low = high = dual = corrected = torch.zeros_like(live)
    if o.surrogate == "ppo_clip":
        per_token = terms.ppo_clip(log_ratio, advantage, o.clip_low, o.clip_high)
        low = (ratio < 1 - o.clip_low) & (advantage < 0)
        high = (ratio > 1 + o.clip_high) & (advantage > 0)
        if o.dual_clip is not None:
            per_token = terms.dual_clip(per_token, advantage, o.dual_clip)
            dual = (ratio > o.dual_clip) & (advantage < 0)
    elif o.surrogate == "cispo":
        per_token = terms.cispo(log_ratio, logprob, advantage, o.clip_high)
        high = ratio > 1 + o.clip_high
    else:
        per_token = terms.reinforce(logprob, advantage)

    log_weight = terms.log_ratio(logprob.detach() if proximal is None else proximal, behaviour)
    correction = live.to(zero.dtype)
    if o.importance_weight != "none":
        at_level = _at_level(o.importance_weight, log_weight, sequence_N, lengths_B)
        correction = correction * terms.truncated(at_level, o.importance_cap)
        corrected = at_level.exp() > o.importance_cap
    if o.importance_mask != "none":
        at_level = _at_level(o.importance_mask, log_weight, sequence_N, lengths_B)
        inside = terms.inside(at_level, o.importance_mask_low, o.importance_mask_high)
        correction, corrected = correction * inside, corrected | ~inside
    per_token = per_token * correction
    kl = torch.zeros_like(logprob)
    if "reference" in safe:
        estimator = {"k1": terms.kl_k1, "k2": terms.kl_k2, "k3": terms.kl_k3}[o.kl_estimator]
        kl = estimator(logprob, safe["reference"])
        per_token = per_token + o.kl_coefficient * kl
    if "entropy" in safe:
        per_token = per_token - o.entropy_coefficient * safe["entropy"]
    total = (safe["weight"] * per_token if "weight" in safe else per_token).sum()
    norm = norm if isinstance(norm, Tensor) else total.new_full((), norm)
    loss = torch.where(norm > 0, total / norm.clamp(min=1e-30), zero)

    with torch.no_grad():
        drift = terms.log_ratio(logprob, behaviour)
        drift_ratio = drift.exp()
        some = live.any()
        sums_of = [
            live, unmasked & ~live, drift_ratio * live, drift_ratio**2 * live, low & live, high & live,
            dual & live, corrected & live, correction, -drift, terms.kl_k3(behaviour, logprob),
            kl * live, safe.get("entropy", zero.expand(count)),
        ]  # fmt: skip
        extremes = [torch.where(live, drift_ratio, -1.0), torch.where(live, drift_ratio, torch.inf)]
        one = drift_ratio.new_ones(1)
        extreme = [torch.cat([extremes[0], -one]).max(), torch.cat([extremes[1], one * torch.inf]).min()]
        stats = torch.stack(
            [loss.detach(), *(value.sum().to(loss.dtype) for value in sums_of)]
            + [torch.where(some, value, zero) for value in extreme]
        )
    return loss, stats


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_policy_grad(
    logprobs_N: Tensor, *inputs: Any, entropy_N: Tensor | None = None, **optional: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`packed_policy_loss` with its gradients, for a caller with whom the loss is the last thing.

    Returns the loss, ∂ loss / ∂ logprobs_N [N], ∂ loss / ∂ entropy_N [N] or None, and the `STATS`, all without
    gradient. On to the parameters: `torch.autograd.backward(logprobs_N, gradient)`.
    """
    leaves = [value.detach().requires_grad_() for value in (logprobs_N, entropy_N) if value is not None]
    with torch.enable_grad():
        loss, stats = packed_policy_loss(
            leaves[0], *inputs, entropy_N=None if entropy_N is None else leaves[1], **optional
        )
    grad_N, *grad_entropy = torch.autograd.grad(loss, leaves)
    return loss.detach(), grad_N, next(iter(grad_entropy), None), stats


def _at_level(level: Level, values_N: Tensor, sequence_N: Tensor, lengths_B: Tensor) -> Tensor:
    return values_N if level == "token" else terms.sequence_means(values_N, sequence_N, lengths_B)


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
