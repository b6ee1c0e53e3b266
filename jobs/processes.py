"""Child processes that do not outlive their parent and can be stopped as a whole."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """`python -m bucketrl.jobs ARGUMENTS`, its output appended to `log`. May be started again."""

    name: str
    arguments: list[str]
    log: Path
    env: dict[str, str]
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bucketrl.jobs", *self.arguments],
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: engines start processes too
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return None if self.process is None else self.process.poll()

    def signal(self, number: int) -> None:
        """To the child alone: it stops its own processes in its own order."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

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


def stop_all(children: list[Child], grace_s: float) -> None:
    """SIGTERM to all, then SIGKILL to what is left after `grace_s`."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(
        child.exit_code() is None and child.process for child in children
    ):
        time.sleep(0.05)
    for child in children:
        child.kill_group()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
