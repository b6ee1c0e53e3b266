"""The eager fused head: values, derivatives, chunking, precision and memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.kernels.logprob import linear_logprob as dispatched
from bucketrl.kernels.reference import IGNORE_INDEX, linear_logprob

N, H, V = 7, 5, 11


def operands(dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(N, H, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    return hidden, weight, targets


def naive(hidden: torch.Tensor, weight: torch.Tensor, target: int, temperature: float) -> tuple[float, float]:
    """Logprob and entropy of one row in Python floats, from the definition."""
    logits = [sum(h * w for h, w in zip(hidden.tolist(), row, strict=True)) for row in weight.tolist()]
    scaled = [logit / temperature for logit in logits]
    top = max(scaled)
    normaliser = top + math.log(sum(math.exp(z - top) for z in scaled))
    entropy = -sum(math.exp(z - normaliser) * (z - normaliser) for z in scaled)
    return scaled[target] - normaliser, entropy


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 5.0),
    chunk=st.integers(1, N + 3),
    scale=st.floats(0.0, 30.0),
)
def test_matches_the_definition_for_any_chunk(
    seed: int, temperature: float, chunk: int, scale: float
) -> None:
    hidden, weight, targets = operands(torch.float64, seed, scale)
    logprobs, entropy = linear_logprob(hidden, weight, targets, temperature, chunk)
    for row in range(N):
        want = naive(hidden[row], weight, int(targets[row]), temperature)
        assert float(logprobs[row]) == pytest.approx(want[0], abs=1e-10)
        assert float(entropy[row]) == pytest.approx(want[1], abs=1e-10)


def test_gradient_matches_finite_differences() -> None:
    hidden, weight, targets = operands(torch.float64)
    hidden.requires_grad_()
    assert torch.autograd.gradcheck(lambda h: linear_logprob(h, weight, targets, 0.7, 3)[0], (hidden,))


def test_float32_gradient_matches_autograd_of_the_full_softmax() -> None:
    hidden, weight, targets = operands(torch.float32, scale=3.0)
    upstream = torch.linspace(-1.0, 2.0, N)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    linear_logprob(ours, weight, targets, 1.3, 2)[0].backward(upstream)
    full = torch.log_softmax(theirs @ weight.T / 1.3, dim=-1).gather(1, targets[:, None])[:, 0]
    full.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_bfloat16_operands_are_not_rounded_again() -> None:
    """The error against float64 of the same operands is that of float32 arithmetic, not of bf16 logits."""
    hidden, weight, targets = operands(torch.bfloat16, scale=4.0)
    found, _ = linear_logprob(hidden, weight, targets, 1.0, 4)
    want, _ = linear_logprob(hidden.double(), weight.double(), targets, 1.0, 4)
    assert found.dtype == torch.float32
    assert float((found.double() - want).abs().max()) < 1e-5


def test_certain_tokens_have_zero_entropy_and_finite_values() -> None:
    hidden = torch.tensor([[1e4, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    logprobs, entropy = linear_logprob(hidden, weight, torch.tensor([0]), 1.0, 1)
    logprobs.sum().backward()
    assert logprobs.tolist() == [0.0]
    assert entropy.tolist() == [0.0]
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = operands(torch.float32)
    rows: list[int] = []
    original = torch.log_softmax

    def spy(logits: torch.Tensor, dim: int) -> torch.Tensor:
        rows.append(logits.shape[0])
        return original(logits, dim=dim)

    monkeypatch.setattr(torch, "log_softmax", spy)
    linear_logprob(hidden.requires_grad_(), weight, targets, 1.0, 3)[0].sum().backward()
    assert rows == [3, 3, 1]


def test_a_trainable_head_is_refused() -> None:
    hidden, weight, targets = operands(torch.float32)
    with pytest.raises(ValueError, match="frozen"):
        linear_logprob(hidden, weight.requires_grad_(), targets, 1.0, 4)


def test_entropy_carries_no_gradient() -> None:
    hidden, weight, targets = operands(torch.float32)
    _, entropy = linear_logprob(hidden.requires_grad_(), weight, targets, 1.0, 4)
    assert not entropy.requires_grad


def test_no_rows_give_no_values() -> None:
    hidden, weight, _ = operands(torch.float32)
    empty = hidden[:0].requires_grad_()
    logprobs, entropy = linear_logprob(empty, weight, torch.empty(0, dtype=torch.int64), 1.0, 4)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)


def test_entropy_gradient_matches_finite_differences() -> None:
    """17 (trl PR 6625): an entropy bonus must not be silently without effect."""
    hidden, weight, targets = operands(torch.float64)
    hidden.requires_grad_()
    temperature = torch.linspace(0.5, 1.5, N, dtype=torch.float64)

    def both(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprob(h, weight, targets, temperature, 3, softcap=2.5, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (hidden,), fast_mode=True)


def test_ignored_rows_and_rows_without_gradient() -> None:
    hidden, weight, targets = operands(torch.float64)
    hidden[1], targets[1] = torch.nan, IGNORE_INDEX
    rows = torch.arange(N) % 3 != 0
    hidden.requires_grad_()
    logprobs, entropy = linear_logprob(hidden, weight, targets, 0.7, 3, entropy_grad=True, grad_rows_N=rows)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert float(logprobs[1].detach()) == float(entropy[1].detach()) == 0.0
    assert (hidden.grad != 0).any(dim=1).tolist() == [False, False, True, False, True, True, False]


def test_13_the_same_bits_under_torch_compile() -> None:
    hidden, weight, targets = operands(torch.float32)

    def call(h: torch.Tensor) -> torch.Tensor:
        return dispatched(h * 1.5, weight, targets, 0.7)[0] * 2.0

    found, want = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    torch.compile(call, backend="eager")(found).sum().backward()
    call(want).sum().backward()
    assert torch.equal(found.grad, want.grad)
