"""How good each completion was, relative to others of its group or of the batch. Floats, no torch.

A completion's reward R becomes its advantage A in three steps:

    overlong_penalty   R + soft punishment of its length                  (optional)
    baseline           - mean of the group | of the others of the group | of the batch
    scale              / standard deviation of the group | of the batch   (optional)

A reward that is not finite stands for a completion that could not be scored: it counts in no mean, and its
advantage is 0. So is that of a completion which has nothing to be compared with. No advantage is ever NaN.
"""

import math
from collections.abc import Sequence
from typing import Literal

Baseline = Literal["group_mean", "leave_one_out", "batch_mean"]
Scale = Literal["none", "group_std", "batch_std"]

EPSILON = 1e-6
"""Added to a standard deviation: rewards that differ by rounding only must not become advantages of 1."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """reward - mean(rewards of the group); [G] to [G].

    GRPO's baseline (arXiv 2402.03300) without the division by the group's standard deviation, which
    weights prompts by how easy or hard they are (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    if has_zero_variance(rewards):  # exactly: the mean of equal numbers may be rounded
        return [0.0] * len(rewards)
    finite = [reward for reward in rewards if math.isfinite(reward)]
    mean = math.fsum(finite) / len(finite)
    return [reward - mean if math.isfinite(reward) else 0.0 for reward in rewards]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """reward - mean(rewards of the others of the group) = G/(G - 1)·(reward - mean); [G] to [G].

    RLOO (arXiv 2402.14740): an unbiased baseline, for it does not depend on the completion itself.
    """
    count = sum(map(math.isfinite, rewards))
    factor = count / (count - 1) if count > 1 else 0.0
    return [factor * advantage for advantage in group_advantages(rewards)]


def standardised(advantages: Sequence[float], deviation: float) -> list[float]:
    """advantage / (deviation + 1e-6); [G] to [G]."""
    return [advantage / (deviation + EPSILON) for advantage in advantages]


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1) of the finite values; 0 of fewer than two.

    With the n - 1 of torch.std, as the implementations of GRPO have it; its paper does not say.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return 0.0
    mean = math.fsum(finite) / len(finite)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / (len(finite) - 1))


def batch_advantages(
    rewards: Sequence[Sequence[float]], baseline: Baseline, scale: Scale
) -> list[list[float]]:
    """Of every completion of every group of a batch; same shape as `rewards`.

    `group_std`: of the group's rewards (GRPO, arXiv 2402.03300, section 4.1.2). `batch_std`: of the
    differences to the baseline over the batch (REINFORCE++, arXiv 2501.03262, with `batch_mean`; with
    `group_mean` its variant for several completions per prompt, and ScaleRL's choice, arXiv 2510.13786).
    """
    if baseline == "batch_mean":
        flat = iter(group_advantages([reward for group in rewards for reward in group]))
        made = [[next(flat) for _ in group] for group in rewards]
    else:
        function = group_advantages if baseline == "group_mean" else leave_one_out_advantages
        made = [function(group) for group in rewards]
    if scale == "group_std":
        return [
            standardised(advantages, deviation(group))
            for advantages, group in zip(made, rewards, strict=True)
        ]
    if scale == "batch_std":
        scored = [
            advantage
            for advantages, group in zip(made, rewards, strict=True)
            for advantage, reward in zip(advantages, group, strict=True)
            if math.isfinite(reward)
        ]
        return [standardised(advantages, deviation(scored)) for advantages in made]
    return made


def overlong_penalty(tokens: int, max_tokens: int, buffer: float, penalty: float) -> float:
    """What is added to the reward of a completion of `tokens` sampled tokens: 0 up to the buffer, falling
    linearly to -penalty at `max_tokens`.

    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) with L_max = max_tokens and
    L_cache = buffer·max_tokens. `buffer` is in (0, 1].
    """
    into_buffer = (tokens - (1.0 - buffer) * max_tokens) / (buffer * max_tokens)
    return -penalty * min(1.0, max(0.0, into_buffer))


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards, as far as they are finite, are all equal: with a baseline of the group, its
    advantages are all 0 and it carries no gradient."""
    finite = [reward for reward in rewards if math.isfinite(reward)]
    return len(finite) < 2 or min(finite) == max(finite)
