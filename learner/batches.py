"""`batches/<step>-e<epoch>.json`: what a step trains on, fixed before it trains (write-ahead).

A step done again after a crash takes its batch over from the learner that died, and is, on CPU, the same step
bit for bit. Nothing of a batch counts before the commit. The epoch in its key keeps two learners, one of them a
zombie, from ever writing over each other.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, NotFound
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import (
    BatchRecord,
    Consumed,
    FileRef,
    SkippedGroup,
    decode,
    sha256_hex,
)
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.intake import Intake
from bucketrl.learner.select import Candidate, Selection, SkipReason

logger = logging.getLogger(__name__)

READINGS = 2
"""Of a stored batch; each group that it names is read again several times by itself."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch with everything it names, read and verified."""

    ref: FileRef
    record: BatchRecord
    groups: tuple[TrajectoryGroup, ...]
    """To train on, in order."""
    trained: tuple[Candidate, ...]
    skipped: tuple[tuple[Candidate, SkipReason], ...]
    consumed: Consumed
    """After the step."""


class Batches:
    """Where the batch of the next step comes from."""

    def __init__(self, store: Store, intake: Intake, *, new_id: Callable[[], str]) -> None:
        self._store = store
        self._intake = intake
        self._new_id = new_id

    def next(self, state: LogState, choose: Callable[[], Selection]) -> Batch:
        """The batch of the step after `state`: that of an earlier learner that got no further, or what `choose`
        selects. Stored under this learner's epoch when it returns.

        `choose` is called only if it is needed, and again if what it chose turns out unreadable.
        """
        batch = self._left_behind(state)
        while batch is None:
            try:
                batch = self._open(self._record(choose(), state), state)
            except IntegrityError as error:
                logger.error("step %d: chose a batch that cannot be read: %s", next_step(state), error)
        self._store.put(batch.ref.key, batch.record.encode())
        return batch

    def _left_behind(self, state: LogState) -> Batch | None:
        """Of the newest learner before this one that stored a batch which can still be trained on.

        Those since the newest commit may have; the one right before this one is asked in any case.
        """
        committed = state.step.epoch if state.step else 0
        for epoch in range(state.epoch - 1, min(committed, state.epoch - 1) - 1, -1):
            key = keys.batch(next_step(state), epoch)
            # Read again before it is given up: what is found damaged may have been damaged on its way.
            for _ in range(READINGS):
                try:
                    record = decode(BatchRecord, self._store.get(key))
                    return self._open(record.model_copy(update={"epoch": state.epoch}), state)
                except NotFound:
                    break
                except IntegrityError as error:
                    logger.warning("%s cannot be trained on: %s", key, error)
        return None

    def _record(self, selection: Selection, state: LogState) -> BatchRecord:
        return BatchRecord(
            run_id=state.run_id,
            step=next_step(state),
            epoch=state.epoch,
            groups=tuple(candidate.ref for candidate in selection.trained),
            skipped=tuple(
                SkippedGroup(**candidate.ref.model_dump(), reason=reason)
                for candidate, reason in selection.skipped
            ),
            write_id=self._new_id(),
        )

    def _open(self, record: BatchRecord, state: LogState) -> Batch:
        """Raises IntegrityError if `record` is no batch that can follow `state`."""
        step = next_step(state)
        if (record.run_id, record.step) != (state.run_id, step):
            raise IntegrityError(f"of run {record.run_id} step {record.step}, want {state.run_id} {step}")
        if not record.groups:
            raise IntegrityError("names no group to train on")
        consumed = _consume(record, state)
        version = state.step.policy.version if state.step else 0
        data = record.encode()
        return Batch(
            ref=FileRef(key=keys.batch(step, record.epoch), size=len(data), sha256=sha256_hex(data)),
            record=record,
            groups=tuple(self._intake.group(ref, version) for ref in record.groups),
            trained=tuple(self._intake.candidate(ref, version) for ref in record.groups),
            skipped=tuple((self._intake.candidate(ref, version), ref.reason) for ref in record.skipped),
            consumed=consumed,
        )


def next_step(state: LogState) -> int:
    """The step that follows the newest commit; steps are trained from 1 on."""
    return state.step.step + 1 if state.step else 1


def _consume(record: BatchRecord, state: LogState) -> Consumed:
    names = [ref.group_id for ref in record.groups] + [ref.group_id for ref in record.skipped]
    ordinals = [keys.GroupId.parse(name).ordinal(state.prompts_per_epoch) for name in names]
    if len(set(ordinals)) != len(ordinals):
        raise IntegrityError("names a group twice")
    try:
        return state.consumed.add(set(ordinals))
    except ValueError as error:
        raise IntegrityError(str(error)) from None
