"""Trajectory objects: what passes `decode` may be trained on, and nothing else passes."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bucket.builders import RUN_ID, group, trajectory

from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.seal import SEAL_KEY, UNSEALED, check_seal, seal
from bucketrl.bucket.trajectories import SCHEMA, Trajectory, TrajectoryGroup, decode, encode

WANTED: dict[str, Any] = {
    "run_id": RUN_ID,
    "group_id": "0000-00000000",
    "attempt": "w1-0001",
    "max_version": 7,
}

token_ids = st.integers(0, 2**31 - 1)
logprobs = st.floats(-(2.0**100), 0.0, width=32)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw: st.DrawFn, sample: int, prompt: tuple[int, ...]) -> Trajectory:
    length = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    return Trajectory(
        sample=sample,
        prompt_token_ids=prompt,
        completion_token_ids=column(token_ids),
        behaviour_logprobs=column(logprobs),
        policy_versions=column(st.integers(0, 7)),
        loss_mask=column(st.booleans()),
        reward=draw(finite),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), finite, max_size=3)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        seed=draw(st.integers(0, 2**63 - 1)),
        started_at=draw(st.text(max_size=5)),
        seconds=draw(st.floats(0, 1e6)),
        completion_text=draw(st.text(max_size=20)),
    )


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    samples = draw(st.lists(st.integers(0, 100), min_size=1, max_size=4, unique=True))
    prompt = tuple(draw(st.lists(token_ids, min_size=1, max_size=6)))
    return group(
        engine=draw(st.text(max_size=20)),
        prompt_text=draw(st.text(max_size=20)),
        trajectories=tuple(draw(trajectories(sample, prompt)) for sample in samples),
    )


@settings(max_examples=60)
@given(groups())
def test_a_valid_group_round_trips_exactly(original: TrajectoryGroup) -> None:
    assert decode(encode(original), **WANTED) == original


@settings(max_examples=300)
@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    """Wherever it is: pages, text, footer, the digest itself, the magic."""
    torn = bytearray(encode(group()))
    torn[data.draw(st.integers(0, len(torn) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(IntegrityError):
        decode(bytes(torn), **WANTED)


@settings(max_examples=100)
@given(st.data())
def test_any_truncation_or_extension_is_refused(data: st.DataObject) -> None:
    whole = encode(group())
    cut = data.draw(st.integers(0, len(whole) - 1))
    for torn in (whole[:cut], whole[cut + 1 :], whole + whole[:cut], whole + b"\0" * (cut + 1)):
        if torn != whole:
            with pytest.raises(IntegrityError):
                decode(torn, **WANTED)


def test_columns_are_plain_to_any_parquet_reader() -> None:
    table = pq.read_table(BytesIO(encode(group())))
    assert table.column_names == SCHEMA.names
    rows = table.to_pylist()
    assert rows[1]["completion_token_ids"] == [21, 23, 2]
    assert rows[1]["behaviour_logprobs"] == [-0.5, -1.25, -0.125]
    assert rows[1]["reward"] == 1.0
    assert rows[1]["reward_parts"] == [("correct", 1.0)]
    assert rows[1]["prompt_text"] == "21 * 2 = "


def test_footer_says_what_the_object_is() -> None:
    metadata = pq.ParquetFile(BytesIO(encode(group()))).metadata.metadata
    digest = metadata.pop(SEAL_KEY.encode())
    assert len(digest) == 64
    assert metadata == {
        b"protocol": b"1",
        b"run_id": RUN_ID.encode(),
        b"group_id": b"0000-00000000",
        b"attempt": b"w1-0001",
        b"worker_id": b"w1",
        b"engine": b"transformers 5.19.0",
        b"rows": b"2",
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completion_token_ids": ()}, "behaviour_logprobs has length 3, completion_token_ids 0"),
        ({"behaviour_logprobs": (-0.5,)}, "behaviour_logprobs has length 1, completion_token_ids 3"),
        ({"policy_versions": (0, 0)}, "policy_versions has length 2"),
        ({"loss_mask": (True,) * 4}, "loss_mask has length 4"),
        ({"behaviour_logprobs": (-0.5, math.nan, -0.5)}, "not all finite"),
        ({"behaviour_logprobs": (-0.5, -math.inf, -0.5)}, "not all finite"),
        ({"behaviour_logprobs": (-0.5, -1e39, -0.5)}, "not all finite"),
        ({"behaviour_logprobs": (-0.5, 0.01, -0.5)}, "positive behaviour logprob"),
        ({"policy_versions": (0, -1, 0)}, "negative policy version"),
        ({"reward": math.inf}, "reward is inf"),
        ({"reward_parts": {"correct": math.nan}}, "reward_parts are not all finite"),
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (11, 12, 14)}, "another prompt than the rest"),
        ({"completion_token_ids": (21, -22, 2)}, "negative token id"),
        ({"completion_token_ids": (21, 2**31, 2)}, "does not fit its column"),
        ({"finish_reason": "abort"}, "finish_reason is 'abort'"),
        ({"seed": -1}, "seed -1 is outside"),
        ({"seconds": math.nan}, "seconds is nan"),
        ({"sample": -1}, "negative sample index"),
        ({"sample": 0}, "sample 0: appears twice"),
    ],
)
def test_a_bad_completion_is_never_encoded(changes: dict[str, Any], reason: str) -> None:
    bad = group(trajectories=(trajectory(0), replace(trajectory(1), **changes)))
    with pytest.raises(IntegrityError, match=reason):
        encode(bad)


def test_an_empty_completion_is_refused() -> None:
    empty = trajectory(0, completion_token_ids=(), behaviour_logprobs=(), policy_versions=(), loss_mask=())
    with pytest.raises(IntegrityError, match="sample 0: empty completion"):
        encode(group(trajectories=(empty,)))


def test_a_group_without_completions_is_refused() -> None:
    with pytest.raises(IntegrityError, match="no completions"):
        encode(group(trajectories=()))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"run_id": "other"}, "run_id is 'demo-4f1c2a', want 'other'"),
        ({"group_id": "0000-00000001"}, "group_id is '0000-00000000', want '0000-00000001'"),
        ({"attempt": "w2-0001"}, "attempt is 'w1-0001', want 'w2-0001'"),
        ({"max_version": 1}, "policy version 2 has not been committed; the newest is 1"),
        ({"max_bytes": 500}, "more than the limit of 500"),
    ],
)
def test_an_object_under_a_name_that_it_does_not_have_is_refused(wanted: dict[str, Any], reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        decode(encode(group(version=2)), **(WANTED | wanted))


def resealed(
    change: Callable[[pa.Table], pa.Table] = lambda table: table,
    metadata: dict[str, str | None] | None = None,
) -> bytes:
    """A well-sealed object that another program might have written."""
    file = pq.ParquetFile(BytesIO(encode(group())))
    table = change(file.read()).replace_schema_metadata(None)
    values: dict[str, str | None] = {k.decode(): v.decode() for k, v in file.metadata.metadata.items()}
    values |= {SEAL_KEY: UNSEALED} | (metadata or {})
    buffer = BytesIO()
    with pq.ParquetWriter(buffer, table.schema, compression="snappy", write_statistics=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({name: value for name, value in values.items() if value is not None})
    return seal(buffer.getvalue())


def with_column(name: str, values: list[Any], kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values, kind))


def as_required(table: pa.Table) -> pa.Table:
    return table.cast(pa.schema([field.with_nullable(False) for field in table.schema]))


def as_large(table: pa.Table) -> pa.Table:
    index = table.column_names.index("completion_token_ids")
    return table.set_column(
        index, "completion_token_ids", table.column(index).cast(pa.large_list(pa.int32()))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table,
        as_required,
        as_large,
        lambda table: table.select(table.column_names[::-1]),
        lambda table: table.append_column("added_later", pa.array([1, 2])),
    ],
    ids=["snappy", "required", "large_list", "reordered", "extra column"],
)
def test_what_another_writer_may_do_differently_is_accepted(change: Callable[[pa.Table], pa.Table]) -> None:
    assert decode(resealed(change), **WANTED) == group()


@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_missing_column_is_refused_by_name(name: str) -> None:
    with pytest.raises(IntegrityError, match=f"missing column {name}"):
        decode(resealed(lambda table: table.drop_columns([name])), **WANTED)


@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_null_is_refused_by_column(name: str) -> None:
    kind = SCHEMA.field(name).type
    with pytest.raises(IntegrityError, match=f"column {name} has a null"):
        decode(resealed(with_column(name, [None, None], kind)), **WANTED)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_column("reward", ["1", "2"], pa.string()), "column reward is .*BYTE_ARRAY"),
        (with_column("behaviour_logprobs", [[-0.5, None, -0.5]] * 2, pa.list_(pa.float32())), "has a null"),
        (
            with_column("reward_parts", [[("correct", None)], []], pa.map_(pa.string(), pa.float64())),
            "column reward_parts has a null",
        ),
        (with_column("prompt_text", ["a", "b"], pa.string()), "prompt_text differs within the group"),
        (with_column("sample", [4, 4], pa.int32()), "sample 4: appears twice"),
        (lambda table: table.append_column("reward", pa.array([0.5, 0.5])), "column reward is"),
        (lambda table: table.slice(0, 0), "no completions|rows"),
        (lambda table: table.slice(0, 1), "1 rows, metadata says '2'"),
    ],
)
def test_wrong_columns_are_refused(change: Callable[[pa.Table], pa.Table], reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        decode(resealed(change), **WANTED)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"protocol": "2"}, "protocol 2, this bucketrl reads up to 1: upgrade it"),
        ({"protocol": "one"}, "protocol is 'one'"),
        ({"protocol": None}, "protocol is ''"),
        ({"run_id": None}, "run_id is ''"),
        ({"engine": None}, "metadata lacks engine"),
        ({"rows": "3"}, "2 rows, metadata says '3'"),
    ],
)
def test_wrong_metadata_is_refused(metadata: dict[str, str | None], reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        decode(resealed(metadata=metadata), **WANTED)


def test_a_small_object_that_expands_beyond_the_limit_is_refused_unread() -> None:
    """Runs of equal values compress to nothing; the footer tells before memory is taken."""
    zeros = with_column("policy_versions", [[0] * 3_000_000, [0, 0, 0]], pa.list_(pa.int32()))
    data = resealed(zeros)
    assert len(data) < 100_000
    with pytest.raises(IntegrityError, match="uncompressed"):
        decode(data, **WANTED, max_bytes=1_000_000)


def test_the_seal_can_be_checked_from_the_specification_alone() -> None:
    """Section 6.4 of `bucket_layout.md`, in the words of somebody who has nothing but it."""
    data = encode(group())
    assert data[-4:] == b"PAR1"
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    start = data.index(b"object_sha256\x18\x40", footer) + 15
    zeroed = data[:start] + b"0" * 64 + data[start + 64 :]
    assert hashlib.sha256(zeroed).hexdigest().encode() == data[start : start + 64]


def test_a_parquet_file_without_a_seal_is_refused() -> None:
    buffer = BytesIO()
    pq.write_table(pa.table({"sample": [1]}), buffer)
    with pytest.raises(IntegrityError, match=f"0 {SEAL_KEY} entries"):
        check_seal(buffer.getvalue())


def test_a_second_seal_is_refused() -> None:
    """Otherwise the digest would depend on which one a reader finds."""
    forged = group(engine=f"{SEAL_KEY}\x18\x40" + "a" * 64)
    with pytest.raises(IntegrityError, match=f"2 {SEAL_KEY} entries"):
        encode(forged)


def test_samples_may_be_missing() -> None:
    """A dropped completion does not cost its group."""
    partial_group = replace(group(), trajectories=(trajectory(3),))
    assert decode(encode(partial_group), **WANTED) == partial_group


def test_rounding_of_a_float32_softmax_is_no_positive_logprob() -> None:
    certain = group(trajectories=(trajectory(0, behaviour_logprobs=(2.0**-20, 0.0, -0.0)),))
    assert decode(encode(certain), **WANTED) == certain
