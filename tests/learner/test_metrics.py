"""Metrics against values worked out by hand or by a loop."""

import dataclasses
import math
import re

import numpy as np
import pytest
from tests.learner.worlds import make_config

from bucketrl.bucket.records import FileRef, GroupRef
from bucketrl.learner.metrics import TokenStatistics, batch_metrics, group_metrics, token_metrics
from bucketrl.learner.select import Candidate

ALGORITHM = make_config().algorithm


def tokens(ratios: list[float], advantages: list[float], versions: list[int]) -> TokenStatistics:
    """Tokens whose behaviour logprob is -1 and whose ratio is as given."""
    logprobs = np.array([math.log(r) - 1.0 for r in ratios], dtype=np.float32)
    return TokenStatistics(
        logprobs=logprobs,
        entropy=np.full(len(ratios), 0.5, dtype=np.float32),
        behaviour_logprobs=np.full(len(ratios), -1.0, dtype=np.float32),
        advantages=np.array(advantages, dtype=np.float32),
        versions=np.array(versions),
        sequence_ids=np.arange(len(ratios)),
        start_logprobs=logprobs,
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
        "logprob_mismatch_bias": math.log(1.5) / 2,
    }
    assert {name for name in metrics if not re.search(r"(?<!tokens)_lag_", name)} == want.keys()
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_each_lag_is_measured_by_itself() -> None:
    """What a step of mixed tokens says of a lag is what a step of those tokens alone says of them all."""
    ratios, advantages, versions = [0.5, 1.0, 1.5, 2.0, 0.7], [-1.0, 1.0, -1.0, 1.0, 1.0], [4, 5, 5, 2, 2]
    mixed = token_metrics([tokens(ratios, advantages, versions)], step=6, algorithm=ALGORITHM)
    for lag in (0, 1, 3):
        chosen = [i for i, version in enumerate(versions) if 5 - version == lag]
        columns = ([column[i] for i in chosen] for column in (ratios, advantages, versions))
        alone = token_metrics([tokens(*columns)], step=6, algorithm=ALGORITHM)
        found = {n.removesuffix(f"_lag_{lag}"): v for n, v in mixed.items() if n.endswith(f"_lag_{lag}")}
        assert {"ess", "ratio_mean", "kl_k3", "entropy", "clip_fraction_high"} < found.keys()
        assert found.pop("tokens") == len(chosen)
        assert found == {name: alone[name] for name in found}


def test_weights_are_measured_before_they_are_truncated_or_masked() -> None:
    algorithm = make_config(
        algorithm={"proximal": "recomputed", "importance_weight": "token", "importance_mask": "token"}
    ).algorithm
    part = dataclasses.replace(
        tokens([1.0] * 4, [1.0] * 4, [0] * 4), proximal_logprobs=np.log([0.25, 1.0, 3.0, 8.0]) - 1.0
    )
    metrics = token_metrics([part], step=1, algorithm=algorithm)
    assert metrics["weight_mean"] == pytest.approx(3.0625)
    assert metrics["weight_min"] == pytest.approx(0.25)
    assert metrics["weight_max"] == pytest.approx(8.0)
    assert metrics["weight_ess"] == pytest.approx(12.25**2 / (4 * (0.0625 + 1 + 9 + 64)))
    assert metrics["weight_truncated_fraction"] == 0.5
    assert metrics["weight_masked_fraction"] == 0.5


def test_the_clip_is_measured_on_the_ratio_that_it_clips() -> None:
    """Of the sequence or to a proximal policy: not that of the token to the behaviour policy."""
    ratios, to_proximal = [9.0, 9.0, 0.1, 9.0], [1.1, 1.1, 0.7, 4.0]
    part = dataclasses.replace(
        tokens(ratios, [1.0, -1.0, -1.0, -1.0], [0] * 4),
        proximal_logprobs=np.log(ratios) - np.log(to_proximal) - 1.0,
    )
    metrics = token_metrics([part], step=1, algorithm=make_config(algorithm={"dual_clip": 3.0}).algorithm)
    assert metrics["ratio_max"] == pytest.approx(9.0)
    assert metrics["clip_fraction_high"] == 0.0
    assert metrics["clip_fraction_low"] == 0.25
    assert metrics["clip_fraction_dual"] == 0.25
    bounded = token_metrics([part], step=1, algorithm=make_config(algorithm={"name": "cispo"}).algorithm)
    assert bounded["clip_fraction_high"] == 0.0
    assert "clip_fraction_low" not in bounded
    free = token_metrics([part], step=1, algorithm=make_config(algorithm={"name": "rloo"}).algorithm)
    assert not any(name.startswith("clip_fraction") for name in free)


def test_by_sequence_every_token_has_the_geometric_mean_of_its_completion() -> None:
    """Also those of another lag than the rest of the completion; completions of several micro-batches."""
    algorithm = make_config(
        algorithm={"name": "gspo", "clip_low": 0.2, "clip_high": 0.28, "importance_mask": "sequence"}
    ).algorithm
    first = dataclasses.replace(
        tokens([2.0, 1.0, 0.5], [1.0, 1.0, -1.0], [0, 1, 1]), sequence_ids=np.array([0, 0, 1])
    )
    second = dataclasses.replace(tokens([1.0], [1.0], [1]), sequence_ids=np.array([2]))
    metrics = token_metrics([first, second], step=2, algorithm=algorithm)
    assert metrics["clip_fraction_high"] == 0.5
    assert metrics["clip_fraction_high_lag_0"] == pytest.approx(1 / 3)
    assert metrics["clip_fraction_low"] == 0.25
    assert metrics["weight_masked_fraction"] == 0.75
    assert "weight_mean" not in metrics


def test_the_divergence_from_the_base_is_there_if_it_was_computed() -> None:
    part = dataclasses.replace(
        tokens([1.0, 1.0], [1.0, 1.0], [0, 0]), reference_logprobs=np.array([-1.5, -0.5])
    )
    metrics = token_metrics([part], step=1, algorithm=ALGORITHM)
    assert metrics["kl_reference_k1"] == pytest.approx(0.0)
    assert metrics["kl_reference_k2"] == pytest.approx(0.125)
    assert metrics["kl_reference_k3"] == pytest.approx(math.cosh(0.5) - 1)


def test_mismatch_leaves_out_what_an_earlier_update_has_moved() -> None:
    first = tokens([1.5], [1.0], [0])
    later = dataclasses.replace(tokens([7.0], [1.0], [0]), start_logprobs=None)
    metrics = token_metrics([first, later], step=1, algorithm=ALGORITHM)
    assert metrics["logprob_mismatch_max"] == pytest.approx(math.log(1.5), abs=1e-6)


def test_advantages_and_what_was_dropped() -> None:
    metrics = batch_metrics([[0.0, 1.0], [math.nan, 1.0]], [[-0.5, 0.5], [0.0, 0.0]], dropped=3)
    assert metrics == {
        "advantage_std": pytest.approx(math.sqrt(0.5 / 3)),
        "advantage_min": -0.5,
        "advantage_max": 0.5,
        "groups_without_advantage": 1.0,
        "rewards_not_finite": 1.0,
        "completions_dropped_not_finite": 3.0,
    }


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
        sequence_ids=np.zeros(2, dtype=np.int64),
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
    metrics = group_metrics(trained, skipped, group_size=4)  # type: ignore[arg-type]
    assert metrics == {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "reward_mean_trained": 0.5,
        "truncation_rate": pytest.approx(1 / 6),
        "completions_missing": 6.0,
        "completed_correct_mean": 0.5,
        "groups_trained": 1.0,
        "groups_skipped": 2.0,
        "groups_skipped_zero_variance": 1.0,
        "groups_skipped_stale": 1.0,
    }


def test_completed_correct_is_absent_if_a_group_does_not_report_it() -> None:
    metrics = group_metrics(
        [candidate((0.0, 1.0), correct=1), candidate((0.0, 1.0), correct=None)], [], group_size=2
    )
    assert "completed_correct_mean" not in metrics


def test_a_reward_that_is_not_finite_is_left_out_of_the_mean() -> None:
    metrics = group_metrics([candidate((0.0, 1.0, math.nan))], [], group_size=3)
    assert (metrics["reward_mean"], metrics["reward_std"]) == (0.5, 0.5)
    assert "reward_mean" not in group_metrics([candidate((math.nan, math.nan))], [], group_size=2)
