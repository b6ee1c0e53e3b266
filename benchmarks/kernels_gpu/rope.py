"""K4: norms of heads and rotary embedding, forward and backward, in turns with its peers."""

import importlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_gpu.linears import TOKENS, Result, Step, both_ways, in_turns, worst
from benchmarks.kernels_gpu.linears_peers import EPS, Shape, norm_module, qwen3
from bucketrl.kernels.rope import qknorm_rope

MEMORY_TB_S = 4.3
"""What a large copy reaches on an H200: what the floor is reckoned at."""


def measure(
    shape: Shape,
    rounds: int,
    without: Collection[str] = (),
    tokens: int = TOKENS,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Prints a table; the figures by name. Errors: of outputs and of dX, each the worst of queries and keys.

    The peers have q and k apart, as of two linears, and nothing to do for v, whose gradient ours puts beside the
    others: that copy is within our time and within the floor.
    """
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    queries, keys = heads * size, kv_heads * size
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

    qkv, weights = normal(tokens, queries + 2 * keys), [1 + normal(size, scale=0.1) for _ in range(2)]
    exponents = torch.arange(0, size, 2, device=device) / size
    angles = torch.arange(tokens, device=device)[:, None] / 1e6**exponents
    cos, sin = (table.repeat(1, 2).to(dtype) for table in (angles.cos(), angles.sin()))
    upstream = [normal(tokens, count, size) for count in (heads, kv_heads, kv_heads)]
    split = [part.contiguous() for part in qkv.split([queries, keys, keys], dim=1)[:2]]  # type: ignore[no-untyped-call]

    def fused(qkv_TN: Tensor) -> Sequence[Tensor]:
        cos_TD, sin_TD, q_weight, k_weight = (each.to(qkv_TN.dtype) for each in (cos, sin, *weights))
        return qknorm_rope(qkv_TN, heads, kv_heads, size, cos_TD, sin_TD, q_weight, k_weight, EPS)

    def eager() -> Callable[..., Sequence[Tensor]]:
        norms, rotary = [norm_module(weight) for weight in weights], qwen3().apply_rotary_pos_emb

        def forward(*parts: Tensor) -> Sequence[Tensor]:
            pairs = zip(parts, norms, strict=True)
            query, key = (norm(part.view(1, tokens, -1, size)).transpose(1, 2) for part, norm in pairs)
            return [each.transpose(1, 2)[0] for each in rotary(query, key, cos[None], sin[None])]

        return forward

    def liger() -> Step:
        norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
        rope = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction.apply

        def forward(*parts: Tensor) -> Sequence[Tensor]:
            pairs = zip(parts, weights, strict=True)
            query, key = (
                norm(part.view(1, tokens, -1, size), weight, EPS, 0.0, "llama", False).transpose(1, 2)
                for part, weight in pairs
            )
            return [each.transpose(1, 2)[0] for each in rope(query, key, cos[None], sin[None])[:2]]

        # It rotates the gradients that it is given in place.
        return partial(both_ways, forward, split, (), [each.clone() for each in upstream[:2]])

    builders: dict[str, Callable[[], Step]] = {
        "ours": lambda: partial(both_ways, fused, (qkv,), (), upstream),
        "transformers": lambda: partial(both_ways, eager(), split, (), upstream[:2]),
        "torch.compile": lambda: partial(
            both_ways, torch.compile(eager(), dynamic=False), split, (), upstream[:2]
        ),
        "Liger": liger,
    }
    (want_query, want_key, _), (want_grad,) = both_ways(
        fused, (qkv.double(),), (), [each.double() for each in upstream]
    )

    def errors(result: Result) -> tuple[float, ...]:
        (query, key, *_), grads = result
        found_grad = torch.cat(list(grads), dim=1)
        parts = (slice(0, queries), slice(queries, queries + keys))
        return (
            worst(((query, want_query), (key, want_key))),
            worst((found_grad[:, part], want_grad[:, part]) for part in parts),
        )

    rows = tokens * dtype.itemsize / MEMORY_TB_S / 1e9
    floor_ms = rows * (5 * (queries + keys) + 2 * keys + 4 * size)
    title = f"K4  T {tokens}, {heads} heads and {kv_heads} of {size}: norms of heads and rotary embedding"
    named = {name: build for name, build in builders.items() if name not in without}
    return in_turns(title, named, errors, rounds, floor_ms)
