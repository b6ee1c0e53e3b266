"""Five minutes of 64 workers on a Hugging Face bucket, in virtual time, and what they ask of it.

Workers, learner and proxy are the real ones (their model is the simulator's), and so is `HfStore`, on the stand-in
of the Hub's client. What one operation costs is what `HfStore` counts; `tests/bucket/test_hf_requests.py` compares
that with what the real client sends.
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support.hub import BUCKET, StandInHub

from bucketrl.bucket import keys
from bucketrl.bucket.counting import HF_WINDOW_S
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.stores.hf import HfStore
from bucketrl.proxy import core
from bucketrl.proxy.stray import STRAY_PUT_S
from bucketrl.simulator import model, roles
from bucketrl.simulator.kernel import Kernel, Process
from bucketrl.simulator.network import Network
from bucketrl.simulator.scenario import Scenario

WORKERS = 64
STEP_S = 60.0
"""From commit to commit: that much training that groups are there before it ends."""
PUBLISHING_S = 2.0
SETTLED_S = 150.0 + STRAY_PUT_S
"""Everybody has started, and steps follow each other."""
COMMITS_KEPT = 96
"""Whose trajectories garbage collection has not removed yet, at most."""


def five_minutes(folder: Path, groups_per_step: int) -> tuple[Counter[tuple[str, str]], int]:
    """API requests by role and kind, and steps, of five minutes in the middle of a run. `folder` is empty."""
    # Idle workers ask the proxy, not the bucket.
    with _silent_dead(), patch.object(model, "Trainer", SlowTrainer), patch.object(core, "IDLE_WAIT_S", 5.0):
        return _counted(folder, groups_per_step)


def _counted(folder: Path, groups_per_step: int) -> tuple[Counter[tuple[str, str]], int]:
    run = Run(folder, groups_per_step)
    try:
        run.until(SETTLED_S)
        before, steps = run.counts(), run.steps
        run.until(SETTLED_S + HF_WINDOW_S)
        return run.counts() - before, run.steps - steps
    finally:
        run.end()


class Run:
    """One proxy, one learner, 64 workers."""

    def __init__(self, folder: Path, groups_per_step: int) -> None:
        scenario = Scenario(
            seed=1, workers=WORKERS, tier=0, steps=1000, groups_per_step=groups_per_step, group_size=2,
            max_staleness=1, prompts=100_000, keep=0, list_lag_s=0.0, clock_error_s=0.0,
            turns=False, chunk_tokens=0, faults=(),
        )  # fmt: skip
        self.kernel = Kernel("budget")
        self._hub = StandInHub()
        self._network = Network(self.kernel, 1, lossy=False)
        self._record = _training_on_every_group(model.run_record(scenario))
        self._scenario = scenario
        self._folder = folder
        self._processes: list[Process] = []
        self.stores: dict[str, HfStore] = {}
        old = HfStore(BUCKET, "run", api=self._hub)
        old.put(keys.RUN, self._record.encode())
        for number in range(COMMITS_KEPT * groups_per_step):
            old.put(f"{keys.TRAJECTORY_PREFIX}consumed-{number}/w1-0001.parquet", b"read by nobody any more")
        self._start("proxy")
        self._start("learner-0")
        for number in range(WORKERS):
            self._start(f"worker-{number}")

    def _start(self, role: str) -> None:
        process = Process(role, 0)
        store = self.stores[role] = HfStore(BUCKET, "run", api=self._hub)
        folder = self._folder / role
        folder.mkdir()
        machine = roles.Machine(
            self.kernel, self._network, self._scenario, self._record, process,
            store, folder,  # type: ignore[arg-type]
        )  # fmt: skip
        body = roles.ROLES[role.split("-")[0]]
        self._processes.append(process)
        self.kernel.spawn(process, lambda: body(machine, lambda _: None), main=True)

    def until(self, seconds: float) -> None:
        self.kernel.run(seconds, lambda: False)

    def counts(self) -> Counter[tuple[str, str]]:
        """API requests by role and kind."""
        total: Counter[tuple[str, str]] = Counter()
        for role, store in self.stores.items():
            for kind, number in store.requests.snapshot().by_kind.items():
                total[role.split("-")[0], kind] += number
        return total

    @property
    def steps(self) -> int:
        """Begun."""
        return len(list(HfStore(BUCKET, "run", api=self._hub).list(keys.BATCH_PREFIX)))

    def end(self) -> None:
        for process in self._processes:
            self.kernel.kill(process)
        self.kernel.drain()


def _training_on_every_group(record: RunRecord) -> RunRecord:
    """With two completions a group, half of them would be skipped."""
    algorithm = record.config.algorithm.model_copy(update={"filter_zero_variance": False})
    return record.model_copy(update={"config": record.config.model_copy(update={"algorithm": algorithm})})


class SlowTrainer(model.Trainer):
    def train(self, groups, step, stopping):  # type: ignore[no-untyped-def]
        self._sleep(STEP_S - PUBLISHING_S - 0.4 * len(groups))
        return super().train(groups, step, stopping)


@contextmanager
def _silent_dead() -> Iterator[None]:
    """Coroutines of killed processes complain when they are collected: that is here, and not heard."""
    with patch.object(sys, "unraisablehook", lambda _: None):
        yield
        gc.collect()
