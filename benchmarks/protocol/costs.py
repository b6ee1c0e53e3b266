"""What an operation costs: CPU seconds of this process, all threads, and requests to the store."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bucketrl.bucket.counting import requests_of
from bucketrl.bucket.store import Store

Progress = Callable[[str], None]
"""Told what is being done: one line, which replaces the one before."""


@dataclass
class Cost:
    """Filled when its block ends."""

    cpu_s: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)
    """By kind."""

    @property
    def total_requests(self) -> int:
        return sum(self.requests.values())


@contextmanager
def measured(store: Store | None = None) -> Iterator[Cost]:
    """The cost of the block. `store`: the only one whose requests count."""
    cost = Cost()
    before = requests_of(store).by_kind if store else {}
    begun = time.process_time()
    yield cost
    cost.cpu_s = time.process_time() - begun
    after = requests_of(store).by_kind if store else {}
    cost.requests = {kind: n - before.get(kind, 0) for kind, n in after.items() if n > before.get(kind, 0)}


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def rounded(self, digits: int) -> list[float]:
        """[median, lowest, highest]"""
        return [round(value, digits) for value in (self.median, self.low, self.high)]
