"""What a store has sent: requests by kind, and bytes. Each store counts at the place where it really sends, so
pages of a listing, parts of an upload and repetitions count as what they are.

What one operation costs a service that limits requests is that service's business: `stores/hf.py` counts what
the Hub counts.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from bucketrl.bucket.store import Store

RequestKind = Literal["get", "put", "create", "list", "delete", "info", "part", "token"]
"""`info` asks for size or existence; `part` is one of a multipart upload, its begin and its end included;
`token` asks for the right to transfer (Hugging Face)."""

HF_LIMIT = 2_500
HF_WINDOW_S = 300.0
"""API requests that the Hub allows to all jobs of one PRO account together."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Since the store was opened."""

    by_kind: Mapping[str, int]
    bytes_up: int
    bytes_down: int

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


class Requests:
    """The counter. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_kind: Counter[str] = Counter()
        self._up = 0
        self._down = 0

    def sent(self, kind: RequestKind, number: int = 1) -> None:
        with self._lock:
            self._by_kind[kind] += number

    def moved(self, *, up: int = 0, down: int = 0) -> None:
        """Bytes of objects that arrived."""
        with self._lock:
            self._up += up
            self._down += down

    def snapshot(self) -> RequestCounts:
        with self._lock:
            return RequestCounts(dict(self._by_kind), self._up, self._down)


@runtime_checkable
class Counted(Protocol):
    """A store that counts; all that `open_store` opens do."""

    requests: Requests


def requests_of(store: Store) -> RequestCounts:
    """What `store` has sent; nothing for one that does not count, as a wrapper in a test may not."""
    return store.requests.snapshot() if isinstance(store, Counted) else RequestCounts({}, 0, 0)
