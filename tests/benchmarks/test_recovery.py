"""What the recovery benchmark says about lost tokens."""

import struct
from pathlib import Path

import pytest
from benchmarks.recovery.bucket_view import BucketView
from tests.bucket.builders import group, partial_group, run_record

from bucketrl.bucket import keys, partials, trajectories
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store

UPLOADED = sum(len(t.completion_token_ids) for t in group().trajectories)
PARTIAL = 5
"""Tokens of `partial_group`."""
GOES_ON = (
    "12:00:00 I worker.group: group 0000-00000001 goes on from attempt w9-ab-0: 4 tokens of 2 completions, …"
)


@pytest.fixture
def store() -> Store:
    """`w1` has uploaded group 0 and left group 1; `w10` is somebody else."""
    made = open_store("memory://lost-tokens")
    for attempt, ordinal in (("w1-ab-0", 0), ("w10-ab-0", 2)):
        whole = group(ordinal, attempt)
        made.put(keys.trajectory(keys.GroupId.parse(whole.group_id), attempt), trajectories.encode(whole))
    left = partial_group(1, "w1-ab-1")
    made.put(keys.partial(keys.GroupId.parse(left.group_id), "w1-ab-1"), partials.encode(left))
    return made


@pytest.mark.parametrize(("log", "drawn_before"), [("", 0), (GOES_ON, 4)])
def test_lost_is_what_was_drawn_and_is_in_no_object(
    store: Store, tmp_path: Path, log: str, drawn_before: int
) -> None:
    """Tokens that others had drawn of a group do not count as its own."""
    drawn = tmp_path / "tokens"
    drawn.write_bytes(struct.pack("<q", UPLOADED + PARTIAL - drawn_before + 7))
    assert BucketView(store, run_record()).lost_by("w1", drawn, log) == 7
