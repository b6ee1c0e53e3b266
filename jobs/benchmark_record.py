"""`benchmarks/results/<name>.json`: what was measured, where, and how to measure it again."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write(
    name: str,
    figures: Mapping[str, Any],
    *,
    command: str,
    seeds: Sequence[int],
    notes: str,
    folder: Path,
    **more: Any,
) -> Path:
    """Writes `<folder>/<name>.json` and returns its path; `more` are further fields."""
    path = folder / f"{name}.json"
    document: dict[str, Any] = {
        "name": name,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        "command": command,
        "seeds": list(seeds),
        "figures": dict(figures),
        **more,
        "notes": notes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def machine() -> str:
    """Cores, processor and GPU of this machine, for people."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # no such file outside Linux: the architecture will do
    gpu = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return ", ".join([f"{os.cpu_count()} cores {processor}", *gpu])


def _commit() -> str:
    """With `-dirty` behind it if files other than records have changed since."""
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = (
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":/",
        ":(top,exclude)benchmarks/results",
    )
    return f"{commit}-dirty" if _output(*changed) else commit


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
