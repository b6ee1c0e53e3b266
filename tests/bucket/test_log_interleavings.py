"""The log under random interleavings of learners on a store that misbehaves in every allowed way."""

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
from tests.bucket.builders import append, create_in, run_record, step_record, writer_on

from bucketrl.bucket import keys
from bucketrl.bucket.errors import Fenced, StoreError
from bucketrl.bucket.log import LogWriter
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import (
    LogRecord,
    StartRecord,
    StepRecord,
    decode_log,
)
from bucketrl.bucket.stores import open_store

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
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=25)
