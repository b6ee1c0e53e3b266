"""The worker's own engine, with completions of given lengths and a clock on what happens in it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.rollout_gpu.workload import Lengths
from bucketrl.rollout_worker.engine import EngineCapacity, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.engines.vllm_engine import VllmEngine


@dataclass(frozen=True)
class Drawn:
    """One request, so that it can be put to another engine."""

    prompt_token_ids: tuple[int, ...]
    tokens: int
    seed: int


@dataclass
class Switch:
    """How a policy version came into service; seconds of the wall clock, which all processes share."""

    begun: float
    """The adapter is on disk and verified, and handed to vLLM."""
    loaded: float = 0.0
    first_token: float = 0.0
    read_s: float = 0.0
    """Of the time until it was loaded: reading it ahead, beside the requests, for which the rest is a gap."""


@dataclass
class Seen:
    """Since it was last cleared."""

    drawn: list[Drawn] = field(default_factory=list)
    first_sent: float = 0.0
    switches: dict[int, Switch] = field(default_factory=dict)
    """By policy version."""
    folders: dict[int, Path] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    """When the tokens of `stepping` came."""


class EndlessVllm(VllmEngine):
    """No token ends a completion."""

    read_s = 0.0
    """What reading the latest adapter ahead took."""

    async def _read_ahead(self, request: Any) -> None:
        begun = time.monotonic()
        await super()._read_ahead(request)
        self.read_s = time.monotonic() - begun

    async def _run(self, token_ids: tuple[int, ...], params: Any, request_id: str, adapter: Any) -> Any:
        params.ignore_eos = True
        return await super()._run(token_ids, params, request_id, adapter)


class MeasuredEngine:
    """Starts once and serves several workers, one after the other. The lengths alone are not the worker's: that
    of a completion follows from its request's seed. The first completion of each version has one token, and its
    end is when the version has sampled its first token."""

    def __init__(self, engine: EndlessVllm, lengths: Lengths) -> None:
        self._engine = engine
        self._lengths = lengths
        self._started = False
        self._loaded: set[int] = set()
        self._fresh: set[int] = set()
        self.seen = Seen()
        self.name = engine.name
        self.stop_token_ids = engine.stop_token_ids
        self.abort = engine.abort
        self.score = engine.score

    @property
    def capacity(self) -> EngineCapacity:
        return self._engine.capacity

    async def start(self) -> None:
        if not self._started:
            await self._engine.start()
        self._started = True

    async def close(self) -> None:
        """The worker has ended; the next one loads its own versions."""
        for version in sorted(self._loaded):
            await self._engine.remove_adapter(version)
        self._loaded.clear()

    async def stop(self) -> None:
        await self._engine.close()

    async def add_adapter(self, version: int, folder: Path) -> None:
        switch = self.seen.switches[version] = Switch(time.time())
        await self._engine.add_adapter(version, folder)
        switch.loaded = time.time()
        switch.read_s = self._engine.read_s
        self._loaded.add(version)
        self._fresh.add(version)
        self.seen.folders[version] = folder

    async def remove_adapter(self, version: int) -> None:
        self._loaded.discard(version)
        await self._engine.remove_adapter(version)

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        first = request.policy_version in self._fresh
        self._fresh.discard(request.policy_version)
        tokens = 1 if first else min(request.max_tokens, self._lengths.of(request.seed))
        self.seen.first_sent = self.seen.first_sent or time.time()
        drawn = await self._engine.generate(replace(request, max_tokens=tokens))
        if first:
            self.seen.switches[request.policy_version].first_token = time.time()
        self.seen.drawn.append(Drawn(request.context, len(drawn.token_ids), request.seed))
        return drawn

    @contextlib.asynccontextmanager
    async def stepping(self) -> AsyncIterator[None]:
        """Inside, one request more runs all the time, whose every token is noted: the times of decode steps."""
        task = asyncio.create_task(self._step())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _step(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=self._lengths.longest, output_kind=RequestOutputKind.DELTA, detokenize=False
        )
        for number in range(10**9):
            # For the base model: no version of the policy has to be kept loaded for it.
            outputs = self._engine._llm.generate(
                {"prompt_token_ids": [5, 6, 7, 8]}, params, f"stepping-{id(self)}-{number}"
            )
            async for _ in outputs:
                self.seen.steps.append(time.time())
