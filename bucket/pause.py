"""Waiting, in one place: real seconds, or a simulation's virtual ones."""

import time
from collections.abc import Callable
from contextvars import ContextVar

sleeper: ContextVar[Callable[[float], None]] = ContextVar("sleeper", default=time.sleep)
"""What `pause` calls. A simulation sets it in each of its threads."""


def pause(seconds: float) -> None:
    """Returns after `seconds`."""
    sleeper.get()(seconds)
