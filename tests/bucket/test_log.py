"""The log: it never forks, whoever writes, whenever they die, whichever replies are lost."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.bucket.builders import NOW, RUN_ID, create_in, file_ref, ids, run_record, step_record

from bucketrl.bucket import keys
from bucketrl.bucket.errors import Fenced, IntegrityError, StoreError
from bucketrl.bucket.log import LogReader, LogState, LogViolation, LogWriter
from bucketrl.bucket.records import (
    Consumed,
    LogRecord,
    SkippedGroup,
    StartRecord,
    StepRecord,
    decode_log,
    sha256_hex,
)
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store


def writer_on(
    store: Store,
    name: str = "a",
    create: Callable[[str, bytes], bytes | None] | None = None,
    reader: LogReader | None = None,
) -> LogWriter:
    return LogWriter(
        reader or LogReader(store, run_record()),
        create or create_in(store),
        now=lambda: NOW,
        new_id=ids(f"write-{name}"),
    )


def append(writer: LogWriter, **changes: Any) -> StepRecord:
    return writer.append_step(lambda header: step_record(header, writer.state, **changes))


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
    assert len(counting.calls) == 1 + 301 + 1
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


GROUP_KEY = "trajectories/0000-00000000/a.parquet"


@pytest.mark.parametrize(
    ("invariant_number", "changes", "reason"),
    [
        (1, {"run_id": "other"}, f"run_id is 'other', want '{RUN_ID}'"),
        (1, {"seq": 3}, "seq is 3, want 2"),
        (1, {"parent_sha256": "0" * 64}, "parent_sha256 is"),
        (1, {"step": 2}, "step is 2, want 1"),
        (1, {"step": 0}, "step is 0, want 1"),
        (1, {"checkpoint": {"step": 0, "files": []}}, "checkpoint is of step 0, not 1"),
        (1, {"policy": {"version": 0, "files": []}}, "policy version 0 is not above 0"),
        (1, {"protocol": 2}, "protocol 2, this bucketrl reads up to 1"),
        (2, {"batch": None}, "names no batch or no group"),
        (2, {"groups": []}, "names no batch or no group"),
        (2, {"consumed": {"cursor": 1, "above": []}}, "consumed is cursor 1 . 0 above"),
        (2, {"consumed": {"cursor": 0, "above": []}}, "consumed is cursor 0 "),
        (2, {"consumed": {"cursor": 3, "above": []}}, "consumed is cursor 3 "),
        (2, {"consumed": {"cursor": 1, "above": [1]}}, "consumed is cursor 1 . 1 above"),
        (3, {"epoch": 2}, "step has epoch 2, the newest start has 1"),
    ],
)
def test_a_step_that_may_not_follow_is_refused(
    memory: Store, invariant_number: int, changes: dict[str, Any], reason: str
) -> None:
    state, valid = one_step_ahead(memory)
    bad = StepRecord.model_validate(valid.model_dump() | changes)
    with pytest.raises(LogViolation, match=rf"log/00000002\.json: .*{reason}") as caught:
        state.apply(bad.encode())
    assert caught.value.invariant == invariant_number
    assert state.apply(valid.encode()).step == valid


@pytest.mark.parametrize(
    ("group_ids", "reason"),
    [
        (["0000-00000001", "0000-00000001"], "0000-00000001 is consumed twice"),
        (["0000-00000004"], "beyond the epoch's 4 prompts"),
        (["1"], "not a group id"),
    ],
)
def test_a_step_cannot_train_a_group_twice_or_one_that_does_not_exist(
    memory: Store, group_ids: list[str], reason: str
) -> None:
    state, valid = one_step_ahead(memory)
    groups = [{"group_id": text, "attempt": "a", "file": file_ref(GROUP_KEY, b"x")} for text in group_ids]
    with pytest.raises(LogViolation, match=reason) as caught:
        state.apply(StepRecord.model_validate(valid.model_dump() | {"groups": groups}).encode())
    assert caught.value.invariant == 2


def test_a_group_is_not_both_trained_and_skipped_nor_consumed_again_later(memory: Store) -> None:
    state, valid = one_step_ahead(memory)
    again = SkippedGroup.model_validate(valid.groups[0].model_dump() | {"reason": "stale"})
    with pytest.raises(LogViolation, match="consumed twice"):
        state.apply(valid.model_copy(update={"skipped": (again,)}).encode())
    after = state.apply(valid.encode())
    repeated = valid.model_copy(
        update={"seq": 3, "parent_sha256": after.head_sha256, "step": 2}
        | {"policy": valid.policy.model_copy(update={"version": 2})}
        | {"checkpoint": valid.checkpoint.model_copy(update={"step": 2})}
    )
    with pytest.raises(LogViolation, match="0000-00000000 is consumed twice"):
        after.apply(repeated.encode())


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_start_needs_an_epoch_above_every_earlier_one(memory: Store, epoch: int) -> None:
    writer_on(memory, "a").start("a")
    newest = writer_on(memory, "b")
    newest.start("b")
    start = StartRecord(
        run_id=RUN_ID,
        seq=2,
        parent_sha256=newest.parent_sha256,
        epoch=epoch,
        write_id="w",
        written_at=NOW,
        learner_id="c",
    )
    with pytest.raises(LogViolation, match=f"start has epoch {epoch}, not above 2") as caught:
        newest.state.apply(start.encode())
    assert caught.value.invariant == 3
    assert newest.state.apply(start.model_copy(update={"epoch": 7}).encode()).epoch == 7


def test_step_0_consumes_nothing(memory: Store) -> None:
    writer = writer_on(memory)
    writer.start("learner-a")
    with pytest.raises(LogViolation, match="step 0 trains on nothing"):
        append(writer, ordinals=(0,))


def one_step_ahead(store: Store) -> tuple[LogState, StepRecord]:
    """The state after `start` and step 0, and a valid step 1."""
    writer = writer_on(store)
    writer.start("learner-a")
    append(writer)
    header = LogRecord(
        run_id=RUN_ID,
        seq=2,
        parent_sha256=writer.parent_sha256,
        epoch=1,
        write_id="w",
        written_at=NOW,
    )
    return writer.state, step_record(header, writer.state)


class CountingStore:
    """Delegates; remembers reads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        def call(key: str, *rest: Any) -> Any:
            self.calls.append((name, key))
            return getattr(self._store, name)(key, *rest)

        return call


FAULTS = st.lists(
    st.sampled_from(["request lost", "reply lost", "own object reported", "delayed"]), max_size=1
)


class Interleavings(RuleBasedStateMachine):
    """Up to three learners at a time on one store that loses requests, loses replies and delays writes."""

    writers = Bundle("writers")

    @initialize()
    def begin(self) -> None:
        self.store = open_store("memory://interleavings")
        self.store.delete([info.key for info in self.store.list(keys.LOG_PREFIX)])
        self.create = create_in(self.store)
        self.faults: list[str] = []
        self.delayed: list[tuple[str, bytes]] = []
        self.log: list[bytes] = []
        self.learners = 0
        self.fenced_write_ids: set[str] = set()

    def faulty_create(self, key: str, data: bytes) -> bytes | None:
        fault = self.faults.pop() if self.faults else "none"
        if fault == "request lost":
            raise StoreError(fault)
        if fault == "delayed":
            self.delayed.append((key, data))
            raise StoreError(fault)
        outcome = self.create(key, data)
        if fault == "reply lost":
            raise StoreError(fault)
        return self.store.get(key) if fault == "own object reported" else outcome

    @rule(target=writers)
    def new_learner(self) -> LogWriter:
        self.learners += 1
        return writer_on(self.store, f"{self.learners}", self.faulty_create)

    @rule(
        writer=writers,
        faults=FAULTS,
    )
    def start(self, writer: LogWriter, faults: list[str]) -> None:
        self.faults = faults
        try:
            epoch = writer.start("learner")
        except StoreError:
            return
        mine = decode_log(self.store.get(keys.log(writer.state.head_seq)))
        assert isinstance(mine, StartRecord)
        assert mine.epoch == epoch

    @precondition(lambda self: self.learners)
    @rule(
        writer=writers,
        ordinals=st.sets(st.integers(0, 11), min_size=1, max_size=2),
        faults=FAULTS,
    )
    def step(self, writer: LogWriter, ordinals: set[int], faults: list[str]) -> None:
        if writer.epoch == 0:
            return
        self.faults = faults
        built: list[StepRecord] = []

        def build(header: LogRecord) -> StepRecord:
            state = writer.state
            fresh = [n for n in ordinals if n not in state.consumed] if state.step else []
            built.append(step_record(header, state, ordinals=fresh))
            return built[-1]

        try:
            record = writer.append_step(build)
        except Fenced:
            self.fenced_write_ids |= {record.write_id for record in built}
        except StoreError:
            pass
        else:
            assert self.store.get(keys.log(record.seq)) == record.encode()

    @rule(writer=writers)
    def look(self, writer: LogWriter) -> None:
        """The learner reads the log at any moment, say for its heartbeat."""
        writer._reader.refresh()

    @precondition(lambda self: self.delayed)
    @rule(data=st.data())
    def a_delayed_write_lands(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.delayed) - 1))
        self.create(*self.delayed.pop(index))

    @invariant()
    def the_log_only_grows_and_every_prefix_is_valid(self) -> None:
        stored = [self.store.get(info.key) for info in self.store.list(keys.LOG_PREFIX)]
        assert stored[: len(self.log)] == self.log
        self.log = stored
        state = LogState.empty(run_record())
        for data in stored:
            state = state.apply(data)
        assert [info.key for info in self.store.list(keys.LOG_PREFIX)] == [
            keys.log(n) for n in range(len(stored))
        ]

    @invariant()
    def a_fenced_step_is_never_seen(self) -> None:
        assert not self.fenced_write_ids & {decode_log(data).write_id for data in self.log}

    def teardown(self) -> None:
        """Whatever happened, the next learner goes on."""
        learner = writer_on(self.store, "last")
        learner.start("last")
        before = learner.state.step
        assert append(learner).step == (before.step + 1 if before else 0)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
