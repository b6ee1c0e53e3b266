"""The runs of a study, each in one of several processes, within a limited time."""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.staleness.grid import EVALUATIONS, Key, Study
from benchmarks.staleness.play import Curve, Run

LOOKED_AT_EVERY_S = 1.0


@dataclass
class Outcome:
    curves: dict[Key, Curve] = field(default_factory=dict)
    """Of the runs that were made whole."""
    cut_short: dict[Key, Curve] = field(default_factory=dict)
    """Of the runs that the end of the time has stopped."""
    failed: dict[Key, str] = field(default_factory=dict)
    not_started: list[Key] = field(default_factory=list)
    seconds_a_run: float = 0.0
    """Of the last that was made whole."""


@dataclass(frozen=True)
class Order:
    """What a process needs to know of a run beside its key."""

    study: Study
    folder: Path
    steps: int
    problems: int
    end: float
    """Wall-clock time, as `time.time`."""


_device = torch.device("cpu")
_progress: Any = None
"""Both of a process of the pool; the second is a queue of (key, steps made, reward)."""


def play_all(
    keys: Sequence[Key], order: Order, gpus: int, processes: int, say: Callable[[str], None]
) -> Outcome:
    """Starts `keys` in their order while there is time for one more of the length of the last one.

    Nothing is started after a failure. `gpus`: 0 for the CPU.
    """
    outcome, waiting = Outcome(), deque(keys)
    running: dict[Future[Curve], tuple[Key, float]] = {}
    states: dict[Key, str] = {}
    context = multiprocessing.get_context("spawn")
    devices, progress = context.Queue(), context.Queue()
    for process in range(processes):
        devices.put(f"cuda:{process % gpus}" if gpus else "cpu")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(devices, progress)
    ) as pool:
        while True:
            while waiting and len(running) < processes and not outcome.failed:
                if time.time() + outcome.seconds_a_run > order.end:
                    break
                key = waiting.popleft()
                running[pool.submit(_play, key, order)] = (key, time.time())
            if not running:
                break
            done, _ = wait(running, timeout=LOOKED_AT_EVERY_S, return_when=FIRST_COMPLETED)
            while not progress.empty():
                key, step, heldout = progress.get()
                states[key] = f"{name(key)} {step}:{heldout:.2f}"
            for future in done:
                key, started = running.pop(future)
                states.pop(key, None)
                _take(outcome, key, future, order.steps, time.time() - started)
            say(f"{len(outcome.curves)} of {len(keys)} runs  " + "  ".join(states.values()))
    outcome.not_started = list(waiting)
    return outcome


def name(key: Key) -> str:
    return "{} lag {} seed {}".format(*key)


def _take(outcome: Outcome, key: Key, future: Future[Curve], steps: int, seconds: float) -> None:
    error = future.exception()
    if error is not None:
        outcome.failed[key] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"\n{name(key)} has failed: {outcome.failed[key]}", flush=True)
    elif future.result().steps[-1] < steps:
        outcome.cut_short[key] = future.result()
    else:
        outcome.curves[key] = future.result()
        outcome.seconds_a_run = seconds


def _begin(devices: Any, progress: Any) -> None:
    from transformers.utils.logging import disable_progress_bar

    global _device, _progress
    torch.set_num_threads(1)
    disable_progress_bar()
    _device, _progress = torch.device(devices.get()), progress
    if _device.type == "cuda":
        # Triton launches on the current device.
        torch.cuda.set_device(_device)


def _play(key: Key, order: Order) -> Curve:
    method, lag, seed = key
    config = order.study.config(method, seed, order.steps)
    run = Run(config, order.folder, order.problems, order.study.drawing, _device)

    def report(step: int, heldout: float) -> bool:
        _progress.put((key, step, heldout))
        return time.time() > order.end

    return run.play(lag, max(1, order.steps // EVALUATIONS), report)
