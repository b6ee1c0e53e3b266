"""vLLM in process: one LoRA request per policy version, token ids in, token ids and logprobs out.

Written against the public API that vLLM 0.24 to 0.33 share. Speculative decoding stays off: on CPU it
samples from a wrong distribution at temperature > 0, and the reported logprobs do not show it.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import tempfile
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    EngineCapacity,
    EngineDied,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.rollout_worker.engines.checks import CLOSED, check_weights, checked_completion
from bucketrl.rollout_worker.engines.null_adapter import write_null_adapter
from bucketrl.rollout_worker.engines.placement import start_seeing
from bucketrl.rollout_worker.engines.settings import EngineSettings
from bucketrl.rollout_worker.engines.vllm_setup import (
    EXTENSION,
    engine_arguments,
    installed_version,
    kv_tokens,
    set_environment,
)

logger = logging.getLogger(__name__)

_ABORT_RETRY_S = 0.02
"""vLLM knows a request only some moments after it was handed over; until then an abort does nothing."""
_DEATH_CHECK_S = 0.5
"""Between two looks at whether the engine process still lives while it owes an answer."""
_READ_CHECK_S = 0.01
"""Between two looks at whether the engine process has read an adapter."""
HANG_CHECK_S = 15.0
HANG_S = 120.0
"""An engine process that answers nothing for so long is stuck for ever: in a collective that waits for a lost
process, on a GPU that is gone. It answers between two steps, of which none takes more than seconds."""
_DEAD = "vLLM's engine process has ended; what it printed before tells why"

T = TypeVar("T")


class VllmEngine:
    """`Engine` on vLLM's AsyncLLM. It lives in child processes of its own, which end with this process."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.stop_token_ids = settings.stop_token_ids
        self.capacity = EngineCapacity(None, settings.max_requests)
        self._llm: Any = None
        self._adapters: dict[int, Any] = {}
        self._on_cpu = False
        self._null_adapter: Any = None
        self._null_folder: tempfile.TemporaryDirectory[str] | None = None
        self._running: dict[str, asyncio.Task[Any]] = {}
        """By request id."""
        self._closing = False
        self._hang_watch: asyncio.Task[None] | None = None
        # vLLM caches adapters by id and prefixes by name: neither is ever used twice, not even when a
        # version is added again after it failed its canary.
        self._lora_ids = itertools.count(1)
        self._score_ids = itertools.count()
        split = (("tp", settings.tensor_parallel), ("pp", settings.pipeline_parallel))
        self.name = f"vllm {installed_version()}" + "".join(f" {key}={n}" for key, n in split if n > 1)

    async def start(self) -> None:
        await in_thread(self._build)
        self._hang_watch = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ends an engine process that hangs, so that its requests fail and it can be started again."""
        with contextlib.suppress(EngineDied):
            while True:
                await asyncio.sleep(HANG_CHECK_S)
                try:
                    await asyncio.wait_for(self._answer(self._llm.list_loras()), HANG_S)
                except TimeoutError:
                    logger.error("vLLM's engine process has answered nothing for %g s: it is killed", HANG_S)
                    for process in self._llm.engine_core.resources.engine_manager.processes:
                        process.kill()
                    return
                except EngineDied:
                    raise
                except Exception as error:  # noqa: BLE001 - it answers, whatever it says
                    logger.warning("vLLM does not say which adapters it has: %s", error)

    def _build(self) -> None:
        set_environment()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self._on_cpu = current_platform.is_cpu()
        try:
            arguments = AsyncEngineArgs(**engine_arguments(self._settings), worker_extension_cls=EXTENSION)
            self._llm = start_seeing(self._settings.devices, AsyncLLM.from_engine_args, arguments)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"engine: vLLM cannot serve this configuration: {reason[:400]}") from error
        # A full collection would go through all that vLLM and torch have imported: 0.4 s without a token.
        gc.collect()
        gc.freeze()
        self.capacity = EngineCapacity(
            kv_tokens(self._llm.vllm_config.cache_config), self._settings.max_requests
        )

    async def add_adapter(self, version: int, folder: Path) -> None:
        await in_thread(check_weights, version, folder)
        request = self._lora_request(f"v{version}", folder)
        try:
            if not self._on_cpu:  # there the thread would take its time from the decode steps
                await self._read_ahead(request)
            await self._answer(self._llm.add_lora(request))
        except EngineDied:
            raise
        except Exception as error:
            # The engine process reports every failure of a call as a bare Exception.
            reason = " ".join(str(error).split())
            raise IntegrityError(f"vLLM cannot load adapter version {version}: {reason[:400]}") from error
        self._adapters[version] = request

    async def _read_ahead(self, request: Any) -> None:
        """While requests go on; see `worker_extension`. That it cannot be done is no error."""
        which = (request.lora_name, request.lora_int_id, request.lora_path)
        try:
            await self._answer(self._llm.collective_rpc("bucketrl_read_adapter", args=which))
            while True:
                asked = self._llm.collective_rpc("bucketrl_has_read", args=(request.lora_int_id,))
                if all(await self._answer(asked)):
                    return
                await asyncio.sleep(_READ_CHECK_S)
        except EngineDied:
            raise
        except Exception as error:  # noqa: BLE001 - of vLLM's inner parts, which differ between versions
            logger.info("adapter %s is not read ahead: %s", request.lora_name, error)

    async def remove_adapter(self, version: int) -> None:
        request = self._adapters.pop(version)
        await self._answer(self._llm.remove_lora(request.lora_int_id))

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        adapter = self._adapters[request.policy_version]
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,
            # One list of floats instead of a dict and an object for each token, made in this very process.
            flat_logprobs=True,
            stop_token_ids=list(self._settings.stop_token_ids),
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        output = await self._run(request.context, params, request.request_id, adapter)
        drawn = output.outputs[0]
        token_ids = tuple(drawn.token_ids)
        return checked_completion(
            token_ids,
            _sampled_logprobs(drawn.logprobs, token_ids),
            request.policy_version,
            drawn.finish_reason,
        )

    async def abort(self, request_id: str) -> None:
        # An aborted request's last output holds all of its tokens and logprobs, also with FINAL_ONLY: nothing
        # has to be streamed for it while the request runs.
        task = self._running.get(request_id)
        while task is not None and not task.done():
            with _death_named():
                await self._llm.abort(request_id)
            await asyncio.wait((task,), timeout=_ABORT_RETRY_S)

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        adapter = await self._base_adapter() if version is None else self._adapters[version]
        params = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        output = await self._run(token_ids, params, f"score-{next(self._score_ids)}", adapter)
        # Row 0 belongs to the first token, which nothing precedes.
        rows = output.prompt_logprobs[1:]
        scores = [_logprob(row, token) for row, token in zip(rows, token_ids[1:], strict=True)]
        return [float("nan") if score is None else score for score in scores]

    async def _base_adapter(self) -> Any:
        """What a request for the base model names: nothing, but the null adapter on CPU."""
        if not self._on_cpu:
            return None
        if self._null_adapter is None:
            self._null_folder = tempfile.TemporaryDirectory(prefix="bucketrl-base-")
            folder = Path(self._null_folder.name)
            await in_thread(
                write_null_adapter, self._settings.model_path, self._settings.lora_targets, folder
            )
            self._null_adapter = self._lora_request("base", folder)
        return self._null_adapter

    def _lora_request(self, name: str, folder: Path) -> Any:
        from vllm.lora.request import LoRARequest

        lora_id = next(self._lora_ids)
        return LoRARequest(f"{name}-{lora_id}", lora_id, str(folder))

    async def _run(self, token_ids: tuple[int, ...], params: Any, request_id: str, adapter: Any) -> Any:
        """The request's only output. Raises DroppedCompletion if the engine is closed meanwhile."""
        if self._closing:
            raise DroppedCompletion(CLOSED)
        task = asyncio.create_task(self._collect(token_ids, params, request_id, adapter))
        self._running[request_id] = task
        try:
            with _death_named():
                return await task
        except asyncio.CancelledError:
            if request_id in self._running:
                raise
            raise DroppedCompletion(CLOSED) from None
        finally:
            self._running.pop(request_id, None)

    async def _answer(self, call: Awaitable[T]) -> T:
        """Of the engine process. vLLM lets a call wait for ever whose process ends meanwhile."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((task,), timeout=_DEATH_CHECK_S))[0]:
                if self._llm is None or self._llm.errored:
                    raise EngineDied(_DEAD)
        finally:
            task.cancel()
        with _death_named():
            return task.result()

    async def _collect(self, token_ids: tuple[int, ...], params: Any, request_id: str, adapter: Any) -> Any:
        outputs = self._llm.generate(
            {"prompt_token_ids": list(token_ids)}, params, request_id, lora_request=adapter
        )
        # FINAL_ONLY: exactly one output.
        [output] = [output async for output in outputs]
        return output

    async def close(self) -> None:
        self._closing = True
        if self._hang_watch is not None:
            self._hang_watch.cancel()
        running, self._running = list(self._running.values()), {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._adapters.clear()
        if self._null_folder is not None:
            self._null_folder.cleanup()
        if self._llm is None:
            return
        if self._llm.output_handler is not None:
            # It would take the end of the engine for a failure, and say so at length.
            self._llm.output_handler.cancel()
        await in_thread(self._llm.shutdown)
        self._llm = None
        # Its finalizer fails, with a traceback, if it first runs while the interpreter shuts down.
        gc.unfreeze()
        gc.collect()


@contextlib.contextmanager
def _death_named() -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied(_DEAD) from error


def _sampled_logprobs(flat: Any, token_ids: tuple[int, ...]) -> tuple[float | None, ...]:
    """Of vLLM's FlatLogprobs; with `logprobs=0` it holds the sampled tokens alone."""
    if flat is None or tuple(flat.token_ids) != token_ids:
        return ()
    return tuple(flat.logprobs)


def _logprob(row: Any, token: int) -> float | None:
    entry = row.get(token) if row else None
    return None if entry is None else float(entry.logprob)
