"""Which way `linear_logprob` takes, and that a Hopper kernel that fails or errs is not taken.

No CPU runs that kernel. `by_torch` is in its place, with the same results.
"""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrl.kernels import logprob_cuda, logprob_hopper, logprob_plan, reference
from bucketrl.kernels.logprob_plan import HOPPER, HOPPER_BLOCK, HOPPER_TOLERANCE, Plan, plan_for

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's, of the interpreter's masked lanes

CPU = torch.device("cpu")
TRITON = Plan(first="triton", block=64, rows_per_tile=16)


def by_torch(
    hidden: Tensor, weight: Tensor, targets: Tensor, inverse: Tensor, target: Tensor, exp: Tensor, sums: Tensor,
    *, store: bool, programs: int,
) -> None:  # fmt: skip
    target = target[: len(hidden)]
    for tile, some in enumerate(weight.split(HOPPER_BLOCK)):  # type: ignore[no-untyped-call]
        z = hidden.float() @ some.float().T * inverse[:, None]
        top = z.amax(1)
        anchor = torch.where(top > target + 60.0, top, target)
        d = z - anchor[:, None]
        own = targets - tile * HOPPER_BLOCK
        e = d.exp() * (torch.arange(len(some)) != own[:, None])
        e[targets == reference.IGNORE_INDEX] = 0.0
        sums[:, tile, : len(hidden)] = torch.stack([anchor, e.sum(1), (e * d).nan_to_num().sum(1)])
        if store:
            exp[:, tile * HOPPER_BLOCK :][:, : len(some)] = e


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., None]], None]]:
    """Makes this a Hopper GPU with the given kernel."""

    def call(kernel: Callable[..., None]) -> None:
        monkeypatch.setattr(logprob_plan, "is_hopper", lambda device: True)
        monkeypatch.setattr(logprob_cuda, "_multiprocessors", lambda device: 132)
        monkeypatch.setattr(logprob_hopper, "gemm_exp", kernel)

    logprob_plan.hopper_is_right.cache_clear()
    yield call
    logprob_plan.hopper_is_right.cache_clear()


def broken(*operands: Tensor, **_: Any) -> None:
    raise AttributeError("Gluon has no attribute 'warpgroup_mma'\nat 10:4")


def spoilt(spoil: Callable[[Tensor, Tensor], object]) -> Callable[..., None]:
    def kernel(*operands: Tensor, **options: Any) -> None:
        by_torch(*operands, **options)
        spoil(operands[5], operands[6])

    return kernel


def operands(rows: int = 5, size: int = 16, vocabulary: int = 600) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, size, generator=generator).bfloat16()
    weight = torch.randn(vocabulary, size, generator=generator).bfloat16()
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=generator)


def both_ways(call: Any, hidden: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden = hidden.clone().requires_grad_()
    logprobs, entropy = call(hidden, *others, **options)
    logprobs.backward(torch.linspace(0.5, 2.0, len(hidden), dtype=logprobs.dtype))
    assert hidden.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad


def agree(found: tuple[Tensor, ...], hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> None:
    want = both_ways(reference.linear_logprob, hidden.double(), weight.double(), targets, **options)
    torch.testing.assert_close(found[0].double(), want[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1].double(), want[1], rtol=1e-5, atol=1e-5)
    assert float((found[2].double() - want[2]).norm()) <= 1.2e-2 * float(want[2].norm())


class TestWithoutAPlan:
    def test_a_hopper_gpu_takes_its_kernel(
        self, use: Callable[..., None], triton_kernels: SimpleNamespace
    ) -> None:
        """In two chunks of rows: three with a gradient, two without."""
        stores: list[bool] = []

        def kernel(*operands: Tensor, store: bool, programs: int) -> None:
            stores.append(store)
            by_torch(*operands, store=store, programs=programs)

        use(kernel)
        assert plan_for(None, *operands()[:2], None) == HOPPER
        stores.clear()
        options = {
            "temperature": torch.linspace(0.5, 2.0, 5),
            "grad_rows_N": torch.tensor([True, False, True, False, True]),
        }
        call = triton_kernels.logprob.linear_logprob
        agree(both_ways(call, *operands(), **options), *operands(), **options)
        assert stores == [True, False]

    def test_softcap_other_gpus_and_odd_rows_go_by_cublas(self, use: Callable[..., None]) -> None:
        hidden, weight, _ = operands()
        assert plan_for(None, hidden, weight, None) == Plan()
        use(by_torch)
        assert plan_for(None, hidden, weight, None) == HOPPER
        assert plan_for(None, hidden, weight, 30.0) == Plan()
        assert plan_for(None, *operands(size=12)[:2], None) == Plan()
        assert plan_for(None, hidden[:1].expand(5, 16), weight, None) == Plan()

    @pytest.mark.parametrize(
        ("kernel", "reason"),
        [
            (broken, r"AttributeError: Gluon has no attribute"),
            (spoilt(lambda exp, sums: exp[3, 600:].zero_()), r"wrong here \(by 0\.\d+\)"),
            (spoilt(lambda exp, sums: sums[1, 2].mul_(1.02)), r"wrong here \(by 0\.0\d+\)"),
            (spoilt(lambda exp, sums: sums[2, 3, 150].fill_(torch.nan)), r"wrong here \(by nan\)"),
            (spoilt(lambda exp, sums: exp[0, 5].fill_(1.0)), r"wrong here \(by "),
            (lambda *_, **__: None, r"wrong here \(by nan\)"),
        ],
        ids=["fails to compile", "a tile lost", "a sum off", "one NaN", "an ignored row", "nothing written"],
    )
    def test_a_kernel_that_fails_or_errs_is_not_taken(
        self,
        use: Callable[..., None],
        caplog: pytest.LogCaptureFixture,
        kernel: Callable[..., None],
        reason: str,
    ) -> None:
        use(kernel)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert plan_for(None, *operands()[:2], None) == Plan()
        (record,) = caplog.records
        assert re.search(reason, record.message)

    def test_a_gpu_that_is_full_for_now_says_nothing_about_the_kernel(self, use: Callable[..., None]) -> None:
        def full(*_: Tensor, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        use(full)
        with pytest.raises(torch.OutOfMemoryError):
            plan_for(None, *operands()[:2], None)
        use(by_torch)
        assert plan_for(None, *operands()[:2], None) == HOPPER

    def test_and_the_results_are_right(
        self, use: Callable[..., None], triton_kernels: SimpleNamespace
    ) -> None:
        use(broken)
        agree(both_ways(triton_kernels.logprob.linear_logprob, *operands(3)), *operands(3))

    def test_an_older_triton_is_not_tried(
        self, use: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(by_torch)
        monkeypatch.setattr("triton.__version__", "3.5.1")
        assert plan_for(None, *operands()[:2], None) == Plan()
        assert "Triton is 3.5.1; want 3.6 or later" in caplog.text

    def test_the_trial_is_exact_to_rounding_and_leaves_the_random_numbers_alone(
        self, use: Callable[..., None]
    ) -> None:
        use(by_torch)
        before = torch.get_rng_state()
        assert logprob_plan.hopper_error(CPU) < HOPPER_TOLERANCE / 2
        assert torch.equal(before, torch.get_rng_state())


class TestAPlanThatIsGiven:
    @pytest.mark.parametrize(
        "plan", [Plan(), Plan(columns=8192), TRITON, HOPPER], ids=lambda plan: plan.first
    )
    def test_is_obeyed_untried(self, use: Callable[..., None], plan: Plan) -> None:
        use(broken)
        assert plan_for(plan, *operands()[:2], None) == plan

    def test_its_failures_are_raised(self, use: Callable[..., None], triton_kernels: SimpleNamespace) -> None:
        use(broken)
        with pytest.raises(AttributeError, match="warpgroup_mma"):
            triton_kernels.logprob.linear_logprob(*operands(), plan=HOPPER)

    def test_what_the_hopper_kernel_cannot_do_triton_does(self, use: Callable[..., None]) -> None:
        hidden, weight, _ = operands()
        triton = replace(HOPPER, first="triton")
        assert plan_for(HOPPER, hidden, weight, None) == triton
        use(by_torch)
        assert plan_for(HOPPER, hidden, weight, 30.0) == triton

    def test_rows_that_no_descriptor_can_read_go_by_cublas(self, use: Callable[..., None]) -> None:
        use(by_torch)
        for plan in (TRITON, HOPPER):
            assert plan_for(plan, *operands(size=12)[:2], None) == replace(plan, first="cublas")

    def test_of_other_tiles_is_refused(self) -> None:
        with pytest.raises(ValueError, match='block is 128; with first="hopper" it must be 256'):
            Plan(first="hopper", block=128)
