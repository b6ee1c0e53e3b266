"""Repeating what may succeed if it is repeated: throttling, server errors, timeouts, lost connections."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from bucketrl.bucket.errors import StoreError

T = TypeVar("T")


class Transient(StoreError):
    """The same call may succeed a little later. Its outcome is unknown: it may have succeeded already."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """What the server asked for (`Retry-After`), in seconds."""


def retrying(
    call: Callable[[], T],
    *,
    attempts: int = 6,
    base_s: float = 0.1,
    cap_s: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = random.uniform,
) -> T:
    """`call()`, repeated while it raises Transient; the last Transient passes through.

    Waits a random time up to `base_s * 2**n`, at most `cap_s` (full jitter, so that callers who failed
    together do not return together), and never less than the server asked for.
    """
    for attempt in range(attempts):
        try:
            return call()
        except Transient as error:
            if attempt == attempts - 1:
                raise
            wait = uniform(0.0, min(cap_s, base_s * 2.0**attempt))
            sleep(max(wait, error.retry_after_s or 0.0))
    raise AssertionError("attempts must be positive")
