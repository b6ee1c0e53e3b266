"""A hand-written stand-in for an engine: it draws from seeds alone, and tests decide how long that takes."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    EngineCapacity,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.tasks.base import FinishReason

from .fake_run import BASE_LOGPROBS, CANARY_TOKENS


def tokens_of_seed(request: SamplingRequest) -> tuple[int, ...]:
    """New tokens of a request: how many and which depends on its seed alone."""
    digest = hashlib.sha256(str(request.seed).encode()).digest()
    return tuple(digest[1 : 2 + digest[0] % request.max_tokens])


def logprob_of(token: int, version: int) -> float:
    """Under the fake engine; exact in float32."""
    return -0.25 - token / 256 - version / 64


class FakeEngine:
    """Draws tokens from the request's seed. `score` returns what the adapter's files say."""

    name = "fake 1"
    stop_token_ids: tuple[int, ...] = (0,)
    capacity = EngineCapacity(kv_tokens=None, max_requests=1024)

    def __init__(self) -> None:
        self.folders: dict[int, Path] = {}
        self.serves_base = 0
        """How many more times the base model is served instead of the adapter."""
        self.before_draw: Callable[[SamplingRequest], Awaitable[None]] | None = None
        self.tokens: Callable[[SamplingRequest], tuple[int, ...]] = tokens_of_seed
        """All that an undisturbed request draws."""
        self.drawn: Callable[[SamplingRequest], int] = lambda request: 0
        """Of these, how many an aborted request has drawn; it never is all of them."""
        self.requests: list[SamplingRequest] = []
        self.running: set[str] = set()
        self._aborts: dict[str, asyncio.Event] = {}
        self.removed: list[int] = []
        self.closed = False

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def add_adapter(self, version: int, folder: Path) -> None:
        assert version not in self.folders
        assert (folder / "adapter_config.json").exists()
        self.folders[version] = folder

    async def remove_adapter(self, version: int) -> None:
        del self.folders[version]
        self.removed.append(version)

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        if request.policy_version not in self.folders:
            raise KeyError(request.policy_version)
        self.requests.append(request)
        self.running.add(request.request_id)
        self._aborts[request.request_id] = asyncio.Event()
        try:
            await asyncio.sleep(0.001)
            aborted = await self._wait(request)
        finally:
            self.running.remove(request.request_id)
            del self._aborts[request.request_id]
        # A version may go only when no request uses it.
        assert request.policy_version in self.folders
        tokens = self.tokens(request)
        if aborted:
            tokens = tokens[: min(self.drawn(request), len(tokens) - 1)]
        ended: FinishReason = "length" if len(tokens) == request.max_tokens else "stop"
        return SampledCompletion(
            token_ids=tokens,
            logprobs=tuple(logprob_of(token, request.policy_version) for token in tokens),
            policy_versions=(request.policy_version,) * len(tokens),
            finish_reason="abort" if aborted else ended,
        )

    async def _wait(self, request: SamplingRequest) -> bool:
        """For `before_draw` or an abort; whether it was the latter."""
        if self.before_draw is None:
            return False
        abort = asyncio.ensure_future(self._aborts[request.request_id].wait())
        draw = asyncio.ensure_future(self.before_draw(request))
        try:
            await asyncio.wait((abort, draw), return_when=asyncio.FIRST_COMPLETED)
            if draw.done():
                draw.result()
            return not draw.done()
        finally:
            abort.cancel()
            draw.cancel()

    async def abort(self, request_id: str) -> None:
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        assert token_ids == CANARY_TOKENS
        if version is None or self.serves_base > 0:
            self.serves_base -= 1
            return list(BASE_LOGPROBS)
        return list(json.loads((self.folders[version] / "adapter_model.safetensors").read_text()))

    async def close(self) -> None:
        self.closed = True
        self.folders.clear()


async def drop(request: SamplingRequest) -> None:
    """For `FakeEngine.before_draw`: no completion is usable."""
    raise DroppedCompletion("logprob not finite")
