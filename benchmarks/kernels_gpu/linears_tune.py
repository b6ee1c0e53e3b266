"""K3's kernels alone, over ways to cut their work: times of all launches of a kernel in one layer, both ways.

What `lora_cuda` launches in a forward and backward pass is recorded and launched again, with the sum over parts of
the tokens where there are parts. Bytes: of every tensor that a launch is given, once. `*` marks the cut in use.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from benchmarks.kernels_gpu.linears import TOKENS, both_ways
from benchmarks.kernels_gpu.linears_peers import SHAPES, make, ours
from benchmarks.kernels_gpu.rope import MEMORY_TB_S
from benchmarks.kernels_gpu.timing import Time, interleaved
from bucketrl.kernels import lora_cuda, lora_triton

Tile = dict[str, int]

CUTS: dict[str, list[tuple[int, int, int, int]]] = {
    "augment": [
        (32, 128, 8, 1), (32, 128, 4, 1), (32, 64, 4, 1), (32, 64, 8, 1), (16, 256, 8, 1), (32, 256, 8, 1),
        (32, 256, 16, 1), (64, 64, 8, 1), (64, 128, 8, 1), (64, 128, 16, 1),
    ],
    "swiglu_augment": [
        (32, 128, 8, 1), (32, 128, 4, 1), (32, 64, 4, 1), (16, 128, 4, 1), (16, 128, 8, 1), (16, 256, 8, 1),
        (64, 64, 4, 1), (64, 64, 8, 1), (64, 128, 16, 1),
    ],
    "add_low_rank": [(32, 128, 4, 1), (32, 128, 8, 1), (64, 64, 4, 1), (64, 128, 8, 1), (32, 256, 8, 1)],
    "rmsnorm_backward": [
        (32, 128, 8, 1), (32, 64, 4, 1), (32, 64, 8, 1), (16, 128, 4, 1), (16, 128, 8, 1), (16, 256, 8, 1),
        (32, 128, 16, 1), (32, 256, 16, 1), (64, 64, 8, 1), (64, 64, 16, 1),
    ],
    "swiglu_backward": [
        (16, 64, 4, 1), (16, 64, 2, 1), (16, 128, 4, 1), (16, 128, 8, 1), (32, 32, 4, 1), (32, 64, 4, 1),
        (32, 64, 8, 1), (64, 64, 8, 1), (32, 128, 8, 1), (64, 64, 16, 1),
    ],
    "tall_product": [
        (64, 128, 8, 3), (64, 128, 8, 4), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64, 256, 8, 3),
        (128, 128, 8, 3), (32, 128, 4, 4), (32, 256, 8, 4),
    ],
}  # fmt: skip
"""BT, BH, num_warps, num_stages."""
PROGRAMS = {"swiglu_backward": (16, 32, 128), "tall_product": (16, 64)}
"""Tried in place of `lora_cuda.PROGRAMS` with the best cut, where tokens are cut into parts."""


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)
        for part in self.tensors:
            if part.dim() == 3:
                part.sum(dim=0)

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in self.args if isinstance(each, Tensor)]

    def compile(self, tile: Tile) -> None:
        with suppress(Exception):  # it will fail again, where it is timed
            self.kernel.warmup(*self.args, grid=self.grid, **self.options | tile)


def measure(rounds: int) -> None:
    """Prints tables. A cut that does not compile or does not fit is one line."""
    for shape in SHAPES.values():
        layer = make(shape, TOKENS, "cuda", torch.bfloat16)
        forward, adapters = ours(layer)
        step = partial(both_ways, forward, layer.inputs, adapters, layer.upstream)
        print(
            f"\nK3's kernels  T {TOKENS}, H {shape.hidden}, I {shape.middle}, bytes at most {MEMORY_TB_S} TB/s"
        )
        _compile(step)
        for name in CUTS:
            _kernel(name, step, rounds)


def _kernel(name: str, step: Callable[[], object], rounds: int) -> None:
    used = lora_cuda.TILES[name], lora_cuda.PROGRAMS.get(name, 0)
    found: dict[str, float] = {}

    def time(tile: Tile, programs: int) -> float:
        label = f"{tile['BT']} x {tile['BH']}, {tile['num_warps']} warps, {tile['num_stages']} stages"
        label += f", {programs} programs" if name in PROGRAMS else ""
        try:
            launches = _launches(name, step, tile, programs)
            taken = interleaved({name: partial(_all, launches)}, rounds)[name]
        except Exception as error:  # noqa: BLE001 one cut that cannot run leaves the others
            print(f"  {name:<17} {label:<42} left out: {type(error).__name__}: {str(error)[:90]}", flush=True)
            return float("inf")
        _show(name, label, taken, launches, (tile, programs) == used)
        found[label] = taken.median
        return taken.median

    tiles = [_tile(cut) for cut in CUTS[name]]
    times = [time(tile, used[1]) for tile in tiles]
    for programs in PROGRAMS.get(name, ()):
        time(tiles[times.index(min(times))], programs)
    if found:
        print(f"  {name:<17} best: {min(found, key=found.__getitem__)}", flush=True)


def _all(launches: list[Launch]) -> None:
    for launch in launches:
        launch()


def _tile(cut: tuple[int, int, int, int]) -> Tile:
    return dict(zip(("BT", "BH", "num_warps", "num_stages"), cut, strict=True))


def _show(name: str, label: str, taken: Time, launches: list[Launch], used: bool) -> None:
    moved = sum(tensor.nbytes for launch in launches for tensor in launch.tensors)
    rate = moved / taken.median / 1e9
    print(
        f"  {name:<17} {label:<42} {taken} ms   {rate * 1000:5.0f} GB/s, {rate / MEMORY_TB_S:.2f}{' *' * used}",
        flush=True,
    )


def _launches(name: str, step: Callable[[], object], tile: Tile, programs: int) -> list[Launch]:
    """Those of one kernel in a forward and backward pass with this cut."""
    launches: list[Launch] = []
    kernel = getattr(lora_triton, name)

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                launches.append(Launch(kernel, grid, args, options))
                kernel[grid](*args, **options)

            return launch

    with (
        patch.object(lora_triton, name, Recorder()),
        patch.dict(lora_cuda.TILES, {name: tile}),
        patch.dict(lora_cuda.PROGRAMS, {name: programs}),
    ):
        step()
    return launches


def _compile(step: Callable[[], object]) -> None:
    """All cuts at once; those of another shape are the same kernels."""
    used = {name: lora_cuda.PROGRAMS.get(name, 0) for name in CUTS}
    launches = {name: _launches(name, step, lora_cuda.TILES[name], used[name]) for name in CUTS}
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for name, cuts in CUTS.items():
            for cut in cuts:
                for launch in launches[name]:
                    launch.compile(_tile(cut))
