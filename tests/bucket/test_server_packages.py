"""When a test that wants another S3 server may be skipped: only without an index, and never where required."""

import subprocess
from pathlib import Path

import pytest
from tests.support import server_packages

NO_INDEX = "error sending request\n  cause: tcp connect error: Connection refused"
NO_SUCH_VERSION = "there is no version of ministack==1.5.33"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The installation fails with the text that is put in."""
    said: list[str] = []

    def run(*command: str) -> None:
        raise subprocess.CalledProcessError(1, command, stderr=said[0])

    monkeypatch.setattr(server_packages, "CACHE", tmp_path)
    monkeypatch.setattr(server_packages, "_run", run)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("BUCKETRL_REQUIRE_S3_SERVERS", raising=False)
    return said


def test_without_an_index_it_is_skipped_and_says_why(failing: list[str]) -> None:
    failing.append(NO_INDEX)
    with pytest.raises(pytest.skip.Exception, match=r"(?s)ministack==.*Connection refused"):
        server_packages.installed_program("ministack", "ministack")


@pytest.mark.parametrize("name", ["CI", "BUCKETRL_REQUIRE_S3_SERVERS"])
def test_where_the_servers_are_required_it_fails(
    failing: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    failing.append(NO_INDEX)
    monkeypatch.setenv(name, "1")
    with pytest.raises(pytest.fail.Exception, match="Connection refused"):
        server_packages.installed_program("ministack", "ministack")


def test_any_other_failure_is_a_failure(failing: list[str]) -> None:
    failing.append(NO_SUCH_VERSION)
    with pytest.raises(pytest.fail.Exception, match="no version"):
        server_packages.installed_program("ministack", "ministack")


def test_what_is_installed_once_is_not_installed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(*command: str) -> None:
        commands.append(command)
        (lock,) = tmp_path.glob("*.lock")
        lock.with_suffix("").mkdir(exist_ok=True)

    monkeypatch.setattr(server_packages, "CACHE", tmp_path)
    monkeypatch.setattr(server_packages, "_run", run)
    program = server_packages.installed_program("ministack", "ministack")
    installed = len(commands)
    assert installed == 2
    assert server_packages.installed_program("ministack", "ministack") == program
    assert len(commands) == installed
