"""What a name of `[algorithm]` means, from rewards to the gradient: each paper's formula by autograd, float64."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bucketrl.bucket.algorithm_config import PRESETS
from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.learner.advantages import batch_advantages, overlong_penalty
from bucketrl.learner.objective import Denominators, Samples, loss_and_gradients

MAX_TOKENS = 20
LENGTHS = [[3, 20, 18], [5, 2]]
REWARDS = [[1.0, 0.0, 1.0], [0.5, -0.5]]
EVERY = [reward for group in REWARDS for reward in group]


@dataclass(frozen=True)
class Completion:
    logp: Tensor
    behaviour: Tensor
    base: Tensor
    reward: float
    group: list[float]


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def ratio(c: Completion) -> Tensor:
    return (c.logp - c.behaviour).exp()


def normed(c: Completion) -> float:
    return (c.reward - statistics.fmean(c.group)) / (statistics.stdev(c.group) + 1e-6)


def tokens(batch: list[Completion], of: Callable[[Completion], Tensor]) -> Tensor:
    return torch.cat([of(c) for c in batch]).mean()


def completions(batch: list[Completion], of: Callable[[Completion], Tensor]) -> Tensor:
    return torch.stack([of(c) for c in batch]).mean()


def grpo(c: Completion) -> Tensor:
    gap = c.base - c.logp
    return (clipped(ratio(c), normed(c), 0.2, 0.2) + 0.04 * (gap.exp() - gap - 1)).mean()


def gspo(c: Completion) -> Tensor:
    return clipped((c.logp - c.behaviour).mean().exp(), normed(c), 3e-4, 4e-4)


def rloo(c: Completion) -> Tensor:
    others = (sum(c.group) - c.reward) / (len(c.group) - 1)
    return -(ratio(c).clamp(max=2).detach() * (c.reward - others) * c.logp).sum() / MAX_TOKENS


PAPERS: dict[str, Callable[[list[Completion]], Tensor]] = {
    "default": lambda b: tokens(
        b, lambda c: clipped(ratio(c), c.reward - statistics.fmean(c.group), 0.2, 0.28)
    ),
    "grpo": lambda b: completions(b, grpo),
    "dr_grpo": lambda b: completions(
        b,
        lambda c: clipped(ratio(c), c.reward - statistics.fmean(c.group), 0.2, 0.2).sum() / MAX_TOKENS,
    ),
    "dapo": lambda b: tokens(b, lambda c: clipped(ratio(c), normed(c), 0.2, 0.28)),
    "gspo": lambda b: completions(b, gspo),
    "cispo": lambda b: tokens(b, lambda c: -ratio(c).clamp(max=5).detach() * normed(c) * c.logp),
    "rloo": lambda b: completions(b, rloo),
    "reinforce_pp": lambda b: tokens(
        b,
        lambda c: clipped(
            ratio(c), (c.reward - statistics.fmean(EVERY)) / (statistics.stdev(EVERY) + 1e-6), 0.2, 0.2
        ),
    ),
}


def overlong(length: int) -> float:
    """DAPO, eq. 13: 4096 tokens of 20480 are its buffer, 4 of 20 here."""
    return 0.0 if length <= 16 else (16 - length) / 4


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_is_the_papers_loss(name: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"name": name})
    assert algorithm.filter_zero_variance == (name != "reinforce_pp")
    generator = torch.Generator().manual_seed(0)
    flat = [length for lengths in LENGTHS for length in lengths]
    logp, *shifts = (torch.randn(sum(flat), generator=generator, dtype=torch.float64) for _ in range(3))
    logp = -logp.abs().requires_grad_()
    # By GSPO's bounds completion 1 is just below, 4 inside, and the others far outside.
    means = {1: -1e-2, 4: 1e-4}
    parts = enumerate(shifts[0].split(flat))
    shift = torch.cat([part - part.mean() + means[i] if i in means else part for i, part in parts])
    behaviour, base = (logp - shift).detach(), (logp - 0.5 * shifts[1]).detach()
    shaped = [
        [r + overlong(length) * (name == "dapo") for r, length in zip(*group, strict=True)]
        for group in zip(REWARDS, LENGTHS, strict=True)
    ]
    per_completion = zip(*(each.split(flat) for each in (logp, behaviour, base)), strict=True)
    groups = [(reward, group) for group in shaped for reward in group]
    batch = [Completion(*each, *of) for each, of in zip(per_completion, groups, strict=True)]
    want = PAPERS[name](batch)
    (slopes,) = torch.autograd.grad(want, logp)

    if algorithm.overlong_penalty is not None:
        buffer, penalty = algorithm.overlong_buffer, algorithm.overlong_penalty
        shaped = [
            [
                r + overlong_penalty(length, MAX_TOKENS, buffer, penalty)
                for r, length in zip(*group, strict=True)
            ]
            for group in zip(REWARDS, LENGTHS, strict=True)
        ]
    else:
        shaped = REWARDS
    advantages = batch_advantages(shaped, algorithm.baseline, algorithm.advantage_scale)
    samples = Samples(
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([a for group in advantages for a in group], dtype=torch.float64),
        lag=torch.zeros(sum(flat), dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *flat]).cumsum(0),
        reference_logprobs=base if algorithm.kl_coefficient else None,
    )
    denominators = Denominators(sum(flat), len(flat), MAX_TOKENS)
    loss, found, _ = loss_and_gradients(
        algorithm, logp.detach(), torch.zeros(sum(flat)), None, samples, denominators
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(found, slopes, rtol=1e-10, atol=1e-14)
