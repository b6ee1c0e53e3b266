"""The background pass: what it does when, and that a run stays bounded however long it goes on."""

import logging
from typing import Any

import pytest
from tests.bucket.builders import NOW
from tests.bucket.counting import CountingStore
from tests.bucket.tiny_runs import TinyLearner

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.learner.housekeeping import MIN_GAP_S, Housekeeping

KEEP = 8
STEPS = 10_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def memory() -> Store:
    return MemoryStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def housekeeping(store: Store, learner: TinyLearner, clock: Clock, keep: int = KEEP) -> Housekeeping:
    return Housekeeping(
        store,
        learner.run,
        lambda: learner.state,
        keep=keep,
        learner_id="a",
        now=lambda: NOW,
        clock=clock,
    )


def adapters(store: Store) -> list[int]:
    """Versions whose adapter is in the bucket."""
    return [int(info.key[7:15]) for info in store.list(keys.POLICY_PREFIX)]


def advance(learner: TinyLearner, steps: int) -> None:
    for _ in range(steps):
        learner.step()


def test_a_pass_comes_after_half_of_keep_but_not_more_often_than_the_gap(memory: Store, clock: Clock) -> None:
    learner = TinyLearner(memory)
    keeper = housekeeping(memory, learner, clock)
    advance(learner, 20)
    keeper.look()
    assert adapters(memory) == [0, *range(13, 21)]
    clock.now += 10 * MIN_GAP_S
    advance(learner, KEEP // 2 - 1)
    keeper.look()
    assert len(adapters(memory)) == 1 + KEEP + 3
    advance(learner, 1)
    keeper.look()
    assert adapters(memory) == [0, *range(17, 25)]
    clock.now += MIN_GAP_S - 1
    advance(learner, KEEP)
    keeper.look()
    assert len(adapters(memory)) == 1 + 2 * KEEP
    clock.now += 1
    keeper.look()
    assert adapters(memory) == [0, *range(25, 33)]


def test_keep_0_removes_nothing_and_still_writes_snapshots(memory: Store, clock: Clock) -> None:
    learner = TinyLearner(memory)
    keeper = housekeeping(memory, learner, clock, keep=0)
    advance(learner, 3 * snapshots.EVERY)
    keeper.look()
    assert len(adapters(memory)) == 3 * snapshots.EVERY + 1
    assert [info.key for info in memory.list(keys.SNAPSHOT_PREFIX)] == [keys.snapshot(learner.state.step_seq)]
    assert list(memory.list(keys.BOUNDARY_PREFIX)) == []


def test_a_learner_that_goes_on_knows_the_snapshot_of_the_one_before(memory: Store, clock: Clock) -> None:
    first = TinyLearner(memory)
    advance(first, snapshots.EVERY)
    housekeeping(memory, first, clock).look()
    second = TinyLearner(memory, "b")
    keeper = housekeeping(memory, second, clock)
    advance(second, snapshots.EVERY - 2)
    keeper.look()
    assert len(list(memory.list(keys.SNAPSHOT_PREFIX))) == 1
    advance(second, 1)
    keeper.look()
    assert len(list(memory.list(keys.SNAPSHOT_PREFIX))) == 2


class FailingStore:
    """Delegates; every deletion fails while `failing`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.failing = True

    def delete(self, names: Any) -> None:
        if self.failing:
            raise StoreError("the store is away")
        self._store.delete(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_failure_is_logged_and_tried_again_later(
    memory: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    learner = TinyLearner(memory)
    failing: Any = FailingStore(memory)
    keeper = housekeeping(failing, learner, clock)
    advance(learner, 20)
    with caplog.at_level(logging.WARNING):
        keeper.look()
        keeper.look()
    assert [message.split(";")[0] for message in caplog.messages] == ["housekeeping: the store is away"]
    failing.failing = False
    keeper.look()
    assert len(adapters(memory)) == 21
    clock.now += MIN_GAP_S
    keeper.look()
    assert adapters(memory) == [0, *range(13, 21)]


def test_the_thread_works_while_it_is_open_and_ends(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr("bucketrl.learner.housekeeping.LOOK_S", 0.01)
    learner = TinyLearner(memory)
    advance(learner, 20)
    keeper = Housekeeping(
        memory, learner.run, lambda: learner.state, keep=KEEP, learner_id="a", now=lambda: NOW
    )
    with keeper:
        deadline = time.monotonic() + 10
        while len(adapters(memory)) > 1 + KEEP and time.monotonic() < deadline:
            time.sleep(0.01)
    assert adapters(memory) == [0, *range(13, 21)]
    assert not keeper._thread.is_alive()


@pytest.mark.slow
def test_10000_steps_hold_a_bounded_number_of_objects_and_resume_reads_a_few(clock: Clock) -> None:
    """With learners that die and leave orphans, at a step a second."""
    store = MemoryStore()
    learner = TinyLearner(store)
    keeper = housekeeping(store, learner, clock, keep=64)
    most_objects = most_bytes = 0
    for number in range(1, STEPS + 1):
        if number % 97 == 0:
            learner.sample(2)
            learner.publish()  # dies before its commit
            learner = TinyLearner(store, f"l{number}")
            keeper = housekeeping(store, learner, clock, keep=64)
        learner.step()
        clock.now += 1.0
        keeper.look()
        if number % 50 == 0:
            beside = [info for info in store.list("") if not info.key.startswith(keys.LOG_PREFIX)]
            most_objects = max(most_objects, len(beside))
            most_bytes = max(most_bytes, sum(info.size for info in beside))
    assert learner.state.step is not None
    assert learner.state.step.step == STEPS
    per_step = 9  # adapter, checkpoint, batch, and three objects for each of two groups
    assert most_objects <= (64 + 64 + 5) * per_step
    assert most_bytes <= 133 * per_step * 20

    counting = CountingStore(store)
    reader = LogReader(counting, learner.run, from_snapshot=True)
    reader.refresh()
    assert reader.state == learner.state
    newest = snapshots.newest(store)
    assert learner.state.head_seq - newest < 2 * snapshots.EVERY
    assert len(counting.calls) <= 8 + learner.state.head_seq - newest
