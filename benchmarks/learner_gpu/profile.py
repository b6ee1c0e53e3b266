"""Where the time of one step goes, by kind of kernel."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|splitk|^aten::(mm|addmm|bmm)$"),
    ("head", r"target_logits|exp_tile|finish_rows|entropy_tile|scale_rows"),
    ("elementwise", r"at::native|at_cuda|^aten::|^mem(cpy|set)|multi_tensor|cub::|thrust"),
    ("our other kernels", r"^\w+$"),
)
"""Kinds, and what names of theirs look like; the first that fits counts."""
HEAD = "_LinearLogprob"
"""Start of the names of the head's autograd function and its backward: what they launch belongs to the head."""
SHOWN = 20


def kinds_of_kernels(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Milliseconds by kind, and the kernels that take most. `busy`: all of them together."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = list(profiler.events() or [])
    times: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[str, float] = defaultdict(float)
    for name, ms in _kernels(events, device):
        times[kind(name)] += ms
        by_name[name[:90]] += ms
    for name, ms in _inside_head(events, device):
        times[kind(name)] -= ms
        times["head"] += ms
    return {
        "busy": round(sum(times.values()), 2),
        "by_kind": _largest(times, len(times)),
        "top": _largest(by_name, SHOWN),
    }


def _largest(times: Mapping[str, float], count: int) -> dict[str, float]:
    return {
        name: round(times[name], 2) for name in sorted(times, key=times.__getitem__, reverse=True)[:count]
    }


@cache
def kind(name: str) -> str:
    """One of KINDS, or `other`."""
    return next((found for found, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def _kernels(events: list[Any], device: torch.device) -> Iterator[tuple[str, float]]:
    """Name and milliseconds: of the device's kernels, or of the operators where the CPU is the device."""
    for event in events:
        if device.type == "cpu":
            yield event.name, event.self_cpu_time_total / 1e3
        elif event.device_type.name == "CUDA" and not event.is_user_annotation:
            yield event.name, event.time_range.elapsed_us() / 1e3


def _inside_head(events: list[Any], device: torch.device) -> Iterator[tuple[str, float]]:
    for event in events:
        if event.device_type.name != "CPU" or not _has_ancestor(event, HEAD):
            continue
        if device.type == "cpu":
            yield event.name, event.self_cpu_time_total / 1e3
        else:
            for kernel in event.kernels:
                yield kernel.name, kernel.duration / 1e3


def _has_ancestor(event: Any, name: str) -> bool:
    while event is not None:
        if event.name.startswith(name):
            return True
        event = event.cpu_parent
    return False
