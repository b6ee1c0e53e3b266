"""When the learner lists the bucket again: at once when told, and never seldom enough to lose an upload."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import UploadedGroups
from bucketrl.learner.pacing import ASK_S, MAX_SLOWER, UNTOLD_S, Arrivals, Pace


class Stop(threading.Event):
    """Time passes in no time, and is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_s += timeout or 0.0
        return self.is_set()


class Proxy:
    """Its uploads rise as a function of the seconds that were waited for them; steps of 0.1 s."""

    def __init__(self, uploaded: Callable[[float], int], log_seq: int = 5) -> None:
        self.uploaded = uploaded
        self.log_seq = log_seq
        self.now = 0.0
        self.asked = 0

    def uploads(self, groups: int, log_seq: int, wait_s: float) -> UploadedGroups:
        self.asked += 1
        end = self.now + wait_s
        while self.now < end and not (self.log_seq >= log_seq and self.uploaded(self.now) >= groups):
            self.now += 0.1
        return UploadedGroups(groups=self.uploaded(self.now), log_seq=self.log_seq)


def arrivals(proxy: Proxy | None, stop: Stop | None = None) -> Arrivals:
    return Arrivals(proxy.uploads if proxy else None, poll_s=2.0, stop=stop or Stop())


def wait(waiting: Arrivals, wanted: int, *, found: int = 0, doubtful: bool = False) -> None:
    waiting.wait(wanted=wanted, log_seq=5, found=found, doubtful=doubtful)


def test_the_last_upload_that_is_needed_ends_the_wait_within_a_moment() -> None:
    proxy = Proxy(lambda now: int(now))
    wait(arrivals(proxy), 8)
    assert 8.0 <= proxy.now <= 8.3


def test_too_few_uploads_are_listed_only_rarely() -> None:
    proxy = Proxy(lambda _: 7)
    wait(arrivals(proxy), 8)
    assert UNTOLD_S <= proxy.now <= UNTOLD_S + 0.2 * proxy.asked


def test_one_more_upload_than_was_told_is_news_when_the_listing_showed_too_few() -> None:
    """The learner found equal rewards among what it was told of: it needs one more."""
    proxy = Proxy(lambda now: 4 if now < 10 else 5)
    waiting = arrivals(proxy)
    wait(waiting, 4)
    assert proxy.now < 1
    wait(waiting, 5)
    assert 10.0 <= proxy.now <= 10.3


@pytest.mark.parametrize("case", ["what was told of does not show", "an invalid object is to be read again"])
def test_what_should_show_and_does_not_is_looked_for_at_the_slowing_pace(case: str) -> None:
    proxy = Proxy(lambda _: 4)
    waiting = arrivals(proxy)
    doubtful = case.startswith("an")
    wanted = 5 if doubtful else 4
    wait(waiting, wanted, doubtful=doubtful)
    gaps = []
    for _ in range(6):
        before = proxy.now
        wait(waiting, wanted, doubtful=doubtful)
        gaps.append(proxy.now - before)
    assert 1.9 <= gaps[0] <= 4.0
    assert gaps == sorted(gaps)
    assert gaps[-1] <= 2.0 * MAX_SLOWER + 1.0


def test_a_proxy_that_has_not_read_the_commit_counts_consumed_groups_and_is_not_believed() -> None:
    proxy = Proxy(lambda _: 64, log_seq=4)
    wait(arrivals(proxy), 8)
    assert proxy.now >= UNTOLD_S - ASK_S


@pytest.mark.parametrize("error", [ProxyUnavailable("refused"), ProxyRefused(404, "no such route"), None])
def test_without_word_from_a_proxy_the_bucket_is_listed_at_the_slowing_pace(error: Exception | None) -> None:
    def fail(*_: object) -> UploadedGroups:
        assert error is not None
        raise error

    stop = Stop()
    waiting = Arrivals(fail if error else None, poll_s=2.0, stop=stop)
    waits = []
    for found in (1, 0, 0, 0, 0, 1):
        before = stop.waited_s
        wait(waiting, 8, found=found)
        waits.append(stop.waited_s - before)
    assert waits == [2.0, 3.0, 4.5, 6.75, 8.0, 2.0]


def test_a_signal_ends_the_wait_within_one_long_poll() -> None:
    stop = Stop()
    proxy = Proxy(lambda now: stop.set() or 0 if now > 5 else 0)  # type: ignore[func-returns-value]
    wait(arrivals(proxy, stop), 8)
    assert proxy.now <= 5 + ASK_S + 0.3


def test_a_new_step_counts_anew() -> None:
    proxy = Proxy(lambda _: 9)
    waiting = arrivals(proxy)
    wait(waiting, 8)
    proxy.uploaded = lambda now: 1 if now < 3 else 8
    waiting.begin()
    wait(waiting, 8)
    assert 3.0 <= proxy.now <= 3.3


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 100), st.integers(0, 100), st.booleans())
def test_no_history_makes_the_learner_wait_longer_than_the_slow_interval_or_list_without_a_pause(
    found: list[int], wanted: int, told: int, doubtful: bool
) -> None:
    pace = Pace(2.0)
    for number in found:
        pace.listed(number)
    pace.listed(0)
    pace.told = told
    assert 2.0 <= pace.patience_s(wanted, doubtful) <= UNTOLD_S
    assert pace.target(wanted) > told
    assert pace.target(wanted) >= wanted
