"""One scenario from its beginning to its end: starts, hits, restarts; then the judge."""

import hashlib
import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.errors import Fenced
from bucketrl.bucket.store import Tier
from bucketrl.learner import housekeeping
from bucketrl.proxy import core
from bucketrl.simulator import judge, model, roles
from bucketrl.simulator.disk import Disk, OperationFaults, SimulatedStore
from bucketrl.simulator.kernel import Crash, Kernel, Process
from bucketrl.simulator.network import Network
from bucketrl.simulator.planted import PLANTED
from bucketrl.simulator.scenario import TROUBLE_S, Fault, Scenario

PATIENCE_S = 4000.0
"""From the end of all trouble to the end of the run; a frozen process sleeps for an hour at most."""
_SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Local disks of simulated machines: in memory, because fsync would be most of the time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    scenario: Scenario
    violations: tuple[str, ...]
    history: tuple[tuple[float, str, str], ...]
    seconds: float
    """Virtual."""

    @property
    def digest(self) -> str:
        """Equal for equal histories."""
        return hashlib.sha256(repr(self.history).encode()).hexdigest()


def simulate(scenario: Scenario, planted: str | None = None) -> Outcome:
    """Plays `scenario`, with the fault of that name planted into the code, and judges it."""
    logging.getLogger("bucketrl").setLevel(logging.CRITICAL)
    sys.unraisablehook = _ignore_the_dead
    folder = Path(tempfile.mkdtemp(prefix="bucketrl-simulation-", dir=_SCRATCH))
    try:
        world = World(scenario, folder)
        with _hurried(), PLANTED[planted]() if planted else nullcontext():
            world.play()
        return world.outcome()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class World:
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario = scenario
        self._folder = folder
        self._rng = random.Random(f"world/{scenario.seed}")
        self._kernel = Kernel(f"kernel/{scenario.seed}")
        self._disk = Disk(self._kernel, scenario)
        self._faults = OperationFaults(scenario)
        self._network = Network(self._kernel, scenario.seed)
        self._run = model.run_record(scenario)
        self._processes: dict[str, Process] = {}
        """The newest incarnation of each role."""
        self._stores: dict[str, SimulatedStore] = {}
        self._terminate: dict[str, Callable[[], None]] = {}
        self._incarnations: dict[str, int] = {}
        self._away: dict[str, float] = {}
        """Until when a machine that was taken away stays away."""
        self._defects: list[str] = []

    def play(self) -> None:
        kernel, scenario = self._kernel, self._scenario
        self._disk.put(keys.RUN, self._run.encode())
        for role in ("proxy", "learner-0", *(f"worker-{n}" for n in range(scenario.workers))):
            kernel.at(self._rng.uniform(0.0, 2.0), partial(self._start, role))
        for fault in scenario.faults:
            if not fault.on_operation:
                kernel.at(fault.at, partial(self._hit, fault))
        kernel.at(2 * TROUBLE_S, self._end_of_trouble)
        kernel.run(2 * TROUBLE_S + PATIENCE_S, self._over)

    def outcome(self) -> Outcome:
        seconds, over = self._kernel.now, self._over()
        forgotten = self._network.forgotten_groups()
        for process in self._processes.values():
            self._kernel.kill(process)
        self._kernel.drain()
        violations = list(self._defects)
        if not over:
            violations.append(f"progress: the run is not over after {seconds:.0f} s")
        violations += [f"progress: the proxy has forgotten group {ordinal}" for ordinal in forgotten]
        violations += judge.violations(self._disk, self._run)
        return Outcome(self._scenario, tuple(violations), tuple(self._kernel.history), seconds)

    def _over(self) -> bool:
        if not judge.finished(self._disk, self._run):
            return False
        left = [one for role, one in self._processes.items() if one.alive and role != "proxy"]
        if left and all(one.frozen_until > self._kernel.now for one in left):
            for one in left:
                one.frozen_until = self._kernel.now  # nothing else will happen until they wake
                self._kernel.thaw(one)
        return not left

    # -- processes ----------------------------------------------------------------------------------

    def _start(self, role: str) -> None:
        before = self._processes.get(role)
        if before is not None and before.alive:
            return
        incarnation = self._incarnations.get(role, 0)
        self._incarnations[role] = incarnation + 1
        process = Process(role, incarnation, on_end=self._ended)
        self._processes[role] = process
        store = SimulatedStore(self._kernel, self._disk, process, self._faults, Tier(self._scenario.tier))
        self._stores[role] = store
        folder = self._folder / process.name
        folder.mkdir()
        machine = roles.Machine(
            self._kernel, self._network, self._scenario, self._run, process, store, folder
        )
        body = roles.ROLES[role.split("-")[0]]
        self._kernel.note(process.name, "starts")
        self._terminate.pop(role, None)
        on_terminate = partial(self._terminate.__setitem__, role)
        self._kernel.spawn(process, lambda: body(machine, on_terminate), main=True)

    def _ended(self, process: Process, error: BaseException | None) -> None:
        """Every process is started again after a while, as a supervisor would, unless its work is done."""
        if process.role == "proxy":
            self._network.proxy_died()
        if isinstance(error, Crash):
            self._disk.machine_died(process)
        if error is not None and not isinstance(error, Crash):
            self._kernel.note(process.name, f"ends: {type(error).__name__}: {error}"[:200])
            if not judge.is_honest_end(error):
                self._defects.append(f"defect: {process.name}: {type(error).__name__}: {error}"[:300])
        elif error is None:
            self._kernel.note(process.name, "ends")
        # A fenced learner has a successor, which is looked after in its own right.
        done = process.role != "proxy" and judge.finished(self._disk, self._run)
        if not (done or isinstance(error, Fenced)):
            back = max(self._away.get(process.role, 0.0), self._kernel.now + self._rng.uniform(0.5, 6.0))
            self._kernel.at(back, partial(self._start, process.role))

    # -- faults -------------------------------------------------------------------------------------

    def _hit(self, fault: Fault) -> None:
        kernel, process = self._kernel, self._processes.get(fault.role)
        kernel.note("fault", str(fault))
        if fault.kind == "second_learner":
            self._start(fault.role)
        elif fault.kind == "foreign_object":
            self._put_foreign_object(fault)
        elif process is None or not process.alive:
            return
        elif fault.kind == "kill":
            kernel.kill(process)
        elif fault.kind == "terminate" and fault.role in self._terminate:
            self._terminate[fault.role]()
        elif fault.kind == "preempt":
            self._away[fault.role] = kernel.now + fault.seconds
            if fault.role in self._terminate:
                self._terminate[fault.role]()
            kernel.at(kernel.now + roles.GRACE_S + 1.0, partial(kernel.kill, process))
        elif fault.kind == "freeze":
            process.frozen_until = kernel.now + fault.seconds
            if fault.role.startswith("learner") and fault.seconds > 60.0:
                kernel.at(kernel.now + 5.0, partial(self._start, "learner-1"))
        elif fault.kind == "cut_from_store":
            store = self._stores[fault.role]
            store.cut_off = True
            kernel.at(kernel.now + fault.seconds, lambda: setattr(store, "cut_off", False))
        elif fault.kind == "cut_from_proxy":
            self._network.cut_off.add(fault.role)
            kernel.at(kernel.now + fault.seconds, lambda: self._network.cut_off.discard(fault.role))

    def _put_foreign_object(self, fault: Fault) -> None:
        """Something that looks like an attempt at an open group, and comes first in every listing."""
        cursor = self._disk.newest.consumed.cursor if self._disk.newest else 0
        group = keys.GroupId.from_ordinal(cursor + int(fault.at) % 3, self._run.prompts_per_epoch)
        whole = [data for key, data in self._disk.objects.items() if key.startswith(keys.TRAJECTORY_PREFIX)]
        data = whole[-1] if whole and fault.seconds < 0.5 else b"PAR1 no Parquet file"
        self._disk.put(keys.trajectory(group, "0-foreign"), data)

    def _end_of_trouble(self) -> None:
        self._network.lossy = False
        self._kernel.note("world", "no more trouble")


@contextmanager
def _hurried() -> Iterator[None]:
    """A simulated run is short: what a real one does every minute or every 64 records happens in it as well, and
    idle workers, whose requests would be most of it, ask less often."""
    with (
        patch.object(housekeeping, "MIN_GAP_S", 4.0),
        patch.object(snapshots, "EVERY", 5),
        patch.object(core, "IDLE_WAIT_S", 2.0),
    ):
        yield


def _ignore_the_dead(_: object) -> None:
    """Coroutines of dead processes complain when they are collected."""
