"""The loss of a micro-batch as the run's algorithm composes it from the terms in `losses.py` and `weights.py`.

    loss per token = surrogate(x, A) · importance weight · mask + β·divergence - η·entropy

Neither weight nor mask touches the last two terms. Suffixes: N loss tokens, S completions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.learner import losses, weights


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of the loss tokens of a micro-batch, beside the policy that is trained."""

    behaviour_logprobs: Tensor
    """[N]"""
    advantages: Tensor
    """[N]"""
    lag: Tensor
    """[N] versions between the policy that sampled the token and the one that the step starts from."""
    sequence: Tensor
    """[N] int64 in [0, S): the completion of the token."""
    lengths: Tensor
    """[S] loss tokens of each completion; all of them are in the micro-batch."""
    start_logprobs: Tensor | None = None
    """[N] under the policy that the step starts from; None if that is the policy as it is."""
    reference_logprobs: Tensor | None = None
    """[N] under the base model; None without a divergence."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What the algorithm makes of each token. All but the loss without gradient, and raw: before truncation."""

    loss: Tensor
    """[N]"""
    log_ratio: Tensor
    """[N] of the surrogate."""
    log_weight: Tensor | None = None
    """[N] of the importance weight, at its level; None if the algorithm has none."""
    masked: Tensor | None = None
    """[N] bool, outside the band of the importance mask; None if the algorithm has none."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Of one optimizer update: over all its micro-batches, before anything is masked."""

    loss_tokens: int
    sequences: int
    max_tokens: int
    """That a completion may have."""


def token_loss(
    algorithm: AlgorithmConfig, logprobs_N: Tensor, entropy_N: Tensor, samples: Samples
) -> TokenLoss:
    """logprobs_N: [N] under the policy, differentiable; so is entropy_N if there is a bonus for it."""
    proximal_N = _proximal(algorithm, logprobs_N, samples)
    centre_N = samples.behaviour_logprobs if proximal_N is None else proximal_N
    x_N = losses.log_ratio(logprobs_N, centre_N)
    if algorithm.ratio_level == "sequence":
        x_N = losses.sequence_log_ratio(x_N, samples.sequence, samples.lengths)
    loss_N = _surrogate(algorithm, x_N, logprobs_N, samples.advantages)

    numerator_N = logprobs_N.detach() if proximal_N is None else proximal_N
    token_weight_N = losses.log_ratio(numerator_N, samples.behaviour_logprobs)
    log_weight_N = masked_N = None
    if algorithm.importance_weight != "none":
        assert algorithm.importance_cap is not None
        log_weight_N = _at_level(algorithm.importance_weight, token_weight_N, samples)
        loss_N = loss_N * weights.truncated(log_weight_N, algorithm.importance_cap)
    if algorithm.importance_mask != "none":
        assert algorithm.importance_mask_low is not None
        assert algorithm.importance_mask_high is not None
        inside_N = weights.inside(
            _at_level(algorithm.importance_mask, token_weight_N, samples),
            algorithm.importance_mask_low,
            algorithm.importance_mask_high,
        )
        loss_N, masked_N = torch.where(inside_N, loss_N, 0.0), ~inside_N

    if algorithm.kl_coefficient > 0:
        assert samples.reference_logprobs is not None
        divergence = losses.kl_k2 if algorithm.kl_estimator == "k2" else losses.kl_k3
        loss_N = loss_N + algorithm.kl_coefficient * divergence(logprobs_N, samples.reference_logprobs)
    if algorithm.entropy_coefficient > 0:
        loss_N = loss_N - algorithm.entropy_coefficient * entropy_N
    return TokenLoss(loss=loss_N, log_ratio=x_N.detach(), log_weight=log_weight_N, masked=masked_N)


def aggregate(
    algorithm: AlgorithmConfig, loss_N: Tensor, samples: Samples, denominators: Denominators
) -> Tensor:
    """The micro-batch's part of the update's loss, a scalar: the parts of all micro-batches add up to it."""
    if algorithm.aggregation == "token_mean":
        return losses.token_mean(loss_N, denominators.loss_tokens)
    if algorithm.aggregation == "sequence_mean":
        return losses.sequence_mean(loss_N, samples.sequence, samples.lengths, denominators.sequences)
    return losses.constant_mean(loss_N, denominators.sequences, denominators.max_tokens)


def _proximal(algorithm: AlgorithmConfig, logprobs_N: Tensor, samples: Samples) -> Tensor | None:
    """[N] without gradient; None without a proximal policy."""
    if algorithm.proximal == "none":
        return None
    if algorithm.proximal == "interpolated":
        return weights.interpolated_proximal(logprobs_N, samples.behaviour_logprobs, samples.lag)
    return logprobs_N.detach() if samples.start_logprobs is None else samples.start_logprobs


def _surrogate(
    algorithm: AlgorithmConfig, log_ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor
) -> Tensor:
    if algorithm.surrogate == "reinforce":
        return losses.reinforce(logprobs_N, advantages_N)
    assert algorithm.clip_high is not None
    if algorithm.surrogate == "cispo":
        return losses.cispo(log_ratio_N, logprobs_N, advantages_N, algorithm.clip_high)
    assert algorithm.clip_low is not None
    loss_N = losses.ppo_clip(log_ratio_N, advantages_N, algorithm.clip_low, algorithm.clip_high)
    if algorithm.dual_clip is None:
        return loss_N
    return losses.dual_clip(loss_N, advantages_N, algorithm.dual_clip)


def _at_level(level: str, log_weight_N: Tensor, samples: Samples) -> Tensor:
    if level == "token":
        return log_weight_N
    return losses.sequence_means(log_weight_N, samples.sequence, samples.lengths)
