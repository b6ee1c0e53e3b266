"""What the supervisor does when a role ends, without starting real ones."""

import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from bucketrl.bucket.errors import UserError
from bucketrl.jobs import local
from bucketrl.jobs.local import LocalOptions, Role
from bucketrl.jobs.restarts import MAX_QUICK_DEATHS


@dataclass
class FakeChild:
    """A child whose end the test decides."""

    name: str
    code: int | None = None
    error: str = "see its log"
    started_at: float = 0.0
    events: list[str] = field(default_factory=list)

    def exit_code(self) -> int | None:
        return self.code

    def start(self) -> None:
        self.events.append("start")
        self.code = None

    def kill_group(self) -> None:
        self.events.append("kill group")

    def last_error(self) -> str:
        return self.error


class FakeDisplay:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("bucketrl.jobs.local.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def revive(role: Role, show: FakeDisplay, *, finished: bool = False) -> None:
    local._revive(role, lambda: finished, cast(Any, show))


def role_of(child: FakeChild, clock: Clock) -> Role:
    child.started_at = clock.now
    return Role(cast(Any, child))


@pytest.mark.parametrize("name", ["proxy", "rollout-0", "learner"])
@pytest.mark.parametrize("code", [-9, 1, 0])
def test_a_role_that_ends_before_the_run_does_is_started_again(name: str, code: int, clock: Clock) -> None:
    """Killed, crashed or told to stop by somebody else; what it had started goes first; after a pause."""
    child, show = FakeChild(name, code), FakeDisplay()
    role = role_of(child, clock)
    revive(role, show)
    assert child.events == ["kill group"]
    assert f"{name} ended with {code}" in show.lines[0]
    revive(role, show)
    assert child.events == ["kill group"]
    clock.now += 1.0
    revive(role, show)
    assert child.events == ["kill group", "start"]
    revive(role, show)
    assert len(show.lines) == 1


@pytest.mark.parametrize("name", ["rollout-0", "learner"])
def test_a_role_that_ends_with_the_run_stays_ended(name: str, clock: Clock) -> None:
    child, show = FakeChild(name, 0), FakeDisplay()
    revive(role_of(child, clock), show, finished=True)
    assert (child.events, show.lines) == ([], [])


def test_a_proxy_that_ends_is_started_again_even_then(clock: Clock) -> None:
    """Nobody told it to: people still ask it for the result."""
    child, show = FakeChild("proxy", 0), FakeDisplay()
    revive(role_of(child, clock), show, finished=True)
    assert child.events == ["kill group"]


@pytest.mark.parametrize("code", [2, 3])
def test_wrong_input_and_a_newer_learner_end_the_run(code: int, clock: Clock) -> None:
    """Starting again would end the same way. The role's own line is passed on."""
    child = FakeChild("learner", code, error="lora.rank: nonsense")
    with pytest.raises(UserError, match=r"learner gave up: lora\.rank: nonsense"):
        revive(role_of(child, clock), FakeDisplay())


def test_a_role_that_keeps_dying_ends_the_run(clock: Clock) -> None:
    child, show = FakeChild("rollout-0", 1, error="out of memory"), FakeDisplay()
    role = role_of(child, clock)
    for _ in range(MAX_QUICK_DEATHS):
        revive(role, show)
        clock.now += 30.0
        revive(role, show)
        child.started_at, child.code = clock.now, 1
    with pytest.raises(UserError, match="rollout-0 keeps dying, last with 1: out of memory"):
        revive(role, show)


def options(folder: Path, **changes: Any) -> LocalOptions:
    values: dict[str, Any] = {
        "bucket": "b", "workers": 2, "engine": "auto", "port": 0, "folder": folder,
        "groups_in_flight": None, "kv_cache_mb": None, "keep": None,
    }  # fmt: skip
    return LocalOptions(**(values | changes))


def test_roles_share_two_urls_and_get_their_tokens_from_the_environment(tmp_path: Path) -> None:
    """No token on a command line, which other users of the machine can see."""
    tokens = {"BUCKETRL_WORKER_TOKEN": "wt", "BUCKETRL_READ_TOKEN": "rt"}
    children = local._children(options(tmp_path, kv_cache_mb=64), 4711, "http://127.0.0.1:4711", tokens)
    assert [child.name for child in children] == ["proxy", "rollout-0", "rollout-1", "learner"]
    for child in children:
        assert child.env | tokens == child.env
        assert not {"wt", "rt"} & set(child.arguments)
        assert child.arguments[1:3] == ["--bucket", "b"] or child.arguments[1:3] == ("--bucket", "b")
    assert all("http://127.0.0.1:4711" in child.arguments for child in children[1:])
    assert "--kv-cache-mb" in children[1].arguments
    assert "--keep" not in children[-1].arguments


def test_the_learner_is_told_how_much_to_keep(tmp_path: Path) -> None:
    *_, learner = local._children(options(tmp_path, keep=0), 1, "http://x", {})
    assert list(learner.arguments)[-2:] == ["--keep", "0"]


def test_cores_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share for the learner and each worker, one thread at least."""
    for cores, threads in ((2, "1"), (12, "4"), (1, "1")):
        monkeypatch.setattr("bucketrl.jobs.local.os.cpu_count", lambda cores=cores: cores)
        children = local._children(options(tmp_path), 1, "http://x", {})
        assert {child.env["OMP_NUM_THREADS"] for child in children} == {threads}


def test_the_users_own_tokens_are_used_and_others_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKETRL_WORKER_TOKEN", "mine")
    monkeypatch.delenv("BUCKETRL_READ_TOKEN", raising=False)
    first, second = local._tokens(), local._tokens()
    assert first["BUCKETRL_WORKER_TOKEN"] == "mine"
    assert first["BUCKETRL_READ_TOKEN"] != second["BUCKETRL_READ_TOKEN"]
    assert len(first["BUCKETRL_READ_TOKEN"]) == 32


def test_the_read_token_is_a_file_that_only_its_owner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed names the file, never the token."""
    monkeypatch.delenv("BUCKETRL_READ_TOKEN", raising=False)
    show = FakeDisplay()
    tokens = {"BUCKETRL_READ_TOKEN": "0123456789abcdef"}
    for _ in range(2):  # a later run replaces it
        local._say_hello(cast(Any, show), options(tmp_path / "run"), "run x", "http://127.0.0.1:1", tokens)
    path = tmp_path / "run" / "read_token"
    assert path.read_text() == "0123456789abcdef\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    said = "\n".join(show.lines)
    assert f"$(cat {path})" in said
    assert "0123456789abcdef" not in said


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: .*choose another"):
            local.check_port(port)
    local.check_port(port)
