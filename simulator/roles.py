"""The three roles as simulated processes. What they run is the real code; only the model is not."""

import asyncio
import random
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from bucketrl.api.client import ProxyClient
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Tier
from bucketrl.learner.batches import Batches
from bucketrl.learner.heartbeat import Heartbeats
from bucketrl.learner.housekeeping import Housekeeping
from bucketrl.learner.intake import Intake
from bucketrl.learner.loop import Learner
from bucketrl.learner.main import appender
from bucketrl.learner.pacing import Arrivals
from bucketrl.learner.parts import Stopped
from bucketrl.proxy.app import create_app
from bucketrl.proxy.auth import Tokens
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.worker import RolloutWorker
from bucketrl.simulator import model, sampling
from bucketrl.simulator.disk import SimulatedStore
from bucketrl.simulator.kernel import Kernel, Process, VirtualEvent, VirtualThread
from bucketrl.simulator.loop import VirtualLoop
from bucketrl.simulator.network import Network
from bucketrl.simulator.scenario import Scenario

VOCAB_SIZE = 200
GRACE_S = 6.0


@dataclass(frozen=True)
class Machine:
    """What a process finds around itself."""

    kernel: Kernel
    network: Network
    scenario: Scenario
    run: RunRecord
    process: Process
    store: SimulatedStore
    folder: Path
    """Its local disk."""

    @property
    def rng(self) -> random.Random:
        return random.Random(f"machine/{self.scenario.seed}/{self.process.name}")

    def wall(self) -> datetime:
        """This machine's idea of the time of day."""
        wrong = random.Random(f"clock/{self.process.role}").uniform(-1, 1) * self.scenario.clock_error_s
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.kernel.now + wrong)

    def client(self) -> ProxyClient:
        return ProxyClient("http://proxy", "", transport=self.network.connection_of(self.process))


StopFunction = Callable[[], None]
"""SIGTERM."""


def proxy(machine: Machine, on_terminate: Callable[[StopFunction], None]) -> None:
    loop, rng = VirtualLoop(machine.kernel), machine.rng
    stopped = asyncio.Event()

    async def serve() -> None:
        app = create_app(
            machine.store,
            machine.run,
            tokens=Tokens("", ""),
            serialise_commits=machine.store.tier < Tier.CREATE,
            poll_s=1.0,
            clock=loop.time,
            wall=machine.wall,
            new_id=lambda: _new_id(rng),
        )
        async with app.router.lifespan_context(app):
            machine.network.listen(machine.process, loop, app)
            await stopped.wait()

    on_terminate(lambda: _from_outside(loop, stopped.set))
    loop.run(serve())


def worker(machine: Machine, on_terminate: Callable[[StopFunction], None]) -> None:
    loop = VirtualLoop(machine.kernel)
    turns = machine.scenario.turns
    task = (sampling.Dialogue if turns else sampling.Task)(machine.scenario.prompts)

    async def work() -> None:
        one = RolloutWorker(
            machine.store,
            machine.run,
            task,
            sampling.Tokenizer(),
            sampling.Engine(turns=turns),
            sampling.Rewards(task),  # type: ignore[arg-type]
            machine.client(),
            WorkerOptions(
                worker_id=machine.process.role,
                cache_dir=machine.folder,
                max_groups_in_flight=2,
                grace_s=GRACE_S,
            ),
            machine.folder,
            rng=machine.rng,
            now=machine.wall,
        )
        on_terminate(lambda: _from_outside(loop, lambda: one.stop("drained")))
        await one.run()

    loop.run(work())


def learner(machine: Machine, on_terminate: Callable[[StopFunction], None]) -> None:
    """Raises what `Learner.learn` raises but Stopped."""
    kernel, run, store, rng = machine.kernel, machine.run, machine.store, machine.rng
    stop = VirtualEvent(kernel)
    on_terminate(stop.set)
    client = machine.client()
    with (
        SimulatedHeartbeats(kernel, client, machine.process.role, on_drain=stop.set) as heartbeats,
        tempfile.TemporaryDirectory(dir=machine.folder) as name,
    ):
        kernel.sleep(1.0)  # loading the model
        trainer = model.Trainer(kernel.sleep)
        intake = Intake(
            store,
            run,
            vocab_size=VOCAB_SIZE,
            learner_id=machine.process.role,
            now=lambda: machine.wall().isoformat(),
            on_refused=lambda group, attempt, _: heartbeats.quarantined(str(group), attempt),
        )
        one = Learner(
            run=run,
            log=LogWriter(
                LogReader(store, run, from_snapshot=True),
                appender(store, store.tier, client, stop),
                now=lambda: machine.wall().isoformat(),
                new_id=partial(_new_id, rng),
            ),
            trainer=trainer,
            publisher=model.Publisher(store, run, trainer, Path(name)),
            intake=intake,
            batches=Batches(store, intake, new_id=partial(_new_id, rng)),
            heartbeats=heartbeats,
            stop=stop,
            arrivals=Arrivals(client.uploads, poll_s=0.5, stop=stop),
        )
        housekeeping = SimulatedHousekeeping(
            store,
            run,
            lambda: one.log.state,
            keep=machine.scenario.keep,
            learner_id=machine.process.role,
            now=lambda: machine.wall().isoformat(),
            clock=lambda: kernel.now,
        )
        housekeeping.in_kernel(kernel)
        try:
            with housekeeping:
                one.learn(machine.process.role)
        except Stopped:
            pass


class SimulatedHeartbeats(Heartbeats):
    """The real ones, in a simulated thread."""

    def __init__(
        self, kernel: Kernel, client: ProxyClient, learner_id: str, *, on_drain: StopFunction
    ) -> None:
        super().__init__(client, learner_id, on_drain=on_drain)
        self._changed = VirtualEvent(kernel)
        self._closing = VirtualEvent(kernel)
        self._thread = VirtualThread(kernel, self._run)  # type: ignore[assignment]


class SimulatedHousekeeping(Housekeeping):
    """The same of the learner's background pass."""

    def in_kernel(self, kernel: Kernel) -> None:
        self._closing = VirtualEvent(kernel)
        self._thread = VirtualThread(kernel, self._run_thread)  # type: ignore[assignment]


def _from_outside(loop: VirtualLoop, function: StopFunction) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


def _new_id(rng: random.Random) -> str:
    return uuid.UUID(int=rng.getrandbits(128), version=4).hex


ROLES: dict[str, Callable[[Machine, Callable[[StopFunction], None]], Any]] = {
    "proxy": proxy,
    "learner": learner,
    "worker": worker,
}
