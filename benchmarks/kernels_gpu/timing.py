"""Times of calls that take turns, so that a clock that drifts or a card that warms up is the same for all."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Time:
    """Milliseconds."""

    median: float
    low: float
    high: float
    """Quartiles."""

    def __str__(self) -> str:
        return f"{self.median:8.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, warmups: int = 1) -> dict[str, Time]:
    """Device time of each call, one after the other, `rounds` times over."""
    for _ in range(warmups):
        for call in calls.values():
            call()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {
        name: _summary([start.elapsed_time(stop) for start, stop in pairs]) for name, pairs in events.items()
    }


def _summary(values: list[float]) -> Time:
    if len(values) < 2:
        return Time(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Time(median, low, high)


def gemm_tflops(size: int = 8192) -> float:
    """What a bfloat16 matrix product reaches on random data now: the card's state, not ours."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    time = interleaved({"gemm": lambda: left @ right}, rounds=10, warmups=3)["gemm"]
    return 2 * size**3 / time.median / 1e9
