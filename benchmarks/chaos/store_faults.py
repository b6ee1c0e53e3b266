"""What an S3 server does to a few requests in a hundred, decided by a seed: for `tests.support.relay`."""

import random
import threading
from collections import Counter

from tests.support.relay import Answer, CutBody, Fault, LoseReply, Stall

_ANY = (
    ("lost reply", LoseReply()),
    ("429", Answer(429, "TooManyRequests", (("Retry-After", "1"),))),
    ("500", Answer(500, "InternalError")),
    ("503", Answer(503, "SlowDown")),
    ("stall", Stall(1.5)),
)
_GET = (("cut body", CutBody()),)
_PUT = (("409", Answer(409, "ConditionalRequestConflict")),)
_CREATE = 3 * (("412 without condition", Answer(412, "PreconditionFailed")),)  # few requests are of this kind
_CREATED = "/log/"
"""Where roles put with `If-None-Match`: nothing else can be answered 412."""


class StoreFaults:
    """A relay's plan that counts what it did."""

    def __init__(self, seed: int, share: float) -> None:
        """`share` of all requests suffer."""
        self._seed = seed
        self._share = share
        self._lock = threading.Lock()
        self.requests = 0
        self.injected: Counter[str] = Counter()
        """By name."""

    def __call__(self, method: str, path: str, before: int) -> Fault | None:
        rng = random.Random(f"{self._seed} {method} {path} {before}")
        hit = rng.random() < self._share
        name, fault = rng.choice(_possible(method, path))
        with self._lock:
            self.requests += 1
            self.injected[name] += hit
        return fault if hit else None


def _possible(method: str, path: str) -> tuple[tuple[str, Fault], ...]:
    faults: tuple[tuple[str, Fault], ...] = _ANY
    if method == "GET":
        faults += _GET
    if method == "PUT":
        faults += _PUT
        if _CREATED in path:
            faults += _CREATE
    return faults
