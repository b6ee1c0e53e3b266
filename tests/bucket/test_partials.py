"""Partial objects: what passes `decode` may be continued, and nothing else passes."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bucket.builders import NOW, RUN_ID, group, group_text, partial_group

from bucketrl.bucket import keys, partials, trajectories
from bucketrl.bucket.completions import Completion
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.store import ObjectInfo

WANTED: dict[str, Any] = {
    "run_id": RUN_ID,
    "group_id": "0000-00000000",
    "attempt": "w1-0001",
    "max_version": 7,
}


@st.composite
def completions(draw: st.DrawFn, sample: int) -> Completion:
    length = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    return Completion(
        sample=sample,
        prompt_token_ids=(1, 2, 3),
        completion_token_ids=column(st.integers(0, 2**31 - 1)),
        behaviour_logprobs=column(st.floats(-(2.0**100), 0.0, width=32)),
        policy_versions=column(st.integers(0, 7)),
        loss_mask=column(st.booleans()),
        finish_reason=draw(st.sampled_from(["stop", "length", ""])),
        seed=draw(st.integers(0, 2**63 - 1)),
        started_at=NOW,
        seconds=draw(st.floats(0, 1e6)),
    )


@settings(max_examples=50)
@given(st.data())
def test_a_partial_group_round_trips_exactly(data: st.DataObject) -> None:
    samples = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=4, unique=True))
    original = partial_group(completions=tuple(data.draw(completions(sample)) for sample in samples))
    assert partials.decode(partials.encode(original), **WANTED) == original


@settings(max_examples=100)
@given(st.data())
def test_any_flipped_bit_and_any_cut_is_refused(data: st.DataObject) -> None:
    whole = partials.encode(partial_group())
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    for torn in (bytes(flipped), whole[:place], whole + whole[: place + 1]):
        with pytest.raises(IntegrityError):
            partials.decode(torn, **WANTED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy_versions": (0,)}, "policy_versions has length 1"),
        ({"behaviour_logprobs": (-0.5, math.nan)}, "not all finite"),
        ({"behaviour_logprobs": (-0.5, 0.01)}, "positive behaviour logprob"),
        ({"finish_reason": "abort"}, "finish_reason is 'abort'"),
        ({"sample": 0}, "appears twice"),
        ({"prompt_token_ids": (9,)}, "another prompt"),
    ],
)
def test_a_bad_completion_is_never_encoded(changes: dict[str, Any], reason: str) -> None:
    first, second = partial_group().completions
    with pytest.raises(IntegrityError, match=reason):
        partials.encode(partial_group(completions=(first, replace(second, **changes))))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"run_id": "other"}, "run_id is"),
        ({"group_id": "0000-00000001"}, "group_id is"),
        ({"attempt": "w2-0001"}, "attempt is"),
        ({"max_version": 1}, "policy version 2 has not been committed"),
        ({"max_bytes": 500}, "more than the limit of 500"),
    ],
)
def test_an_object_under_a_name_that_it_does_not_have_is_refused(wanted: dict[str, Any], reason: str) -> None:
    data = partials.encode(partial_group(version=2))
    with pytest.raises(IntegrityError, match=reason):
        partials.decode(data, **(WANTED | wanted))


def test_a_partial_group_is_no_trajectory() -> None:
    """However it gets under the wrong key, nobody trains on it."""
    with pytest.raises(IntegrityError, match="missing column reward"):
        trajectories.decode(partials.encode(partial_group()), **WANTED)


def test_a_trajectory_can_be_read_as_a_partial_group_whose_completions_have_ended() -> None:
    whole = partials.decode(trajectories.encode(group()), **WANTED)
    assert [one.finish_reason for one in whole.completions] == ["stop", "stop"]


def test_of_several_partials_the_fullest_is_continued() -> None:
    def info(ordinal: int, attempt: str, size: int) -> ObjectInfo:
        return ObjectInfo(keys.partial(GroupId.parse(group_text(ordinal)), attempt), size)

    listing = [
        info(1, "a", 10),
        info(1, "b", 30),
        info(1, "c", 20),
        info(6, "z", 1),
        ObjectInfo("partial/README", 99),
        ObjectInfo("partial/0000-00000009/a.parquet", 99),
    ]
    assert partials.fullest(listing, 4) == {1: "b", 6: "z"}
