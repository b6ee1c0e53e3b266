"""What may follow what in the log: pure, and the same for the proxy, the audit and every reader.

`bucket_layout.md` section 7.1 is the specification.
"""

from dataclasses import dataclass, replace

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.records import (
    Consumed,
    LogRecord,
    RunRecord,
    StartRecord,
    StepRecord,
    decode_log,
    sha256_hex,
)


class LogViolation(IntegrityError):
    """A record may not follow the ones before it. `invariant`: number in `bucket_layout.md` section 9."""

    def __init__(self, invariant: int, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class LogState:
    """What a verified prefix of the log says. `LogState.empty(run)` is that of the empty prefix."""

    run_id: str
    prompts_per_epoch: int
    head_seq: int = -1
    """Newest record; -1 if there is none."""
    head_sha256: str = ""
    epoch: int = 0
    """Of the newest `start`; 0 before the first."""
    step: StepRecord | None = None
    """The newest commit."""
    step_seq: int = -1
    step_sha256: str = ""

    @classmethod
    def empty(cls, run: RunRecord) -> "LogState":
        return cls(run.run_id, run.prompts_per_epoch)

    @classmethod
    def at_commit(cls, run: RunRecord, data: bytes) -> "LogState":
        """After the `step` record `data`, which somebody has verified with everything before it: a commit
        holds the whole state."""
        step, digest = decode_log(data), sha256_hex(data)
        assert isinstance(step, StepRecord)
        return cls(run.run_id, run.prompts_per_epoch, step.seq, digest, step.epoch, step, step.seq, digest)

    @property
    def next_seq(self) -> int:
        return self.head_seq + 1

    @property
    def consumed(self) -> Consumed:
        return self.step.consumed if self.step else Consumed()

    def apply(self, data: bytes) -> "LogState":
        """The state after record `next_seq`, whose bytes are `data`.

        Raises LogViolation, which names the record, if it may not follow.
        """
        key = keys.log(self.next_seq)
        try:
            record = decode_log(data)
        except IntegrityError as error:
            raise LogViolation(1, f"{key}: {error}") from None
        self._check_chain(key, record)
        digest = sha256_hex(data)
        moved = replace(self, head_seq=record.seq, head_sha256=digest, epoch=record.epoch)
        if isinstance(record, StartRecord):
            if record.epoch <= self.epoch:
                raise LogViolation(3, f"{key}: start has epoch {record.epoch}, not above {self.epoch}")
            return moved
        if record.epoch != self.epoch:
            raise LogViolation(3, f"{key}: step has epoch {record.epoch}, the newest start has {self.epoch}")
        self._check_step(key, record)
        self._check_consumed(key, record)
        return replace(moved, step=record, step_seq=record.seq, step_sha256=digest)

    def _check_chain(self, key: str, record: LogRecord) -> None:
        found = (record.run_id, record.seq, record.parent_sha256)
        wanted = (self.run_id, self.next_seq, self.head_sha256)
        for name, have, want in zip(("run_id", "seq", "parent_sha256"), found, wanted, strict=True):
            if have != want:
                raise LogViolation(1, f"{key}: {name} is {have!r}, want {want!r}")

    def _check_step(self, key: str, record: StepRecord) -> None:
        before = self.step
        number = before.step + 1 if before else 0
        if record.step != number:
            raise LogViolation(1, f"{key}: step is {record.step}, want {number}")
        if record.checkpoint.step != record.step:
            raise LogViolation(1, f"{key}: checkpoint is of step {record.checkpoint.step}, not {record.step}")
        newest = before.policy.version if before else -1
        if record.policy.version <= newest:
            raise LogViolation(1, f"{key}: policy version {record.policy.version} is not above {newest}")
        if record.step == 0 and (record.batch or record.groups or record.skipped):
            raise LogViolation(2, f"{key}: step 0 trains on nothing, but names a batch or groups")
        if record.step > 0 and not (record.batch and record.groups):
            raise LogViolation(2, f"{key}: step {record.step} names no batch or no group")

    def _check_consumed(self, key: str, record: StepRecord) -> None:
        ordinals: set[int] = set()
        for text in [g.group_id for g in record.groups] + [s.group_id for s in record.skipped]:
            try:
                group = keys.GroupId.parse(text)
            except IntegrityError as error:
                raise LogViolation(2, f"{key}: {error}") from None
            ordinal = group.ordinal(self.prompts_per_epoch)
            if group.index >= self.prompts_per_epoch:
                raise LogViolation(2, f"{key}: {text} is beyond the epoch's {self.prompts_per_epoch} prompts")
            if ordinal in ordinals or ordinal in self.consumed:
                raise LogViolation(2, f"{key}: group {text} is consumed twice")
            ordinals.add(ordinal)
        expected = self.consumed.add(ordinals)
        if record.consumed != expected:
            raise LogViolation(
                2,
                f"{key}: consumed is cursor {record.consumed.cursor} + {len(record.consumed.above)} above; "
                f"its groups make it cursor {expected.cursor} + {len(expected.above)} above",
            )
