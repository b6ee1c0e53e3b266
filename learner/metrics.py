"""What a step's commit says about it: plain finite numbers, computed in float64 after the fact. Pure.

A metric that cannot be measured in a step (no token of the newest version, a task without `correct`, no
importance weight) is absent, never 0. Ratios and weights are those before clipping, truncation and masks:
what is left afterwards always looks healthy. `docs/algorithms.md` explains every name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.kernels.policy_terms import MAX_LOG_RATIO
from bucketrl.learner.advantages import deviation
from bucketrl.learner.select import Candidate, SkipReason

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating]

NOT_BY_LAG = ("log_ratio_max_abs", "weight_min")
"""Metrics of tokens that are not repeated for each lag."""


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Of the N loss tokens of one micro-batch, each [N]. Log-probabilities and entropy in nats."""

    logprobs: Floats
    """Under the policy that the update starts from."""
    entropy: Floats
    """Of that policy at the token."""
    behaviour_logprobs: Floats
    advantages: Floats
    versions: npt.NDArray[np.int64]
    sequence_ids: npt.NDArray[np.int64]
    """Which completion of the batch; all of its tokens are there."""
    proximal_logprobs: Floats | None = None
    """Under the proximal policy; None without one."""
    start_logprobs: Floats | None = None
    """Under the policy that the step starts from; None where an earlier update has moved it and nothing was
    recomputed."""
    reference_logprobs: Floats | None = None
    """Under the base model; None without a divergence."""


def token_metrics(
    statistics: Sequence[TokenStatistics], *, step: int, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Over the loss tokens of step `step`, which starts from policy version step - 1: over all of them, and
    with the suffix `_lag_<n>` over those of version step - 1 - n."""
    lag = (step - 1) - np.concatenate([part.versions for part in statistics])
    columns = {
        name: np.concatenate([getattr(part, name) for part in statistics]).astype(np.float64)
        for name in TokenStatistics.__slots__
        if name not in ("versions", "start_logprobs") and getattr(statistics[0], name) is not None
    }
    columns |= _at_levels(columns, algorithm)
    metrics = {"loss_tokens": float(len(lag)), "staleness_mean": float(lag.mean())}
    metrics |= {"staleness_max": float(lag.max())} | _over(columns, algorithm)
    for value, count in zip(*np.unique(lag, return_counts=True), strict=True):
        metrics[f"tokens_lag_{value}"] = float(count)
        of_lag = _over({name: column[lag == value] for name, column in columns.items()}, algorithm)
        metrics |= {
            f"{name}_lag_{value}": measured for name, measured in of_lag.items() if name not in NOT_BY_LAG
        }
    return metrics | _mismatch(statistics, step)


def _at_levels(tokens: dict[str, Array], algorithm: AlgorithmConfig) -> dict[str, Array]:
    """The log ratios that the surrogate, the importance weight and the importance mask look at, as far as the
    algorithm has them; each clamped, then by token or as the mean over its completion."""
    logprobs, behaviour = tokens["logprobs"], tokens["behaviour_logprobs"]
    to_centre = logprobs - tokens.get("proximal_logprobs", behaviour)
    to_behaviour = tokens.get("proximal_logprobs", logprobs) - behaviour
    _, sequence, lengths = np.unique(tokens["sequence_ids"], return_inverse=True, return_counts=True)
    found = {}
    for name, level, difference in (
        ("log_ratio", algorithm.ratio_level, to_centre),
        ("log_weight", algorithm.importance_weight, to_behaviour),
        ("log_band", algorithm.importance_mask, to_behaviour),
    ):
        clamped = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if level == "token":
            found[name] = clamped
        elif level == "sequence":
            found[name] = (np.bincount(sequence, clamped) / lengths)[sequence]
    return found


def _over(tokens: dict[str, Array], algorithm: AlgorithmConfig) -> dict[str, float]:
    difference = tokens["logprobs"] - tokens["behaviour_logprobs"]
    log_ratio = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio: Array = np.exp(log_ratio)
    metrics = {
        "entropy": float(tokens["entropy"].mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "log_ratio_max_abs": float(np.abs(difference).max()),
        "ess": _effective_sample_size(ratio),
        "kl_k1": float(-log_ratio.mean()),
        "kl_k3": float((ratio - 1.0 - log_ratio).mean()),
    }
    if "log_ratio" in tokens:
        metrics |= _clip_fractions(tokens["advantages"], np.exp(tokens["log_ratio"]), algorithm)
    if "log_weight" in tokens:
        assert algorithm.importance_cap is not None
        weight: Array = np.exp(tokens["log_weight"])
        metrics |= {
            "weight_mean": float(weight.mean()),
            "weight_min": float(weight.min()),
            "weight_max": float(weight.max()),
            "weight_ess": _effective_sample_size(weight),
            "weight_truncated_fraction": float((weight > algorithm.importance_cap).mean()),
        }
    if "log_band" in tokens:
        assert algorithm.importance_mask_low is not None
        assert algorithm.importance_mask_high is not None
        weight = np.exp(tokens["log_band"])
        outside = (weight < algorithm.importance_mask_low) | (weight > algorithm.importance_mask_high)
        metrics["weight_masked_fraction"] = float(outside.mean())
    if "reference_logprobs" in tokens:
        over_base = (tokens["logprobs"] - tokens["reference_logprobs"]).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        metrics |= {
            "kl_reference_k1": float(over_base.mean()),
            "kl_reference_k2": float((over_base**2 / 2).mean()),
            "kl_reference_k3": float((np.expm1(-over_base) + over_base).mean()),
        }
    return metrics


def _clip_fractions(advantages: Array, ratio: Array, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Shares of the tokens whose gradient the clip cancels; with CISPO, whose weight it bounds."""
    assert algorithm.clip_high is not None
    above = ratio > 1.0 + algorithm.clip_high
    if algorithm.clip_low is None:
        return {"clip_fraction_high": float(above.mean())}
    metrics = {
        "clip_fraction_low": float(((advantages < 0) & (ratio < 1.0 - algorithm.clip_low)).mean()),
        "clip_fraction_high": float(((advantages > 0) & above).mean()),
    }
    if algorithm.dual_clip is not None:
        metrics["clip_fraction_dual"] = float(((advantages < 0) & (ratio > algorithm.dual_clip)).mean())
    return metrics


def _effective_sample_size(weight: Array) -> float:
    """(Σw)² / (n·Σw²), in (0, 1]."""
    return float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))


def _mismatch(statistics: Sequence[TokenStatistics], step: int) -> dict[str, float]:
    """log π - log μ of tokens sampled by the very version that the step starts from: what engine and learner
    disagree about. A mean that is not near 0 says that the engine's distribution is another one."""
    found = [
        (part.start_logprobs.astype(np.float64) - part.behaviour_logprobs)[part.versions == step - 1]
        for part in statistics
        if part.start_logprobs is not None
    ]
    difference = np.concatenate(found) if found else np.empty(0)
    if not len(difference):
        return {}
    return {
        "logprob_mismatch_mean": float(np.abs(difference).mean()),
        "logprob_mismatch_max": float(np.abs(difference).max()),
        "logprob_mismatch_bias": float(difference.mean()),
    }


def batch_metrics(
    rewards: Sequence[Sequence[float]], advantages: Sequence[Sequence[float]], *, dropped: int
) -> dict[str, float]:
    """Over the completions of the groups that the step trains on. `rewards` are those that the advantages were
    made from; `dropped` completions had behaviour log-probabilities that are not finite."""
    flat = [advantage for group in advantages for advantage in group]
    return {
        "advantage_std": deviation(flat),
        "advantage_min": min(flat),
        "advantage_max": max(flat),
        "groups_without_advantage": float(sum(not any(group) for group in advantages)),
        "rewards_not_finite": float(sum(not math.isfinite(reward) for group in rewards for reward in group)),
        "completions_dropped_not_finite": float(dropped),
    }


def group_metrics(
    trained: Sequence[Candidate], skipped: Sequence[tuple[Candidate, SkipReason]], *, group_size: int
) -> dict[str, float]:
    """Over all completions of the groups that the step consumes. Those that are missing of `group_size` were
    dropped by their worker, which tells the proxy why.

    Skipped groups count for the reward and its companions: without the groups that are all right or all
    wrong, a policy that gets better would show a flat curve. `reward_std` is that of the population.
    """
    everyone = [*trained, *(candidate for candidate, _ in skipped)]
    completions = sum(len(candidate.rewards) for candidate in everyone)
    metrics = {
        "truncation_rate": sum(candidate.truncated for candidate in everyone) / completions,
        "completions_missing": float(group_size * len(everyone) - completions),
        "groups_trained": float(len(trained)),
        "groups_skipped": float(len(skipped)),
        "groups_skipped_zero_variance": float(sum(reason == "zero_variance" for _, reason in skipped)),
        "groups_skipped_stale": float(sum(reason == "stale" for _, reason in skipped)),
    }
    if rewards := _finite_rewards(everyone):
        metrics |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    if rewards := _finite_rewards(trained):
        metrics["reward_mean_trained"] = float(np.mean(rewards))
    correct = [candidate.completed_correct for candidate in everyone]
    if None not in correct:
        metrics["completed_correct_mean"] = sum(filter(None, correct)) / completions
    return metrics


def _finite_rewards(candidates: Sequence[Candidate]) -> list[float]:
    return [r for candidate in candidates for r in candidate.rewards if math.isfinite(r)]
