"""Repeating what may succeed if it is repeated: throttling, server errors, timeouts, lost connections."""

import logging
import math
import random
from collections.abc import Callable
from typing import TypeVar

from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.pause import pause

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_WAIT_S = 300.0
"""The longest wait that a server may ask for: one window of the Hugging Face rate limit."""


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
    sleep: Callable[[float], None] = pause,
    uniform: Callable[[float, float], float] = random.uniform,
) -> T:
    """`call()`, repeated while it raises Transient; the last Transient passes through.

    Waits a random time up to `base_s * 2**n`, at most `cap_s` (full jitter, so that callers who failed
    together do not return together), and never less than the server asked for (at most LONGEST_WAIT_S).
    """
    for attempt in range(attempts):
        try:
            return call()
        except Transient as error:
            if attempt == attempts - 1:
                raise
            asked = min(error.retry_after_s or 0.0, LONGEST_WAIT_S)
            wait = max(asked, uniform(0.0, min(cap_s, base_s * 2.0**attempt)))
            logger.info("%s; trying again in %.1f s", error, wait)
            sleep(wait)
    raise AssertionError("attempts must be positive")


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a `Retry-After` header. Its other form, a date, is ignored: no foreign clock decides here."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
