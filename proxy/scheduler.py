"""Who samples which group, and when: pure and synchronous, with time passed in (seconds, monotonic).

Leases only save work. Whatever is lost or issued twice here costs throughput, never data: the learner
consumes each group once, by group id. So a scheduler that starts anew needs nothing but the log's
consumed set, a listing of the trajectories above it, and the heartbeats that follow.

An ordinal below `next_ordinal` is always in exactly one of these: consumed, uploaded, leased, queued
(to be issued again), or unaccounted (a predecessor may have leased it; queued after a grace period).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bucketrl.api.messages import Lease, LeaseCounts, LeaseReply
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import Consumed
from bucketrl.proxy.leases import LeaseTable, LiveLease
from bucketrl.proxy.reissue import ReissueQueue
from bucketrl.proxy.tail import Tail

ADOPTION_GRACE_S = 10.0
"""Two heartbeat intervals: time for workers to claim what a predecessor leased to them."""
IDLE_WAIT_S = 0.5
"""When a worker that got less than it asked for should ask again."""
SHORT_S = 2 * IDLE_WAIT_S
"""For how long a worker that got less than it asked for is remembered, unless it asks again."""
REACH = 4
"""Groups further than this many bounds ahead of all that was issued are nobody's honest work: workers
without a proxy stay within two bounds of the consumed cursor."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the run's configuration and task fix."""

    prompts_per_epoch: int
    max_outstanding: int
    """Groups issued and not consumed, at most."""
    lease_seconds: float


@dataclass(slots=True)
class Totals:
    """Since this scheduler began."""

    issued: int = 0
    completed: int = 0
    """Attempts announced by their workers."""
    expired: int = 0
    reissued: int = 0
    """Of `issued`: groups that had been issued before."""
    tail: int = 0
    """Of `reissued`: late groups given to a second worker while the first one still holds them."""


@dataclass
class Scheduler:
    """See the module's text. `now` never decreases from call to call."""

    limits: Limits
    new_id: Callable[[], str]
    totals: Totals = field(default_factory=Totals)
    next_ordinal: int = 0
    version: int = -1
    """Newest committed policy version; nothing is leased before the first."""
    finished: bool = False
    _cursor: int = 0
    _above: frozenset[int] = frozenset()
    _pending_skips: frozenset[int] = frozenset()
    _queue: ReissueQueue = field(default_factory=ReissueQueue)
    _uploaded: dict[int, set[str]] = field(default_factory=dict)
    _refused: dict[int, set[str]] = field(default_factory=dict)
    """Quarantined attempts: their objects stay in the bucket, and every listing shows them again."""
    _partial: dict[int, str] = field(default_factory=dict)
    """Groups that somebody has begun and left, and the newest known attempt to continue."""
    _leases: LeaseTable = field(default_factory=LeaseTable)
    _unaccounted: dict[int, float] = field(default_factory=dict)
    _tail: Tail = field(default_factory=Tail)
    _short: dict[str, float] = field(default_factory=dict)
    """Workers that got less than they asked for the last time, and when; oldest first."""

    # -- what the bucket says ---------------------------------------------------------------------

    def committed(self, consumed: Consumed, version: int, now: float, *, finished: bool) -> None:
        """A newer commit: drops what it consumed."""
        self._cursor, self._above = consumed.cursor, frozenset(consumed.above)
        self.version = version
        self.finished = finished
        self._advance_to(max(self._cursor, max(self._above, default=-1) + 1), now)
        self._pending_skips = frozenset(o for o in self._pending_skips if not self.is_consumed(o))
        self._queue.discard_if(self.is_consumed)
        for held in (self._uploaded, self._refused, self._unaccounted, self._partial):
            for ordinal in [o for o in held if self.is_consumed(o)]:
                del held[ordinal]
        for ordinal in self._leases.leased_ordinals():
            if self.is_consumed(ordinal):
                self._end_leases(ordinal)

    def listed(self, uploads: Iterable[tuple[int, str]], now: float) -> None:
        """Trajectory objects (ordinal, attempt), ascending, found in the bucket. Ordinals below the highest
        one seen that nobody accounts for may be leased by a predecessor of this scheduler."""
        for ordinal, attempt in uploads:
            if self.is_within_reach(ordinal):
                self._see(ordinal, attempt, now)

    def listed_partial(self, partial: Iterable[tuple[int, str]], now: float) -> None:
        """Partial objects (ordinal, attempt), ascending, found in the bucket. What a release has named is
        newer."""
        for ordinal, attempt in partial:
            if self.is_consumed(ordinal) or ordinal in self._uploaded or not self.is_within_reach(ordinal):
                continue
            self._advance_to(ordinal + 1, now)
            self._partial.setdefault(ordinal, attempt)
            if ordinal in self._queue:
                self._queue.add(ordinal, begun=True)

    def quarantined(self, ordinal: int, attempt: str) -> None:
        """The learner refused this attempt: the group must be sampled again unless another one is there."""
        if self.is_consumed(ordinal) or not self.is_within_reach(ordinal):
            return
        self._refused.setdefault(ordinal, set()).add(attempt)
        attempts = self._uploaded.get(ordinal, set())
        attempts.discard(attempt)
        if ordinal in self._uploaded and not attempts:
            del self._uploaded[ordinal]
            self._requeue(ordinal)

    def pending_skips(self, ordinals: Iterable[int]) -> None:
        """Groups that the learner's next commit will consume untrained: no longer outstanding."""
        self._pending_skips = frozenset(
            o for o in ordinals if not self.is_consumed(o) and o < self.next_ordinal
        )

    # -- what workers ask and say -----------------------------------------------------------------

    def lease(self, worker_id: str, max_groups: int, now: float) -> LeaseReply:
        """Up to `max_groups` groups: those to be issued again first, begun ones before all others, then fresh
        ones within the staleness bound, then late ones a second time.

        While other workers go short, nobody gets fresh groups beyond an equal share of the bound: one large
        engine would else hold all that is admitted."""
        self.expire(now)
        if self.finished:
            return LeaseReply(leases=(), wait_seconds=IDLE_WAIT_S, reason="finished")
        if self.version < 0:
            return LeaseReply(leases=(), wait_seconds=IDLE_WAIT_S, reason="no_policy")
        leases: list[Lease] = []
        share = self._share(worker_id, now)
        while len(leases) < max_groups:
            ordinal = self._choose(worker_id, now, fresh=self.leases_of(worker_id) < share)
            if ordinal is None:
                self._short[worker_id] = now
                return LeaseReply(leases=tuple(leases), wait_seconds=IDLE_WAIT_S, reason="staleness_bound")
            leases.append(self._issue(worker_id, ordinal, now))
        return LeaseReply(leases=tuple(leases))

    def renew(self, lease_id: str, worker_id: str, now: float) -> Lease | None:
        """The lease with a new deadline; None if it is over and its group may be somebody else's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.worker_id != worker_id:
            return None
        lease.deadline = now + self.limits.lease_seconds
        return self._as_message(lease)

    def complete(self, lease_id: str, ordinal: int, attempt: str, now: float) -> None:
        """The group is in the bucket, whoever sampled it and whether or not the lease still stands."""
        if self.is_consumed(ordinal) or not self.is_within_reach(ordinal):
            return
        lease = self._leases.get(lease_id)
        if lease is not None and lease.ordinal == ordinal:
            self._tail.completed(now - lease.issued_at)
            if attempt in self._refused.get(ordinal, ()):
                self._drop(lease)
        if attempt not in self._uploaded.get(ordinal, ()):
            self.totals.completed += 1
        self._see(ordinal, attempt, now)

    def release(self, lease_id: str, worker_id: str, partial_attempt: str | None = None) -> None:
        """The worker gives the group back, to be continued from `partial_attempt` if it names one."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.worker_id == worker_id:
            if partial_attempt is not None:
                self._partial[lease.ordinal] = partial_attempt
            self._drop(lease)

    def held(self, worker_id: str, leases: Iterable[tuple[str, int]], now: float) -> None:
        """A heartbeat: (lease id, ordinal) of what the worker works on. Renews it, or adopts it if it was
        issued by a predecessor."""
        for lease_id, ordinal in leases:
            if self.renew(lease_id, worker_id, now) or self._leases.get(lease_id):
                continue
            if self.is_consumed(ordinal) or not self.is_within_reach(ordinal):
                continue
            if ordinal in self._uploaded or self._leases.of_group(ordinal):
                continue
            self._advance_to(ordinal + 1, now)
            self._queue.discard(ordinal)
            self._unaccounted.pop(ordinal, None)
            self._add_lease(lease_id, worker_id, ordinal, now)

    def lost(self, worker_id: str) -> None:
        """The worker has not been heard of: its groups go to others."""
        self._short.pop(worker_id, None)
        for lease in self._leases.of_worker(worker_id):
            self.totals.expired += 1
            self._drop(lease)

    def expire(self, now: float) -> None:
        """Puts overdue leases and unaccounted groups back into the queue."""
        for lease in self._leases.overdue(now):
            self.totals.expired += 1
            self._drop(lease)
        for ordinal in [o for o, since in self._unaccounted.items() if now - since >= ADOPTION_GRACE_S]:
            del self._unaccounted[ordinal]
            self._requeue(ordinal)

    # -- views ------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Groups issued, not consumed, and not about to be consumed untrained."""
        return self.next_ordinal - self._cursor - len(self._above) - len(self._pending_skips)

    @property
    def uploaded_groups(self) -> int:
        """Groups that are in the bucket, not consumed and not refused."""
        return len(self._uploaded)

    def is_consumed(self, ordinal: int) -> bool:
        return ordinal < self._cursor or ordinal in self._above

    def is_within_reach(self, ordinal: int) -> bool:
        """Whether an honest worker, this scheduler's or a predecessor's, can be at this group."""
        return ordinal < self.next_ordinal + REACH * self.limits.max_outstanding

    def counts(self) -> LeaseCounts:
        return LeaseCounts(
            active=len(self._leases),
            outstanding_groups=self.outstanding,
            max_outstanding_groups=self.limits.max_outstanding,
            issued_total=self.totals.issued,
            completed_total=self.totals.completed,
            expired_total=self.totals.expired,
            reissued_total=self.totals.reissued,
        )

    def leases_of(self, worker_id: str) -> int:
        return self._leases.count_of(worker_id)

    def holder(self, ordinal: int) -> str | None:
        """The worker that holds the oldest lease of the group."""
        return next((lease.worker_id for lease in self._leases.of_group(ordinal)), None)

    def attempts(self, ordinal: int) -> tuple[str, ...]:
        """Uploaded attempts, not refused, of a group that is not consumed yet."""
        return tuple(sorted(self._uploaded.get(ordinal, ())))

    def forgotten(self) -> list[int]:
        """Ordinals issued that no part of this scheduler accounts for: always none."""
        known = self._uploaded.keys() | self._unaccounted.keys() | set(self._queue)
        known |= set(self._leases.leased_ordinals())
        return [
            o for o in range(self._cursor, self.next_ordinal) if o not in known and not self.is_consumed(o)
        ]

    # -- inside -----------------------------------------------------------------------------------

    def _share(self, worker_id: str, now: float) -> float:
        """Groups that the worker may hold before it gets no fresh ones; infinite while nobody else goes short."""
        self._short.pop(worker_id, None)
        # Oldest first, since whoever goes short again is entered anew.
        while self._short and now - next(iter(self._short.values())) > SHORT_S:
            del self._short[next(iter(self._short))]
        return max(1, self.limits.max_outstanding // (1 + len(self._short))) if self._short else math.inf

    def _choose(self, worker_id: str, now: float, *, fresh: bool) -> int | None:
        waiting = self._queue.pop()
        if waiting is not None:
            self.totals.reissued += 1
            return waiting
        if fresh and self.outstanding < self.limits.max_outstanding:
            self.next_ordinal += 1
            return self.next_ordinal - 1
        late = self._tail.late_group(self._leases, worker_id, now)
        if late is not None:
            self.totals.reissued += 1
            self.totals.tail += 1
        return late

    def _issue(self, worker_id: str, ordinal: int, now: float) -> Lease:
        self.totals.issued += 1
        return self._as_message(self._add_lease(self.new_id(), worker_id, ordinal, now))

    def _add_lease(self, lease_id: str, worker_id: str, ordinal: int, now: float) -> LiveLease:
        deadline = now + self.limits.lease_seconds
        lease = LiveLease(lease_id, worker_id, ordinal, self.version, now, deadline)
        self._leases.add(lease)
        return lease

    def _as_message(self, lease: LiveLease) -> Lease:
        return Lease(
            lease_id=lease.lease_id,
            group_id=str(GroupId.from_ordinal(lease.ordinal, self.limits.prompts_per_epoch)),
            ordinal=lease.ordinal,
            policy_version=lease.policy_version,
            seconds=self.limits.lease_seconds,
            partial_attempt=self._partial.get(lease.ordinal),
        )

    def _see(self, ordinal: int, attempt: str, now: float) -> None:
        """An attempt of an ordinal within reach is in the bucket."""
        if self.is_consumed(ordinal):
            return
        self._advance_to(ordinal + 1, now)
        if attempt in self._refused.get(ordinal, ()):
            return
        self._queue.discard(ordinal)
        self._unaccounted.pop(ordinal, None)
        self._partial.pop(ordinal, None)
        self._uploaded.setdefault(ordinal, set()).add(attempt)
        self._end_leases(ordinal)

    def _advance_to(self, ordinal: int, now: float) -> None:
        """Somebody issued groups up to here: those in between are unaccounted for."""
        for missing in range(max(self.next_ordinal, self._cursor), ordinal):
            if not self.is_consumed(missing):
                self._unaccounted[missing] = now
        self.next_ordinal = max(self.next_ordinal, ordinal)

    def _end_leases(self, ordinal: int) -> None:
        for lease in self._leases.of_group(ordinal):
            self._leases.remove(lease)

    def _drop(self, lease: LiveLease) -> None:
        self._leases.remove(lease)
        self._requeue(lease.ordinal)

    def _requeue(self, ordinal: int) -> None:
        """Puts a group that nobody holds into the queue."""
        if not (self.is_consumed(ordinal) or ordinal in self._uploaded or self._leases.of_group(ordinal)):
            self._queue.add(ordinal, begun=ordinal in self._partial)
