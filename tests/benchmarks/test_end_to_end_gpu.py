"""What the end-to-end benchmark says about the use of both roles and about staleness."""

import math

import pytest
from benchmarks.end_to_end_gpu import analysis
from hypothesis import given
from hypothesis import strategies as st

TIMES = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=20).map(sorted)
PHASES = [(10.0, "training"), (13.0, "publishing"), (14.0, "waiting"), (16.0, "training")]


@pytest.mark.parametrize(
    ("phase", "begin", "end", "expected"),
    [
        ("training", 10.0, 16.0, 0.5),
        ("waiting", 10.0, 16.0, 2 / 6),
        ("training", 12.0, 18.0, 0.5),  # the last value holds until the end
        ("training", 4.0, 16.0, 0.25),  # nothing is known before the first
        ("training", 16.5, 17.0, 1.0),
        ("publishing", 0.0, 5.0, 0.0),
    ],
)
def test_a_phase_lasts_until_the_next_one(phase: str, begin: float, end: float, expected: float) -> None:
    assert analysis.share(PHASES, begin, end, lambda found: found == phase) == pytest.approx(expected)


@given(times=TIMES, data=st.data())
def test_the_shares_of_all_values_fill_the_time(times: list[float], data: st.DataObject) -> None:
    trace = [(at, data.draw(st.sampled_from("abc"))) for at in times]
    shares = [analysis.share(trace, times[0], 101.0, wanted.__eq__) for wanted in "abc"]
    assert sum(shares) == pytest.approx(1.0)


@given(times=TIMES, count=st.integers(1, 9), data=st.data())
def test_windows_together_are_the_whole(times: list[float], count: int, data: st.DataObject) -> None:
    trace = [(at, data.draw(st.floats(0, 50))) for at in times]
    totals = [(at, float(number)) for number, at in enumerate(times)]
    windows = analysis.windows(-1.0, 101.0, count)
    for measure, points in ((analysis.mean, trace), (analysis.rate, totals)):
        parts = [measure(points, *window) for window in windows]
        assert math.fsum(parts) / count == pytest.approx(measure(points, -1.0, 101.0), abs=1e-6)


def test_a_rate_is_what_was_counted_within_the_time() -> None:
    totals = [(1.0, 100.0), (3.0, 160.0), (9.0, 400.0)]
    assert analysis.rate(totals, 1.0, 5.0) == 15.0
    assert analysis.rate(totals, 0.0, 10.0) == 40.0


def test_the_staleness_histogram_adds_up_the_tokens_of_every_step() -> None:
    steps = [{"tokens_lag_0": 5.0, "reward_mean": 0.5}, {"tokens_lag_0": 2.0, "tokens_lag_3": 4.0}]
    assert analysis.staleness_histogram(steps) == {0: 7, 1: 0, 2: 0, 3: 4}
    assert analysis.staleness_histogram([]) == {}
