"""Metrics against values worked out by hand or by a loop."""

import math

import numpy as np
import pytest
from tests.learner.worlds import make_config

from bucketrl.bucket.records import FileRef, GroupRef
from bucketrl.learner.metrics import TokenStatistics, group_metrics, token_metrics
from bucketrl.learner.select import Candidate

ALGORITHM = make_config().algorithm


def tokens(ratios: list[float], advantages: list[float], versions: list[int]) -> TokenStatistics:
    """Tokens whose behaviour logprob is -1 and whose ratio is as given."""
    return TokenStatistics(
        logprobs=np.array([math.log(r) - 1.0 for r in ratios], dtype=np.float32),
        entropy=np.full(len(ratios), 0.5, dtype=np.float32),
        behaviour_logprobs=np.full(len(ratios), -1.0, dtype=np.float32),
        advantages=np.array(advantages, dtype=np.float32),
        versions=np.array(versions),
    )


def candidate(rewards: tuple[float, ...], *, truncated: int = 0, correct: int | None = None) -> Candidate:
    ref = GroupRef(group_id="0000-00000000", attempt="w-1", file=FileRef(key="k", size=1, sha256="0" * 64))
    return Candidate(
        ordinal=0,
        ref=ref,
        rewards=rewards,
        min_version=0,
        truncated=truncated,
        completed_correct=correct,
    )


def test_token_metrics_of_known_ratios() -> None:
    ratios, advantages, versions = [0.5, 1.0, 1.5, 2.0], [-1.0, 1.0, -1.0, 1.0], [4, 5, 5, 2]
    parts = [
        tokens(ratios[:1], advantages[:1], versions[:1]),
        tokens(ratios[1:], advantages[1:], versions[1:]),
    ]
    metrics = token_metrics(parts, step=6, algorithm=ALGORITHM)
    logs = [math.log(ratio) for ratio in ratios]
    want = {
        "loss_tokens": 4,
        "entropy": 0.5,
        "ratio_mean": 1.25,
        "ratio_min": 0.5,
        "ratio_max": 2.0,
        "log_ratio_max_abs": math.log(2.0),
        "ess": 5.0**2 / (4 * sum(ratio**2 for ratio in ratios)),
        "kl_k1": -sum(logs) / 4,
        "kl_k3": sum(ratio - 1 - log for ratio, log in zip(ratios, logs, strict=True)) / 4,
        "clip_fraction_low": 0.25,
        "clip_fraction_high": 0.25,
        "staleness_mean": 1.0,
        "staleness_max": 3.0,
        "tokens_lag_0": 2,
        "tokens_lag_1": 1,
        "tokens_lag_3": 1,
        "logprob_mismatch_mean": (0.0 + math.log(1.5)) / 2,
        "logprob_mismatch_max": math.log(1.5),
    }
    assert metrics.keys() == want.keys()
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_mismatch_is_absent_without_tokens_of_the_newest_version() -> None:
    metrics = token_metrics([tokens([1.0], [1.0], [0])], step=3, algorithm=ALGORITHM)
    assert not any(name.startswith("logprob_mismatch") for name in metrics)


def test_extreme_ratios_stay_finite_and_visible() -> None:
    part = TokenStatistics(
        logprobs=np.array([-1.0, -900.0], dtype=np.float32),
        entropy=np.zeros(2, dtype=np.float32),
        behaviour_logprobs=np.array([-900.0, -1.0], dtype=np.float32),
        advantages=np.ones(2, dtype=np.float32),
        versions=np.zeros(2, dtype=np.int64),
    )
    metrics = token_metrics([part], step=1, algorithm=ALGORITHM)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["log_ratio_max_abs"] == 899.0
    assert metrics["ess"] == pytest.approx(0.5)


def test_skipped_groups_count_for_the_reward() -> None:
    trained = [candidate((0.0, 1.0), truncated=1, correct=1)]
    skipped = [
        (candidate((1.0, 1.0), correct=2), "zero_variance"),
        (candidate((0.0, 0.0), correct=0), "stale"),
    ]
    metrics = group_metrics(trained, skipped)  # type: ignore[arg-type]
    assert metrics == {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "reward_mean_trained": 0.5,
        "truncation_rate": pytest.approx(1 / 6),
        "completed_correct_mean": 0.5,
        "groups_trained": 1.0,
        "groups_skipped": 2.0,
        "groups_skipped_zero_variance": 1.0,
        "groups_skipped_stale": 1.0,
    }


def test_completed_correct_is_absent_if_a_group_does_not_report_it() -> None:
    metrics = group_metrics([candidate((0.0, 1.0), correct=1), candidate((0.0, 1.0), correct=None)], [])
    assert "completed_correct_mean" not in metrics
