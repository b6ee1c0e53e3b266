"""Errors, then times in turns, then a profile: all that is measured of one model."""

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.learner_gpu.ours import Ours
from benchmarks.learner_gpu.profile import kinds_of_kernels
from benchmarks.learner_gpu.shapes import Shape, twin
from benchmarks.learner_gpu.trl_path import TrlPath
from benchmarks.learner_gpu.workload import GROUPS, Batch, draw
from bucketrl.learner.packing import Floats

GIB = 1 << 30
OURS = "bucketrl"
WAYS: dict[str, dict[str, bool]] = {
    "peft_trl": {},
    "peft_trl_checkpointed": {"checkpointing": True},
    "peft_trl_bf16_adapter": {"autocast": False},
}
"""Of the peer. The last has no float32 masters: cheaper, and not the same training."""
SAME_TRAINING = ("peft_trl", "peft_trl_checkpointed")
TOLERANCE = 1.5
"""Our error against float32 over the peer's, at most: both compute in bfloat16, in another order."""
FLOAT32_ERROR = 1e-3
"""That ours may have in any case: where the model itself is float32, the peer has none."""


class Provider(Protocol):
    """One way to make a step."""

    checkpointing: bool

    @property
    def microbatch(self) -> str: ...

    def step(self, batch: Batch) -> None: ...

    def gradient(self, batch: Batch) -> tuple[Floats, dict[str, Tensor]]: ...

    def shrink(self) -> bool: ...

    def resident_bytes(self) -> int: ...


@dataclass
class Times:
    """Of one provider on one workload."""

    ms: list[float] = field(default_factory=list)
    """One a round."""
    peak_gib: float | None = None
    """Weights, adapter, optimizer and the step's own memory, without what other providers keep."""
    allocator_retries: int = 0
    """Times that cached memory had to be given back to go on: each costs milliseconds."""
    microbatch: str = ""
    checkpointing: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    def summary(self) -> dict[str, Any]:
        return {"median_ms": self.median} | asdict(self)


class Measurement:
    """One model with its providers."""

    def __init__(self, shape: Shape, device: torch.device, say: Callable[[str], None]) -> None:
        self._shape, self._device, self._say = shape, device, say
        self.left_out: dict[str, str] = {}
        """What could not be measured, and why."""
        say("making the model")
        self._causal = shape.make(device)
        say("bucketrl")
        self._ours = Ours(self._causal, shape, device)
        self._providers: dict[str, Provider] = {OURS: self._ours}
        for name, way in WAYS.items():
            say(name)
            with self._leaving_out(name):
                rows = shape.completions
                self._providers[name] = self._peer(twin(self._causal), rows=rows, **way)
        self._step = 0

    def heads(self) -> dict[str, str]:
        """What computes the peer's log-probabilities."""
        return {name: each.head for name, each in self._providers.items() if isinstance(each, TrlPath)}

    def flops(self, workload: str, per_weight: int) -> float:
        return self._shape.flops(self._causal, workload, per_weight)

    def _peer(self, causal: Any, **way: Any) -> TrlPath:
        made = TrlPath(causal, self._ours.policy.config, self._device, **way)
        made.adopt(self._ours.policy.parameters)
        return made

    def _draw(self, **changes: int) -> Batch:
        self._step += 1
        return draw(self._ours.policy, self._step, **changes)

    def errors(self) -> dict[str, Any]:
        """Of each provider against the peer's step in float32: of log-probabilities, root mean square in nats, and
        of the adapter's gradient, of its norm. Two completions that share half of their length."""
        self._say("errors against float32")
        length = self._shape.length // 2
        batch = self._draw(groups=1, completions=2, length=length, prompt=length // 2)
        found = {}
        with self._leaving_out("float32 reference"):
            model = twin(self._causal, torch.float32)
            want = self._peer(model, rows=1, checkpointing=True, autocast=False).gradient(batch)
            del model
            for name in list(self._providers):
                with self._leaving_out(name):
                    found[name] = _errors(self._providers[name].gradient(batch), want)
        figures: dict[str, Any] = {"errors": found}
        if "peft_trl" in found and OURS in found:
            limits = {key: max(TOLERANCE * error, FLOAT32_ERROR) for key, error in found["peft_trl"].items()}
            figures["agrees"] = all(found[OURS][key] <= limit for key, limit in limits.items())
        return figures

    def times(self, workload: str, rounds: int) -> dict[str, Times]:
        """Of every provider that can, in turns on the same batches."""
        shape = self._shape
        batches = [
            self._draw(
                groups=GROUPS[workload],
                completions=shape.completions,
                length=shape.length,
                prompt=shape.prompts[workload],
            )
            for _ in range(rounds + 1)
        ]
        for name in list(self._providers):
            self._say(f"{workload}: {name} warms up")
            self._warm_up(name, batches[0])
        # What is there stays: a collection in the middle of a step would look at all of it.
        gc.collect()
        gc.freeze()
        made = {name: Times() for name in self._providers}
        for number, batch in enumerate(batches[1:], start=1):
            for name in list(self._providers):
                self._say(f"{workload}, round {number} of {rounds}: {name}")
                with self._leaving_out(name):
                    self._time(self._providers[name], batch, made[name])
        gc.unfreeze()
        return {name: times for name, times in made.items() if len(times.ms) == rounds}

    def profile(self) -> dict[str, Any]:
        """Of one step of ours, nothing shared; empty if there is no profiler."""
        self._say("profile")
        shape = self._shape
        batch = self._draw(
            groups=GROUPS["separate"],
            completions=shape.completions,
            length=shape.length,
            prompt=shape.prompts["separate"],
        )
        found: dict[str, Any] = {}
        with self._leaving_out("profile"):
            found = kinds_of_kernels(lambda: self._ours.step(batch), self._device)
        return found

    def _warm_up(self, name: str, batch: Batch) -> None:
        """With the largest micro-batches that fit."""
        while name in self._providers:
            try:
                self._providers[name].step(batch)
                return
            except RuntimeError as error:
                problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            # Outside of the handler, where the failed step's tensors are free. Libraries have words of their own
            # for memory that they did not get.
            full = "memory" in problem or "ALLOC_FAILED" in problem
            if not (full and self._providers[name].shrink()):
                self._leave_out(name, problem)
            self._collect()

    def _time(self, provider: Provider, batch: Batch, times: Times) -> None:
        on_gpu = self._device.type == "cuda"
        times.microbatch, times.checkpointing = provider.microbatch, provider.checkpointing
        gc.collect()
        resident = retries = 0
        if on_gpu:
            resident = provider.resident_bytes() - torch.cuda.memory_allocated()
            retries = _retries()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        provider.step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        times.ms.append((time.perf_counter() - start) * 1e3)
        if on_gpu:
            peak = (torch.cuda.max_memory_allocated() + resident) / GIB
            times.peak_gib = max(times.peak_gib or 0.0, peak)
            times.allocator_retries += _retries() - retries

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """What fails inside is named in the record, and takes no further part."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 a peer that cannot run leaves the others' figures
            traceback.print_exc()
            self._leave_out(name, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            self._collect()

    def _leave_out(self, name: str, problem: str) -> None:
        print(f"\nleft out: {name}: {problem}", flush=True)
        self.left_out[name] = problem
        self._providers.pop(name, None)

    def _collect(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _errors(
    found: tuple[Floats, dict[str, Tensor]], want: tuple[Floats, dict[str, Tensor]]
) -> dict[str, float]:
    logprobs = found[0].astype(np.float64) - want[0]
    squares = [
        (float((found[1][name].double() - each.double()).square().sum()), float(each.double().square().sum()))
        for name, each in want[1].items()
    ]
    error, norm = (sum(column) for column in zip(*squares, strict=True))
    return {"logprob_rms": float(np.sqrt((logprobs**2).mean())), "gradient": (error / norm) ** 0.5}


def _retries() -> int:
    return int(torch.cuda.memory_stats()["num_alloc_retries"])
