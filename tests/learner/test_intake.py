"""What reaches training: valid groups, one attempt each; everything else is quarantined and named."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.learner.worlds import VOCAB, make_config, make_group, make_run, put_group, replace_first
from tests.support.hub import BUCKET, StandInHub

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, StoreError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import Consumed, QuarantineRecord, decode
from bucketrl.bucket.stores.hf import HfStore
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.intake import READINGS, Intake

NOTHING = Consumed()


class World:
    def __init__(self, **sections: object) -> None:
        self.store = MemoryStore()
        self.run = make_run(make_config(**sections))
        self.refused: list[tuple[str, str, str]] = []
        self.intake = Intake(
            self.store,
            self.run,
            vocab_size=VOCAB,
            learner_id="learner-0",
            now=lambda: "2026-01-01T00:00:00Z",
            on_refused=lambda group, attempt, reason: self.refused.append((str(group), attempt, reason)),
        )

    def poll(self, consumed: Consumed = NOTHING, max_version: int = 0, times: int = 1) -> None:
        for _ in range(times):
            self.intake.poll(consumed, max_version)

    @property
    def found(self) -> list[int]:
        return sorted(self.intake.candidates)


def test_groups_are_found_once_and_summarised() -> None:
    world = World()
    group = make_group(12, rewards=[0.0, 1.0], completions=[(8, 9, 1), (8, 9)])
    key = put_group(world.store, group)
    assert world.intake.poll(NOTHING, 0) == 1
    assert world.intake.poll(NOTHING, 0) == 0
    candidate = world.intake.candidates[12]
    assert candidate.ref.group_id == "0001-00000002"
    assert candidate.ref.file.key == key
    assert candidate.rewards == (0.0, 1.0)
    assert candidate.truncated == 1
    assert candidate.completed_correct == 0
    assert world.intake.group(candidate.ref, 0) == group


def test_consumed_groups_are_neither_read_nor_kept() -> None:
    world = World()
    for ordinal in range(5):
        put_group(world.store, make_group(ordinal, rewards=[0.0, 1.0]))
    world.poll()
    assert world.found == [0, 1, 2, 3, 4]
    world.poll(Consumed(cursor=2, above=(3,)))
    assert world.found == [2, 4]


def test_the_listing_starts_at_the_cursor() -> None:
    world = World()
    starts: list[str] = []
    plain = world.store.list
    world.store.list = lambda prefix, start_after="": (  # type: ignore[method-assign]
        starts.append(start_after) or plain(prefix, start_after)
    )
    put_group(world.store, make_group(11, rewards=[0.0, 1.0]))
    put_group(world.store, make_group(12, rewards=[0.0, 1.0]))
    world.poll(Consumed(cursor=12))
    assert starts == ["trajectories/0001-00000002"]
    assert world.found == [12]


def test_the_lowest_attempt_that_is_there_first_wins_for_good() -> None:
    world = World()
    put_group(world.store, make_group(0, rewards=[0.0, 1.0], attempt="worker-b-1"))
    put_group(world.store, make_group(0, rewards=[1.0, 0.0], attempt="worker-c-1"))
    world.poll()
    put_group(world.store, make_group(0, rewards=[0.5, 0.0], attempt="worker-a-1"))
    world.poll()
    assert world.intake.candidates[0].ref.attempt == "worker-b-1"


def test_an_invalid_attempt_is_quarantined_and_the_next_one_counts_at_once() -> None:
    world = World()
    key = put_group(world.store, make_group(0, rewards=[0.0, 1.0], attempt="worker-a-1"))
    world.store.put(key, world.store.get(key)[:-9])
    put_group(world.store, make_group(0, rewards=[1.0, 0.0], attempt="worker-b-1"))
    put_group(world.store, make_group(1, rewards=[0.0, 1.0], attempt="worker-b-2"))
    world.poll()
    assert world.refused == []
    assert world.intake.candidates[0].ref.attempt == "worker-b-1"
    assert world.found == [0, 1]
    world.poll(times=READINGS)
    assert [attempt for _, attempt, _ in world.refused] == ["worker-a-1"]
    assert world.intake.candidates[0].ref.attempt == "worker-b-1"


def test_quarantine_is_written_reported_once_and_final() -> None:
    world = World()
    key = put_group(world.store, make_group(0, rewards=[0.0, 1.0]))
    good = world.store.get(key)
    world.store.put(key, b"garbage")
    world.poll(times=READINGS - 1)
    assert world.refused == []
    world.poll()
    assert [(group, attempt) for group, attempt, _ in world.refused] == [("0000-00000000", "worker-0-1")]
    record = decode(QuarantineRecord, world.store.get(keys.quarantine(GroupId(0, 0), "worker-0-1")))
    assert (record.key, record.learner_id) == (key, "learner-0")
    assert record.reason == world.refused[0][2]
    world.store.put(key, good)
    world.poll(times=2)
    assert world.found == []
    assert len(world.refused) == 1


def test_a_quarantine_that_could_not_be_written_is_written_and_reported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the proxy would take the group for uploaded for ever, and nobody would sample it again."""
    world = World()
    key = put_group(world.store, make_group(0, rewards=[0.0, 1.0]))
    world.store.put(key, b"garbage")
    world.poll(times=READINGS - 1)

    def fail(key: str, data: bytes) -> None:
        raise StoreError(f"{key}: connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "put", fail)
        with pytest.raises(StoreError):
            world.poll()
    assert world.refused == []
    world.poll(times=2)
    assert len(world.refused) == 1


def test_an_object_that_settles_in_time_is_taken() -> None:
    """Eventually consistent stores may show a torn or missing object for a while."""
    world = World()
    key = put_group(world.store, make_group(0, rewards=[0.0, 1.0]))
    good = world.store.get(key)
    world.store.put(key, good[:100])
    world.poll(times=READINGS - 1)
    world.store.put(key, good)
    world.poll()
    assert world.found == [0]
    assert world.refused == []


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (replace(make_group(0, rewards=[0.0, 1.0]), run_id="another-run"), "run_id is 'another-run'"),
        (make_group(0, rewards=[0.0, 1.0], version=3), "policy version 3 has not been committed"),
        (make_group(0, rewards=[0.0, 1.0], prompt=(5, VOCAB)), "token id 64, the model has 64"),
        (
            make_group(0, rewards=[0.0, 1.0], prompt=(5,) * 30),
            "33 tokens, more than rollout.max_model_len 32",
        ),
        (make_group(0, rewards=[1.0]), "1 completions, want 2 to 4"),
        (make_group(0, rewards=[0.0, 1.0, 0.0, 1.0, 0.0]), "5 completions, want 2 to 4"),
        (
            replace_first(make_group(0, rewards=[0.0, 1.0]), loss_mask=(False, False, False)),
            "no token to train on",
        ),
    ],
)
def test_what_must_not_be_trained_on_is_refused_with_the_reason(group: TrajectoryGroup, reason: str) -> None:
    world = World()
    put_group(world.store, group)
    world.poll(times=READINGS)
    assert world.found == []
    assert len(world.refused) == 1
    assert reason in world.refused[0][2]


def test_a_group_beyond_the_prompts_of_an_epoch_is_refused() -> None:
    world = World()
    group = replace(make_group(0, rewards=[0.0, 1.0]), group_id="0000-00000010")
    put_group(world.store, group)
    world.poll(times=READINGS)
    assert "beyond the epoch's 10 prompts" in world.refused[0][2]


def test_foreign_keys_are_passed_over() -> None:
    world = World()
    world.store.put("trajectories/README.txt", b"hello")
    world.store.put("trajectories/0000-00000000/UPPER.parquet", b"x")
    world.poll(times=READINGS)
    assert world.found == []
    assert world.refused == []


def test_an_oversized_object_is_refused_without_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    put_group(world.store, make_group(0, rewards=[0.0, 1.0]))
    monkeypatch.setattr("bucketrl.bucket.sealed_table.MAX_BYTES", 10)
    monkeypatch.setattr(world.store, "get", lambda key: pytest.fail("it was read"))
    world.poll(times=READINGS)
    assert "more than 10" in world.refused[0][2]


def test_memory_is_bounded_and_what_was_dropped_is_read_again() -> None:
    world = World(algorithm={"groups_per_step": 1, "max_staleness": 1})  # two may be outstanding
    groups = [make_group(ordinal, rewards=[0.0, 1.0]) for ordinal in range(40)]
    for group in groups:
        put_group(world.store, group)
    world.poll()
    assert world.found == list(range(23))  # enough to decide, whatever they are
    assert sorted(world.intake._decoded) == [0, 1]
    assert world.intake.group(world.intake.candidates[5].ref, 0) == groups[5]


def test_an_object_that_changed_since_it_was_chosen_is_refused() -> None:
    world = World()
    key = put_group(world.store, make_group(0, rewards=[1.0, 1.0]))
    world.poll()
    ref = world.intake.candidates[0].ref
    world.store.put(key, world.store.get(key) + b"x")
    with pytest.raises(IntegrityError):
        world.intake.group(ref, 0)
    assert world.found == []
    assert len(world.refused) == 1


def test_a_reference_to_another_object_is_refused() -> None:
    world = World()
    put_group(world.store, make_group(0, rewards=[1.0, 1.0]))
    world.poll()
    ref = world.intake.candidates[0].ref
    forged = ref.model_copy(update={"group_id": "0000-00000001"})
    with pytest.raises(IntegrityError, match="not the object of 0000-00000001"):
        world.intake.group(forged, 0)


def test_groups_are_read_together_where_the_store_has_that_and_none_is_read_twice() -> None:
    world = World(algorithm={"filter_zero_variance": False})
    store = HfStore(BUCKET, "run", api=StandInHub(), sleep=lambda _: None)
    world.intake._store = store
    for ordinal in range(8):
        put_group(store, make_group(ordinal, rewards=[1.0, 1.0]))
    before = Counter(store.requests.snapshot().by_kind)
    world.poll()
    for candidate in world.intake.candidates.values():
        world.intake.group(candidate.ref, 0)
    assert world.found == list(range(8))
    assert Counter(store.requests.snapshot().by_kind) - before == {"list": 1, "get": 1, "token": 1}


def test_an_object_that_is_invalid_is_doubtful_until_it_counts_as_that() -> None:
    world = World()
    world.store.put(keys.trajectory(GroupId(0, 3), "worker-0-1"), b"no Parquet file")
    doubts = []
    for _ in range(READINGS):
        world.poll()
        doubts.append(world.intake.doubtful)
    assert doubts == [True] * (READINGS - 1) + [False]
