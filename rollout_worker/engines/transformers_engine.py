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
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.engine import DroppedCompletion, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.engines.checks import CLOSED
from bucketrl.rollout_worker.engines.decoding import DecodingBatch, PendingRequest
from bucketrl.rollout_worker.engines.settings import EngineSettings

T = TypeVar("T")


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
        self.name = f"transformers {importlib.metadata.version('transformers')}"
        self._versions: set[int] = set()
        self._requests: dict[str, PendingRequest] = {}
        """Not answered yet, by id."""
        # Guarded by _wake: what the callers hand to the engine thread.
        self._wake = threading.Condition()
        self._calls: deque[_Call[Any]] = deque()
        self._waiting: deque[PendingRequest] = deque()
        self._closing = False
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

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.float32 if self._settings.dtype == "float32" else torch.bfloat16
        try:
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
            if self._closing:
                raise DroppedCompletion(CLOSED)
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
            self._closing = True
            self._wake.notify()

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the engine thread, between two decode steps."""
        call = _Call(function)
        with self._wake:
            if self._closing:
                raise DroppedCompletion(CLOSED)
            self._calls.append(call)
            self._wake.notify()
        return await asyncio.wrap_future(call.future)

    # ---- engine thread

    def _serve(self) -> None:
        try:
            while self._admit():
                for batch in self._batches:
                    with self._policy(batch.version):
                        batch.step(self._model)
                self._batches = [batch for batch in self._batches if batch.rows]
        except BaseException as error:
            self._fail_all(error)
            raise
        self._fail_all(DroppedCompletion(CLOSED))
        self._model = None

    def _admit(self) -> bool:
        """Runs the waiting calls and starts the waiting requests. False when the engine is to close."""
        with self._wake:
            while not (self._closing or self._calls or self._waiting or self._batches):
                self._wake.wait()
            if self._closing:
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

    def _fail_all(self, error: BaseException) -> None:
        with self._wake:
            self._closing = True
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

        name = _adapter_name(version)
        try:
            if self._has_adapters:
                self._model.load_adapter(str(folder), adapter_name=name, is_trainable=False)
            else:
                self._model = PeftModel.from_pretrained(self._model, str(folder), adapter_name=name).eval()
                self._has_adapters = True
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
