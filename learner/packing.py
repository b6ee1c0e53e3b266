"""Groups to sequences to micro-batches: flat arrays under a token budget. Pure; no torch.

    completions of a group ──sequences()──► one TokenSequence each ──pack()──► MicroBatch

A micro-batch holds the prompt of a group once, and behind it what its completions add. A completion sees the
prompt and itself; its first token is predicted by the prompt's last row:

    segments              │ prompt A  │ A0     │ A1   │ prompt B and its only completion │
    input_ids     [T]     │ a a a a a │ x x x  │ y y  │ b b b z z z z                    │
    position_ids  [T]     │ 0 1 2 3 4 │ 5 6 7  │ 5 6  │ 0 1 2 3 4 5 6                    │
    rows          [N]           4       5 6 7    5 6      the rows that predict loss tokens: 4 twice, for A0 and A1

Suffixes: T packed tokens, N scored (loss) tokens, L tokens of one sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.advantages import group_advantages

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One completion behind its prompt, as the model reads it."""

    group: int
    """Index of its group in the batch. Sequences of one group have the same prompt."""
    prompt_length: int
    input_ids: Ints
    """[L] prompt and completion without the very last token, which predicts nothing."""
    rows: Ints
    """[N] ascending positions in `input_ids` whose next token is a loss token; none before the prompt's last."""
    targets: Ints
    """[N] those next tokens."""
    behaviour_logprobs: Floats
    """[N] as sampled."""
    versions: Ints
    """[N] the policy version that sampled each target."""
    advantages: Floats
    """[N] the completion's advantage, once per loss token."""
    sequence_ids: Ints
    """[N] which completion of the batch this is, once per loss token: completions are counted in order of groups
    and of samples as stored, those without loss tokens too."""


class Segment(NamedTuple):
    """Tokens that lie one behind the other in a micro-batch. Each sees those before it in the segment."""

    length: int
    prefix: int | None = None
    """Index of an earlier segment, itself without prefix, that all tokens of this one see too: their prompt."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads. Fields as in TokenSequence."""

    input_ids: Ints
    """[T]"""
    position_ids: Ints
    """[T] places in the sequence, so that those of a completion go on where its prompt ends."""
    segments: tuple[Segment, ...]
    """In order, none empty; their lengths sum to T."""
    rows: Ints
    """[N] into [T]. The last row of a prompt occurs once for each completion whose first token is scored."""
    targets: Ints
    behaviour_logprobs: Floats
    versions: Ints
    advantages: Floats
    sequence_ids: Ints


def sequences(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[Sequence[float]] | None = None
) -> list[TokenSequence]:
    """Every completion that has loss tokens, in order of groups and of samples as stored.

    `advantages`: of each completion of each group; by default those of `group_advantages`.
    """
    if advantages is None:
        advantages = [group_advantages([t.reward for t in group.trajectories]) for group in groups]
    made = []
    completions = (
        (index, trajectory, advantage)
        for index, (group, of_group) in enumerate(zip(groups, advantages, strict=True))
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True)
    )
    for sequence_id, (index, trajectory, advantage) in enumerate(completions):
        mask = np.asarray(trajectory.loss_mask, dtype=bool)
        if not mask.any():
            continue
        completion = np.asarray(trajectory.completion_token_ids, dtype=np.int64)
        prompt = np.asarray(trajectory.prompt_token_ids, dtype=np.int64)
        count = int(mask.sum())
        made.append(
            TokenSequence(
                group=index,
                prompt_length=len(prompt),
                input_ids=np.concatenate([prompt, completion[:-1]]),
                rows=np.flatnonzero(mask) + len(prompt) - 1,
                targets=completion[mask],
                behaviour_logprobs=np.asarray(trajectory.behaviour_logprobs, dtype=np.float32)[mask],
                versions=np.asarray(trajectory.policy_versions, dtype=np.int64)[mask],
                advantages=np.full(count, advantage, dtype=np.float32),
                sequence_ids=np.full(count, sequence_id, dtype=np.int64),
            )
        )
    return made


def pack(items: Sequence[TokenSequence], budget: int) -> list[MicroBatch]:
    """First fit: each group, in order, goes to the first micro-batch with room for its tokens.

    `items`: those of a group side by side, as `sequences` makes them. A group of more than `budget` tokens is
    split into parts, each with the prompt; a single sequence of more gets a micro-batch of its own. The same
    input always gives the same packing: a step done again after a crash sums its gradients in the same order.
    """
    bins: list[list[list[TokenSequence]]] = []
    room: list[int] = []
    for part in _parts(items, budget):
        length = _packed_length(part)
        index = next((i for i, free in enumerate(room) if length <= free), None)
        if index is None:
            bins.append([part])
            room.append(budget - length)
        else:
            bins[index].append(part)
            room[index] -= length
    return [_join(parts) for parts in bins]


def _packed_length(part: Sequence[TokenSequence]) -> int:
    """Tokens of sequences that share their prompt: it counts once."""
    prompt = part[0].prompt_length
    return prompt + sum(len(item.input_ids) - prompt for item in part)


def _parts(items: Sequence[TokenSequence], budget: int) -> Iterator[list[TokenSequence]]:
    """Each group, in as many parts as the budget makes necessary."""
    for _, members in groupby(items, key=lambda item: item.group):
        part: list[TokenSequence] = []
        for item in members:
            if part and _packed_length([*part, item]) > budget:
                yield part
                part = []
            part.append(item)
        yield part


def _join(parts: Sequence[Sequence[TokenSequence]]) -> MicroBatch:
    tokens: list[Ints] = []
    segments: list[Segment] = []
    rows: list[Ints] = []
    length = 0
    for part in parts:
        start, shared, prefix = length, 0, None
        if len(part) > 1:
            shared, prefix = part[0].prompt_length, len(segments)
            tokens.append(part[0].input_ids[:shared])
            segments.append(Segment(shared))
            length += shared
        for item in part:
            # The last row of a shared prompt stands where the prompt does, the others where the completion does.
            rows.append(item.rows + np.where(item.rows < shared, start, length - shared))
            own = item.input_ids[shared:]
            if len(own):  # a completion of one token is predicted by the prompt and predicts nothing itself
                tokens.append(own)
                segments.append(Segment(len(own), prefix))
                length += len(own)
    before = [0 if segment.prefix is None else segments[segment.prefix].length for segment in segments]
    members = [item for part in parts for item in part]
    return MicroBatch(
        input_ids=np.concatenate(tokens),
        position_ids=np.concatenate(
            [
                np.arange(first, first + s.length, dtype=np.int64)
                for first, s in zip(before, segments, strict=True)
            ]
        ),
        segments=tuple(segments),
        rows=np.concatenate(rows),
        targets=np.concatenate([item.targets for item in members]),
        behaviour_logprobs=np.concatenate([item.behaviour_logprobs for item in members]),
        versions=np.concatenate([item.versions for item in members]),
        advantages=np.concatenate([item.advantages for item in members]),
        sequence_ids=np.concatenate([item.sequence_ids for item in members]),
    )
