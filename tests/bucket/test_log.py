"""The log: it never forks, whoever writes, whenever they die, whichever replies are lost."""

import pytest
from tests.bucket.builders import (
    Learner,
    append,
    create_in,
    group,
    run_record,
    step_record,
    upload,
    writer_on,
)
from tests.bucket.counting import CountingStore

from bucketrl.bucket import keys
from bucketrl.bucket.errors import Fenced, IntegrityError, StoreError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.log_state import LogViolation
from bucketrl.bucket.records import (
    Consumed,
    LogRecord,
    StartRecord,
    StepRecord,
    decode_log,
    sha256_hex,
)
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores.memory import MemoryStore


def records_in(store: Store) -> list[StartRecord | StepRecord]:
    return [decode_log(store.get(info.key)) for info in store.list(keys.LOG_PREFIX)]


def test_a_run_begins_with_start_then_step_0(memory: Store) -> None:
    writer = writer_on(memory)
    assert writer.start("learner-a") == 1
    assert append(writer).step == 0
    assert append(writer).step == 1
    assert [record.kind for record in records_in(memory)] == ["start", "step", "step"]
    state = writer.state
    assert state.head_sha256 == state.step_sha256 == sha256_hex(memory.get(keys.log(2)))
    assert state.head_seq == state.step_seq == 2
    assert state.consumed == Consumed(cursor=2)


def test_a_reader_gets_each_record_once_and_then_pays_one_miss(memory: Store) -> None:
    writer = writer_on(memory)
    writer.start("learner-a")
    append(writer)
    counting = CountingStore(memory)
    reader = LogReader(counting, run_record())
    assert [record.seq for record in reader.refresh()] == [0, 1]
    counting.calls.clear()
    assert reader.refresh() == []
    assert counting.calls == [("get", keys.log(2))]
    append(writer)
    assert [record.seq for record in reader.refresh()] == [2]
    assert reader.state == writer.state


def test_catching_up_needs_one_listing(memory: Store) -> None:
    writer = writer_on(memory)
    writer.start("learner-a")
    for _ in range(300):
        append(writer)
    counting = CountingStore(memory)
    reader = LogReader(counting, run_record())
    assert [record.seq for record in reader.refresh()] == list(range(301))
    assert [name for name, _ in counting.calls].count("list") == 1
    assert len(counting.calls) == 1 + 301 + 1 + 1  # the newest is read twice
    assert reader.state == writer.state


def test_records_read_before_a_failure_are_not_lost(memory: Store) -> None:
    writer = writer_on(memory)
    writer.start("learner-a")
    append(writer)
    memory.put(keys.log(2), b"torn")
    reader = LogReader(memory, run_record())
    assert [record.seq for record in reader.refresh()] == [0, 1]
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"log/00000002\.json: not a log record"):
            reader.refresh()


def test_a_new_learner_fences_the_old_one(memory: Store) -> None:
    old, new = writer_on(memory, "old"), writer_on(memory, "new")
    old.start("learner-old")
    append(old)
    assert new.start("learner-new") == 2
    with pytest.raises(Fenced, match=r"epoch 1 is over: log/00000002\.json has epoch 2"):
        append(old)
    with pytest.raises(Fenced):
        append(old)
    assert append(new).step == 1
    assert [record.epoch for record in records_in(memory)] == [1, 1, 2, 2]


def test_a_zombies_last_record_before_the_fence_is_the_new_head(memory: Store) -> None:
    zombie = writer_on(memory, "zombie")
    zombie.start("learner-zombie")
    append(zombie)
    late: list[StepRecord] = []

    def create(key: str, data: bytes) -> bytes | None:
        if not late:
            late.append(append(zombie))  # it wins the seq that the new learner is about to take
        return create_in(memory)(key, data)

    new = writer_on(memory, "new", create)
    assert new.start("learner-new") == 2
    assert new.state.step == late[0]
    assert new.state.head_seq == 3


def test_a_lost_reply_is_recognised_by_the_write_id(memory: Store) -> None:
    """A store that reports one's own object as somebody else's, even re-encoded, changes nothing."""

    def create(key: str, data: bytes) -> bytes | None:
        assert create_in(memory)(key, data) is None
        return memory.get(key)

    writer = writer_on(memory, create=create)
    assert writer.start("learner-a") == 1
    assert append(writer).step == 0
    assert append(writer).step == 1


@pytest.mark.parametrize("lands", [True, False])
def test_after_an_unknown_outcome_the_same_bytes_are_sent_again(memory: Store, lands: bool) -> None:
    sent: list[bytes] = []

    def create(key: str, data: bytes) -> bytes | None:
        sent.append(data)
        if len(sent) == 2:
            if lands:
                memory.create(key, data)
            raise StoreError("connection reset")
        return create_in(memory)(key, data)

    writer = writer_on(memory, create=create)
    writer.start("learner-a")
    with pytest.raises(StoreError, match="connection reset"):
        append(writer)

    def not_again(header: LogRecord) -> StepRecord:
        raise AssertionError("a second record for one step")

    record = writer.append_step(not_again)
    assert sent[1] == sent[2] == memory.get(keys.log(1)) == record.encode()
    assert append(writer).step == 1


def test_a_pending_record_that_a_newer_learner_built_upon_was_committed(memory: Store) -> None:
    fail = True

    def create(key: str, data: bytes) -> bytes | None:
        outcome = create_in(memory)(key, data)
        if fail and key == keys.log(1):
            raise StoreError("connection reset")
        return outcome

    old = writer_on(memory, "old", create)
    old.start("learner-old")
    with pytest.raises(StoreError):
        append(old)
    fail = False
    writer_on(memory, "new").start("learner-new")
    assert append(old).step == 0
    with pytest.raises(Fenced):
        append(old)


def test_a_pending_record_whose_place_was_taken_is_fenced(memory: Store) -> None:
    """Also if the learner has looked at the log between the two attempts."""
    down = False

    def create(key: str, data: bytes) -> bytes | None:
        if down:
            raise StoreError("connection refused")
        return create_in(memory)(key, data)

    reader = LogReader(memory, run_record())
    old = writer_on(memory, "old", create, reader)
    old.start("learner-old")
    down = True
    with pytest.raises(StoreError):
        append(old)
    down = False
    writer_on(memory, "new").start("learner-new")
    reader.refresh()
    with pytest.raises(Fenced):
        append(old)
    assert [record.kind for record in records_in(memory)] == ["start", "start"]


def test_two_learners_with_one_epoch_are_reported(memory: Store) -> None:
    """A machine image that was restored twice; or a store without exclusive creates."""
    first = writer_on(memory, "first")
    first.start("learner-a")
    clone = writer_on(memory, "clone", reader=(reader := LogReader(memory, run_record())))
    reader.refresh()
    clone.epoch = first.epoch
    append(first)
    with pytest.raises(IntegrityError, match=r"log/00000001\.json: another learner appends with .* epoch 1"):
        append(clone)


def test_nothing_invalid_is_ever_sent(memory: Store) -> None:
    writer = writer_on(memory)
    writer.start("learner-a")
    with pytest.raises(LogViolation, match="step is 4, want 0"):
        append(writer, step=4)
    with pytest.raises(ValueError, match="does not carry the header"):
        writer.append_step(lambda header: step_record(header.model_copy(update={"epoch": 9}), writer.state))
    assert len(records_in(memory)) == 1
    with pytest.raises(ValueError, match="before start"):
        append(writer_on(memory, "b"))


def test_endless_defeat_in_start_ends(memory: Store) -> None:
    def create(key: str, data: bytes) -> bytes | None:
        writer_on(memory, "rival").start("rival")
        return create_in(memory)(key, data)

    with pytest.raises(StoreError, match="lost 100 races"):
        writer_on(memory, create=create).start("learner-a")


QUIETLY = (b'"written_at": "2', b'"written_at": "3')
"""Damage that nothing but a digest can tell."""
LOUDLY = (b'"seq":', b'"seq";')


class DamagesOnce(MemoryStore):
    """The `nth` reading of `key` is damaged."""

    def __init__(
        self, inner: MemoryStore, key: str, damage: tuple[bytes, bytes] = QUIETLY, nth: int = 1
    ) -> None:
        super().__init__()
        self._objects = inner._objects
        self._key = key
        self._damage = damage
        self._left = nth

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self._left -= key == self._key
        if key == self._key and self._left == 0:
            return data.replace(*self._damage)
        return data


def damaged_at_head(memory: MemoryStore) -> tuple[Learner, DamagesOnce]:
    learner = Learner(memory, run_record(), "learner-a")
    learner.start()
    learner.commit()
    return learner, DamagesOnce(memory, keys.log(1))


def test_a_record_that_was_read_damaged_is_read_again_at_once() -> None:
    """A wrong digest that a proxy announces would keep its workers from the very version that it is about."""
    learner, damaging = damaged_at_head(MemoryStore())
    reader = LogReader(damaging, run_record())
    assert [record.seq for record in reader.refresh()] == [0, 1, 1]
    assert reader.state == learner.reader.state
    assert reader.refresh() == []


def test_it_is_read_again_when_the_next_one_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the second reading fail."""
    memory = MemoryStore()
    learner, damaging = damaged_at_head(memory)
    reader = LogReader(damaging, run_record())
    with monkeypatch.context() as patch:
        patch.setattr(reader, "verify_head", lambda: None)
        assert len(reader.refresh()) == 2
    assert reader.state.head_sha256 != learner.reader.state.head_sha256
    learner.commit(learner.write_batch([upload(memory, group(1))]))
    assert [record.seq for record in reader.refresh()] == [1, 2]
    assert reader.state == learner.reader.state


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("damage", [QUIETLY, LOUDLY])
@pytest.mark.parametrize("seq", [0, 1, 2])
def test_no_single_damaged_reading_ends_anything(seq: int, damage: tuple[bytes, bytes], nth: int) -> None:
    """A learner whose proxy refused its commit because of one would have to be started again."""
    memory = MemoryStore()
    learner = Learner(memory, run_record(), "learner-a")
    learner.start()
    learner.commit()
    learner.commit(learner.write_batch([upload(memory, group(1))]))
    reader = LogReader(DamagesOnce(memory, keys.log(seq), damage, nth), run_record())
    for _ in range(2):
        reader.refresh()
    assert reader.state == learner.reader.state


def test_a_rivals_record_that_was_read_damaged_is_read_again() -> None:
    memory = MemoryStore()
    rival = Learner(memory, run_record(), "rival")

    def create(key: str, data: bytes) -> bytes | None:
        if key == keys.log(0):
            rival.start()
        existing = create_in(memory)(key, data)
        return existing and existing.replace(*LOUDLY)

    writer = writer_on(memory, create=create)
    assert writer.start("learner-a") == 2
    assert writer.state.head_seq == 1


def test_a_learner_names_no_digest_that_it_read_damaged() -> None:
    memory = MemoryStore()
    _, damaging = damaged_at_head(memory)
    Learner(damaging, run_record(), "learner-b").start()
    assert len(LogReader(memory, run_record()).refresh()) == 3


def test_a_broken_log_is_not_healed_by_reading_it_again() -> None:
    memory = MemoryStore()
    learner, _ = damaged_at_head(memory)
    learner.commit(learner.write_batch([upload(memory, group(1))]))
    memory.put(keys.log(1), memory.get(keys.log(1)).replace(*QUIETLY))
    reader = LogReader(memory, run_record())
    assert len(reader.refresh()) == 2
    with pytest.raises(LogViolation, match="parent_sha256"):
        reader.refresh()
