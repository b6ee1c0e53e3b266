"""Child processes: they are stopped as a whole, and never outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bucketrl.jobs.processes import Child, stop_all

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("grandchild", grandchild.pid, flush=True)
time.sleep(600)
"""
PARENT = """
import os, sys, time
from pathlib import Path
from tests.jobs.test_processes import Script
child = Script("child", ["import time; time.sleep(600)"], Path(sys.argv[1]), {})
child.start()
print(child.process.pid, flush=True)
time.sleep(600)
"""


class Script(Child):
    """`python -c ARGUMENTS` in place of a command."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", *self.arguments]


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """A zombie that nobody has collected is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_command_runs_and_its_exit_code_and_words_are_known(tmp_path: Path) -> None:
    """Output of every start is appended to one log file; secrets go by the environment."""
    child = Child("role", ["--version"], tmp_path / "logs" / "role.log", {"SECRET": "s3cr3t"})
    assert child.exit_code() is None
    child.start()
    until(lambda: child.exit_code() is not None)
    child.start()
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 0
    assert child.last_words().count("bucketrl ") == 2
    assert "s3cr3t" not in repr(child)


def test_the_last_error_is_the_commands_one_line(tmp_path: Path) -> None:
    child = Child("role", ["audit", str(tmp_path / "nothing")], tmp_path / "role.log", {})
    child.start()
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 2
    assert "holds no run" in child.last_error()
    assert not child.last_error().startswith("error: ")


def test_without_an_error_line_the_log_is_named(tmp_path: Path) -> None:
    child = Script("role", ["raise SystemExit(1)"], tmp_path / "role.log", {})
    child.start()
    until(lambda: child.exit_code() == 1)
    assert child.last_error() == f"see {tmp_path / 'role.log'}"


def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """After the grace period, not before; its own children would keep their memory otherwise."""
    child = Script("stubborn", [STUBBORN], tmp_path / "log", {})
    child.start()
    until(lambda: "grandchild" in child.last_words())
    grandchild = int(child.last_words().split()[1])
    started = time.monotonic()
    stop_all([child], grace_s=1.0)
    assert time.monotonic() - started >= 1.0
    assert child.exit_code() == -signal.SIGKILL
    until(lambda: not alive(grandchild))


def test_children_that_obey_are_not_waited_for_longer_than_needed(tmp_path: Path) -> None:
    children = [Script(f"{i}", ["import time; time.sleep(600)"], tmp_path / f"{i}", {}) for i in range(3)]
    for child in children:
        child.start()
    started = time.monotonic()
    stop_all([*children, Script("never started", [], tmp_path / "x", {})], grace_s=30.0)
    assert time.monotonic() - started < 15
    assert [child.exit_code() for child in children] == [-signal.SIGTERM] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_children_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL to the supervisor leaves nothing running."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert alive(child)
        parent.kill()
        parent.wait()
        until(lambda: not alive(child))
    finally:
        parent.kill()
        if alive(child):
            os.kill(child, signal.SIGKILL)
