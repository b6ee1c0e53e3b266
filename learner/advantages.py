"""How good each completion of a group was, relative to the others."""

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """reward - mean(rewards of the group); [G] to [G].

    GRPO's baseline (arXiv 2402.03300) without the division by the group's standard deviation, which
    weights prompts by how easy or hard they are (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether every advantage would be 0, so that the group carries no gradient."""
    return min(rewards) == max(rewards)
