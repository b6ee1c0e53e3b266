"""Retries wait as told and give up in the end."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket.errors import NotFound
from bucketrl.bucket.retry import LONGEST_WAIT_S, Transient, retry_after_s, retrying


def test_only_transient_errors_are_retried() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise NotFound("x")

    with pytest.raises(NotFound):
        retrying(call, sleep=lambda _: None)
    assert len(calls) == 1


def test_waits_grow_with_full_jitter_and_never_undercut_the_server() -> None:
    waits: list[float] = []
    answers: list[float | None] = [None, None, 7.0, None]

    def call() -> str:
        if answers:
            raise Transient("busy", answers.pop(0))
        return "done"

    assert retrying(call, base_s=1.0, cap_s=3.0, sleep=waits.append, uniform=lambda _, high: high) == "done"
    assert waits == [1.0, 2.0, 7.0, 3.0]


@given(asked=st.lists(st.none() | st.floats(0, 1e6), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_every_wait_is_within_its_bounds(asked: list[float | None], seed: int) -> None:
    waits: list[float] = []
    left = list(asked)

    def call() -> None:
        if left:
            raise Transient("busy", left.pop(0))

    uniform = random.Random(seed).uniform
    retrying(call, attempts=9, base_s=0.5, cap_s=4.0, sleep=waits.append, uniform=uniform)
    for attempt, (wait, server) in enumerate(zip(waits, asked, strict=True)):
        least = min(server or 0.0, LONGEST_WAIT_S)
        assert least <= wait <= max(least, min(4.0, 0.5 * 2**attempt))


def test_the_last_error_passes_through() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise Transient(f"still busy {len(calls)}")

    with pytest.raises(Transient, match="still busy 3"):
        retrying(call, attempts=3, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("-3", 0.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_read_in_seconds(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds
