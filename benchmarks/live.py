"""Live progress of a benchmark: one line that changes, or one now and then where the output is no terminal."""

import sys
import time
from collections.abc import Callable

SHOWN_EVERY_S = 10.0
"""Where the output is no terminal."""


def live(name: str) -> Callable[[str], None]:
    """What it returns shows what `name` does, with the seconds since this call."""
    start = time.monotonic()
    shown: tuple[float, str] = (-SHOWN_EVERY_S, "")

    def say(text: str) -> None:
        nonlocal shown
        now = time.monotonic() - start
        if text == shown[1] or now - shown[0] < (0.2 if sys.stdout.isatty() else SHOWN_EVERY_S):
            return
        shown = (now, text)
        end = "" if sys.stdout.isatty() else "\n"
        print(f"{chr(13) if not end else ''}{name:<14}{now:6.0f} s  {text:<70}", end=end, flush=True)

    return say
