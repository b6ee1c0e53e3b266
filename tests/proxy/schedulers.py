"""Schedulers of a small run, whose leases are numbered."""

from itertools import count

from bucketrl.bucket.records import Consumed
from bucketrl.proxy.scheduler import Limits, Scheduler

LIMITS = Limits(prompts_per_epoch=5, max_outstanding=6, lease_seconds=60.0)


def scheduler(limits: Limits = LIMITS, *, version: int = 0, prefix: str = "lease") -> Scheduler:
    numbers = count()
    made = Scheduler(limits, lambda: f"{prefix}-{next(numbers)}")
    if version >= 0:
        made.committed(Consumed(), version, 0.0, finished=False)
    return made


def ordinals(reply: object) -> list[int]:
    return [lease.ordinal for lease in reply.leases]  # type: ignore[attr-defined]
