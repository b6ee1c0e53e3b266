"""The backward pass of `gather_rows` on a GPU: every row of the result is summed by one program, in a fixed order.

`index_add_` would take a float32 copy of the gradient and atomics, whose order and so whose result varies.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bucketrl.kernels.gather import RowIndex

ADDENDS = 8
"""Of a row that are loaded at once."""
COLUMNS = 1024
"""Of a program, at most."""


@triton.jit
def sum_rows(GRAD, ORDER, STARTS, OUT, W, sgk, BR: tl.constexpr, BW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    start = tl.load(STARTS + row)
    stop = tl.load(STARTS + row + 1)
    total = tl.zeros((BW,), tl.float32)
    for first in range(start, stop, BR):
        place = first + tl.arange(0, BR)
        addend = tl.load(ORDER + place, mask=place < stop, other=0)
        inside = (place < stop)[:, None] & (column < W)[None, :]
        value = tl.load(GRAD + addend[:, None] * sgk + column[None, :], mask=inside, other=0.0)
        total += tl.sum(value.to(tl.float32), 0)
    tl.store(OUT + row * W + column, total.to(OUT.dtype.element_ty), mask=column < W)


@torch.compiler.disable
def sum_of_rows(grad: Tensor, index: RowIndex) -> Tensor:
    """[K, …] to [T, …]."""
    count, width = len(index.starts_T) - 1, math.prod(grad.shape[1:])
    grad_KW = grad.reshape(len(grad), width)
    if grad_KW.stride(1) != 1:
        grad_KW = grad_KW.contiguous()
    out = grad.new_empty((count, *grad.shape[1:]))
    if out.numel():
        columns = min(COLUMNS, triton.next_power_of_2(width))
        sum_rows[(count, triton.cdiv(width, columns))](
            grad_KW, index.order_K, index.starts_T, out, width, grad_KW.stride(0), BR=ADDENDS, BW=columns
        )
    return out
