"""A worker on fakes, with waits shortened so that outages pass in a fraction of a second."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from bucketrl.bucket.records import RunRecord
from bucketrl.rollout_worker import adapters, heartbeat, link, policy, uploads, work
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import member
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.worker import EndReason, RolloutWorker

from .fake_engine import FakeEngine
from .fake_run import FakeLearner, FakeProxy, make_run
from .fakes import FakeRewards, FakeTask, FakeTokenizer, FlakyStore

if TYPE_CHECKING:  # torch is not needed for a worker on fakes
    from .learned import Learned


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (adapters, "RETRY_S", 0.02),
        (heartbeat, "HEARTBEAT_S", 0.05),
        (link, "OUTAGE_S", 0.3),
        (policy, "RETRY_S", 0.02),
        (policy, "LOG_POLL_S", 0.05),
        (uploads, "RETRY_S", 0.02),
        (uploads, "RETRY_CAP_S", 0.1),
        (work, "RETRY_S", 0.02),
        (work, "ALONE_PERIOD_S", 0.1),
        (member, "RESTART_S", 0.001),
    ):
        monkeypatch.setattr(module, name, seconds)


class World:
    """A bucket, a learner, a proxy and what one worker needs."""

    def __init__(self, folder: Path, run: RunRecord) -> None:
        self.run = run
        self.folder = folder
        self.store = FlakyStore()
        self.learner = FakeLearner(self.store, run, folder)
        self.proxy = FakeProxy(self.learner)
        self.engine = FakeEngine()
        self.task = FakeTask()
        self.tokenizer = FakeTokenizer()
        self._workers = itertools.count()

    def worker(self, **options: Any) -> RolloutWorker:
        local = self.folder / f"local-{next(self._workers)}"
        local.mkdir()
        return RolloutWorker(
            self.store,
            self.run,
            self.task,
            self.tokenizer,
            self.engine,
            FakeRewards(self.task),  # type: ignore[arg-type]
            self.proxy,  # type: ignore[arg-type]
            WorkerOptions(**({"worker_id": "w0", "cache_dir": local, "max_groups_in_flight": 4} | options)),
            local,
        )

    @asynccontextmanager
    async def working(self, **options: Any) -> AsyncIterator["Working"]:
        """A running worker; it is stopped at the end if it has not ended by itself."""
        worker = self.worker(**options)
        task = asyncio.create_task(worker.run())
        try:
            yield Working(worker, task)
        finally:
            worker.stop("drained")
            if not task.done():
                await task


class Working:
    def __init__(self, worker: RolloutWorker, task: "asyncio.Task[EndReason]") -> None:
        self.worker = worker
        self.task = task


@pytest.fixture
def make_world(tmp_path: Path) -> Callable[..., World]:
    def make(**sections: Any) -> World:
        return World(tmp_path, make_run(**sections))

    return make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """With version 0 committed."""
    world = make_world()
    world.learner.commit()
    return world


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> "Learned":
    """Three versions of the learner's, of the tiny model."""
    from .learned import learn

    return learn(tmp_path_factory.mktemp("published"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learned(engine: Engine, published: "Learned") -> "Learned":
    """The same, served by the module's engine from now on."""
    for version, folder in published.adapters.items():
        await engine.add_adapter(version, folder)
    return published


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(published: "Learned") -> AsyncIterator[Engine]:
    """Transformers, on the published model; modules about another engine have their own."""
    from bucketrl.rollout_worker.engines import create_engine

    from .engine_contract import make_settings

    engine = create_engine("transformers", make_settings(published.model))
    await engine.start()
    yield engine
    await engine.close()
