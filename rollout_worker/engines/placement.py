"""Which GPUs each engine of a rollout job gets, told without touching CUDA, and what cannot work.

visible GPUs   0   1   2   3   4   5   6   7
               └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘
engines: 3       0       1       2     idle      tensor_parallel x pipeline_parallel = 2 GPUs each
"""

import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from bucketrl.bucket.errors import UserError

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_LIST_GPUS = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
_LIST_S = 30.0
_PROCESS = "EngineCore"
"""How the names of vLLM's engine processes begin. Of one with another name the start is not seen: then
engines load one after the other."""
_CHECK_S = 0.02

_environment = threading.Lock()
"""Held while this process's environment is not its own."""

A = TypeVar("A")
T = TypeVar("T")


def visible_gpus() -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names them; empty on a machine without."""
    named = os.environ.get(DEVICES_VARIABLE)
    if named is not None:
        return parse_devices(named)
    try:
        listed = subprocess.run(_LIST_GPUS, capture_output=True, text=True, timeout=_LIST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.stdout.split())


def parse_devices(named: str) -> tuple[str, ...]:
    """CUDA's rule: the list ends at the first -1 or empty entry, and nothing after it is visible."""
    devices: list[str] = []
    for device in (part.strip() for part in named.split(",")):
        if device in ("", "-1"):
            break
        devices.append(device)
    return tuple(devices)


def place(
    engines: int, tensor_parallel: int, pipeline_parallel: int, gpus: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """[engines] the GPUs of each; none for each on a machine without, where engines share the CPU's cores.

    Raises UserError if there are too few GPUs.
    """
    each = tensor_parallel * pipeline_parallel
    if not gpus:
        if each > 1:
            raise UserError(
                f"tensor_parallel, pipeline_parallel: {tensor_parallel} x {pipeline_parallel}, but no GPU is "
                "visible here; on CPU both have to be 1"
            )
        return ((),) * engines
    if engines * each > len(gpus):
        raise UserError(
            f"engines: {engines} x tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel} "
            f"take {engines * each} GPUs, {len(gpus)} are visible here ({', '.join(gpus)}); choose at most "
            f"{len(gpus) // each} engines, or fewer GPUs for each"
        )
    return tuple(tuple(gpus[index * each : (index + 1) * each]) for index in range(engines))


def check_split(model: Mapping[str, Any], tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises UserError if a model with this config.json cannot be split so. What it does not say is not
    checked."""
    text = model.get("text_config") or model
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    if isinstance(heads, int) and heads % tensor_parallel:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise UserError(
            f"tensor_parallel: {tensor_parallel} does not divide the model's {heads} attention heads; choose one "
            f"of {', '.join(map(str, fitting))}"
        )
    if isinstance(layers, int) and pipeline_parallel > layers:
        raise UserError(
            f"pipeline_parallel: {pipeline_parallel} exceeds the model's {layers} layers; choose at most {layers}"
        )


def start_seeing(devices: Sequence[str], build: Callable[[A], T], arguments: A) -> T:
    """`build(arguments)`, which starts an engine process that sees these GPUs alone; none: all of this one's.

    A process inherits the environment of the moment when it starts. Only until then is it changed here, and
    one engine waits for the other; then they load side by side.
    """
    if not devices:
        return build(arguments)
    with ThreadPoolExecutor(1, thread_name_prefix="engine start") as threads:
        with _environment, _variable(DEVICES_VARIABLE, ",".join(devices)):
            before = set(multiprocessing.active_children())
            building = threads.submit(build, arguments)
            while not (building.done() or _started(before)):
                wait((building,), timeout=_CHECK_S)
        return building.result()


def _started(before: set[BaseProcess]) -> bool:
    new = set(multiprocessing.active_children()) - before
    # Other processes, as those of rewards, may start at the same time.
    return any(process.name.startswith(_PROCESS) for process in new)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
