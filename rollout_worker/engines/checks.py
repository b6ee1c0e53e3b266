"""What every engine's output must satisfy before anybody trains on it."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.engine import DroppedCompletion, FinishReason, SampledCompletion

_ROUNDING = 1e-4
"""A log-softmax may exceed 0 by rounding; more than this is no log-probability."""

_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
CLOSED = "engine closed"
"""Why a completion is dropped that runs when its engine is closed."""


def check_weights(version: int, folder: Path) -> None:
    """Raises IntegrityError if the adapter's file cannot be read or holds a value that is not finite.

    vLLM serves such a version, and keys and values that are not finite stay in its cache: on CPU they reach
    other versions' requests that are given the same blocks later.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            bad = [name for name in sorted(file.keys()) if not _is_finite(file.get_tensor(name))]
    except (OSError, SafetensorError, TypeError) as error:
        raise IntegrityError(f"adapter version {version}: its weights cannot be read: {error}") from None
    if bad:
        raise IntegrityError(f"adapter version {version}: {bad[0]} holds values that are not finite")


def _is_finite(tensor: Any) -> bool:
    """Raises TypeError for a type that NumPy lacks, but for bfloat16."""
    import torch

    # Not by torch: an operation on a large tensor in a new thread starts a team of threads, and waits until each of
    # them got a core. On a busy machine hundreds of those took seconds.
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy()
        return bool(((bits & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(tensor.numpy()).all())


def checked_completion(
    token_ids: tuple[int, ...],
    logprobs: tuple[float | None, ...],
    version: int,
    finish_reason: str | None,
) -> SampledCompletion:
    """The completion, all of whose T tokens were sampled by `version`.

    Raises DroppedCompletion if there is nothing to train on or a logprob is missing, not finite or positive
    (engines return such for tokens with probability near 1 and after numerical trouble).
    """
    reason = _REASONS.get(finish_reason)
    if reason is None:
        raise DroppedCompletion(f"finish reason {finish_reason}")
    if not token_ids and reason != "abort":
        raise DroppedCompletion("empty completion")
    if len(logprobs) != len(token_ids):
        raise DroppedCompletion("logprob missing")
    kept: list[float] = []
    for logprob in logprobs:
        if logprob is None:
            raise DroppedCompletion("logprob missing")
        if not math.isfinite(logprob):
            raise DroppedCompletion("logprob not finite")
        if logprob > _ROUNDING:
            raise DroppedCompletion("logprob positive")
        kept.append(min(logprob, 0.0))
    return SampledCompletion(
        token_ids=token_ids,
        logprobs=tuple(kept),
        policy_versions=(version,) * len(token_ids),
        finish_reason=reason,
    )
