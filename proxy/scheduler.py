"""Who samples which group, and when: pure and synchronous, with time passed in (seconds, monotonic).

Leases only save work. Whatever is lost or issued twice here costs throughput, never data: the learner
consumes each group once, by group id. So a scheduler that starts anew needs nothing but the log's
consumed set, a listing of the trajectories above it, and the heartbeats that follow.

An ordinal below `next_ordinal` is always in exactly one of these: consumed, uploaded, leased, queued
(to be issued again), or unaccounted (a predecessor may have leased it; queued after a grace period).
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bucketrl.api.messages import Lease, LeaseCounts, LeaseReply
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import Consumed

ADOPTION_GRACE_S = 10.0
"""Two heartbeat intervals: time for workers to claim what a predecessor leased to them."""
IDLE_WAIT_S = 0.5
"""When a worker that got less than it asked for should ask again."""
TAIL_FACTOR = 3.0
TAIL_MIN_S = 10.0
TAIL_MIN_SAMPLES = 8
"""A lease older than TAIL_FACTOR medians (and TAIL_MIN_S) is late: an idle worker gets the group as well."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the run's configuration and task fix."""

    prompts_per_epoch: int
    max_outstanding: int
    """Groups issued and not consumed, at most."""
    lease_seconds: float


@dataclass(slots=True)
class LiveLease:
    lease_id: str
    worker_id: str
    ordinal: int
    policy_version: int
    issued_at: float
    deadline: float


@dataclass(slots=True)
class Totals:
    issued: int = 0
    completed: int = 0
    expired: int = 0
    reissued: int = 0


@dataclass
class Scheduler:
    """See the module's text. Every method that takes `now` first expires what is overdue."""

    limits: Limits
    new_id: Callable[[], str]
    totals: Totals = field(default_factory=Totals)
    next_ordinal: int = 0
    version: int = -1
    """Newest committed policy version; nothing is leased before the first."""
    finished: bool = False
    _consumed: Consumed = field(default_factory=Consumed)
    _pending_skips: frozenset[int] = frozenset()
    _queue: set[int] = field(default_factory=set)
    _uploaded: dict[int, set[str]] = field(default_factory=dict)
    _leases: dict[str, LiveLease] = field(default_factory=dict)
    _unaccounted: dict[int, float] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=256))

    # -- what the bucket says ---------------------------------------------------------------------

    def committed(self, consumed: Consumed, version: int, *, finished: bool) -> None:
        """A newer commit: drops what it consumed."""
        self._consumed = consumed
        self.version = version
        self.finished = finished
        self.next_ordinal = max(self.next_ordinal, consumed.cursor, *(o + 1 for o in consumed.above[-1:]))
        self._pending_skips = frozenset(o for o in self._pending_skips if o not in consumed)
        for held in (self._queue, self._uploaded, self._unaccounted):
            for ordinal in [o for o in held if o in consumed]:
                held.discard(ordinal) if isinstance(held, set) else held.pop(ordinal)
        for lease in [lease for lease in self._leases.values() if lease.ordinal in consumed]:
            del self._leases[lease.lease_id]

    def listed(self, uploads: Iterable[tuple[int, str]], now: float) -> None:
        """Trajectory objects (ordinal, attempt) found in the bucket. Ordinals below the highest one seen
        that nobody accounts for may be leased by a predecessor of this scheduler."""
        for ordinal, attempt in uploads:
            self._see(ordinal, attempt, now)

    def quarantined(self, ordinal: int, attempt: str) -> None:
        """The learner refused this attempt: the group must be sampled again unless another one is there."""
        attempts = self._uploaded.get(ordinal)
        if attempts is None or ordinal in self._consumed:
            return
        attempts.discard(attempt)
        if not attempts:
            del self._uploaded[ordinal]
            self._requeue(ordinal)

    def pending_skips(self, ordinals: Iterable[int]) -> None:
        """Groups that the learner's next commit will consume untrained: no longer outstanding."""
        self._pending_skips = frozenset(
            o for o in ordinals if o not in self._consumed and o < self.next_ordinal
        )

    # -- what workers ask and say -----------------------------------------------------------------

    def lease(self, worker_id: str, max_groups: int, now: float) -> LeaseReply:
        """Up to `max_groups` groups: those to be issued again first, then fresh ones within the staleness
        bound, then late ones a second time."""
        self.expire(now)
        if self.finished:
            return LeaseReply(leases=(), wait_seconds=IDLE_WAIT_S, reason="finished")
        if self.version < 0:
            return LeaseReply(leases=(), wait_seconds=IDLE_WAIT_S, reason="no_policy")
        leases: list[Lease] = []
        while len(leases) < max_groups:
            ordinal = self._choose(worker_id, now)
            if ordinal is None:
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
        lease = self._leases.get(lease_id)
        if lease is not None and lease.ordinal == ordinal:
            self._durations.append(now - lease.issued_at)
        self.totals.completed += 1
        self._see(ordinal, attempt, now)

    def release(self, lease_id: str, worker_id: str) -> None:
        """The worker gives the group back."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.worker_id == worker_id:
            self._drop(lease)

    def held(self, worker_id: str, leases: Iterable[tuple[str, int]], now: float) -> None:
        """A heartbeat: (lease id, ordinal) of what the worker works on. Renews it, or adopts it if it was
        issued by a predecessor."""
        for lease_id, ordinal in leases:
            if self.renew(lease_id, worker_id, now) or lease_id in self._leases:
                continue
            if ordinal in self._consumed or ordinal in self._uploaded or self._is_leased(ordinal):
                continue
            self._advance_to(ordinal + 1, now)
            self._queue.discard(ordinal)
            self._unaccounted.pop(ordinal, None)
            deadline = now + self.limits.lease_seconds
            self._leases[lease_id] = LiveLease(lease_id, worker_id, ordinal, self.version, now, deadline)

    def lost(self, worker_id: str) -> None:
        """The worker has not been heard of: its groups go to others."""
        for lease in [lease for lease in self._leases.values() if lease.worker_id == worker_id]:
            self.totals.expired += 1
            self._drop(lease)

    def expire(self, now: float) -> None:
        """Puts overdue leases and unaccounted groups back into the queue."""
        for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
            self.totals.expired += 1
            self._drop(lease)
        for ordinal in [o for o, since in self._unaccounted.items() if now - since >= ADOPTION_GRACE_S]:
            del self._unaccounted[ordinal]
            self._requeue(ordinal)

    # -- views ------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Groups issued, not consumed, and not about to be consumed untrained."""
        return (
            self.next_ordinal - self._consumed.cursor - len(self._consumed.above) - len(self._pending_skips)
        )

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
        return sum(lease.worker_id == worker_id for lease in self._leases.values())

    def holder(self, ordinal: int) -> str | None:
        """A worker that holds a lease of the group."""
        return next((lease.worker_id for lease in self._leases.values() if lease.ordinal == ordinal), None)

    def attempts(self, ordinal: int) -> tuple[str, ...]:
        """Uploaded attempts of a group that is not consumed yet."""
        return tuple(sorted(self._uploaded.get(ordinal, ())))

    def is_consumed(self, ordinal: int) -> bool:
        return ordinal in self._consumed

    # -- inside -----------------------------------------------------------------------------------

    def _choose(self, worker_id: str, now: float) -> int | None:
        if self._queue:
            ordinal = min(self._queue)
            self._queue.remove(ordinal)
            self.totals.reissued += 1
            return ordinal
        if self.outstanding < self.limits.max_outstanding:
            self.next_ordinal += 1
            return self.next_ordinal - 1
        late = self._late_lease(worker_id, now)
        if late is not None:
            self.totals.reissued += 1
        return late

    def _late_lease(self, worker_id: str, now: float) -> int | None:
        if len(self._durations) < TAIL_MIN_SAMPLES:
            return None
        allowed = max(TAIL_MIN_S, TAIL_FACTOR * statistics.median(self._durations))
        holders: dict[int, list[LiveLease]] = {}
        for lease in self._leases.values():
            holders.setdefault(lease.ordinal, []).append(lease)
        late = [
            ordinal
            for ordinal, (first, *others) in holders.items()
            if not others and first.worker_id != worker_id and now - first.issued_at > allowed
        ]
        return min(late, default=None)

    def _issue(self, worker_id: str, ordinal: int, now: float) -> Lease:
        deadline = now + self.limits.lease_seconds
        lease = LiveLease(self.new_id(), worker_id, ordinal, self.version, now, deadline)
        self._leases[lease.lease_id] = lease
        self.totals.issued += 1
        return self._as_message(lease)

    def _as_message(self, lease: LiveLease) -> Lease:
        return Lease(
            lease_id=lease.lease_id,
            group_id=str(GroupId.from_ordinal(lease.ordinal, self.limits.prompts_per_epoch)),
            ordinal=lease.ordinal,
            policy_version=lease.policy_version,
            seconds=self.limits.lease_seconds,
        )

    def _see(self, ordinal: int, attempt: str, now: float) -> None:
        if ordinal in self._consumed:
            return
        self._advance_to(ordinal + 1, now)
        self._queue.discard(ordinal)
        self._unaccounted.pop(ordinal, None)
        self._uploaded.setdefault(ordinal, set()).add(attempt)
        for lease in [lease for lease in self._leases.values() if lease.ordinal == ordinal]:
            del self._leases[lease.lease_id]

    def _advance_to(self, ordinal: int, now: float) -> None:
        """Somebody issued groups up to here: those in between are unaccounted for."""
        for missing in range(self.next_ordinal, ordinal):
            if missing not in self._consumed:
                self._unaccounted[missing] = now
        self.next_ordinal = max(self.next_ordinal, ordinal)

    def _drop(self, lease: LiveLease) -> None:
        del self._leases[lease.lease_id]
        if not self._is_leased(lease.ordinal):
            self._requeue(lease.ordinal)

    def _requeue(self, ordinal: int) -> None:
        if ordinal not in self._consumed and ordinal not in self._uploaded and not self._is_leased(ordinal):
            self._queue.add(ordinal)

    def _is_leased(self, ordinal: int) -> bool:
        return any(lease.ordinal == ordinal for lease in self._leases.values())
