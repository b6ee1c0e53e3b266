"""Group advantages: the definition in plain numbers, and the Triton kernel (interpreted) against it."""

import statistics
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.kernels.policy import group_advantage

SCALES: list[Literal["none", "group", "batch"]] = ["none", "group", "batch"]
CU = torch.tensor([0, 4, 4, 5, 8, 11])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.3, 0.1, 0.1, 0.1, 2.0, torch.nan, -1.0])
"""A group like any other, an empty one, one of one, one of equals, and one with a reward that failed."""


@given(groups=st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=4))
def test_the_definition(groups: list[list[float]]) -> None:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    cu = torch.tensor([0, *torch.tensor([len(group) for group in groups]).cumsum(0).tolist()])
    everything = statistics.stdev(rewards.tolist()) + 1e-4
    for scale in SCALES:
        found, flat = group_advantage(rewards, cu, scale)
        for index, group in enumerate(groups):
            divisor = {"none": 1.0, "group": statistics.stdev(group) + 1e-4, "batch": everything}[scale]
            want = [(reward - statistics.fmean(group)) / divisor for reward in group]
            assert bool(flat[index]) is (min(group) == max(group))
            if not flat[index]:
                assert found[cu[index] : cu[index + 1]].tolist() == pytest.approx(want, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_22_no_group_gives_a_nan(
    triton_kernels: SimpleNamespace, scale: Literal["none", "group", "batch"]
) -> None:
    want, flat = group_advantage(REWARDS.double(), CU, scale)
    found, found_flat = triton_kernels.policy.group_advantage(REWARDS, CU, scale)
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-6)
    assert found_flat.tolist() == flat.tolist() == [False, True, True, True, False]
    assert found[4:8].tolist() == [0.0] * 4
    assert float(found[9]) == 0.0


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_that_all_failed(
    triton_kernels: SimpleNamespace, scale: Literal["none", "group", "batch"]
) -> None:
    for advantages in (group_advantage, triton_kernels.policy.group_advantage):
        found, flat = advantages(torch.full((3,), torch.nan), torch.tensor([0, 3]), scale)
        assert found.tolist() == [0.0] * 3
        assert flat.tolist() == [True]
