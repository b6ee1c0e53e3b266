"""The loss of a micro-batch as the run's algorithm composes it.

    loss per token = surrogate(x, A) · importance weight · mask + β·divergence - η·entropy

Neither weight nor mask touches the last two terms. `bucketrl.kernels` computes it all: the terms, with formulas and
sources, are in its `policy_terms.py`. What is left to the learner is here: which of them, the proximal policy, and
the normaliser. Suffixes: N loss tokens, S completions.
"""

from dataclasses import dataclass, fields

from torch import Tensor

from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.kernels import Objective, packed_policy_grad


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of the loss tokens of a micro-batch, beside the policy that is trained."""

    behaviour_logprobs: Tensor
    """[N]"""
    advantages: Tensor
    """[S]"""
    lag: Tensor
    """[N] versions between the policy that sampled the token and the one that the step starts from."""
    cu_seqlens: Tensor
    """[S + 1] int64, where the completions begin and the last one ends; all of their loss tokens are there."""
    start_logprobs: Tensor | None = None
    """[N] under the policy that the step starts from; None if that is the policy as it is."""
    reference_logprobs: Tensor | None = None
    """[N] under the base model; None without a divergence."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Of one optimizer update: over all its micro-batches, before anything is masked."""

    loss_tokens: int
    sequences: int
    max_tokens: int
    """That a completion may have."""


def loss_and_gradients(
    algorithm: AlgorithmConfig,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    proximal_N: Tensor | None,
    samples: Samples,
    denominators: Denominators,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The micro-batch's part of the update's loss, a scalar: the parts of all micro-batches add up to it.

    logprobs_N, entropy_N: [N] under the policy. proximal_N: that of `proximal_logprobs`.
    Returns the loss, and its derivatives by logprobs_N and by entropy_N, [N]; None without a bonus for entropy.
    """
    norm, weights_S = _normaliser(algorithm, logprobs_N, samples, denominators)
    loss, grad_N, grad_entropy_N, _ = packed_policy_grad(
        logprobs_N,
        samples.behaviour_logprobs,
        samples.advantages,
        samples.cu_seqlens,
        norm,
        proximal_N=proximal_N,
        reference_N=samples.reference_logprobs,
        entropy_N=entropy_N if algorithm.entropy_coefficient > 0 else None,
        weights_B=weights_S,
        objective=objective(algorithm),
    )
    return loss, grad_N, grad_entropy_N


def objective(algorithm: AlgorithmConfig) -> Objective:
    """What the algorithm leaves out is None there, and without effect here."""
    settings = {field.name: getattr(algorithm, field.name) for field in fields(Objective)}
    return Objective(**{name: value for name, value in settings.items() if value is not None})


def proximal_logprobs(algorithm: AlgorithmConfig, logprobs_N: Tensor, samples: Samples) -> Tensor | None:
    """[N] without gradient; None without a proximal policy.

    interpolated: log μ + a·(log π - log μ), guessed without a forward pass. a = (v_prox - v_behaviour) /
    (v - v_behaviour), with v the version in the making and v_prox = v - 1 the one that the step starts from
    (AReaL's `loglinear`, docs/algorithms/prox_approx.md there): lag / (lag + 1). A fresh token's is its
    behaviour policy.
    """
    if algorithm.proximal == "none":
        return None
    if algorithm.proximal == "interpolated":
        lag_N = samples.lag.to(logprobs_N.dtype)
        difference_N = logprobs_N.detach() - samples.behaviour_logprobs
        return samples.behaviour_logprobs + lag_N / (lag_N + 1) * difference_N
    return logprobs_N.detach() if samples.start_logprobs is None else samples.start_logprobs


def _normaliser(
    algorithm: AlgorithmConfig, logprobs_N: Tensor, samples: Samples, denominators: Denominators
) -> tuple[int, Tensor | None]:
    """What the sum over tokens is divided by, and what the tokens of each completion count in it: [S], or None.

    token_mean     Σ / all loss tokens: DAPO (arXiv 2503.14476, section 3.3).
    sequence_mean  Σ over completions of their means / completions: GRPO (arXiv 2402.03300, eq. 3). Tokens of a
                   long completion count less each.
    constant       Σ / (completions · max_tokens): Dr. GRPO (arXiv 2503.20783, section 3.2). Up to the constant,
                   the mean over completions of sums over their tokens: no length is favoured.
    """
    if algorithm.aggregation == "token_mean":
        return denominators.loss_tokens, None
    if algorithm.aggregation == "sequence_mean":
        return denominators.sequences, samples.cu_seqlens.diff().to(logprobs_N.dtype).reciprocal()
    return denominators.sequences * denominators.max_tokens, None
