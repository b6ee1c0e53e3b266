"""Child processes that do not outlive their parent and can be stopped as a whole."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


@dataclass
class Child:
    """`python -m bucketrl.jobs ARGUMENTS`, its output appended to `log`. May be started again."""

    name: str
    arguments: Sequence[str]
    log: Path
    env: dict[str, str] = field(repr=False)
    """Added to this process's; may hold secrets."""
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    started_at: float = 0.0
    """By `time.monotonic`."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "bucketrl.jobs", *self.arguments]

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: engines start processes too
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self.started_at = time.monotonic()

    def exit_code(self) -> int | None:
        """None while it runs (or before it was started); negative for a signal."""
        return None if self.process is None else self.process.poll()

    def terminate(self) -> None:
        """SIGTERM to the child alone: it stops its own processes in its own order."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """SIGKILL to the child and whatever it started."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all gone already
        self.process.wait()

    def last_words(self, lines: int = 12) -> str:
        """The end of its log, for people."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def last_error(self) -> str:
        """The one line with which the command ended, else where to look."""
        lines = [line for line in self.last_words(50).splitlines() if line.startswith("error: ")]
        return lines[-1].removeprefix("error: ") if lines else f"see {self.log}"


def wait_for_all(children: Sequence[Child], seconds: float) -> None:
    """Returns when none of them runs any more, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(c.process and c.exit_code() is None for c in children):
        time.sleep(_POLL_S)


def stop_all(children: Sequence[Child], grace_s: float) -> None:
    """SIGTERM to all, then SIGKILL to what is left after `grace_s`."""
    for child in children:
        child.terminate()
    wait_for_all(children, grace_s)
    for child in children:
        child.kill_group()


def _die_with_parent(parent: int) -> Any:
    """What a child does first: it asks for SIGTERM when this process ends, even by SIGKILL. Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after a fork only system calls are safe

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before it could be watched

    return ask
