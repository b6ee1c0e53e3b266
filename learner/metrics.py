"""What a step's commit says about it: plain finite numbers, computed in float64 after the fact. Pure.

A metric that cannot be measured in a step (no token of the newest version, a task without `correct`) is
absent, never 0. Ratios are those before clipping: clipped ones always look healthy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.learner.losses import MAX_LOG_RATIO
from bucketrl.learner.select import Candidate, SkipReason

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Of the N loss tokens of one micro-batch, each [N]. Log-probabilities and entropy in nats."""

    logprobs: npt.NDArray[np.float32]
    """Under the policy that the step starts from."""
    entropy: npt.NDArray[np.float32]
    """Of that policy at the token."""
    behaviour_logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]


def token_metrics(
    statistics: Sequence[TokenStatistics], *, step: int, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Over the loss tokens of step `step`, which starts from policy version step - 1.

    With x = log π - log μ and w = eˣ (|x| clamped as in the loss): `ratio_*` of w; `ess` = (Σw)² / (n·Σw²);
    `kl_k1` = mean(-x) and `kl_k3` = mean(eˣ - 1 - x), estimators of KL(μ‖π)
    (joschu.net/blog/kl-approx.html); `clip_fraction_*`: the share of tokens whose gradient the clip
    cancels; `logprob_mismatch_*`: |x| over tokens sampled by the very version that the step starts from,
    where only numerical differences between engine and learner are left.
    """
    fields = ("logprobs", "entropy", "behaviour_logprobs", "advantages")
    logprobs, entropy, behaviour, advantages = (
        np.concatenate([getattr(part, name) for part in statistics]).astype(np.float64) for name in fields
    )
    lag = (step - 1) - np.concatenate([part.versions for part in statistics])
    difference: Array = logprobs - behaviour
    log_ratio = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio: Array = np.exp(log_ratio)
    metrics = {
        "loss_tokens": float(len(ratio)),
        "entropy": float(entropy.mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "log_ratio_max_abs": float(np.abs(difference).max()),
        "ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "kl_k1": float(-log_ratio.mean()),
        "kl_k3": float((ratio - 1.0 - log_ratio).mean()),
        "clip_fraction_low": float(((advantages < 0) & (ratio < 1.0 - algorithm.clip_low)).mean()),
        "clip_fraction_high": float(((advantages > 0) & (ratio > 1.0 + algorithm.clip_high)).mean()),
        "staleness_mean": float(lag.mean()),
        "staleness_max": float(lag.max()),
    }
    for value, count in zip(*np.unique(lag, return_counts=True), strict=True):
        metrics[f"tokens_lag_{value}"] = float(count)
    mismatch = np.abs(difference[lag == 0])
    if len(mismatch):
        metrics["logprob_mismatch_mean"] = float(mismatch.mean())
        metrics["logprob_mismatch_max"] = float(mismatch.max())
    return metrics


def group_metrics(
    trained: Sequence[Candidate], skipped: Sequence[tuple[Candidate, SkipReason]]
) -> dict[str, float]:
    """Over all completions of the groups that the step consumes.

    Skipped groups count for the reward and its companions: without the groups that are all right or all
    wrong, a policy that gets better would show a flat curve. `reward_std` is that of the population.
    """
    everyone = [*trained, *(candidate for candidate, _ in skipped)]
    rewards = np.array([reward for candidate in everyone for reward in candidate.rewards])
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_mean_trained": float(np.mean([r for candidate in trained for r in candidate.rewards])),
        "truncation_rate": sum(candidate.truncated for candidate in everyone) / len(rewards),
        "groups_trained": float(len(trained)),
        "groups_skipped": float(len(skipped)),
        "groups_skipped_zero_variance": float(sum(reason == "zero_variance" for _, reason in skipped)),
        "groups_skipped_stale": float(sum(reason == "stale" for _, reason in skipped)),
    }
    correct = [candidate.completed_correct for candidate in everyone]
    if None not in correct:
        metrics["completed_correct_mean"] = sum(filter(None, correct)) / len(rewards)
    return metrics
