"""A worker in this process between a proxy and a paced learner in theirs, over an S3 server beside them."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tests.e2e.roles import WORKER_TOKEN, Role, cli, free_port
from tests.support.s3 import S3Server

from benchmarks.rollout_gpu.measured_engine import MeasuredEngine
from benchmarks.rollout_gpu.paced_learner import FOLDER, PACE_S, commits
from bucketrl.api.client import ProxyClient
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.runs import open_run
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.engines.pool import EnginePool
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.prompts import Tokenizer
from bucketrl.rollout_worker.rewards import RewardPool
from bucketrl.rollout_worker.worker import RolloutWorker
from bucketrl.tasks.load import load_task

LIMIT_S = 300.0


class PacedRole(Role):
    module = "benchmarks.rollout_gpu.paced_learner"


class Fleet:
    """One run. The learner is on the CPU, as if it were on another machine: the GPU is the worker's."""

    def __init__(self, config: str, folder: Path, server: S3Server, *, pace_s: float | None) -> None:
        folder.mkdir()
        self.folder = folder
        path = folder / "config.toml"
        path.write_text(config)
        url = server.url(folder.name)
        made = cli("create", str(path), "--bucket", url, env=server.environment)
        if made.returncode != 0:
            raise RuntimeError(made.stderr)
        port = free_port()
        self._proxy_url = f"http://127.0.0.1:{port}"
        paced = {FOLDER: str(folder)} | ({PACE_S: str(pace_s)} if pace_s is not None else {})
        where = ["--bucket", url, "--proxy", self._proxy_url]
        self._roles = [
            Role(
                "proxy", ["proxy", "--bucket", url, "--port", str(port)],
                folder / "proxy.log", server.environment,
            ),
            PacedRole(
                "learner", ["learner", *where, "--device", "cpu", "--threads", "4", "--poll", "0.2"],
                folder / "learner.log", server.environment | paced | {"CUDA_VISIBLE_DEVICES": ""},
            ),
        ]  # fmt: skip
        os.environ.update(server.environment)
        self.store: Store = open_store(url)
        self.run: RunRecord = open_run(self.store)
        self.worker: RolloutWorker

    @contextlib.asynccontextmanager
    async def working(self, engine: MeasuredEngine, tokenizer: Tokenizer) -> AsyncIterator[None]:
        """All roles run inside. An error of the worker is raised at the end."""
        task = load_task(self.run.config.task)
        for role in self._roles:
            role.start()
        pool = EnginePool(lambda _: engine, 1, group_size=self.run.config.sampling.group_size)
        options = WorkerOptions(worker_id="worker", cache_dir=self.folder, reward_processes=4)
        rewards = RewardPool(task, processes=options.reward_processes, timeout_s=options.reward_timeout_s)
        scratch = self.folder / "adapters"
        scratch.mkdir()
        client = ProxyClient(self._proxy_url, WORKER_TOKEN)
        self.worker = RolloutWorker(
            self.store, self.run, task, tokenizer, pool, rewards, client, options, scratch
        )
        running = asyncio.create_task(self.worker.run())
        self._running = running
        try:
            yield
        finally:
            self.worker.stop("drained")
            await running
            for role in self._roles:
                if role.alive:
                    await in_thread(role.kill)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            dead = [role for role in self._roles if not role.alive]
            if self._running.done() or dead or time.monotonic() > deadline:
                tails = "\n".join(f"--- {role.name}\n{role.tail()}" for role in self._roles)
                raise RuntimeError(f"{what}: it does not come\n{tails}")
            await asyncio.sleep(0.002)

    async def until_uploaded(self, groups: int) -> None:
        """So many since the worker began."""
        await self.until(lambda: self.worker.counters.groups_uploaded >= groups, f"{groups} groups")

    def commits(self) -> dict[int, float]:
        return commits(self.folder)

    def go(self, step: int) -> None:
        """Lets a learner without a pace make its next step."""
        (self.folder / f"go-{step}").touch()
