"""How a completion begins, what is taken over of another attempt's, and how new tokens are joined to old ones.
Pure."""

from collections.abc import Sequence
from dataclasses import replace

from bucketrl.bucket.completions import Completion
from bucketrl.rollout_worker.engine import SampledCompletion


def usable(
    completions: Sequence[Completion],
    *,
    prompt_token_ids: tuple[int, ...],
    newest_version: int,
    max_staleness: int,
    max_tokens: int,
    group_size: int,
) -> dict[int, Completion]:
    """By sample, those of another attempt that are worth going on with; the others are drawn anew.

    Beyond `max_staleness` the learner would only skip the group: staleness at the next step is the distance
    from the oldest token's version to the newest one.
    """
    return {
        completion.sample: completion
        for completion in completions
        if completion.prompt_token_ids == prompt_token_ids
        and completion.sample < group_size
        and newest_version - min(completion.policy_versions) <= max_staleness
        and len(completion.completion_token_ids) < max_tokens + bool(completion.finish_reason)
    }


def fresh(prompt_token_ids: tuple[int, ...], sample: int, seed: int, started_at: str) -> Completion:
    """A completion before its first token."""
    return Completion(
        sample=sample,
        prompt_token_ids=prompt_token_ids,
        completion_token_ids=(),
        behaviour_logprobs=(),
        policy_versions=(),
        loss_mask=(),
        finish_reason="",
        seed=seed,
        started_at=started_at,
        seconds=0.0,
    )


def joined(so_far: Completion, drawn: SampledCompletion, seconds: float) -> Completion:
    """`so_far` and the tokens that follow it; each keeps the version and the logprob it was drawn with."""
    return replace(
        so_far,
        completion_token_ids=so_far.completion_token_ids + drawn.token_ids,
        behaviour_logprobs=so_far.behaviour_logprobs + drawn.logprobs,
        policy_versions=so_far.policy_versions + drawn.policy_versions,
        loss_mask=so_far.loss_mask + (True,) * len(drawn.token_ids),
        finish_reason="" if drawn.finish_reason == "abort" else drawn.finish_reason,
        seconds=so_far.seconds + seconds,
    )
