"""Whether an engine really serves a version: it must reproduce the learner's log-probabilities of a probe.

Engines have been seen to serve the base model, or an older adapter, under a new name without any error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bucketrl.bucket.records import Canary


@dataclass(frozen=True, slots=True)
class _Tolerance:
    distance: Callable[[Sequence[float], Sequence[float]], float]
    name: str
    limit: float


def _max_abs(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def _mean_abs(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / max(len(a), 1)


_TOLERANCES = {
    # Measured between vLLM and transformers: 4e-6 to 4e-5 in float32; in bfloat16 a mean of 0.008 to 0.04,
    # single tokens up to 0.3.
    "float32": _Tolerance(_max_abs, "max abs", 1e-3),
    "bfloat16": _Tolerance(_mean_abs, "mean abs", 0.15),
}


def canary_failure(
    measured: Sequence[float], canary: Canary, dtype: Literal["float32", "bfloat16"]
) -> str | None:
    """Why `measured` ([n - 1] logprobs of the probe's n tokens) is not this version's, or None if it is.

    Where adapter and base can be told apart, `measured` must also be nearer to the adapter.
    """
    tolerance = _TOLERANCES[dtype]
    if len(measured) != len(canary.logprobs):
        return f"{len(measured)} logprobs for a canary of {len(canary.logprobs)}"
    if not all(map(math.isfinite, measured)):
        return "logprobs of the canary are not all finite"
    to_adapter = tolerance.distance(measured, canary.logprobs)
    to_base = tolerance.distance(measured, canary.base_logprobs)
    if to_adapter > tolerance.limit:
        serves = " (it serves the base model)" if to_base <= tolerance.limit else ""
        return (
            f"canary is off by {to_adapter:.2g} ({tolerance.name}), allowed are {tolerance.limit:.2g}{serves}"
        )
    distinct = tolerance.distance(canary.logprobs, canary.base_logprobs) > tolerance.limit
    if distinct and to_base <= to_adapter:
        return f"canary is nearer to the base model ({to_base:.2g}) than to the adapter ({to_adapter:.2g})"
    return None
