"""Importance weights, masks and the guessed proximal policy against loops over floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.learner.losses import sequence_means
from bucketrl.learner.weights import inside, interpolated_proximal, truncated

logprob = st.floats(-30.0, 0.0)


@given(st.lists(st.tuples(logprob, logprob, st.integers(0, 40)), min_size=1, max_size=20))
def test_the_proximal_policy_lies_between_as_the_versions_do(tokens: list[tuple[float, float, int]]) -> None:
    """Written with AReaL's versions: step 100 makes version 100 and starts from version 99."""
    policy, behaviour = (torch.tensor([one[i] for one in tokens], dtype=torch.float64) for i in (0, 1))
    policy.requires_grad_()
    found = interpolated_proximal(policy, behaviour, torch.tensor([lag for _, _, lag in tokens]))
    want = []
    for theta, mu, lag in tokens:
        made, proximal, sampled = 100, 99, 99 - lag
        alpha = (proximal - sampled) / (made - sampled)
        want.append(mu + alpha * (theta - mu))
    assert found.tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert not found.requires_grad


@given(st.lists(st.floats(-20.0, 20.0), min_size=1, max_size=20), st.floats(1.0, 10.0))
def test_truncation_bounds_from_above_only(log_weights: list[float], cap: float) -> None:
    found = truncated(torch.tensor(log_weights, dtype=torch.float64), cap)
    assert found.tolist() == pytest.approx([min(cap, math.exp(x)) for x in log_weights], rel=1e-12)


def test_the_band_includes_what_is_on_policy() -> None:
    weights = torch.tensor([0.49, 0.5, 1.0, 4.9, 5.1], dtype=torch.float64)
    assert inside(weights.log(), 0.5 - 1e-12, 5.0).tolist() == [False, True, True, True, False]


def test_a_long_completion_is_not_masked_for_its_length() -> None:
    """Each token is half a percent off: the product of 2000 such ratios is e^10, the geometric mean 1.005."""
    off = torch.full((2000,), math.log(1.005), dtype=torch.float64)
    mean = sequence_means(off, torch.zeros(2000, dtype=torch.int64), torch.tensor([2000]))
    assert inside(mean, 0.99, 1.01).all()
    assert math.exp(float(off.sum())) > 2e4
