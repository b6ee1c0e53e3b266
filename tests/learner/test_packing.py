"""Packing loses no token, breaks no budget and is a function of its input alone."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.learner.worlds import make_group, replace_first

from bucketrl.learner.packing import TokenSequence, pack, sequences


def sequence(length: int, marker: int) -> TokenSequence:
    rows = np.arange(length // 2, length, dtype=np.int64)
    count = len(rows)
    return TokenSequence(
        input_ids=np.full(length, marker, dtype=np.int64),
        rows=rows,
        targets=np.full(count, marker, dtype=np.int64),
        behaviour_logprobs=np.full(count, -1.0, dtype=np.float32),
        versions=np.zeros(count, dtype=np.int64),
        advantages=np.full(count, float(marker), dtype=np.float32),
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 64))
def test_every_sequence_is_packed_once_and_whole(lengths: list[int], budget: int) -> None:
    items = [sequence(length, marker) for marker, length in enumerate(lengths)]
    batches = pack(items, budget)
    markers = []
    for batch in batches:
        total = len(batch.input_ids)
        assert total <= budget or len(batch.lengths) == 1
        assert sum(batch.lengths) == total == len(batch.position_ids)
        start = 0
        for length in batch.lengths:
            inside = slice(start, start + length)
            assert len(set(batch.input_ids[inside].tolist())) == 1
            assert batch.position_ids[inside].tolist() == list(range(length))
            markers.append(int(batch.input_ids[start]))
            start += length
        assert np.array_equal(batch.input_ids[batch.rows], batch.targets)
        assert np.array_equal(batch.targets, batch.advantages.astype(np.int64))
    assert sorted(markers) == list(range(len(lengths)))
    assert sum(len(batch.targets) for batch in batches) == sum(len(item.targets) for item in items)


def test_first_fit_fills_the_earliest_gap() -> None:
    batches = pack([sequence(length, marker) for marker, length in enumerate([6, 7, 4, 3])], 10)
    assert [batch.lengths for batch in batches] == [(6, 4), (7, 3)]


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


def test_a_completion_without_loss_tokens_still_counts_in_the_baseline() -> None:
    group = make_group(0, rewards=[1.0, 0.0])
    group = replace_first(group, loss_mask=(False, False, False))
    (only,) = sequences([group])
    assert only.advantages.tolist() == [-0.5, -0.5, -0.5]


def test_packing_is_deterministic() -> None:
    items = [sequence(length, marker) for marker, length in enumerate([9, 2, 7, 7, 1])]
    for one, two in zip(pack(items, 12), pack(items, 12), strict=True):
        for field in dataclasses.fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(two, field.name))
