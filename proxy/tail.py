"""Which leases are late: those of a step's last groups, which idle workers then sample as well."""

import statistics
from collections import deque

from bucketrl.proxy.leases import LeaseTable

TAIL_FACTOR = 3.0
TAIL_MIN_S = 10.0
TAIL_MIN_SAMPLES = 8
"""A lease older than TAIL_FACTOR medians (and TAIL_MIN_S) is late: an idle worker gets the group as well."""


class Tail:
    """How long groups took of late, and which one takes too long. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=256)

    def completed(self, seconds: float) -> None:
        """A group was in the bucket `seconds` after its lease was issued."""
        self._durations.append(seconds)

    def late_group(self, leases: LeaseTable, worker_id: str, now: float) -> int | None:
        """The oldest group that one other worker alone has held for too long."""
        if len(self._durations) < TAIL_MIN_SAMPLES:
            return None
        allowed = max(TAIL_MIN_S, TAIL_FACTOR * statistics.median(self._durations))
        for lease in leases:
            if now - lease.issued_at <= allowed:
                return None
            if lease.worker_id != worker_id and len(leases.of_group(lease.ordinal)) == 1:
                return lease.ordinal
        return None
