"""A learner that crashes, freezes, is told to go or finds its batch damaged: what is learned is the same."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.learner.runs import STEPS, World, is_commit_of, is_write_to
from tests.learner.worlds import Crash, EventStore, Trigger, die, make_group, put_group

from bucketrl.bucket import keys
from bucketrl.bucket.errors import Fenced
from bucketrl.bucket.records import BatchRecord, StartRecord, decode
from bucketrl.bucket.stores.memory import MemoryStore

CRASHES: dict[str, tuple[Trigger, bool]] = {
    "before anything is published": (is_write_to(keys.policy(0, 1)), False),
    "after step 0 is published, before its commit": (is_commit_of(0), False),
    "before the batch is written": (is_write_to(keys.batch(2, 1)), False),
    "after the batch is written": (is_write_to(keys.batch(2, 1)), True),
    "after the optimizer step, before anything is published": (is_write_to(keys.policy(2, 1)), False),
    "with half an adapter published": (is_write_to(keys.policy(2, 1)), True),
    "with half a checkpoint published": (is_write_to(keys.checkpoint(2, 1)), True),
    "after everything is published, before the commit": (is_commit_of(2), False),
    "after the commit": (is_commit_of(2), True),
    "after the last commit": (is_commit_of(STEPS), True),
}


@pytest.mark.parametrize("where", CRASHES)
def test_a_crash_anywhere_changes_not_a_byte_of_what_is_learned(
    world: World, undisturbed: World, where: str
) -> None:
    trigger, after = CRASHES[where]
    crashing = EventStore(world.store, trigger, die, after=after)
    with pytest.raises(Crash):
        world.learn(crashing)
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()
    assert [type(record) for record in world.log].count(StartRecord) == 2
    world.assert_sound()


def test_the_batch_that_was_written_is_trained_whatever_has_arrived_since(world: World) -> None:
    """A late, older group would be chosen first if the step were selected anew."""
    late = keys.trajectory(keys.GroupId(0, 3), "worker-0-1")
    data = world.store.get(late)
    world.store.delete([late])
    with pytest.raises(Crash):
        world.learn(EventStore(world.store, is_write_to(keys.batch(2, 1)), die, after=True))
    written = decode(BatchRecord, world.store.get(keys.batch(2, 1)))
    world.store.put(late, data)
    world.learn()
    assert world.commits[2].groups == written.groups
    assert world.commits[2].batch.key == keys.batch(2, 2)
    assert "0000-00000003" not in {ref.group_id for ref in written.groups}
    assert "0000-00000003" in {ref.group_id for ref in world.commits[3].groups}
    world.assert_sound()


def test_a_crash_at_every_step_in_turn_changes_nothing_either(world: World, undisturbed: World) -> None:
    for step in range(1, STEPS + 1):
        with pytest.raises(Crash):
            world.learn(EventStore(world.store, is_commit_of(step), die))
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()
    assert world.commits[-1].epoch == STEPS + 1
    world.assert_sound()


@pytest.mark.parametrize(
    "frozen_at",
    [is_write_to(keys.batch(2, 1)), is_write_to(keys.policy(2, 1)), is_commit_of(2), is_commit_of(STEPS)],
    ids=["batch", "publish", "commit", "last commit"],
)
def test_a_learner_that_wakes_after_another_has_taken_over_is_fenced(
    world: World, undisturbed: World, frozen_at: Trigger
) -> None:
    """The second learner does the rest of the run while the first one is frozen."""
    frozen = EventStore(world.store, frozen_at, lambda: world.learn(learner_id="learner-1"), after=False)
    with pytest.raises(Fenced):
        world.learn(frozen)
    assert world.fingerprint() == undisturbed.fingerprint()
    world.assert_sound()


def test_a_zombie_that_wakes_while_it_waits_changes_nothing(
    world: World, model_folder: Path, tmp_path: Path
) -> None:
    """Frozen before it listed the bucket: what it finds then was sampled with versions that it does not know."""
    objects: list[set[str]] = []

    def others_go_on() -> None:
        world.learn(learner_id="learner-1")
        newer = make_group(30, rewards=[1.0, 0.0], version=STEPS)
        put_group(world.store, newer)
        objects.append({info.key for info in world.store.list("")})

    frozen = EventStore(world.store, is_commit_of(0), others_go_on, after=True)
    with pytest.raises(Fenced):
        world.learn(frozen)
    assert {info.key for info in world.store.list("")} == objects[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_training_abandons_the_step(world: World, undisturbed: World, number: int) -> None:
    world.learn(EventStore(world.store, is_write_to(keys.batch(2, 1)), lambda: os.kill(os.getpid(), number)))
    assert [commit.step for commit in world.commits] == [0, 1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()


def test_a_signal_while_publishing_lets_the_step_be_committed(world: World, undisturbed: World) -> None:
    at_publishing = is_write_to(keys.policy(2, 1))
    world.learn(EventStore(world.store, at_publishing, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert [commit.step for commit in world.commits] == [0, 1, 2]
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()


def test_a_signal_while_waiting_ends_the_wait(model_folder: Path, tmp_path: Path) -> None:
    empty = World(model_folder, tmp_path, None)
    later = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    empty.learn(EventStore(empty.store, is_commit_of(0), later.start, after=True))
    assert [commit.step for commit in empty.commits] == [0]


def damage_batch(store: MemoryStore) -> None:
    store.put(keys.batch(2, 1), store.get(keys.batch(2, 1))[:-30])


def damage_trajectory(store: MemoryStore) -> None:
    ref = decode(BatchRecord, store.get(keys.batch(2, 1))).groups[0].file
    store.put(ref.key, store.get(ref.key)[:-30])


def forget_trajectory(store: MemoryStore) -> None:
    store.delete([decode(BatchRecord, store.get(keys.batch(2, 1))).groups[1].file.key])


def name_a_consumed_group(store: MemoryStore) -> None:
    store.put(keys.batch(2, 1), store.get(keys.batch(1, 1)).replace(b'"step": 1', b'"step": 2'))


@pytest.mark.parametrize(
    "damage", [damage_batch, damage_trajectory, forget_trajectory, name_a_consumed_group]
)
def test_a_batch_that_can_no_longer_be_trained_on_is_replaced(
    world: World, damage: Callable[[MemoryStore], None]
) -> None:
    with pytest.raises(Crash):
        world.learn(EventStore(world.store, is_write_to(keys.policy(2, 1)), die))
    damage(world.store)
    for ordinal in range(20, 24):
        put_group(world.store, make_group(ordinal, rewards=[1.0, 0.0]))
    world.learn()
    assert [commit.step for commit in world.commits] == list(range(STEPS + 1))
    world.assert_sound()


def test_scratch_space_is_removed_whatever_happens(world: World, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        world.learn(EventStore(world.store, is_commit_of(1), die))
    assert list(tmp_path.iterdir()) == []
    world.learn()
    assert list(tmp_path.iterdir()) == []
