"""Rows that are taken several times: by the definition, and the sum of their gradients by the Triton kernel."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bucketrl.kernels.gather import RowIndex, gather_rows

CPU = torch.device("cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Sum = Callable[[Tensor, RowIndex], Tensor]


def index(rows: list[int], length: int, device: torch.device = CPU) -> RowIndex:
    return RowIndex.of(np.array(rows, dtype=np.int64), length, device)


@pytest.fixture(scope="module")
def sum_of_rows(triton_kernels: SimpleNamespace) -> Sum:
    """The kernel's, interpreted."""
    from triton.runtime.interpreter import InterpretedFunction

    from bucketrl.kernels import gather_triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_triton, "sum_rows", InterpretedFunction(gather_triton.sum_rows.fn))
        yield gather_triton.sum_of_rows


def by_definition(grad: Tensor, rows: RowIndex) -> Tensor:
    source = torch.zeros(len(rows.starts_T) - 1, *grad.shape[1:], dtype=grad.dtype, requires_grad=True)
    gather_rows(source, rows).backward(grad)
    assert source.grad is not None
    return source.grad


@pytest.mark.parametrize("way", ["definition", "kernel"])
def test_gradients_of_a_repeated_row_are_summed_without_losing_digits(way: str, sum_of_rows: Sum) -> None:
    """255 addends: a running sum in bfloat16 would stop growing on the way."""
    function = by_definition if way == "definition" else sum_of_rows
    found = function(torch.full((256, 2), 1.5, dtype=torch.bfloat16), index([1] * 255 + [2], 3))
    assert found.dtype == torch.bfloat16
    assert found[:, 0].tolist() == [0.0, float(torch.tensor(382.5).bfloat16()), 1.5]


def test_gathering_is_differentiated_right() -> None:
    source = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gather_rows, (source, index([0, 2, 2, 3, 2], 4)))


@settings(max_examples=25)
@given(data=st.data(), length=st.integers(1, 5), shape=st.sampled_from([(1,), (3,), (2, 5)]))
def test_the_kernel_computes_the_definition(
    sum_of_rows: Sum, data: st.DataObject, length: int, shape: tuple[int, ...]
) -> None:
    rows = data.draw(st.lists(st.integers(0, length - 1), max_size=40))
    grad = torch.randn(len(rows), *shape, generator=torch.Generator().manual_seed(len(rows)))
    torch.testing.assert_close(
        sum_of_rows(grad, index(rows, length)), by_definition(grad, index(rows, length)), rtol=1e-6, atol=1e-6
    )


def test_more_columns_than_a_program_has_and_rows_that_are_not_dense(sum_of_rows: Sum) -> None:
    rows = index([3, 0, 3, 1], 4)
    wide = torch.randn(4, 2600)
    for grad in (wide[:, :1300], wide[:, ::2], wide.view(4, 2, 1300).transpose(1, 2)):
        torch.testing.assert_close(sum_of_rows(grad, rows), by_definition(grad, rows))


@GPU
def test_a_gpu_sums_as_a_cpu_and_the_same_bits_every_time() -> None:
    """A group's prompt behind eight completions."""
    prompt, own = list(range(300)), list(range(300, 1000))
    rows = prompt + [row for part in np.array_split(own, 8) for row in [*prompt, *part.tolist()]]
    grad = torch.randn(len(rows), 8, 128, generator=torch.Generator().manual_seed(0))
    gpu = torch.device("cuda")
    results = []
    for _ in range(3):
        source = torch.zeros(1000, 8, 128, device=gpu, requires_grad=True)
        gather_rows(source, index(rows, 1000, gpu)).backward(grad.to(gpu))
        assert source.grad is not None
        results.append(source.grad.cpu())
    torch.testing.assert_close(results[0], by_definition(grad, index(rows, 1000)), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(each, results[0]) for each in results)
