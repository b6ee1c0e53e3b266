"""`bucketrl` with a trace of what the role is busy with, in a file of the folder that TRACES names.

A rollout worker writes its running requests and generated tokens, twenty times a second; the learner each
phase as it begins. A line is `[seconds since 1970, ...]`.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bucketrl.jobs.cli import main

TRACES = "BUCKETRL_BENCHMARK_TRACES"
"""Environment variable."""
SAMPLED_EVERY_S = 0.05


def read_trace(folder: Path, role: str) -> list[list[Any]]:
    """Without a line that was cut off in writing."""
    lines = (folder / f"{role}.trace").read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _writer(role: str) -> Callable[..., None]:
    file = (Path(os.environ[TRACES]) / f"{role}.trace").open("a", buffering=1, encoding="utf-8")
    return lambda *values: print(json.dumps([round(time.time(), 3), *values]), file=file)


def _trace_rollout() -> None:
    from bucketrl.rollout_worker import worker
    from bucketrl.rollout_worker.counters import Counters

    write = _writer("rollout")

    def traced() -> Counters:
        counters = Counters()

        def sample() -> None:
            while True:
                write(counters.running_requests, counters.tokens_generated)
                time.sleep(SAMPLED_EVERY_S)

        threading.Thread(target=sample, name="trace", daemon=True).start()
        return counters

    vars(worker)["Counters"] = traced


def _trace_learner() -> None:
    from bucketrl.learner.heartbeat import Heartbeats

    write, original = _writer("learner"), Heartbeats.update

    def traced(self: Heartbeats, **changes: Any) -> None:
        if "phase" in changes:
            write(changes["phase"])
        original(self, **changes)

    Heartbeats.update = traced  # type: ignore[method-assign]


if __name__ == "__main__":
    {"rollout": _trace_rollout, "learner": _trace_learner}.get(sys.argv[1], lambda: None)()
    sys.exit(main())
