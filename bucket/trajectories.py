"""One trajectory object: a group of completions of one prompt, as a Parquet file with plain columns.

    rollout worker: TrajectoryGroup -> encode -> one PUT        learner: GET -> decode -> TrajectoryGroup

`decode` is the gate of training: whatever passes it may be trained on. `bucket_layout.md` section 6.4 is
the schema.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import PROTOCOL_VERSION
from bucketrl.bucket.seal import SEAL_KEY, UNSEALED, check_seal, seal

MAX_BYTES = 64 << 20
"""Largest object that `decode` takes, and largest total of its columns uncompressed."""
MAX_POSITIVE_LOGPROB = 1e-4
"""Rounding of a float32 log-softmax over large logits; anything above is no log-probability."""

_ANY_VERSION = 2**31 - 1
_PHYSICAL = {
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INT32",
    pa.int64(): "INT64",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "BYTE_ARRAY",
}

SCHEMA = pa.schema(
    [
        ("sample", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("behaviour_logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("finish_reason", pa.string()),
        ("seed", pa.int64()),
        ("started_at", pa.string()),
        ("seconds", pa.float64()),
        ("prompt_text", pa.string()),
        ("completion_text", pa.string()),
    ]
)


def _leaves(kind: pa.DataType) -> list[tuple[str, int]]:
    if pa.types.is_map(kind):
        return [(_PHYSICAL[kind.key_type], 1), (_PHYSICAL[kind.item_type], 1)]
    if pa.types.is_list(kind):
        return [(_PHYSICAL[kind.value_type], 1)]
    return [(_PHYSICAL[kind], 0)]


_LEAVES = {field.name: _leaves(field.type) for field in SCHEMA}
"""Parquet physical type and repetition depth of each column's leaves: what another writer must match."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One completion of T >= 1 tokens."""

    sample: int
    """Index within the group."""
    prompt_token_ids: tuple[int, ...]
    """[P] as sent to the engine; the same for the whole group."""
    completion_token_ids: tuple[int, ...]
    """[T] including the end-of-turn token if one was sampled."""
    behaviour_logprobs: tuple[float, ...]
    """[T] natural log of the probability with which the policy that sampled it drew each token."""
    policy_versions: tuple[int, ...]
    """[T] the policy version that sampled each token."""
    loss_mask: tuple[bool, ...]
    """[T] False for tokens that no policy sampled (an environment's); their logprob is 0.0."""
    reward: float
    reward_parts: dict[str, float]
    finish_reason: Literal["stop", "length"]
    seed: int
    """Of the sampling request, in [0, 2**63)."""
    started_at: str
    """RFC 3339, when the request was sent; information only."""
    seconds: float
    """From request to last token."""
    completion_text: str
    """What was scored."""


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All completions of one prompt that one attempt produced; some samples may be missing."""

    run_id: str
    group_id: str
    attempt: str
    worker_id: str
    engine: str
    prompt_text: str
    trajectories: tuple[Trajectory, ...]


def validate(group: TrajectoryGroup) -> None:
    """Raises IntegrityError, with one reason, if `group` must not be trained on."""
    GroupId.parse(group.group_id)
    if not group.trajectories:
        raise IntegrityError("no completions")
    prompt = group.trajectories[0].prompt_token_ids
    samples: set[int] = set()
    for trajectory in group.trajectories:
        problem = _problem(trajectory)
        if problem is None and trajectory.sample in samples:
            problem = "appears twice"
        if problem is None and trajectory.prompt_token_ids != prompt:
            problem = "has another prompt than the rest of the group"
        if problem is not None:
            raise IntegrityError(f"sample {trajectory.sample}: {problem}")
        samples.add(trajectory.sample)


def _problem(t: Trajectory) -> str | None:
    """What is wrong with one completion by itself, or None."""
    length = len(t.completion_token_ids)
    for name in ("behaviour_logprobs", "policy_versions", "loss_mask"):
        if len(getattr(t, name)) != length:
            return f"{name} has length {len(getattr(t, name))}, completion_token_ids {length}"
    checks: tuple[tuple[bool, str], ...] = (
        (length == 0, "empty completion"),
        (not t.prompt_token_ids, "empty prompt"),
        (t.sample < 0, "negative sample index"),
        (min((*t.prompt_token_ids, *t.completion_token_ids), default=0) < 0, "negative token id"),
        (not all(map(math.isfinite, t.behaviour_logprobs)), "behaviour_logprobs are not all finite"),
        (max(t.behaviour_logprobs, default=0.0) > MAX_POSITIVE_LOGPROB, "positive behaviour logprob"),
        (min(t.policy_versions, default=0) < 0, "negative policy version"),
        (not math.isfinite(t.reward), f"reward is {t.reward}"),
        (not all(map(math.isfinite, t.reward_parts.values())), "reward_parts are not all finite"),
        (t.finish_reason not in ("stop", "length"), f"finish_reason is {t.finish_reason!r}"),
        (not 0 <= t.seed < 1 << 63, f"seed {t.seed} is outside [0, 2**63)"),
        (not (math.isfinite(t.seconds) and t.seconds >= 0), f"seconds is {t.seconds}"),
    )
    return next((message for failed, message in checks if failed), None)


def encode(group: TrajectoryGroup) -> bytes:
    """The object's bytes, which `decode` has been seen to accept.

    Raises IntegrityError if `group` is not valid or does not fit the schema and its limits.
    """
    validate(group)
    columns = {name: [_cell(group, t, name) for t in group.trajectories] for name in SCHEMA.names}
    try:
        table = pa.table(columns, schema=SCHEMA)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise IntegrityError(f"a value does not fit its column: {error}") from None
    data = _write(table, _identity(group) | {"rows": str(len(group.trajectories))})
    decode(
        data, run_id=group.run_id, group_id=group.group_id, attempt=group.attempt, max_version=_ANY_VERSION
    )
    return data


def _identity(group: TrajectoryGroup) -> dict[str, str]:
    return {
        "protocol": str(PROTOCOL_VERSION),
        "run_id": group.run_id,
        "group_id": group.group_id,
        "attempt": group.attempt,
        "worker_id": group.worker_id,
        "engine": group.engine,
    }


def _cell(group: TrajectoryGroup, t: Trajectory, name: str) -> Any:
    if name == "prompt_text":
        return group.prompt_text
    value = getattr(t, name)
    return list(value.items()) if name == "reward_parts" else value


def _write(table: pa.Table, metadata: dict[str, str]) -> bytes:
    buffer = BytesIO()
    # No statistics: they would put text from the columns into the footer, where the seal is searched.
    # No stored Arrow schema: the Parquet types say it all, and it would repeat the metadata.
    with pq.ParquetWriter(
        buffer, table.schema, compression="zstd", store_schema=False, write_statistics=False
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata | {SEAL_KEY: UNSEALED})
    return seal(buffer.getvalue())


def decode(
    data: bytes, *, run_id: str, group_id: str, attempt: str, max_version: int, max_bytes: int = MAX_BYTES
) -> TrajectoryGroup:
    """The group in `data`, safe to train on.

    `max_version` is the newest committed policy version: no token can come from a later one. Raises
    IntegrityError with one reason if anything is not as `bucket_layout.md` section 6.4 wants it.
    """
    if len(data) > max_bytes:
        raise IntegrityError(f"object of {len(data)} bytes, more than the limit of {max_bytes}")
    check_seal(data)
    file = _parsed(lambda: pq.ParquetFile(BytesIO(data)), "not a Parquet file")
    raw = file.metadata.metadata or {}
    metadata = _parsed(lambda: {k.decode(): v.decode() for k, v in raw.items()}, "unreadable metadata")
    _check_identity(metadata, {"run_id": run_id, "group_id": group_id, "attempt": attempt})
    _check_shape(file, metadata, max_bytes)
    rows = _parsed(
        lambda: file.read(columns=SCHEMA.names).select(SCHEMA.names).cast(SCHEMA).to_pylist(),
        "unreadable columns",
    )
    group = _group(rows, metadata)
    validate(group)
    newest = max(max(t.policy_versions) for t in group.trajectories)
    if newest > max_version:
        raise IntegrityError(f"policy version {newest} has not been committed; the newest is {max_version}")
    return group


def _parsed(read: Callable[[], Any], what: str) -> Any:
    try:
        return read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{what}: {str(error).splitlines()[0]}") from None


def _check_identity(metadata: dict[str, str], wanted: dict[str, str]) -> None:
    protocol = metadata.get("protocol", "")
    if not protocol.isdecimal():
        raise IntegrityError(f"protocol is {protocol!r}, want a number")
    if int(protocol) > PROTOCOL_VERSION:
        raise IntegrityError(
            f"object has protocol {protocol}, this bucketrl reads up to {PROTOCOL_VERSION}: upgrade it"
        )
    for name, want in wanted.items():
        if metadata.get(name) != want:
            raise IntegrityError(f"{name} is {metadata.get(name, '')!r}, want {want!r}")
    for name in ("worker_id", "engine"):
        if name not in metadata:
            raise IntegrityError(f"metadata lacks {name}")


def _check_shape(file: pq.ParquetFile, metadata: dict[str, str], max_bytes: int) -> None:
    """Types and sizes as the footer declares them, before a single column is read."""
    found: dict[str, list[tuple[str, int]]] = {}
    for i in range(len(file.schema)):
        leaf = file.schema.column(i)
        name = leaf.path.split(".")[0]
        found.setdefault(name, []).append((leaf.physical_type, leaf.max_repetition_level))
    for name, leaves in _LEAVES.items():
        if name not in found:
            raise IntegrityError(f"missing column {name}")
        if found[name] != leaves:
            raise IntegrityError(f"column {name} is {found[name]}, want {leaves} (type, repetition)")
    if metadata.get("rows") != str(file.metadata.num_rows):
        raise IntegrityError(f"{file.metadata.num_rows} rows, metadata says {metadata.get('rows', '')!r}")
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
    # Runs of equal values take almost no bytes even uncompressed; 4 bytes is the smallest list element.
    if max(sum(group.total_byte_size for group in groups), 4 * values) > max_bytes:
        raise IntegrityError(f"columns of {values} values, more than {max_bytes} bytes uncompressed")


def _group(rows: list[dict[str, Any]], metadata: dict[str, str]) -> TrajectoryGroup:
    """Raises IntegrityError for a null anywhere."""
    for row in rows:
        for name, value in row.items():
            parts = [part for pair in value for part in pair] if name == "reward_parts" and value else value
            if value is None or (isinstance(parts, list) and None in parts):
                raise IntegrityError(f"column {name} has a null")
    prompts = {row.pop("prompt_text") for row in rows}
    if len(prompts) > 1:
        raise IntegrityError("prompt_text differs within the group")
    trajectories = []
    for row in rows:
        parts = row.pop("reward_parts")
        lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
        trajectories.append(Trajectory(**(row | lists), reward_parts=dict(parts)))
    return TrajectoryGroup(
        run_id=metadata["run_id"],
        group_id=metadata["group_id"],
        attempt=metadata["attempt"],
        worker_id=metadata["worker_id"],
        engine=metadata["engine"],
        prompt_text=prompts.pop() if prompts else "",
        trajectories=tuple(trajectories),
    )
