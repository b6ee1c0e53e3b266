"""Records: one encoding, refused when wrong, tolerant of what later minor versions add."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bucket.builders import run_record

from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.records import (
    PROTOCOL_VERSION,
    Consumed,
    RunRecord,
    StartRecord,
    StepRecord,
    decode,
    decode_log,
)

START = {
    "kind": "start",
    "protocol": 1,
    "run_id": "r",
    "seq": 0,
    "parent_sha256": "",
    "epoch": 1,
    "write_id": "w",
    "written_at": "",
    "learner_id": "l",
}


def test_run_record_round_trips_to_the_same_bytes() -> None:
    data = run_record().encode()
    assert decode(RunRecord, data) == run_record()
    assert decode(RunRecord, data).encode() == data


def test_encoding_is_readable_json_with_sorted_keys_and_a_final_newline() -> None:
    text = run_record().encode().decode()
    assert text.endswith("}\n")
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_log_records_are_told_apart_by_kind() -> None:
    assert isinstance(decode_log(json.dumps(START).encode()), StartRecord)
    with pytest.raises(IntegrityError, match="kind"):
        decode_log(json.dumps(START | {"kind": "other"}).encode())


def test_unknown_fields_are_ignored() -> None:
    assert decode_log(json.dumps(START | {"added_later": 1}).encode()) == StartRecord.model_validate(START)


def test_unknown_configuration_is_refused() -> None:
    """A setting that this reader does not know could change what the run means."""
    changed = json.loads(run_record().encode())
    changed["config"]["algorithm"]["new_loss"] = 1
    with pytest.raises(IntegrityError, match=r"config\.algorithm\.new_loss"):
        decode(RunRecord, json.dumps(changed).encode())


def test_a_later_protocol_is_refused_by_number() -> None:
    later = json.dumps(START | {"protocol": PROTOCOL_VERSION + 1}).encode()
    with pytest.raises(IntegrityError, match=f"protocol {PROTOCOL_VERSION + 1}.*upgrade"):
        decode_log(later)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"kind": "start"}'])
def test_what_is_no_record_raises_integrity_error(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode_log(data)


def test_non_finite_metrics_are_refused() -> None:
    with pytest.raises(IntegrityError):
        decode(StepRecord, json.dumps(START | {"kind": "step", "metrics": {"x": float("nan")}}).encode())


@given(st.permutations(range(12)), st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_consumed_is_the_set_of_what_was_added_in_any_order(order: list[int], sizes: list[int]) -> None:
    consumed, added = Consumed(), set[int]()
    remaining = list(order)
    for size in sizes:
        batch, remaining = set(remaining[:size]), remaining[size:]
        before = consumed
        consumed = consumed.add(batch)
        added |= batch
        assert {n for n in range(20) if n in consumed} == added
        assert consumed.cursor >= before.cursor
        assert consumed.cursor not in consumed
        assert list(consumed.above) == sorted(set(consumed.above))
        assert all(n > consumed.cursor for n in consumed.above)
    assert consumed == Consumed(cursor=12)


@given(st.sets(st.integers(0, 20), min_size=1))
def test_nothing_is_consumed_twice(ordinals: set[int]) -> None:
    consumed = Consumed().add(ordinals)
    for ordinal in ordinals:
        with pytest.raises(ValueError, match=f"ordinal {ordinal} would be consumed twice"):
            consumed.add({ordinal, 99})
