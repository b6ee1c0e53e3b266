"""What `correctness` checks of K3 and K4: against their definitions in float64, and beyond 32-bit offsets."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels_gpu.correctness_policy import Check
from benchmarks.kernels_gpu.heads import relative
from bucketrl.kernels import LoraLayer, LoraLinears, lora, lora_reference, qknorm_rope

ERROR = 0.02
"""Of any result, relative to its norm; bfloat16 leaves 0.004 to 0.01."""
Call = Callable[[Any, Tensor, LoraLinears], Tensor]
"""A K3 function of a module, given its input."""
CALLS: dict[str, tuple[int, Call]] = {
    "linear": (1, lambda module, x, linears: module.lora_linear(x, linears)),
    "norm": (1, lambda module, x, linears: module.rmsnorm_lora_linear(x, _norm(x), 1e-6, linears)),
    "SwiGLU": (2, lambda module, x, linears: module.swiglu_lora_linear(x, linears)),
}
"""By name: widths of its input in units of the layers' own, and the call."""


def checks() -> Iterator[tuple[str, Check]]:
    for name in CALLS:
        for rank in (1, 4, 8, 12, 16, 24, 64):
            yield f"26 K3 {name}, rank {rank}: against float64", partial(_against_float64, name, rank)
        yield f"2 K3 {name}: 90,000 tokens of 12,288 columns", partial(_long, name)
        yield f"29 K3 {name}: the same bits in a second backward pass", partial(_twice, name)
    yield "28 K3: gate and up keep their own adapters, and the masters their bits", _masters
    for norms in (True, False):
        yield f"K4, norms {norms}: against float64", partial(_rope, norms)


def _norm(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.shape[1], device=x.device).to(x.dtype)


def _normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).mul_(scale)


def _linears(size: int, outs: tuple[int, ...], rank: int, dtype: torch.dtype = torch.bfloat16) -> LoraLinears:
    """Of values that bfloat16 holds, so that every type computes the same function."""

    def rounded(tensor: Tensor, target: torch.dtype) -> Tensor:
        return tensor.bfloat16().to(target)

    masters = torch.float64 if dtype == torch.float64 else torch.float32
    return LoraLinears(
        [
            LoraLayer(
                nn.Parameter(rounded(_normal(out, size, scale=size**-0.5), dtype), requires_grad=False),
                nn.Parameter(rounded(_normal(rank, size, scale=size**-0.5, seed=out), masters)),
                nn.Parameter(rounded(_normal(out, rank, scale=rank**-0.5, seed=1), masters)),
                0.5,
            )
            for out in outs
        ]
    )


def _results(module: Any, name: str, x: Tensor, linears: LoraLinears, upstream: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of each master."""
    x = x.clone().requires_grad_()
    out = CALLS[name][1](module, x, linears)
    return [out.detach(), *torch.autograd.grad(out, [x, *linears.adapter()], upstream.to(out.dtype))]


def _against_float64(name: str, rank: int) -> tuple[float, float]:
    size, outs, count = 320, (200, 72), 333
    x = _normal(count, CALLS[name][0] * size).bfloat16()
    upstream = _normal(count, sum(outs)).bfloat16()
    found = _results(lora, name, x, _linears(size, outs, rank), upstream)
    exact = _linears(size, outs, rank, torch.float64)
    want = _results(lora_reference, name, x.double(), exact, upstream)
    return max(relative(a.double(), b) for a, b in zip(found, want, strict=True)), ERROR


def _long(name: str) -> tuple[float, float]:
    """Whole against thirds: outputs and input gradients of the same rows, and the sums of the adapters'."""
    size, outs, count = 12_288, (64,), 90_000
    linears = _linears(size, outs, 16)
    x = _normal(count, CALLS[name][0] * size).bfloat16()
    upstream = _normal(count, sum(outs)).bfloat16()
    whole = _results(lora, name, x, linears, upstream)
    parts = [
        _results(lora, name, x[rows], linears, upstream[rows])
        for rows in (slice(first, first + count // 3) for first in range(0, count, count // 3))
    ]
    want = [torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])]
    want += [sum(each[1:], each[0]) for each in zip(*(part[2:] for part in parts), strict=True)]
    return max(relative(a.float(), b.float()) for a, b in zip(whole, want, strict=True)), 1e-3


def _twice(name: str) -> tuple[float, float]:
    """With the output and the upstream gradient written over by their owner in between."""
    size, outs = 256, (128, 64)
    linears = _linears(size, outs, 16)
    x = _normal(500, CALLS[name][0] * size).bfloat16().requires_grad_()
    upstream = _normal(500, sum(outs)).bfloat16()
    out = CALLS[name][1](lora, x, linears)
    leaves = [x, *linears.adapter()]
    first = torch.autograd.grad(out, leaves, upstream.clone(), retain_graph=True)
    kept = [each.clone() for each in first]
    for each in (out.detach(), *first):
        each.zero_()
    again = torch.autograd.grad(out, leaves, upstream)
    return float(sum(not torch.equal(a, b) for a, b in zip(kept, again, strict=True))), 0.0


def _masters() -> tuple[float, float]:
    size = 256
    linears = _linears(size, (128, 128), 16)
    before = [master.detach().clone() for master in linears.adapter()]
    base = [layer.weight.detach().clone() for layer in linears.layers]
    x = _normal(300, size).bfloat16()
    both = lora.lora_linear(x, linears)
    with torch.no_grad():
        linears.layers[1].b.zero_()
    changed = lora.lora_linear(x, linears)
    faults = [
        torch.equal(both[:, :128], changed[:, :128]),
        not torch.equal(both[:, 128:], changed[:, 128:]),
        all(torch.equal(a, b) for a, b in zip(linears.adapter()[:3], before[:3], strict=True)),
        all(torch.equal(layer.weight, weight) for layer, weight in zip(linears.layers, base, strict=True)),
    ]
    return float(sum(not right for right in faults)), 0.0


def _rope(norms: bool) -> tuple[float, float]:
    heads, kv_heads, size, count = 12, 4, 96, 777
    qkv = _normal(count, (heads + 2 * kv_heads) * size).bfloat16()
    angles = _normal(count, size // 2).repeat(1, 2)
    weights = [_normal(size, seed=seed).bfloat16() if norms else None for seed in (1, 2)]
    upstream = [_normal(count, n, size, seed=n).bfloat16() for n in (heads, kv_heads, kv_heads)]

    def results(dtype: torch.dtype) -> list[Tensor]:
        x = qkv.to(dtype).requires_grad_()
        given = [None if weight is None else weight.to(dtype) for weight in weights]
        cos, sin = angles.cos().bfloat16().to(dtype), angles.sin().bfloat16().to(dtype)
        made = qknorm_rope(x, heads, kv_heads, size, cos, sin, *given)
        grads = torch.autograd.grad(made, [x], [each.to(dtype) for each in upstream])
        return [each.detach() for each in (*made, *grads)]

    found, want = results(torch.bfloat16), results(torch.float64)
    return max(relative(a.double(), b) for a, b in zip(found, want, strict=True)), ERROR
