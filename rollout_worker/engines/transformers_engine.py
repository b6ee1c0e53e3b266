"""A small engine on transformers and PEFT, for machines where vLLM cannot be installed.

One thread owns the model. Between any two decode steps it loads adapters, scores and admits new requests,
so none of them waits for a running completion:

    callers ── requests, calls ──► queue ──► engine thread: [calls] [admit] [one token for every batch] ─┐
                                                   ▲                                                      │
                                                   └──────────────────────────────────────────────────────┘
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from bucketrl.bucket.errors import BucketrlError, IntegrityError, UserError
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    EngineCapacity,
    EngineDied,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.rollout_worker.engines.checks import CLOSED, check_weights
from bucketrl.rollout_worker.engines.decoding import DecodingBatch, PendingRequest
from bucketrl.rollout_worker.engines.placement import visible_gpus
from bucketrl.rollout_worker.engines.settings import EngineSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOADING = threading.Lock()
"""transformers changes defaults of torch while it loads, which all engines of this process share."""


class _Call(Generic[T]):
    """Something to run in the engine thread, and the future that its caller awaits."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except Exception as error:  # noqa: BLE001 - raised again where the call is awaited
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class TransformersEngine:
    """`Engine` on one process and one device."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.stop_token_ids = settings.stop_token_ids
        self.capacity = EngineCapacity(None, settings.max_requests)
        self.name = f"transformers {importlib.metadata.version('transformers')}"
        self._versions: set[int] = set()
        self._requests: dict[str, PendingRequest] = {}
        """Not answered yet, by id."""
        # Guarded by _wake: what the callers hand to the engine thread.
        self._wake = threading.Condition()
        self._calls: deque[_Call[Any]] = deque()
        self._waiting: deque[PendingRequest] = deque()
        self._end: BucketrlError | None = None
        """What callers get once the engine is closed or dead."""
        # Owned by the engine thread.
        self._model: Any = None
        self._has_adapters = False
        self._active: int | None = None
        self._batches: list[DecodingBatch] = []

    async def start(self) -> None:
        await in_thread(self._load)
        threading.Thread(target=self._serve, name="transformers engine", daemon=True).start()

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM

        devices = self._settings.devices
        device = f"cuda:{visible_gpus().index(devices[0])}" if devices else "cuda"
        if not torch.cuda.is_available():
            device = "cpu"
        dtype = torch.float32 if self._settings.dtype == "float32" else torch.bfloat16
        try:
            with _LOADING:
                model = AutoModelForCausalLM.from_pretrained(self._settings.model_path, dtype=dtype)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"engine: transformers cannot load the model: {reason[:400]}") from error
        self._model = model.to(device).eval()

    async def add_adapter(self, version: int, folder: Path) -> None:
        await self._call(lambda: self._add(version, folder))
        self._versions.add(version)

    async def remove_adapter(self, version: int) -> None:
        self._versions.remove(version)
        await self._call(lambda: self._remove(version))

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        if request.policy_version not in self._versions:
            raise KeyError(request.policy_version)
        pending = PendingRequest(request)
        with self._wake:
            if self._end is not None:
                raise self._end
            self._waiting.append(pending)
            self._wake.notify()
        self._requests[request.request_id] = pending
        try:
            return await asyncio.wrap_future(pending.future)
        finally:
            del self._requests[request.request_id]

    async def abort(self, request_id: str) -> None:
        pending = self._requests.get(request_id)
        if pending is None:
            return
        pending.aborted = True
        with self._wake:
            waiting = pending in self._waiting
            if waiting:
                self._waiting.remove(pending)
        if waiting:
            pending.finish("abort")

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        if version is not None and version not in self._versions:
            raise KeyError(version)
        return await self._call(lambda: self._score(token_ids, version))

    async def close(self) -> None:
        with self._wake:
            self._end = self._end or DroppedCompletion(CLOSED)
            self._wake.notify()

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the engine thread, between two decode steps."""
        call = _Call(function)
        with self._wake:
            if self._end is not None:
                raise self._end
            self._calls.append(call)
            self._wake.notify()
        return await asyncio.wrap_future(call.future)

    # ---- engine thread

    def _serve(self) -> None:
        try:
            while self._admit():
                for batch in filter(DecodingBatch.wanted, self._batches):
                    with self._policy(batch.version):
                        batch.step(self._model)
                self._batches = [batch for batch in self._batches if batch.rows]
        except Exception as error:
            logger.exception("the engine thread has ended")
            reason = " ".join(str(error).split())
            self._end_with(EngineDied(f"transformers: {type(error).__name__}: {reason[:300]}"))
        else:
            self._end_with(DroppedCompletion(CLOSED))
        self._model = None

    def _admit(self) -> bool:
        """Runs the waiting calls and starts the waiting requests. False when the engine is to close."""
        with self._wake:
            while not (self._end or self._calls or self._waiting or self._batches):
                self._wake.wait()
            if self._end is not None:
                return False
            calls = list(self._calls)
            self._calls.clear()
            running = sum(len(batch.rows) for batch in self._batches)
            admitted = [
                self._waiting.popleft()
                for _ in range(min(len(self._waiting), self._settings.max_requests - running))
            ]
        for call in calls:
            call.run()
        device = next(self._model.parameters()).device
        for version in sorted({pending.request.policy_version for pending in admitted}):
            batch = [pending for pending in admitted if pending.request.policy_version == version]
            self._batches.append(DecodingBatch(batch, self._settings.stop_token_ids, device))
        return True

    def _end_with(self, error: BucketrlError) -> None:
        """Answers everybody who waits."""
        with self._wake:
            self._end = error
            orphans: list[PendingRequest | _Call[Any]] = [*self._waiting, *self._calls]
            self._waiting.clear()
            self._calls.clear()
        for batch in self._batches:
            orphans.extend(batch.rows)
        for orphan in orphans:
            orphan.fail(error)

    def _policy(self, version: int | None) -> contextlib.AbstractContextManager[None]:
        """Makes the model compute with `version`; None is the base model alone."""
        if version is None:
            return self._model.disable_adapter() if self._has_adapters else contextlib.nullcontext()
        if self._active != version:
            self._model.set_adapter(_adapter_name(version))
            self._active = version
        return contextlib.nullcontext()

    def _add(self, version: int, folder: Path) -> None:
        from peft import PeftModel

        check_weights(version, folder)
        name = _adapter_name(version)
        try:
            with _LOADING:
                if self._has_adapters:
                    self._model.load_adapter(str(folder), adapter_name=name, is_trainable=False)
                else:
                    model = PeftModel.from_pretrained(self._model, str(folder), adapter_name=name)
                    self._model, self._has_adapters = model.eval(), True
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise IntegrityError(f"PEFT cannot load adapter version {version}: {reason[:400]}") from error

    def _remove(self, version: int) -> None:
        name = _adapter_name(version)
        others = [other for other in self._model.peft_config if other != name]
        self._active = None
        if others:
            self._model.set_adapter(others[0])
            self._model.delete_adapter(name)
        else:
            # A PeftModel without any adapter cannot even switch adapters off.
            self._model = self._model.unload()
            self._has_adapters = False

    @torch.inference_mode()
    def _score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        device = next(self._model.parameters()).device
        tokens = torch.tensor([token_ids], device=device)
        with self._policy(version):
            logits = self._model(input_ids=tokens).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        scores: list[float] = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1).tolist()
        return scores


def _adapter_name(version: int) -> str:
    return f"v{version}"
