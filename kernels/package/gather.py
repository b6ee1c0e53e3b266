"""`gather_rows`: rows of a matrix, some of them several times, and the sums of their gradients."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bucketrl.kernels.transfer import to_device
from bucketrl.kernels.triton_here import triton_is_here


@dataclass(frozen=True)
class RowIndex:
    """Which of T rows are taken, in which order; for `gather_rows`. All int64, on the device of the rows."""

    rows_K: Tensor
    order_K: Tensor
    """Places in `rows_K`: those that hold row 0, then those that hold row 1, and so on, each in ascending order."""
    starts_T: Tensor
    """[T + 1]: where in `order_K` the places of each row begin."""

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], length: int, device: torch.device) -> "RowIndex":
        """rows: [K], each in 0 … length - 1, which is not checked."""
        starts = np.zeros(length + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=length), out=starts[1:])
        arrays = rows, np.argsort(rows, kind="stable"), starts
        return cls(*(to_device(each, device) for each in arrays))


def gather_rows(source: Tensor, index: RowIndex) -> Tensor:
    """source[rows] along the first dimension. [T, …] to [K, …].

    The gradients of a row that is taken several times are summed in float32 or better, whatever their type, and
    rounded once: with as many addends as a group has completions, sums in bfloat16 would lose most of their digits.
    """
    apply: Any = _GatherRows.apply
    gathered: Tensor = apply(source, index)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: RowIndex) -> Tensor:
        ctx.index = index
        return source.index_select(0, index.rows_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        if grad.is_cuda and grad.dtype != torch.float64 and triton_is_here():
            from bucketrl.kernels import gather_triton

            return gather_triton.sum_of_rows(grad, ctx.index), None
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((len(ctx.index.starts_T) - 1, *grad.shape[1:]), dtype=dtype)
        return total.index_add_(0, ctx.index.rows_K, grad.to(dtype)).to(grad.dtype), None
