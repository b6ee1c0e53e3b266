"""A whole run as a benchmark: `bucketrl run` on an example, in a fresh bucket, with held-out problems
before and after. It takes what a user would wait for it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROBLEMS = 200


def run(example: str, name: str) -> int:
    """Runs `examples/<example>.toml` and writes `benchmarks/results/<name>.json`; the exit code."""
    with tempfile.TemporaryDirectory(prefix="bucketrl-benchmark-") as folder:
        command = [
            sys.executable, "-m", "bucketrl.jobs", "run", f"examples/{example}.toml", "--engine", "vllm",
            "--bucket", str(Path(folder) / "bucket"), "--evaluate", str(PROBLEMS), "--record", name,
        ]  # fmt: skip
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code == 0:
        _name_command(ROOT / "benchmarks" / "results" / f"{name}.json", f"python -m benchmarks.{name}")
    return code


def _name_command(path: Path, command: str) -> None:
    """The record repeats the inner command, whose bucket is gone; this is the one to repeat."""
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(record | {"command": command}, indent=1) + "\n", encoding="utf-8")
