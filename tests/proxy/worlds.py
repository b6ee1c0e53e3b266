"""A proxy in this process, over a memory store, with a learner that commits for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any
from uuid import uuid4

import httpx
from fastapi import FastAPI
from tests.bucket.builders import Learner, group, run_record, upload

from bucketrl.bucket.records import GroupRef, RunRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.proxy.app import create_app
from bucketrl.proxy.auth import Tokens
from bucketrl.proxy.stray import STRAY_PUT_S

OPEN = Tokens("", "")
WALL = datetime(2026, 3, 1, 13, 0, tzinfo=UTC)
"""One hour after the builders' records were written."""


@dataclass
class Clock:
    """Monotonic seconds that pass when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """What outlives a proxy."""

    run: RunRecord = field(default_factory=run_record)
    store: Store = field(default_factory=lambda: open_store(f"memory://{uuid4().hex}"))
    clock: Clock = field(default_factory=Clock)
    learner: Learner = field(init=False)

    def __post_init__(self) -> None:
        self.learner = Learner(self.store, self.run, "learner-a")

    def begin(self) -> None:
        """The learner starts and publishes version 0."""
        self.learner.start()
        self.learner.commit()

    def upload(self, ordinal: int, attempt: str = "w1-0001", version: int = 0) -> GroupRef:
        return upload(self.store, group(ordinal, attempt, version=version))

    def train(self, *ordinals: int) -> None:
        """Uploads groups that are not there and commits a step on them."""
        self.learner.commit(self.learner.write_batch([self.upload(ordinal) for ordinal in ordinals]))


@dataclass
class Proxy:
    app: FastAPI
    http: httpx.AsyncClient

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.http.get(path, **options)

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def lease(self, worker: str = "w1", groups: int = 1) -> dict[str, Any]:
        reply = await self.post(
            "/v1/leases", {"worker_id": worker, "max_groups": groups, "loaded_version": 0}
        )
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    async def leased(self, worker: str = "w1", groups: int = 1) -> list[int]:
        return [lease["ordinal"] for lease in (await self.lease(worker, groups))["leases"]]

    async def beat(self, **state: Any) -> httpx.Response:
        return await self.post("/v1/heartbeats", {"state": state})

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The run's status once `holds` is true of it."""
        for _ in range(500):
            status: dict[str, Any] = (await self.get("/v1/run")).json()
            if holds(status):
                return status
            await asyncio.sleep(0.01)
        raise AssertionError(f"still {status}")

    async def until_ready(self) -> None:
        for _ in range(500):
            reply = await self.get("/readyz")
            if reply.status_code == 200:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(reply.text)


def rollout(worker: str = "w1", **changes: Any) -> dict[str, Any]:
    """A rollout worker's heartbeat."""
    return {"role": "rollout", "worker_id": worker, "engine": "tiny 1", "loaded_version": 0} | changes


def learner(**changes: Any) -> dict[str, Any]:
    """The learner's heartbeat."""
    return {"role": "learner", "learner_id": "learner-a", "epoch": 1, "step": 0, "phase": "waiting"} | changes


@asynccontextmanager
async def proxy_of(
    world: World,
    *,
    tokens: Tokens = OPEN,
    serialise_commits: bool = False,
    ready: bool = True,
    settled: bool = True,
    poll_s: float = 0.01,
    **options: Any,
) -> AsyncIterator[Proxy]:
    """A running proxy; `ready`: once it has read the bucket; `settled`: no put of one before it may land any
    more."""
    numbers = count(1)
    name = uuid4().hex[:6]
    app = create_app(
        world.store,
        world.run,
        tokens=tokens,
        serialise_commits=serialise_commits,
        poll_s=poll_s,
        clock=world.clock,
        wall=lambda: WALL,
        new_id=lambda: f"{name}-{next(numbers)}",
        **options,
    )
    if settled and serialise_commits:
        world.clock.now += STRAY_PUT_S
    transport = httpx.ASGITransport(app)
    headers = {"authorization": f"Bearer {tokens.worker}"} if tokens.worker else {}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://proxy", headers=headers) as http,
    ):
        proxy = Proxy(app, http)
        if ready:
            await proxy.until_ready()
        yield proxy
