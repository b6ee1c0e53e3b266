"""Attention within packed sequences, as an attention implementation of transformers.

A block-causal mask over T packed tokens costs T² work however short the sequences are; one call per
sequence costs the sum of their squares (measured on one CPU core, 320 sequences of 25 tokens, tiny
model, forward and backward: 0.5 s instead of 10.4 s). On a GPU one call of a variable-length kernel does
the same work for all of them: `attention_varlen.py`.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bucketrl.learner.attention_varlen import VarlenLayout, flash4_function, varlen_function
from bucketrl.learner.packing import Segment

logger = logging.getLogger(__name__)

NAME = "bucketrl_packed"
"""Value of `attn_implementation`. Calls of such a model must pass `layout`."""
PROBE_TOLERANCE = 0.03
"""Of outputs and gradients, relative to their norm; bfloat16 rounding is 0.004, a misplaced mask 0.3 and more."""
PROBE_SCORE = -120.0
"""Added to all scores of a second probe, which changes no result. Massive activations do it in models; keys that a
backward pass forgets to mask weigh exp(120) then (pytorch 196678: NaN on Hopper)."""


class Layout(Protocol):
    """Which token of a micro-batch sees which: made once, used by every layer."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """query [1, heads, T, head_dim], key and value [1, kv heads, T, head_dim] to [1, T, heads, head_dim].

        `window`: tokens that a token sees, itself included; None is all before it.
        """
        ...


MakeLayout = Callable[[Sequence[Segment]], Layout]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment and to its prefix. No attention weights are returned."""
    return layout.attend(query, key, value, scaling, sliding_window), None


class SdpaLayout:
    """One call per segment: in every type, on every device, bit for bit the same on CPU."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._segments = segments
        self._lengths = [segment.length for segment in segments]
        self._device = device
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        # One split, whose backward is one concatenation; a slice's would be T tokens for each segment.
        queries, keys, values = (torch.split(each, self._lengths, dim=2) for each in (query, key, value))
        outputs = []
        for (_, prefix), q, k, v in zip(self._segments, queries, keys, values, strict=True):
            before = 0
            if prefix is not None:
                before = self._lengths[prefix]
                k, v = torch.cat([keys[prefix], k], dim=2), torch.cat([values[prefix], v], dim=2)
            mask = self._mask(q.shape[2], before, window)
            outputs.append(
                scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()

    def _mask(self, length: int, before: int, window: int | None) -> Tensor | None:
        """[length, before + length], True where a query (row) sees a key; None where plain causality says all."""
        if before == 0 and (window is None or length <= window):
            return None
        found = self._masks.get((length, before, window))
        if found is None:
            places = torch.arange(before + length, device=self._device)
            distance = places[before:, None] - places[None, :]
            found = (distance >= 0) & (distance < (window or before + length))
            self._masks[length, before, window] = found
        return found


def choose(text_config: Any, device: torch.device, dtype: torch.dtype) -> MakeLayout:
    """The fastest attention that this machine is seen to do right, for a model of transformers' `text_config`."""
    sdpa = partial(SdpaLayout, device=device)
    if device.type != "cuda":
        return sdpa
    heads = int(text_config.num_attention_heads)
    kv_heads = int(getattr(text_config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text_config, "head_dim", None) or text_config.hidden_size // heads)
    windows = (None, 24) if getattr(text_config, "sliding_window", None) else (None,)
    for name, function in (("FlashAttention 4", flash4_function), ("PyTorch", varlen_function)):
        try:
            varlen = partial(VarlenLayout, device=device, function=function())
            errors = [probe(varlen, heads, kv_heads, head_dim, window, device, dtype) for window in windows]
        except (ImportError, NotImplementedError) as missing:
            logger.info("attention: not by %s: %s", name, missing)
            continue
        except Exception as found:  # noqa: BLE001 - of compilers and drivers, which raise what they like
            problem = " ".join(f"{type(found).__name__}: {found}".split())[:300]
            logger.warning("attention: not by %s: %s", name, problem)
            continue
        if all(error <= PROBE_TOLERANCE for error in errors):
            logger.info("attention: all sequences of a micro-batch in one call of %s's kernel", name)
            return varlen
        logger.warning("attention: not by %s: it is wrong here, by %s", name, errors)
    logger.warning("attention: one call per sequence, which is slower")
    return sdpa


def probe(
    make: MakeLayout,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """The largest relative error of `make`'s layouts against float32 SDPA, NaN if one is: of the output and of the
    gradients of query, key and value, for segments of one token and of many, with a prefix and without, with
    PROBE_SCORE and without. 64 keys, with a prefix and without, are half a tile of some kernels."""
    lengths = ((40, None), (1, 0), (33, 0), (1, None), (70, None), (24, 0), (64, None))
    segments = [Segment(*each) for each in lengths]
    generator = torch.Generator().manual_seed(0)
    tokens = sum(segment.length for segment in segments)
    draw = [torch.randn(1, n, tokens, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(1, tokens, heads, head_dim, generator=generator).to(device, dtype)
    shifted = [each.clone() for each in draw]
    size = (head_dim**0.5 * -PROBE_SCORE / 3) ** 0.5
    shifted[0][..., 0], shifted[1][..., 0] = -3 * size, size
    errors = []
    for inputs in (draw, shifted):
        found, want = (
            _results(
                layout(segments),
                [each.to(device, dtype).to(kind) for each in inputs],
                upstream.to(kind),
                window,
            )
            for layout, kind in ((make, dtype), (partial(SdpaLayout, device=device), torch.float32))
        )
        errors += [(a.float() - b).norm() / b.norm() for a, b in zip(found, want, strict=True)]
    # Not Python's max, which can lose a NaN.
    return float(torch.stack(errors).max())


def _results(
    layout: Layout, inputs: Sequence[Tensor], upstream: Tensor, window: int | None
) -> tuple[Tensor, ...]:
    """Output and gradients."""
    query, key, value = leaves = [each.requires_grad_() for each in inputs]
    output = layout.attend(query, key, value, None, window)
    return (output.detach(), *torch.autograd.grad(output, leaves, upstream))


AttentionInterface.register(NAME, packed_attention)
