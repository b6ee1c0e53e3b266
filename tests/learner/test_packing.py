"""Packing shows each loss token once, behind its own prompt, breaks no budget and depends on its input alone."""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.learner.worlds import make_group, replace_first

from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.packing import MicroBatch, Segment, pack, sequences

Masks = list[list[bool]]
"""Of a group: which tokens of each completion are trained on."""
masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=6).filter(any), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.integers(1, 9), masks), min_size=1, max_size=4)
"""Prompt length and masks of each group."""


def make_batch(shape: list[tuple[int, Masks]]) -> list[TrajectoryGroup]:
    """No two tokens and no two log-probabilities of the batch are the same."""
    tokens = iter(range(10_000))
    groups = []
    for ordinal, (prompt, of_group) in enumerate(shape):
        group = make_group(
            ordinal,
            prompt=[next(tokens) for _ in range(prompt)],
            completions=[[next(tokens) for _ in mask] for mask in of_group],
            rewards=[0.0] * len(of_group),
        )
        trajectories = [
            dataclasses.replace(
                trajectory,
                loss_mask=tuple(mask),
                behaviour_logprobs=tuple(-float(token) for token in trajectory.completion_token_ids),
                policy_versions=trajectory.completion_token_ids,
            )
            for trajectory, mask in zip(group.trajectories, of_group, strict=True)
        ]
        groups.append(dataclasses.replace(group, trajectories=tuple(trajectories)))
    return groups


def number(groups: list[TrajectoryGroup]) -> list[list[float]]:
    """An advantage for each completion: its place in the batch."""
    places = iter(range(10_000))
    return [[float(next(places)) for _ in group.trajectories] for group in groups]


def contexts(batch: MicroBatch) -> Iterator[list[int]]:
    """What each of the T rows sees of the others, itself last, in the order of their positions."""
    starts = np.cumsum([0, *(segment.length for segment in batch.segments)])
    inside = [list(range(a, b)) for a, b in pairwise(starts)]
    for rows, segment in zip(inside, batch.segments, strict=True):
        before = [] if segment.prefix is None else inside[segment.prefix]
        for count in range(1, segment.length + 1):
            yield [*before, *rows[:count]]


@settings(max_examples=50)
@given(batches, st.integers(1, 40))
def test_each_loss_token_is_scored_once_and_behind_what_it_was_sampled_from(
    shape: list[tuple[int, Masks]], budget: int
) -> None:
    groups = make_batch(shape)
    want = []
    completions = [(g, t) for g in groups for t in g.trajectories]
    for place, (_, t) in enumerate(completions):
        for index, token in enumerate(t.completion_token_ids):
            if t.loss_mask[index]:
                want.append((token, (*t.prompt_token_ids, *t.completion_token_ids[:index]), place))
    found = []
    for batch in pack(sequences(groups, number(groups)), budget):
        seen = list(contexts(batch))
        assert len(seen) == len(batch.input_ids) == len(batch.position_ids)
        for row, context in enumerate(seen):
            assert batch.position_ids[context].tolist() == list(range(len(context)))
            assert context[-1] == row
        for row, target, place in zip(batch.rows, batch.targets, batch.sequence_ids, strict=True):
            found.append((int(target), tuple(batch.input_ids[seen[row]].tolist()), int(place)))
        assert np.array_equal(-batch.behaviour_logprobs, batch.targets)
        assert np.array_equal(batch.versions, batch.targets)
        assert np.array_equal(batch.advantages, batch.sequence_ids)
    assert sorted(found) == sorted(want)


@settings(max_examples=50)
@given(batches, st.integers(1, 40))
def test_the_budget_is_kept_and_a_prompt_repeated_only_where_its_group_does_not_fit(
    shape: list[tuple[int, Masks]], budget: int
) -> None:
    groups = make_batch(shape)
    batches = pack(sequences(groups), budget)
    for batch in batches:
        assert all(segment.length for segment in batch.segments)
        assert len(batch.input_ids) <= budget or len(set(batch.sequence_ids)) == 1
    packed = [token for batch in batches for token in batch.input_ids.tolist()]
    for group in groups:
        prompt = group.trajectories[0].prompt_token_ids
        own = [len(t.completion_token_ids) - 1 for t in group.trajectories]
        times = packed.count(prompt[0])
        if len(prompt) + sum(own) <= budget:
            assert times == 1
        elif len(prompt) + max(own) <= budget:
            # Two parts side by side hold more than the budget, or they would be one.
            assert times <= 2 * -(-sum(own) // max(1, budget - len(prompt)))
        else:
            assert times <= len(own)


def test_first_fit_fills_the_earliest_gap() -> None:
    shape = [(1, [[True] * length]) for length in (6, 7, 4, 3)]
    packed = pack(sequences(make_batch(shape)), 10)
    assert [batch.segments for batch in packed] == [(Segment(6), Segment(4)), (Segment(7), Segment(3))]


def test_a_prompt_is_followed_by_what_its_completions_add() -> None:
    """As drawn in the module's docstring."""
    shared = make_group(0, prompt=(1,) * 5, completions=[(2, 3, 4, 5), (6, 7, 8)], rewards=[1, 0])
    alone = make_group(1, prompt=(10,) * 3, completions=[(11, 12, 13, 14, 15)], rewards=[1])
    (batch,) = pack(sequences([shared, alone], [[1.0, -1.0], [0.0]]), 100)
    assert batch.segments == (Segment(5), Segment(3, 0), Segment(2, 0), Segment(7))
    assert batch.input_ids.tolist() == [1, 1, 1, 1, 1, 2, 3, 4, 6, 7, 10, 10, 10, 11, 12, 13, 14]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 0, 1, 2, 3, 4, 5, 6]
    assert batch.rows.tolist() == [4, 5, 6, 7, 4, 8, 9, 12, 13, 14, 15, 16]
    assert batch.targets.tolist() == [2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15]
    assert batch.sequence_ids.tolist() == [0] * 4 + [1] * 3 + [2] * 5
    assert batch.advantages.tolist() == [1.0] * 4 + [-1.0] * 3 + [0.0] * 5


def test_completions_of_one_token_are_predicted_by_the_prompt_alone() -> None:
    group = make_group(0, prompt=(5, 6), completions=[(8,), (9,), (10, 11)], rewards=[1.0, 0.0, 0.0])
    (batch,) = pack(sequences([group]), 100)
    assert batch.segments == (Segment(2), Segment(1, 0))
    assert batch.rows.tolist() == [1, 1, 1, 2]
    assert batch.targets.tolist() == [8, 9, 10, 11]


def test_a_sequence_predicts_its_completion_and_nothing_else() -> None:
    group = make_group(0, prompt=(5, 6, 7), completions=[(8, 9, 1), (10, 11)], rewards=[1.0, 0.0])
    first, second = sequences([group])
    assert first.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert first.rows.tolist() == [2, 3, 4]
    assert first.targets.tolist() == [8, 9, 1]
    assert first.advantages.tolist() == [0.5, 0.5, 0.5]
    assert second.input_ids.tolist() == [5, 6, 7, 10]
    assert second.advantages.tolist() == [-0.5, -0.5]


def test_masked_tokens_are_read_but_not_scored() -> None:
    group = make_group(0, prompt=(5,), completions=[(8, 9, 10), (8, 9, 10)], rewards=[1.0, 0.0])
    group = replace_first(group, loss_mask=(True, False, True), behaviour_logprobs=(-0.5, 0.0, -0.25))
    first = sequences([group])[0]
    assert first.input_ids.tolist() == [5, 8, 9]
    assert first.targets.tolist() == [8, 10]
    assert first.behaviour_logprobs.tolist() == [-0.5, -0.25]


def test_a_completion_without_loss_tokens_still_counts_in_the_baseline_and_in_the_numbering() -> None:
    group = make_group(0, rewards=[1.0, 0.0])
    group = replace_first(group, loss_mask=(False, False, False))
    (only,) = sequences([group])
    assert only.advantages.tolist() == [-0.5, -0.5, -0.5]
    assert only.sequence_ids.tolist() == [1, 1, 1]


def test_packing_is_deterministic() -> None:
    shape = [(3, [[True] * length for length in (9, 2, 7)]), (1, [[True] * 7]), (4, [[True], [True]])]
    one_more_time = sequences(make_batch(shape))
    for one, two in zip(pack(sequences(make_batch(shape)), 12), pack(one_more_time, 12), strict=True):
        for field in dataclasses.fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(two, field.name))
