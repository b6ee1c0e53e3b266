"""Each term of the policy loss, against loops over Python floats written from the formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.kernels.policy_terms import (
    cispo,
    dual_clip,
    inside,
    kl_k1,
    kl_k2,
    kl_k3,
    log_ratio,
    ppo_clip,
    reinforce,
    sequence_log_ratio,
    sequence_means,
    truncated,
)

LOW, HIGH = 0.2, 0.28

finite = st.floats(-30.0, 0.0)
token = st.tuples(finite, finite, st.floats(-3.0, 3.0))


def naive_token(logprob: float, behaviour: float, advantage: float) -> tuple[float, float]:
    """Loss and its derivative by `logprob`, for one token."""
    x = logprob - behaviour
    inside = -20.0 <= x <= 20.0
    ratio = math.exp(min(20.0, max(-20.0, x)))
    clipped = min(1.0 + HIGH, max(1.0 - LOW, ratio))
    if ratio * advantage <= clipped * advantage:
        return -ratio * advantage, -ratio * advantage if inside else 0.0
    return -clipped * advantage, 0.0


@settings(max_examples=200)
@given(tokens=st.lists(token, min_size=1, max_size=20), padding=st.integers(0, 50))
def test_policy_loss_matches_a_loop_over_tokens(
    tokens: list[tuple[float, float, float]], padding: int
) -> None:
    logprobs, behaviour, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    logprobs.requires_grad_()
    denominator = len(tokens) + padding
    loss = ppo_clip(log_ratio(logprobs, behaviour), advantages, LOW, HIGH).sum() / denominator
    loss.backward()
    want = [naive_token(*values) for values in tokens]
    assert loss.item() == pytest.approx(math.fsum(value for value, _ in want) / denominator, rel=1e-12)
    for ours, (value, slope), (_, _, advantage) in zip(logprobs.grad.tolist(), want, tokens, strict=True):
        ratio = abs(value / advantage) if advantage else 0.0
        if min(abs(ratio - 1 + LOW), abs(ratio - 1 - HIGH)) > 1e-9:  # at a kink either slope is right
            assert ours == pytest.approx(slope / denominator, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient_flows"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (0.5, 1.0, True),
        (0.81, -1.0, True),
        (0.79, -1.0, False),
        (5.0, -1.0, True),
    ],
)
def test_the_clip_stops_only_tokens_that_moved_too_far_the_wanted_way(
    ratio: float, advantage: float, gradient_flows: bool
) -> None:
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = ppo_clip(
        log_ratio(logprob, torch.zeros(1)), torch.tensor([advantage], dtype=torch.float64), LOW, HIGH
    )
    loss.sum().backward()
    assert (logprob.grad.item() != 0.0) == gradient_flows


def test_absurd_behaviour_logprobs_stay_finite_and_silent() -> None:
    logprobs = torch.tensor([-1.0, -1e4], requires_grad=True)
    loss = ppo_clip(
        log_ratio(logprobs, torch.tensor([-1e4, -1.0])), torch.tensor([-1.0, 1.0]), LOW, HIGH
    ).sum()
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad.tolist() == [0.0, 0.0]


def doubles(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def slopes(loss_N: torch.Tensor, by: torch.Tensor) -> list[float]:
    found: list[float] = torch.autograd.grad(loss_N.sum(), by)[0].tolist()
    return found


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (2.0, -1.0, 2.0, 2.0),
        (2.9, -1.0, 2.9, 2.9),
        (5.0, -1.0, 3.0, 0.0),  # PPO: 5 and 5
        (0.5, -1.0, 0.8, 0.0),
        (5.0, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_dual_clip_bounds_negative_advantages_only(
    ratio: float, advantage: float, value: float, slope: float
) -> None:
    logprob = doubles(math.log(ratio), grad=True)
    advantages = doubles(advantage)
    loss = dual_clip(
        ppo_clip(log_ratio(logprob, torch.zeros(1)), advantages, LOW, HIGH), advantages, bound=3.0
    )
    assert loss.item() == pytest.approx(value)
    assert slopes(loss, logprob) == pytest.approx([slope])


@given(st.lists(token, min_size=1, max_size=20))
def test_cispo_clips_the_weight_and_never_the_token(tokens: list[tuple[float, float, float]]) -> None:
    logprobs, behaviour, advantages = (doubles(*column) for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    loss = cispo(log_ratio(logprobs, behaviour), logprobs, advantages, clip_high=4.0)
    weights = [min(5.0, math.exp(max(-20.0, p - m))) for p, m, _ in tokens]
    want = [-w * a for w, (_, _, a) in zip(weights, tokens, strict=True)]
    assert slopes(loss, logprobs) == pytest.approx(want, rel=1e-12)
    assert loss.tolist() == pytest.approx([w * p for w, (p, _, _) in zip(want, tokens, strict=True)])


def test_reinforce_is_the_gradient_of_the_expected_reward() -> None:
    """Expected reward of a softmax policy over four actions, differentiated as it stands and by the estimator
    whose expectation is taken over all actions."""
    logits = torch.tensor([0.3, -1.0, 0.5, 1.2], dtype=torch.float64, requires_grad=True)
    rewards = doubles(1.0, -2.0, 0.5, 3.0)
    logprobs = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((logprobs.exp() * rewards).sum(), logits, retain_graph=True)[0]
    loss = (logprobs.exp().detach() * reinforce(logprobs, rewards)).sum()
    torch.testing.assert_close(-torch.autograd.grad(loss, logits)[0], exact, rtol=1e-12, atol=0)


SEQUENCE = torch.tensor([0, 2, 1, 0, 1, 1])
LENGTHS = torch.tensor([2, 3, 1])


def test_the_sequence_ratio_is_the_geometric_mean_and_its_gradient_the_papers() -> None:
    """GSPO by its own formula (arXiv 2507.18071, eq. 5 to 7), differentiated by autograd, on tokens of three
    completions in any order."""
    logprobs = doubles(-0.1, -0.2, -0.4, -0.3, -0.6, -0.5, grad=True)
    behaviour = doubles(-0.2, -0.1, -0.5, -0.1, -0.3, -0.5)
    advantages_S = doubles(1.5, -0.7, 0.4)
    terms = []
    for completion, advantage in enumerate(advantages_S):
        inside = completion == SEQUENCE
        ratio = ((logprobs - behaviour)[inside].sum() / inside.sum()).exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage))
    want = -torch.stack(terms).mean()
    x = sequence_log_ratio(log_ratio(logprobs, behaviour), SEQUENCE, LENGTHS)
    ours = (ppo_clip(x, advantages_S[SEQUENCE], LOW, HIGH) / LENGTHS[SEQUENCE]).sum() / 3
    assert ours.item() == pytest.approx(want.item(), rel=1e-14)
    assert slopes(ours, logprobs) == pytest.approx(slopes(want, logprobs), rel=1e-12)


def test_one_hopeless_token_does_not_take_its_sequence_beyond_all_bounds() -> None:
    x = log_ratio(doubles(-0.1, -math.inf, grad=True), doubles(-0.1, -1.0))
    found = sequence_log_ratio(x, torch.tensor([0, 0]), torch.tensor([2]))
    assert found.tolist() == [-10.0, -10.0]


def test_means_over_sequences_match_a_loop() -> None:
    values = doubles(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    means = sequence_means(values, SEQUENCE, LENGTHS)
    assert means.tolist() == pytest.approx([4.5, 2.0, 52 / 3, 4.5, 52 / 3, 52 / 3])


@given(st.lists(st.floats(-20.0, 20.0), min_size=1, max_size=20), st.floats(1.0, 10.0))
def test_truncation_bounds_from_above_only(log_weights: list[float], cap: float) -> None:
    found = truncated(doubles(*log_weights), cap)
    assert found.tolist() == pytest.approx([min(cap, math.exp(x)) for x in log_weights], rel=1e-12)


def test_the_band_includes_what_is_on_policy() -> None:
    weights = doubles(0.49, 0.5, 1.0, 4.9, 5.1)
    assert inside(weights.log(), 0.5 - 1e-12, 5.0).tolist() == [False, True, True, True, False]


def test_a_long_completion_is_not_masked_for_its_length() -> None:
    """Each token is half a percent off: the product of 2000 such ratios is e^10, the geometric mean 1.005."""
    off = torch.full((2000,), math.log(1.005), dtype=torch.float64)
    mean = sequence_means(off, torch.zeros(2000, dtype=torch.int64), torch.tensor([2000]))
    assert inside(mean, 0.99, 1.01).all()
    assert math.exp(float(off.sum())) > 2e4


class TestDivergence:
    """Over all six tokens of a small vocabulary, so that expectations are sums."""

    logits = torch.tensor([0.1, -0.7, 0.9, 0.0, -2.0, 1.1], dtype=torch.float64, requires_grad=True)
    base = torch.log_softmax(torch.tensor([0.3, 0.2, -0.5, 0.8, -1.0, 0.0], dtype=torch.float64), 0)

    def expected(self, values: torch.Tensor) -> torch.Tensor:
        """Over tokens of the policy, which are samples: no gradient through their frequency."""
        return (torch.log_softmax(self.logits, 0).exp().detach() * values).sum()

    def divergence(self, *, reverse: bool) -> torch.Tensor:
        policy = torch.log_softmax(self.logits, 0)
        one, two = (self.base, policy) if reverse else (policy, self.base)
        return (one.exp() * (one - two)).sum()

    def slope(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.logits)[0]

    def test_k1_and_k3_are_unbiased(self) -> None:
        policy = torch.log_softmax(self.logits, 0)
        want = self.divergence(reverse=False).item()
        assert self.expected(kl_k1(policy, self.base)).item() == pytest.approx(want, rel=1e-12)
        assert self.expected(kl_k3(policy, self.base)).item() == pytest.approx(want, rel=1e-12)

    def test_k1_is_no_loss(self) -> None:
        found = self.slope(self.expected(kl_k1(torch.log_softmax(self.logits, 0), self.base)))
        assert found.abs().max().item() < 1e-15

    def test_k2_has_the_gradient_of_the_divergence(self) -> None:
        found = self.slope(self.expected(kl_k2(torch.log_softmax(self.logits, 0), self.base)))
        torch.testing.assert_close(found, self.slope(self.divergence(reverse=False)), rtol=1e-12, atol=1e-15)

    def test_k3_has_the_gradient_of_the_reverse(self) -> None:
        found = self.slope(self.expected(kl_k3(torch.log_softmax(self.logits, 0), self.base)))
        torch.testing.assert_close(found, self.slope(self.divergence(reverse=True)), rtol=1e-12, atol=1e-15)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=20))
def test_divergences_match_their_formulas(tokens: list[tuple[float, float]]) -> None:
    logprobs, base = (doubles(*column) for column in zip(*tokens, strict=True))
    differences = [min(20.0, max(-20.0, p - b)) for p, b in tokens]
    assert kl_k1(logprobs, base).tolist() == pytest.approx(differences)
    assert kl_k2(logprobs, base).tolist() == pytest.approx([d * d / 2 for d in differences])
    want = [math.expm1(-d) + d for d in differences]
    assert kl_k3(logprobs, base).tolist() == pytest.approx(want, rel=1e-9, abs=1e-15)
    assert min(kl_k3(logprobs, base).tolist()) >= 0.0


def test_upstream_gradients_that_differ_per_token_arrive_at_their_token() -> None:
    """As with `reduction="none"` (Liger-Kernel #968): the first is zero, the others all differ."""
    logprobs = doubles(-1.0, -1.1, -1.2, grad=True)
    loss = ppo_clip(log_ratio(logprobs, doubles(-1.0, -1.1, -1.2)), doubles(1.0, 1.0, 1.0), LOW, HIGH)
    loss.backward(doubles(0.0, 2.0, -3.0))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.0, 3.0])
