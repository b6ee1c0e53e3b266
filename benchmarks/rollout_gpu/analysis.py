"""From times to figures. Pure."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.rollout_gpu.measured_engine import Switch

BEFORE_S = 0.05
"""The window around a switch begins so long before its adapter is handed to vLLM."""
AFTER_S = 0.05
"""And ends so long after the new version's first token."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def longest_gap(steps: Sequence[float], begin: float, end: float) -> float:
    """Between two decode steps, seconds, of those gaps that reach into [begin, end]. `steps` ascend."""
    first, last = max(0, bisect_left(steps, begin) - 1), bisect_right(steps, end) + 1
    inside = steps[first:last]
    return max((b - a for a, b in itertools.pairwise(inside)), default=0.0)


def extra_gaps(steps: Sequence[float], switches: Sequence[Switch]) -> list[float]:
    """For each switch: the longest gap around it less the longest in a window as long just before it, in which
    no version changes; seconds."""
    found = []
    for before, switch in zip((None, *switches), switches, strict=False):
        begin, end = switch.begun - BEFORE_S, switch.first_token + AFTER_S
        still = 2 * begin - end
        if still < steps[0] or (before is not None and still < before.first_token + AFTER_S):
            continue
        found.append(longest_gap(steps, begin, end) - longest_gap(steps, still, begin))
    return found


def switch_figures(
    commits: Mapping[int, float], switches: Mapping[int, Switch], steps: Sequence[float]
) -> dict[str, Any]:
    """Of the versions that were committed and came into service; those that a newer one overtook have none. The
    lists are in the order of the versions."""
    served = {v: s for v, s in switches.items() if v in commits and v > 0 and s.first_token}
    if len(served) < 3:
        raise RuntimeError(f"only {len(served)} versions came into service")
    total = [s.first_token - commits[v] for v, s in served.items()]
    extra = extra_gaps(steps, list(served.values()))
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    return {
        "switches": len(served),
        "commit_to_token_p50_s": round(median(total), 3),
        "commit_to_token_p99_s": round(percentile(total, 0.99), 3),
        "commit_to_token_max_s": round(max(total), 3),
        "commit_to_fetched_p50_s": round(median(s.begun - commits[v] for v, s in served.items()), 3),
        "read_p50_s": round(median(s.read_s for s in served.values()), 3),
        "load_p50_s": round(median(s.loaded - s.begun for s in served.values()), 3),
        "load_to_token_p50_s": round(median(s.first_token - s.loaded for s in served.values()), 3),
        "switch_gap_ms": round(1e3 * median(extra), 1) if extra else float("nan"),
        "switch_gap_p95_ms": round(1e3 * percentile(extra, 0.95), 1) if extra else float("nan"),
        "switch_gap_max_ms": round(1e3 * max(extra), 1) if extra else float("nan"),
        "switch_gaps_compared": len(extra),
        "decode_step_p50_ms": round(1e3 * median(gaps), 2),
        "decode_step_max_ms": round(1e3 * max(gaps), 1),
        "commit_to_token_s": [round(value, 3) for value in total],
        "switch_gaps_ms": [round(1e3 * value, 1) for value in extra],
    }
