"""The proxy's view of one run: the log as far as it is read, the scheduler, the roster.

Everything here runs in one thread (the event loop's) except `read` and `list_uploads`, which only fetch;
what they return is applied by `apply_records` and `apply_uploads`.
"""

import statistics
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise

from bucketrl.api.messages import (
    Completion,
    GroupStatus,
    Heartbeat,
    HeartbeatReply,
    LearnerState,
    Lease,
    LeaseReply,
    LeaseRequest,
    PolicyHead,
    RolloutState,
    RunStatus,
    StepSummary,
    WorkerSummary,
)
from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.log import LogReader, LogState
from bucketrl.bucket.records import RunRecord, StartRecord, StepRecord
from bucketrl.bucket.store import Store
from bucketrl.proxy.roster import Roster
from bucketrl.proxy.scheduler import Limits, Scheduler

STEPS_KEPT = 10_000
"""Step summaries in memory; older ones are in the log."""
RATE_WINDOW = 20
"""Commits over which `steps_per_minute` is taken."""


class ProxyCore:
    """One run. `clock` is monotonic seconds."""

    def __init__(
        self, store: Store, run: RunRecord, *, clock: Callable[[], float], new_id: Callable[[], str]
    ) -> None:
        self.run = run
        self.store = store
        self.reader = LogReader(store, run)
        self.started_at = _now()
        self.scheduler = Scheduler(
            Limits(
                run.prompts_per_epoch, run.config.max_outstanding_groups, run.config.rollout.lease_seconds
            ),
            new_id,
        )
        self.roster = Roster()
        self.steps: deque[StepSummary] = deque(maxlen=STEPS_KEPT)
        self._state = LogState.empty(run)
        self._clock = clock
        self._committed_at: float | None = None

    # -- following the bucket ---------------------------------------------------------------------

    def read(self) -> list[StartRecord | StepRecord]:
        """New log records (I/O). Raises StoreError, IntegrityError."""
        return self.reader.refresh()

    def list_uploads(self) -> list[tuple[int, str]]:
        """(ordinal, attempt) of every trajectory object above the consumed cursor (I/O)."""
        cursor = self._state.consumed.cursor
        start_after = ""
        if cursor > 0:
            last = GroupId.from_ordinal(cursor - 1, self.run.prompts_per_epoch)
            start_after = f"{keys.TRAJECTORY_PREFIX}{last}/\uffff"
        found = []
        for info in self.store.list(keys.TRAJECTORY_PREFIX, start_after):
            parsed = keys.parse_trajectory(info.key)
            if parsed is not None:
                found.append((parsed[0].ordinal(self.run.prompts_per_epoch), parsed[1]))
        return found

    def apply_records(self, records: list[StartRecord | StepRecord]) -> bool:
        """Whether there is a newer policy version."""
        commits = [record for record in records if isinstance(record, StepRecord)]
        self.steps.extend(_summary(record) for record in commits)
        self._state = self.reader.state
        if not commits:
            return False
        newest = commits[-1]
        self._committed_at = self._clock()
        self.scheduler.committed(newest.consumed, newest.policy.version, finished=self.finished)
        return True

    def apply_uploads(self, uploads: list[tuple[int, str]]) -> None:
        self.scheduler.listed(uploads, self._clock())

    def tick(self) -> None:
        """Once a second or so: takes the leases of silent workers back."""
        now = self._clock()
        for worker_id in self.roster.newly_silent(now):
            self.scheduler.lost(worker_id)
        self.scheduler.expire(now)

    # -- what jobs ask ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._state.step.policy.version if self._state.step else -1

    @property
    def finished(self) -> bool:
        step = self._state.step
        return step is not None and step.step >= self.run.config.algorithm.steps

    def policy_head(self) -> PolicyHead | None:
        """None before the first commit."""
        state = self._state
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
        )

    def ordinal(self, group_id: str) -> int:
        """Raises IntegrityError for a group that this run cannot have."""
        group = GroupId.parse(group_id)
        if group.index >= self.run.prompts_per_epoch:
            raise IntegrityError(
                f"group_id {group_id}: index beyond the {self.run.prompts_per_epoch} prompts of an epoch"
            )
        return group.ordinal(self.run.prompts_per_epoch)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        return self.scheduler.lease(request.worker_id, request.max_groups, self._clock())

    def renew(self, lease_id: str, worker_id: str) -> Lease | None:
        """None if the lease is over."""
        return self.scheduler.renew(lease_id, worker_id, self._clock())

    def complete(self, lease_id: str, completion: Completion) -> None:
        ordinal = self.ordinal(completion.group_id)
        # A confused worker must not make the scheduler account for groups far ahead.
        if ordinal >= self.scheduler.next_ordinal + self._reach():
            raise IntegrityError(f"group_id {completion.group_id}: far beyond what was ever issued")
        self.scheduler.complete(lease_id, ordinal, completion.attempt, self._clock())

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        now = self._clock()
        state = beat.state
        self.roster.heard(state, now)
        if isinstance(state, RolloutState):
            held = [(lease.lease_id, self.ordinal(lease.group_id)) for lease in state.leases]
            reach = self.scheduler.next_ordinal + self._reach()
            self.scheduler.held(state.worker_id, [pair for pair in held if pair[1] < reach], now)
        else:
            for refused in state.quarantined:
                self.scheduler.quarantined(self.ordinal(refused.group_id), refused.attempt)
            self.scheduler.pending_skips(state.pending_skips)
        return HeartbeatReply(version=self.version, finished=self.finished)

    def _reach(self) -> int:
        """How far beyond `next_ordinal` honest workers can be: a predecessor's or their own issue."""
        return 4 * self.run.config.max_outstanding_groups

    # -- what people ask --------------------------------------------------------------------------

    def status(self) -> RunStatus:
        now = self._clock()
        newest = self._state.step
        metrics = newest.metrics if newest and newest.step > 0 else {}
        alive = self.roster.rollouts_alive(now)
        return RunStatus(
            run_id=self.run.run_id,
            name=self.run.config.name,
            bucket=self.store.url,
            step=newest.step if newest else 0,
            steps=self.run.config.algorithm.steps,
            version=self.version,
            finished=self.finished,
            reward=metrics.get("reward_mean"),
            staleness_mean=metrics.get("staleness_mean"),
            staleness_max=metrics.get("staleness_max"),
            workers_alive=len(alive),
            learner_alive=self.roster.learner_alive(now),
            leases=self.scheduler.counts(),
            rollout_tokens_per_second=sum(state.tokens_per_second for state in alive),
            steps_per_minute=_rate(list(self.steps)[-RATE_WINDOW:]),
            proxy_started_at=self.started_at,
            run_started_at=self.run.created_at,
            last_commit_at=newest.written_at if newest else None,
            seconds_since_commit=None if self._committed_at is None else now - self._committed_at,
        )

    def workers(self) -> list[WorkerSummary]:
        now = self._clock()
        return [
            WorkerSummary(
                id=member.id,
                role=member.state.role,
                alive=self.roster.is_alive(member, now),
                seconds_since_seen=now - member.seen_at,
                leases=0 if isinstance(member.state, LearnerState) else self.scheduler.leases_of(member.id),
                state=member.state,
            )
            for member in self.roster.members()
        ]

    def group(self, group_id: str) -> GroupStatus:
        ordinal = self.ordinal(group_id)
        attempts = self.scheduler.attempts(ordinal)
        holder = self.scheduler.holder(ordinal)
        if self.scheduler.is_consumed(ordinal):
            return GroupStatus(group_id=group_id, state="consumed")
        if attempts:
            return GroupStatus(group_id=group_id, state="uploaded", attempts=attempts)
        return GroupStatus(group_id=group_id, state="leased" if holder else "not_issued", worker_id=holder)


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


def _rate(steps: list[StepSummary]) -> float:
    """Steps per minute, from the median time between commits. Times are one machine's, the learner's."""
    try:
        times = [datetime.fromisoformat(step.written_at).timestamp() for step in steps]
    except ValueError:
        return 0.0
    gaps = [after - before for before, after in pairwise(times) if after > before]
    return 60.0 / statistics.median(gaps) if gaps else 0.0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
