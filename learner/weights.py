"""Off-policy corrections: the proximal policy, and what a token's sample counts for. Nothing has a gradient.

With μ the behaviour policy and π_prox the proximal one (without one, the policy π itself):

    w = π_prox / μ, by token, or by sequence as geometric mean exp(mean log w)
    truncated   min(w, cap)                 TIS
    masked      0 unless low <= w <= high    IcePop by token, MIS by sequence

The mean over a completion is `losses.sequence_means`: a product of ratios grows with the length (trl #5814), so
none is formed. What is masked or truncated never shortens the batch: denominators are counted before.
"""

from torch import Tensor


def interpolated_proximal(logprobs_N: Tensor, behaviour_logprobs_N: Tensor, lag_N: Tensor) -> Tensor:
    """log μ + a·(log π - log μ), the proximal policy guessed without a forward pass; [N], no gradient.

    a = (v_prox - v_behaviour) / (v - v_behaviour), with v the version in the making and v_prox = v - 1 the one
    that the step starts from (AReaL's `loglinear`, docs/algorithms/prox_approx.md there). lag_N: [N]
    v_prox - v_behaviour, >= 0, so a = lag / (lag + 1): a fresh token's proximal policy is its behaviour policy.
    """
    difference_N = logprobs_N.detach() - behaviour_logprobs_N
    lag_N = lag_N.to(difference_N.dtype)
    return behaviour_logprobs_N + lag_N / (lag_N + 1) * difference_N


def truncated(log_weight_N: Tensor, cap: float) -> Tensor:
    """min(w, cap); [N]. Truncated importance sampling: V-trace (arXiv 1802.01561, section 4.1), AIPO
    (LlamaRL, arXiv 2505.24034), with cap 2 in most systems of today."""
    return log_weight_N.exp().clamp(max=cap)


def inside(log_weight_N: Tensor, low: float, high: float) -> Tensor:
    """Whether low <= w <= high; [N] bool.

    By token the band of IcePop (Ring-1T, arXiv 2510.18855), by sequence the mask on the geometric mean
    (yingru.notion.site, "When Speed Kills Stability"; SkyRL's geometric mask).
    """
    weight_N = log_weight_N.exp()
    return (weight_N >= low) & (weight_N <= high)
