"""All segments of a micro-batch in one call of a variable-length attention kernel, shared prefixes included.

The kernel takes queries and keys of different lengths and aligns their ends (bottom-right causal mask), which is
what a completion behind a shared prompt needs: as queries its own tokens, as keys the prompt's and its own.

    segments     │ prompt │ A │ B │          queries  │ prompt │ A        │ B        │    T rows
                                             keys     │ prompt │ prompt A │ prompt B │    gathered from T rows
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bucketrl.kernels.gather import RowIndex, gather_rows
from bucketrl.kernels.transfer import to_device
from bucketrl.learner.packing import Segment

logger = logging.getLogger(__name__)

FLASH4_BOUND = 256
"""FlashAttention 4 takes bounds of the lengths, and compiles its kernels again for bounds within one tile. None of
its tiles is longer than this: as the least bound it makes one kernel do for all lengths."""


def varlen_function() -> Callable[..., Tensor]:
    """PyTorch's own: FlashAttention 2, in bfloat16 and float16. Raises ImportError where there is none."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key-value heads without being told; later ones want to be.
    function: Any = varlen_attn
    if "enable_gqa" in inspect.signature(function).parameters:
        function = partial(function, enable_gqa=True)
    return cast(Callable[..., Tensor], function)


def flash4_function() -> Callable[..., Tensor]:
    """FlashAttention 4's, on Hopper, in bfloat16 and float16, by the package `flash-attn-4`.

    A process compiles its kernels at the first call and the first backward pass, again with a window and again for
    more than 256 sequences; counts and lengths change nothing else.
    Raises ImportError without that package, NotImplementedError where the GPU is not for it.
    """
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise NotImplementedError(f"it needs compute capability (9, 0); here is {capability}")
    kernel = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    logger.info("attention: FlashAttention 4 compiles its kernels, which takes many seconds")
    return partial(_flash4, kernel)


def _flash4(
    kernel: Callable[..., tuple[Tensor, Any]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_q: Tensor,
    cumulative_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """`varlen_attn`, its window (…, 0)."""
    before, _ = window_size
    output, _ = kernel(
        q,
        k,
        v,
        cu_seqlens_q=cumulative_q,
        cu_seqlens_k=cumulative_k,
        max_seqlen_q=max(longest_q, FLASH4_BOUND),
        max_seqlen_k=max(longest_k, FLASH4_BOUND),
        softmax_scale=scale,
        causal=before < 0,
        window_size=(None, None) if before < 0 else (before, 0),
        # Not needed: without it a pass that needs no gradient would be another kernel.
        return_lse=True,
    )
    return output


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
            to_device(np.cumsum([0, *each], dtype=np.int32), device) for each in (lengths, key_lengths)
        )
        shared = any(segment.prefix is not None for segment in segments)
        self._key_rows = RowIndex.of(np.concatenate(rows), int(starts[-1]), device) if shared else None
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
