"""Advantages against `statistics` and loops, and what holds for any rewards."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.learner.advantages import (
    EPSILON,
    Baseline,
    Scale,
    batch_advantages,
    deviation,
    group_advantages,
    has_zero_variance,
    leave_one_out_advantages,
    overlong_penalty,
)

reward = st.integers(-40, 40).map(lambda value: value / 8)
group = st.lists(reward, min_size=1, max_size=8)
baselines = st.sampled_from(["group_mean", "leave_one_out", "batch_mean"])
scales = st.sampled_from(["none", "group_std", "batch_std"])


@given(st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=16))
def test_advantages_are_rewards_minus_their_mean(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    mean = statistics.fmean(rewards)
    assert advantages == pytest.approx([reward - mean for reward in rewards], abs=1e-12)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9)


@given(st.lists(reward, min_size=2, max_size=8))
def test_leave_one_out_compares_with_the_others_only(rewards: list[float]) -> None:
    want = [own - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, own in enumerate(rewards)]
    assert leave_one_out_advantages(rewards) == pytest.approx(want, abs=1e-12)


def naive(groups: list[list[float]], baseline: str, scale: str) -> list[list[float]]:
    everything = [one for rewards in groups for one in rewards]
    made = []
    for rewards in groups:
        row = []
        for i, own in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            compared = {"group_mean": rewards, "leave_one_out": others, "batch_mean": everything}[baseline]
            row.append(own - sum(compared) / len(compared) if compared else 0.0)
        made.append(row)
    differences = [one for row in made for one in row]
    spread = {
        "none": lambda _: 1.0,
        "group_std": lambda rewards: (statistics.stdev(rewards) if len(rewards) > 1 else 0.0) + EPSILON,
        "batch_std": lambda _: (statistics.stdev(differences) if len(differences) > 1 else 0.0) + EPSILON,
    }[scale]
    return [[one / spread(rewards) for one in row] for row, rewards in zip(made, groups, strict=True)]


@given(st.lists(group, min_size=1, max_size=5), baselines, scales)
def test_every_combination_matches_its_formula(
    groups: list[list[float]], baseline: Baseline, scale: Scale
) -> None:
    for ours, want in zip(
        batch_advantages(groups, baseline, scale), naive(groups, baseline, scale), strict=True
    ):
        assert ours == pytest.approx(want, rel=1e-9, abs=1e-8)


@given(st.lists(group, min_size=1, max_size=5), baselines, scales, st.integers(-5, 5))
def test_a_constant_added_to_every_reward_changes_nothing(
    groups: list[list[float]], baseline: Baseline, scale: Scale, shift: int
) -> None:
    moved = [[one + shift for one in rewards] for rewards in groups]
    for one, two in zip(
        batch_advantages(groups, baseline, scale), batch_advantages(moved, baseline, scale), strict=True
    ):
        assert one == pytest.approx(two, rel=1e-9, abs=1e-8)


@given(st.lists(st.lists(reward, min_size=2, max_size=6), min_size=1, max_size=4), baselines)
def test_scaled_advantages_do_not_depend_on_the_unit_of_the_reward(
    groups: list[list[float]], baseline: Baseline
) -> None:
    larger = [[1000 * one for one in rewards] for rewards in groups]
    for scale in ("group_std", "batch_std"):
        if baseline == "batch_mean" and scale == "group_std" and any(map(has_zero_variance, groups)):
            continue  # divided by epsilon alone, which has a unit
        for one, two in zip(
            batch_advantages(groups, baseline, scale),  # type: ignore[arg-type]
            batch_advantages(larger, baseline, scale),  # type: ignore[arg-type]
            strict=True,
        ):
            assert one == pytest.approx(two, rel=1e-4, abs=1e-4)


@given(st.lists(st.lists(st.one_of(reward, st.sampled_from([math.nan, math.inf, -math.inf])), min_size=1,
                         max_size=6), min_size=1, max_size=4), baselines, scales)  # fmt: skip
def test_rewards_that_are_not_finite_get_no_advantage_and_do_not_touch_others(
    groups: list[list[float]], baseline: Baseline, scale: Scale
) -> None:
    made = batch_advantages(groups, baseline, scale)
    kept = [[one for one in rewards if math.isfinite(one)] for rewards in groups]
    alone = batch_advantages([rewards for rewards in kept if rewards] or [[0.0]], baseline, scale)
    for row, rewards in zip(made, groups, strict=True):
        assert all(map(math.isfinite, row))
        assert all(a == 0.0 for a, r in zip(row, rewards, strict=True) if not math.isfinite(r))
    shown = [
        [a for a, r in zip(row, rewards, strict=True) if math.isfinite(r)]
        for row, rewards in zip(made, groups, strict=True)
    ]
    assert [row for row in shown if row] == [row for row in alone if any(kept)]


@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
@pytest.mark.parametrize("rewards", [[1.0], [0.3, 0.3, 0.3], [math.nan, math.nan], [math.nan, 2.0]])
def test_without_a_comparison_the_advantage_is_zero(rewards: list[float], scale: Scale) -> None:
    """A group of one, equal rewards, a group that could not be scored, or but one that could."""
    for baseline in ("group_mean", "leave_one_out"):
        (row,) = batch_advantages([rewards], baseline, scale)  # type: ignore[arg-type]
        assert row == pytest.approx([0.0] * len(rewards), abs=1e-9)
    assert has_zero_variance(rewards)


@given(reward, st.integers(2, 8))
def test_equal_rewards_are_zero_variance(reward: float, count: int) -> None:
    assert has_zero_variance([reward] * count)
    assert not has_zero_variance([reward] * count + [reward + 0.5])


@given(st.floats(-1e4, 1e4), st.integers(1, 16), baselines, scales)
def test_equal_rewards_have_advantages_of_exactly_zero(
    reward: float, count: int, baseline: Baseline, scale: Scale
) -> None:
    """Three times 0.003 has a rounded mean: AdamW would make a step of that."""
    for groups in ([[reward] * count], [[0.003] * 3, [0.003] * count]):
        assert not any(map(any, batch_advantages(groups, baseline, scale)))


def test_deviation_is_that_of_a_sample() -> None:
    assert deviation([1.0, 2.0, 4.0]) == pytest.approx(statistics.stdev([1, 2, 4]))
    assert deviation([1.0, math.nan]) == 0.0


@pytest.mark.parametrize(
    ("tokens", "want"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (130, -2.0)]
)
def test_the_overlong_penalty_grows_within_its_buffer(tokens: int, want: float) -> None:
    """DAPO, eq. 13, with L_max 100, L_cache 20 and a factor of 2: (80 - 90) / 20 is half of it at 90."""
    assert overlong_penalty(tokens, 100, 0.2, 2.0) == pytest.approx(want)
