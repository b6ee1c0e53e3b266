"""A snapshot saves reading and decides nothing: whatever happens to it, the state is that of the log."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bucket.builders import RUN_ID, append, run_record, writer_on
from tests.bucket.counting import CountingStore

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import sha256_hex
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores.memory import MemoryStore


def run_of(store: Store, steps: int) -> LogWriter:
    writer = writer_on(store)
    writer.start("learner-a")
    for _ in range(steps + 1):
        append(writer)
    return writer


def snapshot_at(store: Store, seq: int) -> None:
    snapshots.write(store, RUN_ID, seq, sha256_hex(store.get(keys.log(seq))))


def state_read(store: Store, *, from_snapshot: bool) -> LogState:
    reader = LogReader(store, run_record(), from_snapshot=from_snapshot)
    while reader.refresh():
        pass
    return reader.state


def test_a_reader_begins_at_the_newest_snapshot(memory: Store) -> None:
    writer = run_of(memory, steps=20)
    for seq in (5, 11):
        snapshot_at(memory, seq)
    counting = CountingStore(memory)
    reader = LogReader(counting, run_record(), from_snapshot=True)
    assert [record.seq for record in reader.refresh()] == list(range(11, 22))
    assert reader.state == writer.state
    read = [key for name, key in counting.calls if name == "get"]
    assert read[:2] == [keys.snapshot(11), keys.log(11)]
    assert sorted(read[2:]) == [keys.log(seq) for seq in (*range(12, 22), 21, 22)]  # the newest twice


def test_a_snapshot_at_the_head_is_all_there_is_to_read(memory: Store) -> None:
    writer = run_of(memory, steps=20)
    snapshot_at(memory, 21)
    counting = CountingStore(memory)
    reader = LogReader(counting, run_record(), from_snapshot=True)
    assert [record.seq for record in reader.refresh()] == [21]
    assert len(counting.calls) == 5
    assert reader.state == writer.state
    assert reader.refresh() == []


def test_a_reader_of_everything_does_not_look_at_snapshots(memory: Store) -> None:
    run_of(memory, steps=20)
    snapshot_at(memory, 11)
    assert [record.seq for record in LogReader(memory, run_record()).refresh()] == list(range(22))


def test_a_learner_goes_on_from_a_snapshot(memory: Store) -> None:
    run_of(memory, steps=20)
    snapshot_at(memory, 21)
    reader = LogReader(memory, run_record(), from_snapshot=True)
    writer = writer_on(memory, "b", reader=reader)
    assert writer.start("learner-b") == 2
    assert append(writer).step == 21
    assert state_read(memory, from_snapshot=False) == writer.state


def edited(store: Store, seq: int, /, **changes: object) -> None:
    value = json.loads(store.get(keys.snapshot(seq)))
    store.put(keys.snapshot(seq), json.dumps(value | changes).encode())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"record_sha256": "0" * 64}, "another digest"),
        ({"run_id": "other"}, "of run other"),
        ({"seq": 4}, "record 4"),
        ({"protocol": 2}, "upgrade"),
        ({"kind": "boundary"}, "not a SnapshotRecord"),
    ],
)
def test_a_snapshot_that_does_not_verify_is_passed_over(
    memory: Store, caplog: pytest.LogCaptureFixture, changes: dict[str, object], reason: str
) -> None:
    writer = run_of(memory, steps=20)
    for seq in (5, 11):
        snapshot_at(memory, seq)
    edited(memory, 11, **changes)
    reader = LogReader(memory, run_record(), from_snapshot=True)
    assert reader.refresh()[0].seq == 5
    assert reader.state == writer.state
    [warning] = caplog.messages
    assert keys.snapshot(11) in warning
    assert reason in warning


def test_without_a_valid_snapshot_a_reader_begins_with_record_0(memory: Store) -> None:
    writer = run_of(memory, steps=3)
    snapshot_at(memory, 0)  # a start
    memory.put(keys.snapshot(99), memory.get(keys.snapshot(0)).replace(b'"seq": 0', b'"seq": 99'))
    memory.put(keys.snapshot(2), b"torn")
    memory.put("snapshots/notes.txt", b"foreign")
    reader = LogReader(memory, run_record(), from_snapshot=True)
    assert [record.seq for record in reader.refresh()] == list(range(5))
    assert reader.state == writer.state


@settings(max_examples=60)
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=12),
    marked=st.sets(st.integers(0, 13), max_size=4),
)
def test_any_set_of_snapshots_gives_the_state_of_the_log(kinds: list[bool], marked: set[int]) -> None:
    """Also where learners restart in between, so that the newest record is a start."""
    store = MemoryStore()
    writer = run_of(store, steps=0)
    for is_start in kinds:
        if is_start:
            writer = writer_on(store, "again")
            writer.start("again")
        else:
            append(writer)
    for seq in marked & set(range(writer.next_seq)):
        snapshot_at(store, seq)
    assert state_read(store, from_snapshot=True) == writer.state


def test_history_is_verified_backwards(memory: Store) -> None:
    run_of(memory, steps=20)
    reader = LogReader(memory, run_record())
    records = reader.refresh()
    assert snapshots.history(memory, records[15], 4) == records[11:15]
    assert snapshots.history(memory, records[3], 100) == records[:3]
    assert snapshots.history(memory, records[0], 4) == []
    memory.put(keys.log(12), memory.get(keys.log(12)) + b" ")
    with pytest.raises(IntegrityError, match=r"log/00000012\.json: digest"):
        snapshots.history(memory, records[15], 4)
