"""From traces of the roles to their utilisation. Pure.

A trace is a step function: (time in seconds, value) in order of time; each value holds until the next one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
Trace = Sequence[tuple[float, T]]

LAG = "tokens_lag_"
"""Metrics of a commit: loss tokens by the number of steps between sampling and training."""


def share(trace: Trace[T], begin: float, end: float, wanted: Callable[[T], bool]) -> float:
    """Of the time from `begin` to `end`, that in which the value is a wanted one. Before the first point
    nothing is."""
    return mean([(at, float(wanted(value))) for at, value in trace], begin, end)


def mean(trace: Trace[float], begin: float, end: float) -> float:
    """Over the time from `begin` to `end`; 0 before the first point."""
    closed = [*trace, (end, 0.0)]
    area = sum(
        value * max(0.0, min(until, end) - max(since, begin))
        for (since, value), (until, _) in pairwise(closed)
    )
    return area / (end - begin)


def rate(totals: Trace[float], begin: float, end: float) -> float:
    """What a counter that only grows, from 0, gained a second."""
    return (_at(totals, end) - _at(totals, begin)) / (end - begin)


def _at(totals: Trace[float], time: float) -> float:
    return max((value for at, value in totals if at <= time), default=0.0)


def windows(begin: float, end: float, count: int) -> list[tuple[float, float]]:
    """`count` equal ones that cover the time from `begin` to `end`."""
    edges = [begin + (end - begin) * i / count for i in range(count)] + [end]
    return list(pairwise(edges))


def staleness_histogram(metrics: Iterable[Mapping[str, float]]) -> dict[int, int]:
    """Loss tokens by lag, over the commits with these metrics; from lag 0 on without a gap."""
    tokens: Counter[int] = Counter()
    for step in metrics:
        for name, value in step.items():
            if name.startswith(LAG):
                tokens[int(name.removeprefix(LAG))] += int(value)
    return {lag: tokens[lag] for lag in range(max(tokens, default=-1) + 1)}
