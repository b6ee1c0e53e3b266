"""All segments of a micro-batch in one call of a variable-length attention kernel, shared prefixes included.

The kernel takes queries and keys of different lengths and aligns their ends (bottom-right causal mask), which is
what a completion behind a shared prompt needs: as queries its own tokens, as keys the prompt's and its own.

    segments     │ prompt │ A │ B │          queries  │ prompt │ A        │ B        │    T rows
                                             keys     │ prompt │ prompt A │ prompt B │    gathered from T rows
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bucketrl.learner.packing import Segment


def varlen_function() -> Callable[..., Tensor]:
    """PyTorch's own: FlashAttention 2, in bfloat16 and float16. Raises ImportError where there is none."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key-value heads without being told; later ones want to be.
    function: Any = varlen_attn
    if "enable_gqa" in inspect.signature(function).parameters:
        function = partial(function, enable_gqa=True)
    return cast(Callable[..., Tensor], function)


class VarlenLayout:
    """`attention.Layout` by `function`, which has the signature of `torch.nn.attention.varlen.varlen_attn`."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, function: Callable[..., Tensor]
    ) -> None:
        lengths = [segment.length for segment in segments]
        starts = np.cumsum([0, *lengths])
        rows = [
            np.arange(starts[i], starts[i + 1])
            for index, segment in enumerate(segments)
            for i in ((index,) if segment.prefix is None else (segment.prefix, index))
        ]
        key_lengths = [n + (0 if p is None else lengths[p]) for n, p in segments]
        self._function = function
        self._longest = max(lengths), max(key_lengths)
        self._cumulative = tuple(
            torch.tensor(np.cumsum([0, *each]), dtype=torch.int32, device=device)
            for each in (lengths, key_lengths)
        )
        shared = any(segment.prefix is not None for segment in segments)
        self._key_rows = torch.from_numpy(np.concatenate(rows)).to(device) if shared else None
        """Which of the T rows the keys are; None where they are all, in order."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        # Not each[0]: its gradient would be copied into zeros.
        q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
        if self._key_rows is not None:
            k, v = gather_rows(k, self._key_rows), gather_rows(v, self._key_rows)
        # The kernel counts the tokens before the query; its -1 is all of them.
        seen = (-1 if window is None else window - 1, 0)
        output = self._function(q, k, v, *self._cumulative, *self._longest, scale=scaling, window_size=seen)
        return output[None]


def gather_rows(source: Tensor, rows: Tensor) -> Tensor:
    """source[rows] along the first dimension; `rows` may repeat. [T, …], [K] to [K, …].

    The gradients of a repeated row are summed in float32 or better, whatever their type: with as many addends as a
    group has completions, sums in bfloat16 would lose most of their digits.
    """
    apply: Any = _GatherRows.apply
    gathered: Tensor = apply(source, rows)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.length = source.shape[0]
        return source.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (rows,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((ctx.length, *grad.shape[1:]), dtype=dtype)
        return total.index_add_(0, rows, grad.to(dtype)).to(grad.dtype), None
