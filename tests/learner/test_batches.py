"""Whose batch a step trains on, when learners have come and gone."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from tests.learner.worlds import PROMPTS_PER_EPOCH, RUN_ID

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import BatchRecord, FileRef, GroupRef, SkippedGroup, decode
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.learner.batches import Batch, Batches
from bucketrl.learner.select import Candidate, Selection


class AnyGroup:
    """An intake to which every group is good, but those in `lost`."""

    def __init__(self) -> None:
        self.lost: set[str] = set()

    def group(self, ref: GroupRef | SkippedGroup, max_version: int) -> Any:
        if ref.group_id in self.lost:
            raise IntegrityError(f"{ref.group_id} is lost")
        return ref.group_id

    def candidate(self, ref: GroupRef | SkippedGroup, max_version: int) -> Candidate:
        self.group(ref, max_version)
        return candidate(keys.GroupId.parse(ref.group_id).ordinal(PROMPTS_PER_EPOCH))


def candidate(ordinal: int) -> Candidate:
    group_id = keys.GroupId.from_ordinal(ordinal, PROMPTS_PER_EPOCH)
    file = FileRef(key=keys.trajectory(group_id, "w"), size=1, sha256="0" * 64)
    ref = GroupRef(group_id=str(group_id), attempt="w", file=file)
    return Candidate(ordinal, ref, (0.0, 1.0), min_version=0, truncated=0, completed_correct=None)


def state(epoch: int) -> LogState:
    """Before step 1, for the learner of that epoch."""
    return replace(LogState(RUN_ID, PROMPTS_PER_EPOCH), epoch=epoch)


class World:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.intake = AnyGroup()
        self._ids = itertools.count()
        self.chosen = 0

    def next(self, epoch: int, *ordinals: int) -> Batch:
        """What the learner of `epoch` trains on; `ordinals` are what it would choose."""

        def choose() -> Selection:
            self.chosen += 1
            return Selection(tuple(candidate(n) for n in ordinals), (), ready=True)

        batches = Batches(self.store, self.intake, new_id=lambda: f"id-{next(self._ids)}")  # type: ignore[arg-type]
        return batches.next(state(epoch), choose)


@pytest.fixture
def world() -> World:
    return World()


def ordinals(batch: Batch) -> list[int]:
    return [one.ordinal for one in batch.trained]


def test_a_batch_is_stored_before_it_is_trained(world: World) -> None:
    batch = world.next(1, 4, 7)
    assert ordinals(batch) == [4, 7]
    assert batch.ref.key == keys.batch(1, 1)
    stored = world.store.get(batch.ref.key)
    assert (len(stored), decode(BatchRecord, stored)) == (batch.ref.size, batch.record)


def test_a_batch_that_was_left_behind_is_taken_over(world: World) -> None:
    left = world.next(1, 4, 7)
    taken = world.next(2, 0, 1)
    assert ordinals(taken) == [4, 7]
    assert taken.record == left.record.model_copy(update={"epoch": 2})
    assert taken.ref.key == keys.batch(1, 2)
    assert world.chosen == 1


def test_a_learner_that_died_before_it_stored_one_hides_none(world: World) -> None:
    world.next(1, 4, 7)
    assert ordinals(world.next(4, 0, 1)) == [4, 7]


def test_the_newest_one_counts(world: World) -> None:
    """The learner of epoch 2 could not use what that of epoch 1 had left."""
    world.next(1, 4, 7)
    world.intake.lost = {"0000-00000004"}
    assert ordinals(world.next(2, 0, 1)) == [0, 1]
    world.intake.lost = set()
    assert ordinals(world.next(3, 8, 9)) == [0, 1]


def test_learners_never_write_over_each_other(world: World) -> None:
    """A zombie that writes its batch late, on a store where the last writer wins."""
    newer = world.next(2, 0, 1)
    stored = world.store.get(newer.ref.key)
    world.next(1, 4, 7)
    assert world.store.get(newer.ref.key) == stored


def test_what_is_damaged_on_its_way_is_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.next(1, 4, 7)
    get, damaged = world.store.get, [True]

    def once(key: str) -> bytes:
        data = get(key)
        return data[:-40] if damaged and damaged.pop() else data

    monkeypatch.setattr(world.store, "get", once)
    assert ordinals(world.next(2, 0, 1)) == [4, 7]


def test_a_choice_that_cannot_be_read_is_made_again(world: World) -> None:
    world.intake.lost = {"0000-00000000"}
    offers = iter([(0, 1), (2, 3)])

    def choose() -> Selection:
        return Selection(tuple(candidate(n) for n in next(offers)), (), ready=True)

    batches = Batches(world.store, world.intake, new_id=lambda: "id")  # type: ignore[arg-type]
    assert ordinals(batches.next(state(1), choose)) == [2, 3]
