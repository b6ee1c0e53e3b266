"""Groups to sequences to micro-batches: flat arrays under a token budget. Pure; no torch.

    completions of a group ──sequences()──► one TokenSequence each ──pack()──► MicroBatch
                                                                               ┌──────┬────┬────────┐
                                            input_ids  [T]                     │ s0   │ s1 │ s2     │
                                            position_ids [T], restarting       │ 0123 │ 01 │ 012345 │
                                            rows [N] of the scored tokens      │   ^^ │  ^ │    ^^^ │

Suffixes: T packed tokens, N scored (loss) tokens, L tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.advantages import group_advantages

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One completion behind its prompt, as the model reads it."""

    input_ids: Ints
    """[L] prompt and completion without the very last token, which predicts nothing."""
    rows: Ints
    """[N] ascending positions in `input_ids` whose next token is a loss token."""
    targets: Ints
    """[N] those next tokens."""
    behaviour_logprobs: Floats
    """[N] as sampled."""
    versions: Ints
    """[N] the policy version that sampled each target."""
    advantages: Floats
    """[N] the completion's advantage, once per loss token."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads: whole sequences one behind the other. Fields as in TokenSequence."""

    input_ids: Ints
    """[T]"""
    position_ids: Ints
    """[T] restarting at 0 with each sequence."""
    lengths: tuple[int, ...]
    """Of the sequences, in order; they sum to T. No token attends across their borders."""
    rows: Ints
    """[N] into [T]."""
    targets: Ints
    behaviour_logprobs: Floats
    versions: Ints
    advantages: Floats


def sequences(groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
    """Every completion that has loss tokens, in order of groups and of samples as stored."""
    made = []
    for group in groups:
        advantages = group_advantages([t.reward for t in group.trajectories])
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            mask = np.asarray(trajectory.loss_mask, dtype=bool)
            if not mask.any():
                continue
            completion = np.asarray(trajectory.completion_token_ids, dtype=np.int64)
            prompt = np.asarray(trajectory.prompt_token_ids, dtype=np.int64)
            made.append(
                TokenSequence(
                    input_ids=np.concatenate([prompt, completion[:-1]]),
                    rows=np.flatnonzero(mask) + len(prompt) - 1,
                    targets=completion[mask],
                    behaviour_logprobs=np.asarray(trajectory.behaviour_logprobs, dtype=np.float32)[mask],
                    versions=np.asarray(trajectory.policy_versions, dtype=np.int64)[mask],
                    advantages=np.full(int(mask.sum()), advantage, dtype=np.float32),
                )
            )
    return made


def pack(items: Sequence[TokenSequence], budget: int) -> list[MicroBatch]:
    """First fit: each sequence, in order, goes to the first micro-batch with room for its tokens.

    A sequence longer than `budget` tokens gets a micro-batch of its own. The same input always gives the
    same packing: a step done again after a crash sums its gradients in the same order.
    """
    bins: list[list[TokenSequence]] = []
    room: list[int] = []
    for item in items:
        length = len(item.input_ids)
        index = next((i for i, free in enumerate(room) if length <= free), None)
        if index is None:
            bins.append([item])
            room.append(budget - length)
        else:
            bins[index].append(item)
            room[index] -= length
    return [_join(members) for members in bins]


def _join(members: Sequence[TokenSequence]) -> MicroBatch:
    lengths = tuple(len(member.input_ids) for member in members)
    starts = np.cumsum((0, *lengths[:-1]))
    return MicroBatch(
        input_ids=np.concatenate([member.input_ids for member in members]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths=lengths,
        rows=np.concatenate([member.rows + start for member, start in zip(members, starts, strict=True)]),
        targets=np.concatenate([member.targets for member in members]),
        behaviour_logprobs=np.concatenate([member.behaviour_logprobs for member in members]),
        versions=np.concatenate([member.versions for member in members]),
        advantages=np.concatenate([member.advantages for member in members]),
    )
