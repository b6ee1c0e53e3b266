"""Advantages and each term of the loss, against loops over Python floats written from the formulas."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.learner.advantages import group_advantages, has_zero_variance
from bucketrl.learner.losses import log_ratio, ppo_clip, token_mean

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
    loss = token_mean(ppo_clip(log_ratio(logprobs, behaviour), advantages, LOW, HIGH), denominator)
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


@given(st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=16))
def test_advantages_are_rewards_minus_their_mean(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    mean = statistics.fmean(rewards)
    assert advantages == pytest.approx([reward - mean for reward in rewards], abs=1e-12)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9)


@given(st.floats(-10.0, 10.0), st.integers(2, 8))
def test_equal_rewards_are_zero_variance(reward: float, count: int) -> None:
    assert has_zero_variance([reward] * count)
    assert not has_zero_variance([reward] * count + [reward + 0.5])
