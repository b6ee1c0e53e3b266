"""`linear_logprob`'s Triton kernels against float64, on the CPU.

The numbers in the names are those of the bug reports of other implementations that the case comes from.
The interpreter truncates where a GPU rounds to bfloat16, so gradients have twice the error here.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrl.kernels import reference
from bucketrl.kernels.logprob import linear_logprob

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's, of the overflows that cases ask for

BF16_GRADIENT = 1.2e-2
"""Relative error of a gradient whose exponentials and result are bfloat16."""
PLANS: dict[str, dict[str, Any]] = {
    "whole rows": {"block": 64},
    "tiles": {"columns": 64, "block": 32, "workspace_bytes": 2000},
    "triton": {"first": "triton", "block": 64, "rows_per_tile": 16},
}


def operands(rows: int = 4, size: int = 16, vocabulary: int = 131, scale: float = 3.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, size, generator=generator)
    weight = torch.randn(vocabulary, size, generator=generator) * scale / size**0.5
    return hidden.bfloat16(), weight.bfloat16(), torch.randint(0, vocabulary, (rows,), generator=generator)


def results(call: Any, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, and the gradient of uneven upstream gradients of both, in float64."""
    hidden = hidden.clone().requires_grad_()
    logprobs, entropy = call(hidden, weight, targets, **options)
    upstream = torch.linspace(0.0, 2.0, len(targets), dtype=logprobs.dtype)
    loss = (logprobs * upstream).sum()
    if options.get("entropy_grad"):
        loss = loss - (entropy * upstream.flip(0)).sum()
    loss.backward()
    assert hidden.grad is not None
    return logprobs.detach().double(), entropy.detach().double(), hidden.grad.double()


def check(
    kernels: SimpleNamespace,
    plan: dict[str, Any],
    *inputs: Tensor,
    logprob_error: float = 1e-5,
    of_gradient: slice = slice(None),
    **options: Any,
) -> tuple[Tensor, ...]:
    """The kernel's results, if they are those of the definition in float64."""
    hidden, weight, targets = inputs
    found = results(kernels.logprob.linear_logprob, *inputs, plan=kernels.logprob.Plan(**plan), **options)
    want = results(reference.linear_logprob, hidden.double(), weight.double(), targets, **options)
    torch.testing.assert_close(found[0], want[0], rtol=1e-6, atol=logprob_error)
    torch.testing.assert_close(found[1], want[1], rtol=1e-5, atol=logprob_error)
    found_grad, want_grad = found[2][:, of_gradient], want[2][:, of_gradient]
    assert float((found_grad - want_grad).norm()) <= BF16_GRADIENT * float(want_grad.norm()) + 1e-30
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
class TestEveryPlan:
    def test_4_a_ragged_vocabulary_has_no_phantom_columns(
        self, triton_kernels: SimpleNamespace, plan: dict[str, Any]
    ) -> None:
        """And 9: the first row is ignored and its upstream gradient is 0."""
        hidden, weight, targets = operands()
        targets[0] = reference.IGNORE_INDEX
        hidden[0] = torch.nan
        logprobs, entropy, grad = check(triton_kernels, plan, hidden, weight, targets)
        assert float(logprobs[0]) == float(entropy[0]) == float(grad[0].abs().sum()) == 0.0

    def test_5_logits_far_below_zero(self, triton_kernels: SimpleNamespace, plan: dict[str, Any]) -> None:
        """The shift's own gradient is 500 - Σ p · 500: no bfloat16 gives that."""
        hidden, weight, targets = operands()
        hidden[:, 0], weight[:, 0] = 1.0, -500.0
        rest = slice(1, None)
        check(triton_kernels, plan, hidden, weight, targets, logprob_error=3e-4, of_gradient=rest)

    def test_a_target_far_below_the_maximum(
        self, triton_kernels: SimpleNamespace, plan: dict[str, Any]
    ) -> None:
        """exp(z - z[target]) overflows in every row; and 17: the entropy has a gradient."""
        hidden, weight, targets = operands(rows=2, scale=90.0)
        options = {"entropy_grad": True, "temperature": torch.tensor([0.6, 1.0])}
        logprobs, *_ = check(triton_kernels, plan, hidden, weight, targets, logprob_error=2e-4, **options)
        assert float(logprobs.max()) < -88.0

    def test_31_softcap_and_temperature_compose(
        self, triton_kernels: SimpleNamespace, plan: dict[str, Any]
    ) -> None:
        hidden, weight, targets = operands(rows=3, scale=8.0)
        check(triton_kernels, plan, hidden, weight, targets, softcap=5.0, temperature=0.7)


@pytest.mark.parametrize("digits", [1, 3, 5, 8])
def test_10_a_confident_token_keeps_its_gradient(triton_kernels: SimpleNamespace, digits: int) -> None:
    """p = 1 - 10^-digits: nothing is subtracted from 1, so the row is right to a per cent. And 32."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 8, generator=generator).bfloat16()
    weight[0, 0], weight[1:, 0] = 8.0, 0.0
    hidden = torch.randn(1, 8, generator=generator).bfloat16() * 0.1
    hidden[0, 0] = (digits * 2.302585 + 4.3) / 8.0
    logprobs, *_ = check(triton_kernels, {"block": 64}, hidden.repeat(2, 1), weight, torch.zeros(2).long())
    assert -2 * 10.0**-digits < float(logprobs[1]) < 0.0


def test_what_tensor_cores_cut_off_is_made_good(
    triton_kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact target's logit against others that are too small by a ten thousandth."""
    kernels, inputs = triton_kernels.logprob, operands()
    exact, lost = kernels._matmul, 1e-4

    def cutting(left: Tensor, right: Tensor, out: Tensor) -> None:
        exact(left, right, out)
        out *= 1.0 - lost

    monkeypatch.setattr(kernels, "_matmul", cutting)
    monkeypatch.setattr(kernels, "CUT_OFF", lost / inputs[0].shape[1])
    with pytest.raises(AssertionError):
        check(triton_kernels, {"block": 64}, *inputs)
    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    check(triton_kernels, {"block": 64}, *inputs)


def test_6_a_target_outside_the_vocabulary_is_not_a_number(triton_kernels: SimpleNamespace) -> None:
    hidden, weight, _ = operands(rows=2, vocabulary=60)
    targets = torch.tensor([60, -1])
    logprobs, _ = triton_kernels.logprob.linear_logprob(hidden, weight, targets, plan=plan_of(triton_kernels))
    assert logprobs.isnan().all()


def test_8_24_the_gradient_error_does_not_grow_with_tiles(triton_kernels: SimpleNamespace) -> None:
    inputs = operands(rows=2, vocabulary=260)
    plans = [{"block": 256}, {"columns": 16, "block": 16}]
    found = [check(triton_kernels, plan, *inputs)[2] for plan in plans]
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=1e-4)


def test_grad_rows_are_the_rows_with_a_gradient(triton_kernels: SimpleNamespace) -> None:
    inputs = operands(rows=5, vocabulary=60)
    rows = torch.tensor([True, False, True, False, False])
    *_, grad = check(triton_kernels, {"block": 64}, *inputs, grad_rows_N=rows)
    assert (grad != 0).any(dim=1).tolist() == [False, False, True, False, False]  # upstream is 0 in row 0


def test_29_two_backward_passes_give_the_same(triton_kernels: SimpleNamespace) -> None:
    hidden, weight, targets = operands(rows=2, vocabulary=60)
    hidden.requires_grad_()
    logprobs, _ = triton_kernels.logprob.linear_logprob(hidden, weight, targets, plan=plan_of(triton_kernels))
    grads = [torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row(triton_kernels: SimpleNamespace, rows: int) -> None:
    hidden, weight, targets = operands(rows=rows, vocabulary=60)
    if rows:
        check(triton_kernels, {"block": 64}, hidden, weight, targets)
        return
    hidden.requires_grad_()
    logprobs, entropy = triton_kernels.logprob.linear_logprob(hidden, weight, targets)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)


def test_all_rows_ignored(triton_kernels: SimpleNamespace) -> None:
    hidden, weight, targets = operands(rows=2, vocabulary=60)
    found = check(triton_kernels, {"block": 64}, hidden * torch.nan, weight, targets * 0 - 100)
    assert all(bool((tensor == 0).all()) for tensor in found)


def test_14_strided_operands(triton_kernels: SimpleNamespace) -> None:
    hidden, weight, targets = operands(rows=3, vocabulary=60)
    wide, tall = torch.full((3, 40), torch.nan).bfloat16(), torch.full((60, 24), torch.nan).bfloat16()
    wide[:, ::2][:, :16], tall[:, :16] = hidden, weight
    twice = targets.repeat_interleave(2)[::2]
    check(triton_kernels, {"block": 64}, wide[:, ::2][:, :16], tall[:, :16], twice)


def test_rows_off_16_bytes_are_not_read_by_descriptors(triton_kernels: SimpleNamespace) -> None:
    check(triton_kernels, PLANS["triton"], *operands(rows=2, size=12, vocabulary=60))


def test_18_a_trainable_head_is_refused(triton_kernels: SimpleNamespace) -> None:
    hidden, weight, targets = operands()
    with pytest.raises(ValueError, match="frozen"):
        triton_kernels.logprob.linear_logprob(hidden, weight.requires_grad_(), targets)


def plan_of(kernels: SimpleNamespace) -> Any:
    return kernels.logprob.Plan(block=64)


def test_a_plan_whose_tiles_do_not_meet_is_refused(triton_kernels: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="columns is 100"):
        triton_kernels.logprob.Plan(columns=100, block=64)


class TestOnePassOverTheLogits:
    """The pass between the GEMMs by itself, on logits that no GEMM of a sound model gives."""

    def rows(
        self, kernels: SimpleNamespace, logits: Tensor, targets: Tensor, stride: int | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probabilities, entropies, ∂ logprob / ∂ logits, and E with what lies around it."""
        count, width = logits.shape
        block, tiles = 32, -(-width // 32)
        stride = stride or width
        exp = torch.full((count, stride), 7.0)
        target = logits.gather(1, targets[:, None])[:, 0].contiguous()
        one, sums = torch.ones(count), torch.empty(3, tiles, count)
        outs = torch.empty(4, count)
        options = {"softcap": 1.0, "HAS_CAP": False, "STORE": True, "BLOCK": block}
        kernels.logprob.kernels.exp_tile[(tiles, count)](
            logits,
            targets,
            one,
            target,
            exp,
            *sums,
            0,
            width,
            width,
            count,
            logits.stride(0),
            stride,
            **options,
        )
        kernels.logprob.kernels.finish_rows[(count,)](
            targets, one, target, exp, *sums, *outs, width, tiles, count, stride, **options, BK=8
        )
        return outs[0], outs[1], exp[:, :width] * outs[2][:, None], exp

    def test_16_minus_infinity_and_one_hot_rows(self, triton_kernels: SimpleNamespace) -> None:
        logits = torch.randn(2, 70)
        logits[0, 5:66] = -torch.inf
        logits[1] = -torch.inf
        logits[1, 3] = 2.0
        logprobs, entropy, slope, _ = self.rows(triton_kernels, logits, torch.tensor([2, 3]))
        want = torch.log_softmax(logits.double(), dim=1)
        onehot = torch.nn.functional.one_hot(torch.tensor([2, 3]), 70)
        torch.testing.assert_close(logprobs.double(), want[[0, 1], [2, 3]], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(slope.double(), onehot - want.exp(), atol=1e-6, rtol=1e-5)
        assert float(entropy[1]) == float(slope[1].abs().sum()) == 0.0

    def test_15_rows_further_apart_than_they_are_long(self, triton_kernels: SimpleNamespace) -> None:
        wide = torch.randn(3, 90)
        targets = torch.tensor([0, 40, 69])
        *_, exp = self.rows(triton_kernels, wide[:, :70], targets, stride=80)
        assert bool((exp[:, 70:] == 7.0).all())
        near = self.rows(triton_kernels, wide[:, :70].contiguous(), targets)
        assert torch.equal(exp[:, :70], near[3])

    def test_1_3_offsets_beyond_two_to_the_31(self, triton_kernels: SimpleNamespace) -> None:
        """Three rows, 2^30 elements apart; all but a few pages of it are never touched."""
        apart = 1 << 30
        far = torch.empty(2 * apart + 64, dtype=torch.bfloat16).as_strided((3, 64), (apart, 1))
        values = torch.randn(3, 64)
        out = torch.empty(3, 64)
        far.copy_(values)
        triton_kernels.logprob.scale_rows([(torch.tensor([1.0, 2.0, 3.0]), far)], out)
        torch.testing.assert_close(out, values.bfloat16() * torch.tensor([[1.0], [2.0], [3.0]]))


def test_23_autocast_does_not_round_the_logits() -> None:
    hidden, weight, targets = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = linear_logprob(hidden.float(), weight.float(), targets)
    want, _ = linear_logprob(hidden.double(), weight.double(), targets)
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)


def test_32_no_log_probability_is_above_zero(triton_kernels: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 8, generator=generator).bfloat16() * torch.logspace(-3, 2, 6).bfloat16()[:, None]
    weight = torch.randn(40, 8, generator=generator).bfloat16()
    best = (hidden.float() @ weight.float().T).argmax(dim=1)
    logprobs, entropy = triton_kernels.logprob.linear_logprob(
        hidden, weight, best, plan=plan_of(triton_kernels)
    )
    assert float(logprobs.max()) <= 0.0
    assert float(entropy.min()) >= 0.0
