"""From trajectory objects in the bucket to groups that may be trained on.

    trajectories/ ──list after the cursor──► new attempts ──get, decode, check──► Candidate per group
                                                   │ invalid, three readings in a row
                                                   ▼
                                              quarantine/ and the next heartbeat

Of several attempts of a group the first valid one counts: the lowest attempt id among those listed when
the group is first found. What is kept is bounded: candidates are small, and of the decoded groups only
the oldest `max_outstanding_groups` stay in memory; others are read again if they are needed.
"""

import logging
from collections.abc import Callable
from itertools import islice

from bucketrl.bucket import artifacts, keys, sealed_table, trajectories
from bucketrl.bucket.errors import IntegrityError, NotFound
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.reading import get_together
from bucketrl.bucket.records import (
    Consumed,
    FileRef,
    GroupRef,
    QuarantineRecord,
    RunRecord,
    SkippedGroup,
    sha256_hex,
)
from bucketrl.bucket.store import ObjectInfo, Store
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.advantages import has_zero_variance
from bucketrl.learner.select import NO_SIGNAL_FACTOR, Candidate

logger = logging.getLogger(__name__)

READINGS = 3
"""Polls in which an object must be found invalid before it is quarantined: listings and reads may lag."""

READ_TOGETHER = 64
"""Objects asked for at once, where the store has that."""
MAX_BYTES_TOGETHER = 256 << 20

Refused = Callable[[GroupId, str, str], None]
"""Told the group, the attempt and the reason of every quarantine."""


class Intake:
    """The learner's view of `trajectories/`. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        run: RunRecord,
        *,
        vocab_size: int,
        learner_id: str,
        now: Callable[[], str],
        on_refused: Refused,
    ) -> None:
        self._store = store
        self._run = run
        self._vocab_size = vocab_size
        self._learner_id = learner_id
        self._now = now
        self._on_refused = on_refused
        self._bound = run.config.max_outstanding_groups
        self._invalid: dict[tuple[int, str], int] = {}
        """Readings in which an attempt (ordinal, attempt id) was found invalid; READINGS: quarantined."""
        self._decoded: dict[int, TrajectoryGroup] = {}
        self.candidates: dict[int, Candidate] = {}
        """Valid groups that are not consumed, by ordinal."""

    @property
    def doubtful(self) -> bool:
        """Whether an object was found invalid and has to be read again before that counts."""
        return any(readings < READINGS for readings in self._invalid.values())

    def poll(self, consumed: Consumed, max_version: int) -> int:
        """Looks for new groups; returns how many it found. `max_version`: the newest committed policy.

        Raises StoreError; what was found before it stays found.
        """
        self._forget(consumed)
        before = len(self.candidates)
        cursor = GroupId.from_ordinal(consumed.cursor, self._run.prompts_per_epoch)
        listing = self._store.list(keys.TRAJECTORY_PREFIX, start_after=f"{keys.TRAJECTORY_PREFIX}{cursor}")
        wanted = (info for info in listing if self._is_wanted(info, consumed))
        while not self._is_full and (batch := list(islice(wanted, READ_TOGETHER))):
            small = [info.key for info in batch if info.size <= MAX_BYTES_TOGETHER // READ_TOGETHER]
            read = get_together(self._store, small)
            for info in batch:
                if self._is_wanted(info, consumed) and not self._is_full:
                    self._consider(info, read.get(info.key), max_version)
        return len(self.candidates) - before

    def group(self, ref: GroupRef | SkippedGroup, max_version: int) -> TrajectoryGroup:
        """The group that `ref` names, verified. Raises IntegrityError, with the attempt quarantined, if it
        is not what `ref` says or must not be trained on."""
        group_id = GroupId.parse(ref.group_id)
        ordinal = group_id.ordinal(self._run.prompts_per_epoch)
        if ordinal in self._decoded and self.candidates[ordinal].ref.file == ref.file:
            return self._decoded[ordinal]
        try:
            if ref.file.key != keys.trajectory(group_id, ref.attempt):
                raise IntegrityError(f"{ref.file.key}: not the object of {ref.group_id} {ref.attempt}")
            data = artifacts.read_verified(self._store, ref.file)
            group = self._decode(group_id, ref.attempt, data, max_version)
        except IntegrityError as error:
            self.candidates.pop(ordinal, None)
            self._decoded.pop(ordinal, None)
            self._quarantine(group_id, ref.attempt, str(error))
            raise
        self._accept(ordinal, ref.attempt, ref.file, group)
        return group

    def candidate(self, ref: GroupRef | SkippedGroup, max_version: int) -> Candidate:
        """The same without its tokens; raises as `group` does."""
        ordinal = GroupId.parse(ref.group_id).ordinal(self._run.prompts_per_epoch)
        if ordinal not in self.candidates or self.candidates[ordinal].ref.file != ref.file:
            self.group(ref, max_version)
        return self.candidates[ordinal]

    def _forget(self, consumed: Consumed) -> None:
        kept = {ordinal: one for ordinal, one in self.candidates.items() if ordinal not in consumed}
        self.candidates = kept
        self._decoded = {ordinal: group for ordinal, group in self._decoded.items() if ordinal in kept}
        self._invalid = {key: count for key, count in self._invalid.items() if key[0] not in consumed}

    @property
    def _is_full(self) -> bool:
        """`select` needs no more than this to decide, and a flood of objects must not fill the memory."""
        return len(self.candidates) > (NO_SIGNAL_FACTOR + 1) * self._bound

    def _is_wanted(self, info: ObjectInfo, consumed: Consumed) -> bool:
        parsed = keys.parse_trajectory(info.key)
        if parsed is None:
            logger.debug("%s: not a trajectory's key; ignored", info.key[:128])
            return False
        group_id, attempt = parsed
        ordinal = group_id.ordinal(self._run.prompts_per_epoch)
        readings = self._invalid.get((ordinal, attempt), 0)
        if readings >= READINGS or ordinal in consumed:
            return False
        # Of further attempts, one that was found invalid is followed up nevertheless.
        return readings > 0 or ordinal not in self.candidates

    def _consider(self, info: ObjectInfo, data: bytes | None, max_version: int) -> None:
        """`data`: None if it has not been read yet."""
        parsed = keys.parse_trajectory(info.key)
        assert parsed is not None
        group_id, attempt = parsed
        ordinal = group_id.ordinal(self._run.prompts_per_epoch)
        readings = self._invalid.get((ordinal, attempt), 0)
        try:
            if info.size > sealed_table.MAX_BYTES:
                raise IntegrityError(f"{info.size} bytes, more than {sealed_table.MAX_BYTES}")
            if data is None:
                data = self._store.get(info.key)
            group = self._decode(group_id, attempt, data, max_version)
        except (IntegrityError, NotFound) as error:
            if readings + 1 < READINGS:
                self._invalid[ordinal, attempt] = readings + 1
            else:  # counted once it is stored: should that fail, the next poll comes here again
                self._quarantine(group_id, attempt, str(error))
            return
        self._invalid.pop((ordinal, attempt), None)
        if ordinal not in self.candidates:
            file = FileRef(key=info.key, size=len(data), sha256=sha256_hex(data))
            self._accept(ordinal, attempt, file, group)

    def _decode(self, group_id: GroupId, attempt: str, data: bytes, max_version: int) -> TrajectoryGroup:
        group = trajectories.decode(
            data,
            run_id=self._run.run_id,
            group_id=str(group_id),
            attempt=attempt,
            max_version=max_version,
        )
        check_trainable(group, group_id, self._run, self._vocab_size)
        return group

    def _accept(self, ordinal: int, attempt: str, file: FileRef, group: TrajectoryGroup) -> None:
        ref = GroupRef(group_id=group.group_id, attempt=attempt, file=file)
        self.candidates[ordinal] = summarise(ordinal, ref, group)
        # Kept whole are groups that are likely to be trained on, the oldest ones.
        filtered = self._run.config.algorithm.filter_zero_variance
        if filtered and has_zero_variance(self.candidates[ordinal].rewards):
            return
        self._decoded[ordinal] = group
        if len(self._decoded) > self._bound:
            del self._decoded[max(self._decoded)]

    def _quarantine(self, group_id: GroupId, attempt: str, reason: str) -> None:
        key = keys.trajectory(group_id, attempt)
        logger.warning("%s is quarantined: %s", key, reason)
        record = QuarantineRecord(key=key, reason=reason, learner_id=self._learner_id, written_at=self._now())
        self._store.put(keys.quarantine(group_id, attempt), record.encode())
        self._invalid[group_id.ordinal(self._run.prompts_per_epoch), attempt] = READINGS
        self._on_refused(group_id, attempt, reason)


def check_trainable(group: TrajectoryGroup, group_id: GroupId, run: RunRecord, vocab_size: int) -> None:
    """What the run and the model ask beyond a valid object. Raises IntegrityError with one reason."""
    if group_id.index >= run.prompts_per_epoch:
        raise IntegrityError(f"group {group_id} is beyond the epoch's {run.prompts_per_epoch} prompts")
    if not 2 <= len(group.trajectories) <= run.config.sampling.group_size:
        raise IntegrityError(
            f"{len(group.trajectories)} completions, want 2 to {run.config.sampling.group_size}"
        )
    for t in group.trajectories:
        tokens = (*t.prompt_token_ids, *t.completion_token_ids)
        if max(tokens) >= vocab_size:
            raise IntegrityError(f"sample {t.sample}: token id {max(tokens)}, the model has {vocab_size}")
        if len(tokens) > run.config.rollout.max_model_len:
            raise IntegrityError(
                f"sample {t.sample}: {len(tokens)} tokens, more than rollout.max_model_len "
                f"{run.config.rollout.max_model_len}"
            )
        if not any(t.loss_mask):
            raise IntegrityError(f"sample {t.sample}: no token to train on")


def summarise(ordinal: int, ref: GroupRef, group: TrajectoryGroup) -> Candidate:
    """What remains of a group once its tokens may be forgotten."""
    graded = all("correct" in t.reward_parts for t in group.trajectories)
    return Candidate(
        ordinal=ordinal,
        ref=ref,
        rewards=tuple(t.reward for t in group.trajectories),
        min_version=min(min(t.policy_versions) for t in group.trajectories),
        truncated=sum(t.finish_reason == "length" for t in group.trajectories),
        completed_correct=(
            sum(t.finish_reason == "stop" and t.reward_parts["correct"] > 0 for t in group.trajectories)
            if graded
            else None
        ),
    )
