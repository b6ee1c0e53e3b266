"""`batches/<step>.json`: what a step trains on, fixed before it trains (write-ahead).

A step done again after a crash finds its batch here and is, on CPU, the same step bit for bit. Nothing
of a batch counts before the commit, so one that can no longer be read is replaced.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from bucketrl.bucket import conditional, keys
from bucketrl.bucket.errors import IntegrityError, NotFound
from bucketrl.bucket.log import LogState
from bucketrl.bucket.records import (
    BatchRecord,
    Consumed,
    FileRef,
    SkippedGroup,
    decode,
    sha256_hex,
)
from bucketrl.bucket.store import Store, Tier
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.intake import Intake
from bucketrl.learner.select import Candidate, Selection, SkipReason

logger = logging.getLogger(__name__)


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

    def __init__(self, store: Store, tier: Tier, intake: Intake, *, new_id: Callable[[], str]) -> None:
        self._store = store
        self._tier = tier
        self._intake = intake
        self._new_id = new_id

    def next(self, state: LogState, choose: Callable[[], Selection]) -> Batch:
        """The batch of the step after `state`: the stored one, or what `choose` selects, then stored.

        `choose` is called only if it is needed, and again if what it chose turns out unreadable.
        """
        key = keys.batch(next_step(state))
        data = self._stored(key)
        while True:
            if data is not None:
                try:
                    return self._open(data, state)
                except IntegrityError as error:
                    logger.error("%s cannot be trained on (%s); another batch replaces it", key, error)
            data = self._write(self._record(choose(), state), replace=data is not None)

    def _stored(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except NotFound:
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

    def _write(self, record: BatchRecord, *, replace: bool) -> bytes:
        """What is stored afterwards: `record`, or the batch of another learner that was faster."""
        key, data = keys.batch(record.step), record.encode()
        if replace or self._tier < Tier.CREATE:
            # Tier 0 cannot create exclusively. If two learners overwrite each other here, still only one
            # of them commits, and its commit names the groups itself.
            self._store.put(key, data)
            return data
        existing = conditional.create(self._store, key, data)
        return data if existing is None else existing

    def _open(self, data: bytes, state: LogState) -> Batch:
        """Raises IntegrityError if `data` is no batch that can follow `state`."""
        step = next_step(state)
        record = decode(BatchRecord, data)
        if (record.run_id, record.step) != (state.run_id, step):
            raise IntegrityError(f"of run {record.run_id} step {record.step}, want {state.run_id} {step}")
        if not record.groups:
            raise IntegrityError("names no group to train on")
        consumed = _consume(record, state)
        version = state.step.policy.version if state.step else 0
        return Batch(
            ref=FileRef(key=keys.batch(step), size=len(data), sha256=sha256_hex(data)),
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
