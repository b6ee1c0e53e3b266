"""vLLM reached over HTTP, for those who run `vllm serve` themselves. Token ids in, token ids and logprobs out.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-loras N --max-lora-rank R
        --logprobs-mode processed_logprobs --generation-config vllm

The server must see the worker's cache folder under the same path: adapters are named to it by path. It must
be one process (`--api-server-count 1`): an adapter is loaded by the process that answers. `start` checks all
of that. A server that was restarted is another engine: this one has died then.
"""

import asyncio
import itertools
import json
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.bucket.scratch import scratch_folder
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    EngineCapacity,
    EngineDied,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.rollout_worker.engines.checks import CLOSED, check_weights, checked_completion
from bucketrl.rollout_worker.engines.http_checks import (
    NEUTRAL,
    check_connections,
    check_model,
    check_sampling,
    check_slots,
    kv_tokens,
    load_failure,
    prompt_logprobs,
    score_request,
    unclamped,
)
from bucketrl.rollout_worker.engines.http_server import (
    KEY_VARIABLE,
    OUTAGE_S,
    ServerAway,
    ServerRefused,
    VllmServer,
)
from bucketrl.rollout_worker.engines.null_adapter import write_null_adapter
from bucketrl.rollout_worker.engines.settings import EngineSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHUNK_TOKENS = 16
"""Tokens per event of a stream, where the server can (else one). Those that an abort catches on their way are
lost, and each event costs both sides as much as several tokens."""
_FAREWELL_S = 2.0
"""For unloading what is loaded when the engine is closed."""


@dataclass(slots=True)
class _Adapter:
    """One that the server has, or had before somebody unloaded it."""

    label: str
    folder: Path
    name: str = ""
    """Of the newest load. Never used again: the server caches prefixes by name."""


@dataclass(slots=True)
class _Drawn:
    """What has arrived of one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None
    ended: Literal["", "abort", "close"] = ""
    """By whom, if it is not to be waited for any longer."""

    def take(self, event: dict[str, Any], name: str, context: tuple[int, ...]) -> None:
        """Raises ServerRefused if the event is not of adapter `name`, DroppedCompletion if another context than
        was sent led to it."""
        if event.get("model") != name:
            # With VLLM_SKIP_MODEL_NAME_VALIDATION a name that is not known gets the base model.
            raise ServerRefused(404, f"asked for {name}, answered by {event.get('model')}")
        for choice in event["choices"]:
            sent = choice.get("prompt_token_ids")
            if sent is not None and tuple(sent) != context:
                raise DroppedCompletion("the server has changed the prompt")
            self.token_ids += choice.get("token_ids") or ()
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


class HttpEngine:
    """`Engine` on a vLLM server that somebody else runs. Several workers may share one."""

    def __init__(self, settings: EngineSettings, url: str, *, cache_dir: Path) -> None:
        """`cache_dir` is seen by the server as well. Raises UserError for a URL or a key that cannot be used."""
        self._server = VllmServer(url, os.environ.get(KEY_VARIABLE, ""), rng=random.Random())
        self._settings = settings
        self.stop_token_ids = settings.stop_token_ids
        self.capacity = EngineCapacity(None, settings.max_requests)
        self._cache_dir = cache_dir
        self._files = ExitStack()
        self._adapters: dict[int, _Adapter] = {}
        # The base model by way of an adapter that changes nothing (see null_adapter): it shows at start
        # that adapters work, and after a restart of the server that the others are gone.
        self._base = _Adapter("base", Path())
        self._loading = asyncio.Lock()
        self._running: dict[str, tuple[asyncio.Task[None], _Drawn]] = {}
        """By request id."""
        self._closing = False
        self._prefix = f"bucketrl-{secrets.token_hex(4)}"
        self._loads = itertools.count(1)
        self.name = "vllm over HTTP"

    async def start(self) -> None:
        logger.info("waiting for the engine at %s, for up to %.0f s", self._server.url, OUTAGE_S)
        parent = self._cache_dir / "engine"
        self._base.folder = await in_thread(self._files.enter_context, scratch_folder(parent, "base-"))
        await in_thread(_write_base, self._settings, self._base.folder)
        await self._check_server()

    async def _check_server(self) -> None:
        """Loads the base adapter. Raises UserError unless the server is as it has to be."""
        server, settings = self._server, self._settings
        try:
            await server.persist(server.health)
            check_model(server.url, await server.persist(server.models), settings)
            self.name = f"vllm {await server.persist(server.version)} over HTTP"
        except (ServerRefused, KeyError, TypeError) as error:
            raise UserError(f"engine {server.url}: does not answer as vLLM does: {error}") from None
        try:
            await self._load(self._base)
        except ServerRefused as error:
            raise load_failure(server.url, error, settings, self._base.folder) from None
        await check_sampling(server, self._base.name, settings)
        await check_connections(server, self._base.name)
        metrics = await server.persist(server.metrics)
        check_slots(server.url, metrics, settings)
        self.capacity = EngineCapacity(kv_tokens(metrics), settings.max_requests)

    async def add_adapter(self, version: int, folder: Path) -> None:
        await in_thread(check_weights, version, folder)
        adapter = _Adapter(f"v{version}", folder)
        try:
            await self._load(adapter)
        except ServerRefused as error:
            raise IntegrityError(f"vLLM cannot load adapter version {version}: {error}") from error
        self._adapters[version] = adapter
        # After it is loaded: a restart from now on loses this version too, which its requests find out.
        await self._check_not_restarted()

    async def _check_not_restarted(self) -> None:
        """Raises EngineDied if it was: then it has to be checked again, and each version proved, before it draws
        anything."""
        if self._base.name not in await self._server.persist(self._server.models):
            raise EngineDied(
                f"engine {self._server.url}: the server has lost its adapters; was it restarted?"
            )

    async def _load(self, adapter: _Adapter) -> None:
        name = f"{self._prefix}-{adapter.label}-{next(self._loads)}"
        await self._server.persist(lambda: self._server.load_adapter(name, adapter.folder))
        adapter.name = name

    async def remove_adapter(self, version: int) -> None:
        name = self._adapters.pop(version).name
        try:
            await self._server.persist(lambda: self._server.unload_adapter(name))
        except ServerRefused as error:
            logger.warning("the engine's server does not unload version %d: %s", version, error)

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        adapter = self._adapters[request.policy_version]
        if self._closing:
            raise DroppedCompletion(CLOSED)
        drawn = _Drawn()
        task = asyncio.create_task(self._draw(request, adapter, drawn))
        self._running[request.request_id] = (task, drawn)
        try:
            await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not drawn.ended or (caller is not None and caller.cancelling()):
                raise
        except ServerRefused as error:
            if error.status == 404:
                raise DroppedCompletion("the engine's server does not serve the adapter") from None
            if 400 <= error.status < 500 and error.status != 429:
                raise UserError(f"engine {self._server.url}: refuses a request: {error}") from None
            raise DroppedCompletion(f"the engine's server failed: HTTP {error.status}") from None
        finally:
            self._running.pop(request.request_id, None)
        return self._completion(request, drawn)

    def _completion(self, request: SamplingRequest, drawn: _Drawn) -> SampledCompletion:
        """Raises DroppedCompletion."""
        if drawn.ended == "close":
            raise DroppedCompletion(CLOSED)
        longest = min(request.max_tokens, self._settings.max_model_len - len(request.context))
        if drawn.finish_reason == "length" and len(drawn.token_ids) < longest:
            raise DroppedCompletion("cut short by the server's own limit of tokens")
        return checked_completion(
            tuple(drawn.token_ids),
            tuple(logprob if logprob is None else unclamped(logprob) for logprob in drawn.logprobs),
            request.policy_version,
            drawn.finish_reason or drawn.ended,
        )

    async def _draw(self, request: SamplingRequest, adapter: _Adapter, drawn: _Drawn) -> None:
        context = request.context
        body = {
            "prompt": context, "max_tokens": request.max_tokens, "temperature": request.temperature,
            "seed": request.seed, "stop_token_ids": self._settings.stop_token_ids, "logprobs": 0,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
            "stream_interval": _CHUNK_TOKENS, **NEUTRAL,
        }  # fmt: skip

        async def attempt(name: str) -> None:
            try:
                async with aclosing(self._server.stream(body | {"model": name})) as events:
                    async for event in events:
                        drawn.take(event, name, context)
            except ServerAway:
                if drawn.finish_reason is None and drawn.token_ids:
                    raise DroppedCompletion("the engine's server broke off") from None
                if drawn.finish_reason is None:
                    raise
            if drawn.finish_reason == "abort":
                # The server shuts down.
                drawn.finish_reason = None
                if drawn.token_ids:
                    raise DroppedCompletion("the engine's server broke off")
                raise ServerAway(503, f"{self._server.url}: aborted the request")

        await self._named(adapter, attempt)

    async def _named(self, adapter: _Adapter, call: Callable[[str], Awaitable[T]]) -> T:
        """`call` with the adapter's name, repeated while the server is away, and after loading the adapter
        again if the server has lost it."""
        name = adapter.name
        try:
            return await self._server.persist(lambda: call(name))
        except ServerRefused as error:
            if error.status != 404:
                raise
        await self._load_again(adapter, name)
        return await self._server.persist(lambda: call(adapter.name))

    async def _load_again(self, adapter: _Adapter, lost: str) -> None:
        """Once, whoever else has missed `lost`. Raises EngineDied if the server was restarted."""
        async with self._loading:
            if adapter.name != lost:
                return
            await self._check_not_restarted()
            logger.warning("the engine's server has lost adapter %s; loading it again", lost)
            await self._load(adapter)

    async def abort(self, request_id: str) -> None:
        task, drawn = self._running.get(request_id, (None, None))
        if task is not None and drawn is not None:
            drawn.ended = drawn.ended or "abort"
            task.cancel()
            await asyncio.wait((task,))

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        adapter = self._base if version is None else self._adapters[version]
        body = score_request([token_ids])
        try:
            [choice] = await self._named(adapter, lambda name: self._server.complete(body | {"model": name}))
        except ServerRefused as error:
            # NaN, which JSON cannot carry, is answered with HTTP 500.
            raise IntegrityError(f"vLLM cannot score with {adapter.label}: {error}") from error
        try:
            return prompt_logprobs(choice, token_ids)
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"vLLM scores in an unknown format: {error!r}") from None

    async def close(self) -> None:
        self._closing = True
        running, self._running = list(self._running.values()), {}
        for task, drawn in running:
            drawn.ended = "close"
            task.cancel()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
        names = [adapter.name for adapter in (self._base, *self._adapters.values()) if adapter.name]
        self._adapters.clear()
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await asyncio.gather(*map(self._server.unload_adapter, names), return_exceptions=True)
        except TimeoutError:
            logger.warning("the engine's server does not answer; it keeps up to %d adapters", len(names))
        await self._server.close()
        await in_thread(self._files.close)


def _write_base(settings: EngineSettings, folder: Path) -> None:
    """The null adapter, declared to have the rank of the run's adapters: a server that takes only smaller ones
    refuses it."""
    write_null_adapter(settings.model_path, settings.lora_targets, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": settings.lora_rank}))
