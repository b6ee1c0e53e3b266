"""A pool of fake engines that are told when to draw, fail, die and lie."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    EngineCapacity,
    EngineDied,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.rollout_worker.engines.member import Judge
from bucketrl.rollout_worker.engines.pool import EnginePool

LENGTH = 6
"""Tokens of every completion of the fake engine."""
PROBE = (1, 2, 3)


class FakeEngine:
    """Draws the tokens 0, 1, ... LENGTH - 1, one for each `advance`; the first after `prior` is the next of
    them, so that a completion shows whether anything of it was lost, drawn twice or put together wrongly."""

    name = "fake 1"
    stop_token_ids: tuple[int, ...] = (0,)
    capacity = EngineCapacity(kv_tokens=100, max_requests=4)

    def __init__(self, index: int) -> None:
        self.index = index
        self.adapters: dict[int, Path] = {}
        self.running: dict[str, tuple[SamplingRequest, list[int], asyncio.Future[SampledCompletion]]] = {}
        self.served: list[SamplingRequest] = []
        self.start_error: Exception | None = None
        self.broken_adapter = False
        self.serves_base = False
        self.start_steps = 1 + 11 * index
        self.dead = False
        self.closed = False

    async def start(self) -> None:
        for _ in range(self.start_steps):
            await asyncio.sleep(0)
        if self.start_error is not None:
            raise self.start_error

    async def add_adapter(self, version: int, folder: Path) -> None:
        await self._pass()
        assert version not in self.adapters
        if self.broken_adapter:
            raise IntegrityError(f"cannot load {version}")
        self.adapters[version] = folder

    async def remove_adapter(self, version: int) -> None:
        assert not any(request.policy_version == version for request, _, _ in self.running.values())
        await self._pass()
        del self.adapters[version]

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        await self._pass()
        served = None if version is None or self.serves_base else self.adapters[version]
        return [float(served.name) if served else -1.0] * (len(token_ids) - 1)

    async def _pass(self) -> None:
        """What a call to a real engine is: it takes a while, and either may end meanwhile."""
        for _ in range(2):
            if self.closed:
                raise DroppedCompletion("engine closed")
            if self.dead:
                raise EngineDied("fake death")
            await asyncio.sleep(0)

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        assert request.policy_version in self.adapters, "served by an engine without its version"
        if self.closed:
            raise DroppedCompletion("engine closed")
        if self.dead:
            raise EngineDied("fake death")
        assert request.request_id not in self.running
        future: asyncio.Future[SampledCompletion] = asyncio.get_running_loop().create_future()
        self.running[request.request_id] = (request, [], future)
        self.served.append(request)
        try:
            return await future
        finally:
            del self.running[request.request_id]

    def advance(self, steps: int = 1) -> None:
        for asked, tokens, future in self.running.values():
            for _ in range(steps):
                if not future.done():
                    tokens.append(len(asked.prior) + len(tokens))
                    if tokens[-1] == LENGTH - 1:
                        self._answer(asked, tokens, future, "stop")

    def _answer(self, request: SamplingRequest, tokens: list[int], future: Any, reason: Any) -> None:
        count = len(tokens)
        future.set_result(
            SampledCompletion(tuple(tokens), (-1.0,) * count, (request.policy_version,) * count, reason)
        )

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            request, tokens, future = self.running[request_id]
            if not future.done():
                self._answer(request, tokens, future, "abort")
        await asyncio.sleep(0)

    def kill(self) -> None:
        self.dead = True
        self._fail(EngineDied("fake death"))

    def _fail(self, error: Exception) -> None:
        for _, _, future in self.running.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        self.closed = True
        self._fail(DroppedCompletion("engine closed"))
        await asyncio.sleep(0)


class Bench:
    """A pool of fake engines, all of which are kept in view."""

    def __init__(self, engines: int, group_size: int = 2) -> None:
        self.made: list[FakeEngine] = []
        self.prepare: Callable[[FakeEngine], None] = lambda engine: None
        self.pool = EnginePool(self._make, engines, group_size=group_size)

    def _make(self, index: int) -> FakeEngine:
        engine = FakeEngine(index)
        self.prepare(engine)
        self.made.append(engine)
        return engine

    def now(self, index: int) -> FakeEngine:
        return [engine for engine in self.made if engine.index == index][-1]

    async def start(self, *versions: int) -> None:
        await self.pool.start()
        for version in versions:
            await self.pool.add_adapter(version, Path(f"/adapters/{version}"))
            assert await self.pool.prove(version, PROBE, judge_of(version)) is None

    def draw(self, name: str, version: int = 1, prompt: tuple[int, ...] = (7,)) -> asyncio.Task[Any]:
        asked = SamplingRequest(name, prompt, 100, 1.0, 5, version)
        return asyncio.create_task(self.pool.generate(asked))

    def finish(self) -> None:
        for engine in self.made:
            engine.advance(LENGTH)

    async def drawn(self, *tasks: asyncio.Task[Any]) -> list[SampledCompletion]:
        """All of them, the engines working as they should."""
        async with asyncio.timeout(10):
            while not all(task.done() for task in tasks):
                self.finish()
                await asyncio.sleep(0.001)
        return [task.result() for task in tasks]


def judge_of(version: int) -> Judge:
    def judge(measured: Sequence[float]) -> str | None:
        return None if list(measured) == [float(version)] * 2 else "it serves the base model"

    return judge


def whole(completion: SampledCompletion, version: int) -> bool:
    return completion == SampledCompletion(
        tuple(range(LENGTH)), (-1.0,) * LENGTH, (version,) * LENGTH, "stop"
    )
