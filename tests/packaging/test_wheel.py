"""The wheel that jobs install: complete, and light where a role needs little."""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import httpx
import pytest
from tests.jobs.worlds import save_model_files, toml

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "uv"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, built from a copy of the working tree."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "bucketrl"
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        target = source / name
        if not (ROOT / name).exists():
            continue  # deleted, and not committed yet
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    run(UV, "build", "--wheel", "--out-dir", str(folder), str(source), cwd=source)
    return folder


@pytest.fixture(scope="module")
def bare_environment() -> dict[str, str]:
    """Nothing of this environment: no virtual environment, no path to our sources."""
    dropped = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def test_it_holds_every_file_of_the_packages(dist: Path) -> None:
    """Each Python and data file of the root folders is in the wheel, once, under bucketrl/."""
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = [name for name in archive.namelist() if name.startswith("bucketrl/")]
    assert len(packed) == len(set(packed))
    wanted = {"bucketrl/__init__.py", "bucketrl/py.typed", "bucketrl/proxy/dashboard.html"}
    for link in (ROOT / "src" / "bucketrl").iterdir():
        if link.is_symlink():
            folder = link.resolve().relative_to(ROOT)
            tracked = run(
                "git", "ls-files", "--cached", "--others", "--exclude-standard", str(folder), cwd=ROOT
            )
            wanted |= {
                f"bucketrl/{link.name}/{Path(name).relative_to(folder)}"
                for name in tracked.splitlines()
                if (ROOT / name).exists()
            }
    assert wanted <= set(packed), sorted(wanted - set(packed))


def test_the_proxy_and_base_installs_bring_no_torch(dist: Path, tmp_path: Path) -> None:
    """`bucketrl[proxy]` resolves to small packages only."""
    run(UV, "venv", "--python", sys.executable, str(tmp_path / "venv"), cwd=tmp_path)
    done = subprocess.run(
        [UV, "pip", "install", "--dry-run", "--find-links", str(dist), "bucketrl[proxy,s3,hf]"],
        cwd=tmp_path,
        env=os.environ | {"VIRTUAL_ENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    planned = {line.strip(" +").split("==")[0] for line in done.stderr.splitlines() if line.startswith(" + ")}
    assert {"bucketrl", "fastapi", "uvicorn", "s3fs"} <= planned
    assert not {"torch", "vllm", "transformers", "peft", "triton", "matplotlib"} & planned


def test_the_proxy_script_serves_from_an_empty_environment(
    dist: Path, bare_environment: dict[str, str], tmp_path: Path
) -> None:
    """`uv run jobs/start_proxy.py` installs what it names, and answers /healthz for a run in a folder."""
    bucket, log = tmp_path / "bucket", tmp_path / "proxy.log"
    config = tmp_path / "x.toml"
    config.write_text(toml(save_model_files(tmp_path / "model")))
    run(sys.executable, "-m", "bucketrl.jobs", "create", str(config), "--bucket", str(bucket), cwd=ROOT)
    script = shutil.copy(ROOT / "jobs" / "start_proxy.py", tmp_path)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                UV, "run", "--no-project", "--python", sys.executable, "--find-links", str(dist), str(script),
                "--bucket", str(bucket), "--port", "0",
            ],
            cwd=tmp_path, env=bare_environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        url = _announced_url(log, process)
        health = httpx.get(f"{url}/healthz", timeout=10)
        assert health.status_code == 200
        assert health.json()["status"] == "alive"
        status = httpx.get(f"{url}/v1/run", timeout=10).json()
        assert status["run_id"] == health.json()["run_id"]
        assert status["steps"] == 3
    finally:
        process.terminate()
        process.wait(20)


def _announced_url(log: Path, process: "subprocess.Popen[bytes]", seconds: float = 240) -> str:
    """The proxy's URL from its log: it was told to take any free port."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if " on http://" in line:
                url = line.rpartition(" on ")[2].strip()
                if _answers(url):
                    return url
        time.sleep(0.3)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
