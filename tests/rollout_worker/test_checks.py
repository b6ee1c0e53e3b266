"""Unusable engine output is dropped with its reason, never trained on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.rollout_worker.engine import DroppedCompletion
from bucketrl.rollout_worker.engines.checks import checked_completion


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0)), min_size=1), st.sampled_from(["stop", "length"])
)
def test_sound_output_passes_unchanged(rows: list[tuple[int, float]], reason: str) -> None:
    tokens, logprobs = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
    completion = checked_completion(tokens, logprobs, 7, reason)
    assert (completion.token_ids, completion.logprobs) == (tokens, logprobs)
    assert completion.policy_versions == (7,) * len(tokens)
    assert completion.finish_reason == reason


def test_a_probability_of_one_may_exceed_zero_by_rounding() -> None:
    assert checked_completion((1,), (3e-6,), 0, "stop").logprobs == (0.0,)


@pytest.mark.parametrize(
    ("logprobs", "reason", "complaint"),
    [
        ((), "stop", "empty"),
        ((-1.0, None), "stop", "missing"),
        ((-1.0, math.nan), "stop", "not finite"),
        ((-1.0, -math.inf), "stop", "not finite"),
        ((-1.0, 0.01), "stop", "positive"),
        ((-1.0, None), "abort", "missing"),
        ((-1.0, -1.0), None, "finish reason"),
    ],
)
def test_unusable_output_is_dropped_with_its_reason(
    logprobs: tuple[float | None, ...], reason: str | None, complaint: str
) -> None:
    with pytest.raises(DroppedCompletion, match=complaint):
        checked_completion(tuple(range(len(logprobs))), logprobs, 0, reason)


@pytest.mark.parametrize("drawn", [(), (-1.0, -2.0)])
def test_what_an_aborted_request_drew_is_kept(drawn: tuple[float, ...]) -> None:
    completion = checked_completion(tuple(range(len(drawn))), drawn, 7, "abort")
    assert (completion.logprobs, completion.finish_reason) == (drawn, "abort")


def test_a_missing_row_is_dropped() -> None:
    with pytest.raises(DroppedCompletion, match="missing"):
        checked_completion((1, 2), (-1.0,), 0, "stop")
