"""The leases that stand, found by id, by group, by worker and by age without walking over all of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class LiveLease:
    """One worker's right and duty to sample one group. Times are monotonic seconds."""

    lease_id: str
    worker_id: str
    ordinal: int
    policy_version: int
    issued_at: float
    deadline: float


class LeaseTable:
    """Deadlines only move later while a lease stands: `overdue` relies on it."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveLease] = {}
        self._by_ordinal: dict[int, list[LiveLease]] = {}
        self._by_worker: dict[str, dict[str, LiveLease]] = {}
        self._no_deadline_before = math.inf

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveLease]:
        """Oldest issue first."""
        return iter(self._by_id.values())

    def add(self, lease: LiveLease) -> None:
        """`lease.lease_id` must be new, and `lease.issued_at` not below that of any other."""
        self._by_id[lease.lease_id] = lease
        self._by_ordinal.setdefault(lease.ordinal, []).append(lease)
        self._by_worker.setdefault(lease.worker_id, {})[lease.lease_id] = lease
        self._no_deadline_before = min(self._no_deadline_before, lease.deadline)

    def remove(self, lease: LiveLease) -> None:
        """`lease` must be in the table."""
        del self._by_id[lease.lease_id]
        siblings = self._by_ordinal[lease.ordinal]
        siblings.remove(lease)
        if not siblings:
            del self._by_ordinal[lease.ordinal]
        held = self._by_worker[lease.worker_id]
        del held[lease.lease_id]
        if not held:
            del self._by_worker[lease.worker_id]

    def get(self, lease_id: str) -> LiveLease | None:
        return self._by_id.get(lease_id)

    def of_group(self, ordinal: int) -> tuple[LiveLease, ...]:
        return tuple(self._by_ordinal.get(ordinal, ()))

    def of_worker(self, worker_id: str) -> list[LiveLease]:
        return list(self._by_worker.get(worker_id, {}).values())

    def count_of(self, worker_id: str) -> int:
        return len(self._by_worker.get(worker_id, {}))

    def leased_ordinals(self) -> list[int]:
        return list(self._by_ordinal)

    def overdue(self, now: float) -> list[LiveLease]:
        """Leases whose deadline has passed, for the caller to remove. Walks over all of them only when
        there may be one."""
        if now < self._no_deadline_before:
            return []
        late = [lease for lease in self if lease.deadline <= now]
        self._no_deadline_before = min(
            (lease.deadline for lease in self if lease.deadline > now), default=math.inf
        )
        return late
