"""The log: the one mutable truth of a run, an append-only chain of `start` and `step` records.

`log_state.py` decides what may follow what. `LogReader` follows the log in a store. `LogWriter` is the learner's
hand on it. `bucket_layout.md` section 7 is the specification.
"""

from collections.abc import Callable, Iterator

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.errors import Fenced, IntegrityError, NotFound, StoreError
from bucketrl.bucket.log_state import LogState, LogViolation
from bucketrl.bucket.records import (
    LogRecord,
    RunRecord,
    StartRecord,
    StepRecord,
    decode_log,
    sha256_hex,
)
from bucketrl.bucket.store import Store

START_ATTEMPTS = 100
"""Races for the next record that `LogWriter.start` may lose; each loss is another learner's progress."""


class LogReader:
    """Follows the log of one run. Not thread-safe: one owner calls it, others may look at `state`.

    It begins with record 0; `from_snapshot`: with the commit that the newest snapshot points to, for
    readers who need the state and not the history.
    """

    def __init__(self, store: Store, run: RunRecord, *, from_snapshot: bool = False) -> None:
        self._store = store
        self._run = run
        self._from_snapshot = from_snapshot
        self.state = LogState.empty(run)
        """After the newest record read so far. Replaced, never changed in place."""
        self._before: LogState | None = None
        """The state before that record; None if its bytes are known to be right."""

    def refresh(self) -> list[StartRecord | StepRecord]:
        """The records since the last call, oldest first. One GET (a miss) when there is none; the newest one is
        read twice.

        The first call from a snapshot returns its commit and what follows.

        Raises IntegrityError (the log is broken at the record it names) or StoreError, but only when no
        record was read before the failure: what was read is always returned, and the next call fails.
        """
        fresh: list[StartRecord | StepRecord] = []
        try:
            if self.state.next_seq == 0:
                fresh.extend(self._begin())
                fresh.extend(self._catch_up())
            while (record := self._next()) is not None:
                fresh.append(record)
        except (IntegrityError, StoreError):
            if not fresh:
                raise
        return fresh

    def _next(self) -> StartRecord | StepRecord | None:
        """The next record, or the newest one set right; None if there is neither."""
        try:
            return self.accept_read(self._store.get(keys.log(self.state.next_seq)))
        except NotFound:
            return self._healed()

    def _healed(self) -> StartRecord | StepRecord | None:
        try:
            return self.verify_head()
        except (StoreError, NotFound):
            return None  # the next call tries again

    def accept(self, data: bytes, *, own: bool = False) -> StartRecord | StepRecord:
        """Moves past record `state.next_seq`, whose bytes the caller already has; `own`: because it wrote them.

        Raises LogViolation and stays where it is if it may not follow.
        """
        self.state, self._before = self.state.apply(data), None if own else self.state
        return decode_log(data)

    def accept_read(self, data: bytes) -> StartRecord | StepRecord:
        """As `accept`, for bytes that were read once and may have been damaged on the way: before they are
        refused, the newest record is read again, and returned if it had been damaged; then these are.

        Raises LogViolation, StoreError, NotFound.
        """
        try:
            return self.accept(data)
        except LogViolation:
            return self._healed() or self.accept(self._store.get(keys.log(self.state.next_seq)))

    def verify_head(self) -> StartRecord | StepRecord | None:
        """Reads the newest record once more: only the next one names its digest, so a bit that was damaged on
        the way to this reader may have passed. Returns it if it was, with `state` set right; else None.

        Raises StoreError, NotFound.
        """
        if self._before is None:
            return None
        data = self._store.get(keys.log(self.state.head_seq))
        if sha256_hex(data) == self.state.head_sha256:
            self._before = None
            return None
        self.state, self._before = self._before, None
        return self.accept_read(data)

    def _begin(self) -> list[StartRecord | StepRecord]:
        """The commit of the newest snapshot, if this reader uses it and there is one."""
        data = snapshots.find(self._store, self._run.run_id) if self._from_snapshot else None
        if data is None:
            return []
        self.state = LogState.at_commit(self._run, data)
        return [decode_log(data)]

    def _catch_up(self) -> Iterator[StartRecord | StepRecord]:
        """What follows, fetched in parallel: a late joiner would wait for one round trip each. Ends at a
        record that may not follow."""
        first = self.state.next_seq
        after = keys.log(first - 1) if first else ""
        listed = {keys.parse_log(info.key) for info in self._store.list(keys.LOG_PREFIX, after)}
        end = first
        while end in listed:
            end += 1
        for data in snapshots.fetch(self._store, range(first, end)):
            try:
                yield self.accept(data)
            except LogViolation:
                return


class LogWriter:
    """One learner incarnation's right to append. Owns `reader`: nobody else may refresh it.

    `create(key, data)` returns None if the object now is `data`, else the bytes that are there; on a
    tier-0 store the proxy does it. Whatever it raises means "outcome unknown" and passes through:
    `append_step` called again sends the very same bytes.
    """

    def __init__(
        self,
        reader: LogReader,
        create: Callable[[str, bytes], bytes | None],
        *,
        now: Callable[[], str],
        new_id: Callable[[], str],
    ) -> None:
        self._reader = reader
        self._create = create
        self._now = now
        self._new_id = new_id
        self._pending: StepRecord | None = None
        self.epoch = 0
        """This incarnation's fencing token; 0 until `start`."""

    @property
    def state(self) -> LogState:
        return self._reader.state

    @property
    def next_seq(self) -> int:
        return self.state.next_seq

    @property
    def parent_sha256(self) -> str:
        return self.state.head_sha256

    def start(self, learner_id: str) -> int:
        """Appends `start` with an epoch above every one in the log, which fences all earlier learners.

        Returns the epoch. Afterwards `state.step` is the commit to resume from.
        """
        self._pending = None
        for _ in range(START_ATTEMPTS):
            self._reader.refresh()
            # What is appended here names the newest record's digest for ever.
            if self._reader.verify_head() is not None:
                continue
            header = self._header(self.state.epoch + 1)
            record = StartRecord(**header.model_dump(), learner_id=learner_id)
            if self._send(record):
                self.epoch = record.epoch
                return self.epoch
        raise StoreError(
            f"lost {START_ATTEMPTS} races for the log's next record: too many learners start at once"
        )

    def look(self) -> None:
        """Whether another learner has started since: one GET, a miss if not. Raises Fenced, StoreError."""
        self._reader.refresh()
        self._raise_if_fenced()

    def append_step(self, build: Callable[[LogRecord], StepRecord]) -> StepRecord:
        """Commits a step: `build` completes the header that it gets (`StepRecord(**header.model_dump(), …)`).

        After an error with unknown outcome the same call settles it: the record built then is sent
        again and `build` is not called. Raises Fenced if a newer learner has started; nothing of this
        step is visible then.
        """
        if self.epoch == 0:
            raise ValueError("append_step before start")
        if self._pending is None:
            self._raise_if_fenced()
            header = self._header(self.epoch)
            record = build(header)
            if any(getattr(record, name) != value for name, value in header):
                raise ValueError("the step record does not carry the header that it was given")
            self.state.apply(record.encode())  # raises before anybody can see a record that may not follow
            self._pending = record
        record = self._pending
        won = self._send(record) if record.seq == self.next_seq else self._has_landed(record)
        self._pending = None
        if won:
            return record
        self._raise_if_fenced()
        raise IntegrityError(
            f"{keys.log(record.seq)}: another learner appends with this one's epoch {self.epoch}"
        )

    def _header(self, epoch: int) -> LogRecord:
        return LogRecord(
            run_id=self.state.run_id,
            seq=self.next_seq,
            parent_sha256=self.parent_sha256,
            epoch=epoch,
            write_id=self._new_id(),
            written_at=self._now(),
        )

    def _send(self, record: StartRecord | StepRecord) -> bool:
        """Whether `record` is in the log now. Either way the reader has moved past its seq."""
        data = record.encode()
        existing = self._create(keys.log(record.seq), data)
        if existing is None:
            self._reader.accept(data, own=True)
            return True
        stored = self._reader.accept_read(existing)
        return stored.write_id == record.write_id

    def _has_landed(self, record: StepRecord) -> bool:
        """For a pending record whose seq the reader has passed meanwhile."""
        return self.state.step is not None and self.state.step.write_id == record.write_id

    def _raise_if_fenced(self) -> None:
        if self.state.epoch > self.epoch:
            raise Fenced(
                f"epoch {self.epoch} is over: {keys.log(self.state.head_seq)} has epoch {self.state.epoch}; "
                "another learner has taken over"
            )
