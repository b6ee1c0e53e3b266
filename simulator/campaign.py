"""Many seeds on many processes, with live progress; the first failure is cut to its shortest history."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue

from bucketrl.simulator.scenario import Scenario, scenario
from bucketrl.simulator.shrink import shrink
from bucketrl.simulator.world import Outcome, simulate

AHEAD = 3
"""Seeds handed out ahead to each process."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is kept of a seed that was played."""

    seed: int
    violations: tuple[str, ...]
    faults: int
    events: int
    seconds: float
    """Virtual."""


def judge(seed: int, planted: str | None = None) -> Verdict:
    outcome = simulate(scenario(seed), planted)
    return Verdict(
        seed, outcome.violations, len(outcome.scenario.faults), len(outcome.history), outcome.seconds
    )


def _stay_on_one_core(numbers: "SimpleQueue[int]") -> None:
    # One thread of a simulation runs at a time: handed over on one core it takes two thirds of the time.
    if hasattr(os, "sched_setaffinity"):
        cores = _cores()
        os.sched_setaffinity(0, {cores[numbers.get() % len(cores)]})


def _cores() -> list[int]:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class Campaign:
    """Worker processes that play seeds. A context manager."""

    def __init__(self, processes: int | None = None) -> None:
        self._processes = processes or len(_cores())
        context = get_context("spawn")
        numbers = context.SimpleQueue()
        for number in range(self._processes):
            numbers.put(number)
        self._pool = ProcessPoolExecutor(
            self._processes, mp_context=context, initializer=_stay_on_one_core, initargs=(numbers,)
        )

    def __enter__(self) -> "Campaign":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def verdicts(self, seeds: Iterable[int], planted: str | None = None) -> Iterator[Verdict]:
        """As they come, not in order."""
        waiting: set[Future[Verdict]] = set()
        for seed in seeds:
            waiting.add(self._pool.submit(judge, seed, planted))
            if len(waiting) >= AHEAD * self._processes:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)

    def search(self, planted: str, limit: int) -> Verdict | None:
        """The failing seed below `limit` that is found first; None if there is none."""
        for verdict in self.verdicts(range(limit), planted):
            if verdict.violations:
                return verdict
        return None


def shortest(seed: int, planted: str | None, progress: Callable[[int], None]) -> Outcome:
    """The outcome of a failing seed under the fewest faults that still make it fail."""

    def fails(candidate: Scenario) -> bool:
        progress(len(candidate.faults))
        return bool(simulate(candidate, planted).violations)

    return simulate(shrink(scenario(seed), fails), planted)


class Progress:
    """One line that is written over: how far, how fast."""

    def __init__(self, what: str, total: int, write: Callable[[str], None]) -> None:
        self._what = what
        self._total = total
        self._write = write
        self._start = time.monotonic()
        self._done = self._failed = 0

    def add(self, verdict: Verdict) -> None:
        self._done += 1
        self._failed += bool(verdict.violations)
        seconds = time.monotonic() - self._start
        left = seconds / self._done * (self._total - self._done)
        self._write(
            f"{self._what}: {self._done}/{self._total} seeds, {self._failed} failed, "
            f"{self._done / seconds:.1f}/s, {left / 60:.0f} min left"
        )
