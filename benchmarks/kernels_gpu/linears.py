"""K3: one Qwen3 layer's linears with LoRA, forward and backward, in turns with their peers.

Gradients go to both inputs and to the adapters. Errors are those of the very computation that is timed, relative
to float64 over all tokens.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_gpu.heads import relative
from benchmarks.kernels_gpu.linears_peers import GROUPS, PEERS, RANK, Built, Layer, Shape, make, ours
from benchmarks.kernels_gpu.timing import interleaved

TOKENS = 32768
FLOOR = "bare GEMMs"

Result = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Outputs and gradients; neither where there is nothing to compare."""
Step = Callable[[], Result]


def measure(
    shape: Shape,
    rounds: int,
    without: Collection[str] = (),
    tokens: int = TOKENS,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Prints a table; the figures by name. Errors: of outputs, of dX, of dA and dB, each the worst."""
    layer = make(shape, tokens, device, dtype)
    outputs, grads = _truth(layer)

    def errors(result: Result) -> tuple[float, ...]:
        found, found_grads = result
        if len(found_grads) < len(grads):
            return (float("nan"),) * 3
        pairs = list(zip(found_grads, grads, strict=True))
        return (
            worst(zip((torch.cat(list(found[:-1]), dim=1), found[-1]), outputs, strict=True)),
            worst(pairs[:2]),
            worst(pairs[2:]),
        )

    builders: dict[str, Callable[[], Step]] = {
        name: partial(_step, build, layer)
        for name, build in {"ours": ours, **PEERS}.items()
        if name not in without
    }
    title = f"K3  T {tokens}, H {shape.hidden}, I {shape.middle}, rank {RANK}: a layer's linears"
    return in_turns(title, builders | {FLOOR: partial(_gemms, layer)}, errors, rounds)


def _step(build: Callable[[Layer], Built], layer: Layer) -> Step:
    forward, adapters = build(layer)
    upstream = layer.upstream if build is ours else layer.separate()
    return partial(both_ways, forward, layer.inputs, adapters, upstream)


def both_ways(
    forward: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    adapters: Sequence[Tensor],
    upstream: Sequence[Tensor],
) -> Result:
    leaves = [each.detach().requires_grad_() for each in inputs]
    outputs = forward(*leaves)
    grads = torch.autograd.grad(outputs, [*leaves, *adapters], upstream)
    return [each.detach() for each in outputs], grads


def _truth(layer: Layer, rows: int = 4096) -> Result:
    """In float64, from the definition in plain torch, `rows` tokens at a time."""
    forward, adapters = ours(layer.to(torch.float64))
    parts: list[list[Tensor]] = []
    sums = [torch.zeros_like(master) for master in adapters]
    for some in zip(*(each.split(rows) for each in (*layer.inputs, *layer.upstream)), strict=True):  # type: ignore[no-untyped-call]
        x, attention, *upstream = (each.double() for each in some)
        outputs, grads = both_ways(forward, (x, attention), adapters, upstream)
        parts.append([*outputs, *grads[:2]])
        for total, grad in zip(sums, grads[2:], strict=True):
            total += grad
    whole = [torch.cat(each) for each in zip(*parts, strict=True)]
    return whole[:2], whole[2:] + sums


def _gemms(layer: Layer) -> Step:
    """The base's products alone, forward and dX, of linears side by side: the least that any of these can take."""
    weights = [torch.cat([layer.weights[name] for name in group]) for group in GROUPS]
    x, attention = layer.inputs
    grad_qkv, grad_out = layer.upstream
    gate_up = x @ weights[2].T
    middle = gate_up[:, : layer.shape.middle].contiguous()
    inputs, grads = (x, attention, x, middle), (grad_qkv, grad_out, gate_up, grad_out)

    def call() -> Result:
        for input_, weight, grad in zip(inputs, weights, grads, strict=True):
            input_ @ weight.T
            grad @ weight
        return (), ()

    return call


def worst(pairs: Any) -> float:
    return max(relative(found, want) for found, want in pairs)


def in_turns(
    title: str,
    builders: Mapping[str, Callable[[], Step]],
    errors_of: Callable[[Result], tuple[float, ...]],
    rounds: int,
    floor_ms: float | None = None,
) -> dict[str, Any]:
    """The floor is `FLOOR`'s time where none is given."""
    print(f"\n{title}, forward and backward")
    errors: dict[str, tuple[float, ...]] = {}
    calls: dict[str, Step] = {}
    for name, build in builders.items():
        try:
            call = build()
            errors[name] = errors_of(call())
            calls[name] = call
        except Exception as error:  # noqa: BLE001 whatever a peer cannot do here, the others can be measured
            print(f"  {name:<40} left out: {type(error).__name__}: {str(error)[:120]}", flush=True)
        torch.cuda.empty_cache()
    times = interleaved(calls, rounds)
    floor_ms = times[FLOOR].median if floor_ms is None else floor_ms
    first = next(iter(times.values())).median
    for name, time in times.items():
        print(
            f"  {name:<40} {time} ms   {floor_ms / time.median:.3f} of floor"
            f"   ours x {time.median / first:.2f}   errors {' '.join(f'{each:.1e}' for each in errors[name])}",
            flush=True,
        )
    return {
        "floor_ms": floor_ms,
        "ms": {name: time.median for name, time in times.items()},
        "errors": errors,
    }
