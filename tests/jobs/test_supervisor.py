"""`bucketrl run` with real processes: killed, stopped, started again."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEPS = 24  # enough that a quick machine is still at it when the first one is seen


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The quick demo, cut to a few small steps."""
    text = (ROOT / "examples" / "tiny.toml").read_text()
    algorithm = tomllib.loads(text)["algorithm"]
    for key, value in (("steps", STEPS), ("groups_per_step", 4)):
        text = text.replace(f"{key} = {algorithm[key]}", f"{key} = {value}", 1)
    assert tomllib.loads(text)["algorithm"]["steps"] == STEPS
    path = tmp_path / "short.toml"
    path.write_text(text)
    return path


class Command:
    """`bucketrl ARGUMENTS` in `folder`, its output in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output = folder / "output.txt"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "BUCKETRL_CACHE": str(folder / "cache")}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bucketrl.jobs", *arguments],
                cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str, seconds: float = 240) -> None:
        self.until(lambda: words in self.text, seconds)

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def children(self) -> dict[str, int]:
        """Role -> process id of its command."""
        return {
            arguments[3]: pid
            for pid, arguments in commands()
            if parent_of(pid) == self.process.pid and arguments[1:3] == ["-m", "bucketrl.jobs"]
        }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def run(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield run
    for command in started:
        command.process.kill()
        command.process.wait()
    deadline = time.monotonic() + 30
    while left := mine(tmp_path):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still running: {left}")
        time.sleep(0.1)


def commands() -> list[tuple[int, list[str]]]:
    """Every process with its command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                found.append((int(folder.name), (folder / "cmdline").read_bytes().decode().split("\0")))
            except OSError:
                continue  # it has ended meanwhile
    return found


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def mine(folder: Path) -> list[int]:
    """Processes that work in `folder`, or did so before they were orphaned."""
    found = []
    for pid, arguments in commands():
        try:
            if arguments[0] and Path(f"/proc/{pid}/cwd").readlink() == folder:
                found.append(pid)
        except OSError:
            continue  # it has ended meanwhile
    return found


def audit(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bucketrl.jobs", "audit", "runs/tiny/bucket"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_kill_the_supervisor_then_a_role_then_go_on(
    config: Path, tmp_path: Path, start: Callable[..., Command]
) -> None:
    """SIGKILL to the supervisor takes its roles along; the same command goes on where the log ends; a role
    that is killed is started again; the same command on a finished run says so, and evaluates it."""
    command = ("run", str(config), "--engine", "transformers")
    first = start(*command)
    first.wait_for("step    1/")
    assert set(first.children()) == {"proxy", "rollout", "learner"}
    first.process.kill()
    first.process.wait()
    deadline = time.monotonic() + 30
    while mine(tmp_path):
        assert time.monotonic() < deadline, commands()
        time.sleep(0.1)

    second = start(*command)
    second.wait_for("an engine takes about")
    second.until(lambda: "learner" in second.children(), 30)
    os.kill(second.children()["learner"], signal.SIGKILL)
    assert second.process.wait(400) == 0, second.text
    assert "learner ended with -9; starting it again" in second.text
    assert f"step {STEPS:4d}/{STEPS}" in second.text
    assert f"{STEPS} steps in" in second.text
    assert (tmp_path / "runs" / "tiny" / "reward.png").read_bytes().startswith(b"\x89PNG")
    audit(tmp_path)

    third = start(*command, "--evaluate", "8")
    assert third.process.wait(240) == 0, third.text
    assert "is finished already" in third.text
    assert "held-out   version 0 " in third.text
    assert f"-> version {STEPS} " in third.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_says_how_to_go_on(
    config: Path, tmp_path: Path, start: Callable[..., Command], number: int
) -> None:
    """Exit code 130, no child left."""
    command = start("run", str(config), "--engine", "transformers")
    command.until(lambda: len(command.children()) == 3, 60)
    command.process.send_signal(number)
    assert command.process.wait(60) == 130, command.text
    assert mine(tmp_path) == []
    assert "the same command goes on from the last commit" in command.text
    assert "Traceback" not in command.text
