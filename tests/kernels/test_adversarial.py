"""Cases that broke other implementations, where no other test here has them: `docs/adversarial_cases.md`.

The numbers in the names are those of that table.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrl.kernels import reference
from bucketrl.kernels.policy import STATS, Objective, packed_policy_loss

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's, of the overflows that cases ask for

Head = Callable[..., tuple[Tensor, Tensor]]
PLAN: dict[str, Any] = {"block": 32}


@pytest.fixture(params=["eager", "whole rows", "tiles"])
def head(request: pytest.FixtureRequest, triton_kernels: SimpleNamespace) -> Head:
    if request.param == "eager":
        return reference.linear_logprob
    plan = PLAN | ({"columns": 32} if request.param == "tiles" else {})

    def kernel(*operands: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = triton_kernels.logprob.linear_logprob(
            *operands, plan=triton_kernels.logprob.Plan(**plan), **options
        )
        return found

    return kernel


@pytest.fixture(params=["eager", "kernel"])
def loss_of(request: pytest.FixtureRequest, triton_kernels: SimpleNamespace) -> Callable[..., Tensor]:
    """The policy loss of log-probabilities; log π is at the behaviour policy's."""

    def call(logprobs_N: Tensor, advantages_B: Tensor, objective: Objective, **optional: Tensor) -> Tensor:
        cu_seqlens = torch.tensor([0, 3, len(logprobs_N)])
        behaviour_N = logprobs_N.detach()
        if request.param == "eager":
            return packed_policy_loss(
                logprobs_N, behaviour_N, advantages_B, cu_seqlens, 4.0, objective=objective, **optional
            )[0]
        required = (behaviour_N, advantages_B, cu_seqlens, torch.tensor(4.0))
        given = (None, None, optional.get("reference_N"), None)
        loss: Tensor = triton_kernels.policy.packed_policy_loss(
            logprobs_N, optional.get("entropy_N"), required, given, objective
        )[0]
        return loss

    return call


def operands(rows: int = 3, size: int = 16, vocabulary: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, size, generator=generator).bfloat16()
    weight = torch.randn(vocabulary, size, generator=generator).bfloat16()
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=generator)


def apart(values: Tensor, stride: int = 1 << 30) -> Tensor:
    """The same rows, so far from each other that three of them end beyond 2^31. Few pages are ever touched."""
    rows, columns = values.shape
    far = torch.empty((rows - 1) * stride + columns, dtype=values.dtype).as_strided(values.shape, (stride, 1))
    far.copy_(values)
    return far


def test_3_no_offset_of_the_head_is_32_bit(triton_kernels: SimpleNamespace) -> None:
    """Hidden states and weight of the target's logit; logits and E of the pass between the GEMMs; E once more at
    the end. Each kernel against itself with the rows side by side."""
    kernels = triton_kernels.logprob.kernels
    hidden, weight, _ = operands(vocabulary=3)
    targets, one = torch.tensor([2, 0, 1]), torch.ones(3)
    cap = {"softcap": 1.0, "HAS_CAP": False}

    def pass_over(x: Tensor, w: Tensor, logits: Tensor, exp: Tensor) -> list[Tensor]:
        target, sums, outs = torch.empty(3), torch.empty(3, 2, 3), torch.empty(4, 3)
        kernels.target_logits[(3,)](
            x, w, targets, one, target, 16, 3, x.stride(0), w.stride(0), **cap, BH=16
        )  # fmt: skip
        kernels.exp_tile[(2, 3)](
            logits, targets, one, target, exp, *sums, 0, 64, 64, 3, logits.stride(0), exp.stride(0),
            **cap, STORE=True, BLOCK=32,
        )  # fmt: skip
        kernels.finish_rows[(3,)](
            targets, one, target, exp, *sums, *outs, 64, 2, 3, exp.stride(0),
            **cap, STORE=True, BLOCK=32, BK=2,
        )  # fmt: skip
        return [target, outs, exp.clone()]

    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    blank = torch.zeros(3, 64).bfloat16()
    near = pass_over(hidden, weight, logits, blank.clone())
    far = pass_over(apart(hidden), apart(weight), apart(logits), apart(blank))
    assert all(map(torch.equal, near, far))


@pytest.mark.parametrize("head", ["whole rows", "tiles"], indirect=True)
def test_6_a_target_outside_the_vocabulary_spoils_no_other_row(head: Head) -> None:
    """The first is where the last tile's padded columns are."""
    hidden, weight, targets = operands()
    want, _ = head(hidden, weight, targets)
    for outside in (70, 95, 1 << 20, -1):
        found, _ = head(hidden, weight, targets.index_fill(0, torch.tensor([1]), outside))
        assert found.isnan().tolist() == [False, True, False]
        assert torch.equal(found[::2], want[::2])


def test_16_logits_that_overflow_to_minus_infinity(head: Head) -> None:
    hidden, weight, targets = operands()
    hidden[:, 0], weight[:, 0], weight[40:, 0] = 1e30, 0.0, -1e30
    hidden.requires_grad_()
    logprobs, entropy = head(hidden, weight, targets % 40, entropy_grad=True)
    [grad] = torch.autograd.grad([logprobs.sum(), entropy.sum()], hidden)
    want, _ = reference.linear_logprob(hidden.detach().double(), weight[:40].double(), targets % 40)
    torch.testing.assert_close(logprobs.detach().double(), want, atol=1e-5, rtol=1e-5)
    assert bool(entropy.isfinite().all() & grad.isfinite().all())


def test_23_autocast_changes_no_bit_of_the_head(head: Head) -> None:
    hidden, weight, targets = operands()

    def results() -> list[Tensor]:
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = head(leaf, weight, targets)
        return [logprobs, entropy, *torch.autograd.grad(logprobs.sum(), leaf)]

    want = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, results(), want))


def test_29_the_head_shares_no_buffer_with_anybody(head: Head) -> None:
    """Hidden states with two more consumers, results written over by the caller, one upstream gradient used
    again by them, and a second backward pass."""
    hidden, weight, targets = operands()
    kept, leaf = hidden.clone(), hidden.clone().requires_grad_()
    rows = leaf * 1.0
    one, _ = head(rows, weight, targets)
    two, _ = head(rows, weight, targets.flip(0))
    upstream = torch.tensor([0.5, -1.0, 2.0])
    alone = [torch.autograd.grad(x, rows, upstream, retain_graph=True)[0] for x in (one, two)]
    with torch.no_grad():
        one.zero_()
    for _ in range(2):
        [both] = torch.autograd.grad([one, two, rows], leaf, [upstream, upstream, kept], retain_graph=True)
        torch.testing.assert_close(both, alone[0] + alone[1] + kept, rtol=2e-2, atol=2e-2)
    assert upstream.tolist() == [0.5, -1.0, 2.0]
    assert torch.equal(leaf, kept)


def test_29_the_policy_loss_shares_no_buffer_with_anybody(loss_of: Callable[..., Tensor]) -> None:
    logprobs = torch.linspace(-2.0, -0.1, 5).requires_grad_()
    entropy = torch.ones(5, requires_grad=True)
    kept = logprobs.detach().clone()
    loss = loss_of(logprobs, torch.tensor([1.0, -0.5]), Objective(entropy_coefficient=0.1), entropy_N=entropy)
    passes = [
        torch.autograd.grad([loss, logprobs.sum()], [logprobs, entropy], retain_graph=True) for _ in range(2)
    ]
    assert all(map(torch.equal, *passes))
    [alone] = torch.autograd.grad(loss, [logprobs], retain_graph=True)
    with torch.no_grad():
        alone.mul_(7.0)  # what was handed out is the caller's
    torch.testing.assert_close(torch.autograd.grad(loss, [logprobs])[0] + 1.0, passes[0][0])
    assert torch.equal(logprobs, kept)


def test_22_a_group_without_advantage_has_the_gradient_of_its_divergence_alone(
    loss_of: Callable[..., Tensor],
) -> None:
    logprobs = torch.linspace(-2.0, -0.1, 5).requires_grad_()
    reference_N = logprobs.detach() - 0.3
    flat = torch.tensor([0.0, 0.0])
    [none] = torch.autograd.grad(loss_of(logprobs, flat, Objective()), logprobs)
    assert none.tolist() == [0.0] * 5
    # k2: ∂ (log π_ref - log π)² / 2 = log π - log π_ref = 0.3; over the norm, 4.
    objective = Objective(kl_coefficient=0.1, kl_estimator="k2")
    [grad] = torch.autograd.grad(loss_of(logprobs, flat, objective, reference_N=reference_N), logprobs)
    torch.testing.assert_close(grad, torch.full((5,), 0.1 * 0.3 / 4))


def test_13_the_gradients_of_the_policy_loss_are_the_same_bits_under_torch_compile() -> None:
    """Python floats in the objective must not become float64 tensors on the way."""
    objective = Objective(
        ratio_level="sequence", dual_clip=3.0, importance_weight="token", importance_cap=1.3,
        importance_mask="sequence", kl_coefficient=0.05, entropy_coefficient=0.01,
    )  # fmt: skip
    values = torch.linspace(-2.0, -0.1, 5)

    def call(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        return packed_policy_loss(
            logprobs, values + 0.1, torch.tensor([1.0, -0.5]), torch.tensor([0, 3, 5]), 4.0,
            reference_N=values - 0.2, entropy_N=entropy, objective=objective,
        )  # fmt: skip

    def results(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [values.clone().requires_grad_(), (-values).requires_grad_()]
        loss, stats = function(*leaves)
        return [loss, stats, *torch.autograd.grad(loss, leaves)]

    found, want = results(torch.compile(call, backend="aot_eager")), results(call)
    assert all(map(torch.equal, found, want))
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert float(found[1][STATS.index("tokens")]) == 5.0
