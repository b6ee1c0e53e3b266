"""The proxy's view of one run: the log as far as it is read, the scheduler, the roster.

Everything here runs in one thread (the event loop's) except `read` and `list_attempts`, which only fetch;
what they return is applied by `apply_records` and `apply_attempts`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from bucketrl.api.messages import (
    Completion,
    Heartbeat,
    HeartbeatReply,
    LearnerState,
    Lease,
    LeaseReply,
    LeaseRequest,
    PolicyHead,
    Release,
    RolloutState,
    StepSummary,
    UploadedGroups,
)
from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.counting import requests_of
from bucketrl.bucket.errors import IntegrityError, StoreError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.partials import fullest
from bucketrl.bucket.records import RunRecord, StartRecord, StepRecord, sha256_hex
from bucketrl.bucket.store import ObjectInfo, Store
from bucketrl.proxy.roster import Roster
from bucketrl.proxy.scheduler import IDLE_WAIT_S, Limits, Scheduler
from bucketrl.proxy.store_traffic import StoreTraffic

logger = logging.getLogger(__name__)

STEPS_KEPT = 10_000
"""Step summaries in memory; older ones are in the log."""
HISTORY = 256
"""Log records before the snapshot that are read at start, for what people see of earlier steps."""
IDLE_REQUESTS_PER_S = 200.0
"""What all idle workers together may ask: the more there are, the longer each one waits."""
MAX_RECORD_BYTES = 64 << 10
"""Of a log record that is handed to workers with the newest version; a larger one they get from the bucket."""

Attempt = tuple[int, str]
"""Group ordinal and attempt id."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """What a listing above the consumed cursor found, each in key order."""

    uploaded: tuple[Attempt, ...]
    quarantined: tuple[Attempt, ...]
    partial: tuple[Attempt, ...]
    """One for each group."""


class ProxyCore:
    """One run. `clock` is monotonic seconds, `wall` the time of day."""

    def __init__(
        self,
        store: Store,
        run: RunRecord,
        *,
        clock: Callable[[], float],
        wall: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self.run = run
        self.store = store
        self.reader = LogReader(store, run, from_snapshot=True)
        self.started_at = wall().isoformat(timespec="seconds")
        self.clock = clock
        self.scheduler = Scheduler(
            Limits(
                run.prompts_per_epoch, run.config.max_outstanding_groups, run.config.rollout.lease_seconds
            ),
            new_id,
        )
        self.roster = Roster()
        self.traffic = StoreTraffic()
        self.steps: deque[StepSummary] = deque(maxlen=STEPS_KEPT)
        self.state = LogState.empty(run)
        """Of the log as far as it has been applied."""
        self.committed_at: float | None = None
        """When the newest commit was made, by `clock`; None before the first."""
        self._announced_seq = -1
        """Newest log record that the learner says exists."""
        self._record = ""
        """The newest commit as it stands in the log; empty if it is large."""
        self._wall = wall
        self._caught_up = False
        """The bucket has been listed once: only then is it known what a predecessor had issued."""

    # -- following the bucket ---------------------------------------------------------------------

    def read(self) -> list[StartRecord | StepRecord]:
        """New log records (I/O). Raises StoreError, IntegrityError."""
        begins = self.reader.state.next_seq == 0
        records = self.reader.refresh()
        return [*self._history(records[0]), *records] if begins and records else records

    def _history(self, first: StartRecord | StepRecord) -> list[StartRecord | StepRecord]:
        """Only people look at it, so a proxy that cannot read it works without."""
        try:
            return snapshots.history(self.store, first, HISTORY)
        except (StoreError, IntegrityError) as error:
            logger.warning("steps before %s are not shown: %s", keys.log(first.seq), error)
            return []

    def list_attempts(self) -> Attempts:
        """Of every group above the consumed cursor (I/O). Raises StoreError.

        `quarantine/` is listed until that has succeeded once: later the learner tells of what it refuses.
        """
        return Attempts(
            tuple(self._listed(keys.TRAJECTORY_PREFIX, keys.parse_trajectory)),
            () if self._caught_up else tuple(self._listed(keys.QUARANTINE_PREFIX, keys.parse_quarantine)),
            tuple(sorted(fullest(self._list(keys.PARTIAL_PREFIX), self.run.prompts_per_epoch).items())),
        )

    def _listed(self, prefix: str, parse: Callable[[str], tuple[GroupId, str] | None]) -> Iterator[Attempt]:
        size = self.run.prompts_per_epoch
        for info in self._list(prefix):
            parsed = parse(info.key)
            if parsed is not None and parsed[0].index < size:
                yield parsed[0].ordinal(size), parsed[1]

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        """From the consumed cursor on."""
        first = GroupId.from_ordinal(self.state.consumed.cursor, self.run.prompts_per_epoch)
        return self.store.list(prefix, start_after=f"{prefix}{first}")

    def apply_records(self, records: list[StartRecord | StepRecord]) -> bool:
        """Whether there is a newer policy version."""
        commits = [record for record in records if isinstance(record, StepRecord)]
        self.steps.extend(_summary(record) for record in commits)
        self.state = self.reader.state
        if not commits:
            return False
        newest, now = commits[-1], self.clock()
        self._record = self._text_of(newest)
        # A commit that was there before this proxy is as old as its writer's clock says.
        self.committed_at = now if self._caught_up else now - self._age(newest)
        self.scheduler.committed(newest.consumed, newest.policy.version, now, finished=self.finished)
        return True

    def apply_attempts(self, attempts: Attempts) -> None:
        self.scheduler.listed(attempts.uploaded, self.clock())
        for ordinal, attempt in attempts.quarantined:
            self.scheduler.quarantined(ordinal, attempt)
        self.scheduler.listed_partial(attempts.partial, self.clock())
        self._caught_up = True

    def tick(self) -> None:
        """Once a second or so: takes the leases of silent workers back."""
        now = self.clock()
        self.traffic.reported("", "proxy", requests_of(self.store).total, now)
        for worker_id in self.roster.newly_silent(now):
            self.scheduler.lost(worker_id)
        self.scheduler.expire(now)

    def _text_of(self, commit: StepRecord) -> str:
        """Empty for a record that is large, or that another implementation wrote in its own way."""
        data = commit.encode()
        whole = len(data) <= MAX_RECORD_BYTES and sha256_hex(data) == self.state.step_sha256
        return data.decode() if whole else ""

    def _age(self, record: StepRecord) -> float:
        try:
            written = datetime.fromisoformat(record.written_at)
        except ValueError:
            return 0.0
        aware = written if written.tzinfo else written.replace(tzinfo=UTC)
        return max(0.0, (self._wall() - aware).total_seconds())

    # -- what jobs ask ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Newest committed policy version; -1 before the first."""
        return self.state.step.policy.version if self.state.step else -1

    @property
    def finished(self) -> bool:
        step = self.state.step
        return step is not None and step.step >= self.run.config.algorithm.steps

    def policy_head(self) -> PolicyHead | None:
        """None before the first commit."""
        state = self.state
        if state.step is None:
            return None
        return PolicyHead(
            run_id=self.run.run_id,
            version=state.step.policy.version,
            step=state.step.step,
            log_seq=state.step_seq,
            log_sha256=state.step_sha256,
            consumed_cursor=state.step.consumed.cursor,
            finished=self.finished,
            record=self._record,
        )

    @property
    def is_behind(self) -> bool:
        """Whether the learner knows a log record that has not been read here."""
        return self._announced_seq > self.state.head_seq

    @property
    def learner_heard(self) -> bool:
        return self.roster.learner_alive(self.clock())

    def announced(self, log_seq: int) -> None:
        """The learner knows this record."""
        self._announced_seq = max(self._announced_seq, log_seq)

    def uploads(self) -> UploadedGroups:
        return UploadedGroups(groups=self.scheduler.uploaded_groups, log_seq=self.state.head_seq)

    def ordinal(self, group_id: str) -> int:
        """Raises IntegrityError for a group that this run cannot have."""
        group = GroupId.parse(group_id)
        if group.index >= self.run.prompts_per_epoch:
            raise IntegrityError(
                f"group_id {group_id}: index beyond the {self.run.prompts_per_epoch} prompts of an epoch"
            )
        return group.ordinal(self.run.prompts_per_epoch)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        now = self.clock()
        wait_s = max(IDLE_WAIT_S, self.roster.count_rollouts_alive(now) / IDLE_REQUESTS_PER_S)
        if not (self._caught_up or self.finished):
            return LeaseReply(leases=(), wait_seconds=wait_s, reason="no_policy")
        reply = self.scheduler.lease(request.worker_id, request.max_groups, now)
        return reply if reply.reason == "ok" else reply.model_copy(update={"wait_seconds": wait_s})

    def renew(self, lease_id: str, worker_id: str) -> Lease | None:
        """None if the lease is over."""
        return self.scheduler.renew(lease_id, worker_id, self.clock())

    def release(self, lease_id: str, release: Release) -> None:
        self.scheduler.release(lease_id, release.worker_id, release.partial_attempt)

    def complete(self, lease_id: str, completion: Completion) -> None:
        """Raises IntegrityError for a group that nobody can have been asked to sample."""
        ordinal = self.ordinal(completion.group_id)
        if not self.scheduler.is_within_reach(ordinal):
            raise IntegrityError(f"group_id {completion.group_id}: far beyond what was ever issued")
        self.scheduler.complete(lease_id, ordinal, completion.attempt, self.clock())

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Raises IntegrityError, with nothing changed, if it names a group that this run cannot have."""
        now = self.clock()
        state = beat.state
        if isinstance(state, RolloutState):
            held = [(lease.lease_id, self.ordinal(lease.group_id)) for lease in state.leases]
            self.roster.heard(state, now)
            self.traffic.reported(state.worker_id, "rollout", state.store_requests, now)
            if state.state == "starting":
                # It has leased nothing yet: what is leased to its name was its predecessor's.
                self.scheduler.lost(state.worker_id)
            self.scheduler.held(state.worker_id, held, now)
        else:
            refused = [(self.ordinal(one.group_id), one.attempt) for one in state.quarantined]
            self.roster.heard(state, now)
            self.traffic.reported(state.learner_id, "learner", state.store_requests, now)
            self._hear_learner(state, refused)
        return HeartbeatReply(version=self.version, finished=self.finished)

    def _hear_learner(self, state: LearnerState, refused: list[Attempt]) -> None:
        for ordinal, attempt in refused:
            self.scheduler.quarantined(ordinal, attempt)
        # A fenced learner that still speaks will commit nothing: what it would skip stays outstanding.
        if state.epoch >= self.state.epoch:
            self.announced(state.log_seq)
            self.scheduler.pending_skips(state.pending_skips)


def _summary(record: StepRecord) -> StepSummary:
    return StepSummary(
        step=record.step,
        version=record.policy.version,
        log_seq=record.seq,
        written_at=record.written_at,
        groups=len(record.groups),
        skipped=len(record.skipped),
        metrics=record.metrics,
    )
