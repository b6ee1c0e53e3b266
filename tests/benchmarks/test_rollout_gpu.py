"""What the rollout benchmark makes of the times that it takes."""

import pytest
from benchmarks.rollout_gpu.analysis import extra_gaps, longest_gap, percentile, switch_figures
from benchmarks.rollout_gpu.measured_engine import Switch
from benchmarks.rollout_gpu.workload import Lengths


def steps(until: float, *pauses: tuple[float, float]) -> list[float]:
    """A decode step every 10 ms, with pauses (when, how long)."""
    times, now = [], 0.0
    while now < until:
        times.append(now)
        now += 0.01 + sum(long for at, long in pauses if now <= at < now + 0.01)
    return times


def test_a_gap_counts_where_it_reaches_into_the_window() -> None:
    times = steps(5, (1.0, 0.3))
    assert longest_gap(times, 0.5, 0.9) == pytest.approx(0.01)
    assert longest_gap(times, 0.5, 1.1) == pytest.approx(0.31)
    assert longest_gap(times, 1.2, 1.25) == pytest.approx(0.31)


def test_a_switch_that_stalls_decoding_is_seen_and_one_that_does_not_is_not() -> None:
    switches = [Switch(at, at + 0.1, at + 0.2) for at in (1.0, 2.0, 3.0)]
    extra = extra_gaps(steps(5, (2.05, 0.08)), switches)
    assert extra == pytest.approx([0.0, 0.08, 0.0], abs=1e-6)


def test_a_switch_right_after_another_has_nothing_to_be_compared_with() -> None:
    switches = [Switch(1.0, 1.1, 1.2), Switch(1.3, 1.4, 1.5)]
    assert len(extra_gaps(steps(5), switches)) == 1


def test_figures_are_those_of_the_versions_that_came_into_service() -> None:
    commits = {v: float(v) for v in range(1, 6)}
    switches = {v: Switch(v + 0.2, v + 0.3, v + 0.4) for v in (1, 2, 4, 5)}
    switches[3] = Switch(3.2, 3.3)
    figures = switch_figures(commits, switches, steps(7))
    assert figures["switches"] == 4
    assert figures["commit_to_token_p50_s"] == figures["commit_to_token_p99_s"] == pytest.approx(0.4)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100)]
    assert percentile(values, 0.99) == 98.0
    assert percentile(values, 0.5) == 49.0
    assert percentile([3.0], 0.99) == 3.0


def test_lengths_have_a_long_tail_and_depend_on_the_seed_alone() -> None:
    lengths = Lengths()
    drawn = sorted(lengths.of(seed) for seed in range(2000))
    assert drawn[1000] == pytest.approx(lengths.median, rel=0.1)
    assert drawn[-1] == lengths.longest > 5 * drawn[1000]
    assert lengths.of(7) == lengths.of(7)
