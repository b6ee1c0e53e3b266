"""One trajectory object: a group of completions of one prompt, as a Parquet file with plain columns.

    rollout worker: TrajectoryGroup -> encode -> one PUT        learner: GET -> decode -> TrajectoryGroup

`decode` is the gate of training: whatever passes it may be trained on. `bucket_layout.md` section 6.4 is
the schema.
"""

import math
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from bucketrl.bucket.completions import (
    ANY_VERSION,
    REQUEST_COLUMNS,
    TOKEN_COLUMNS,
    Completion,
    Group,
    check_completions,
    check_versions,
    read_group,
    write_group,
)
from bucketrl.bucket.sealed_table import MAX_BYTES, SealedTable

TABLE = SealedTable(
    pa.schema(
        [
            *TOKEN_COLUMNS,
            ("reward", pa.float64()),
            ("reward_parts", pa.map_(pa.string(), pa.float64())),
            *REQUEST_COLUMNS,
            ("completion_text", pa.string()),
        ]
    )
)
SCHEMA = TABLE.schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Completion):
    """A completion that has ended, and what it is worth."""

    finish_reason: Literal["stop", "length"]
    reward: float
    reward_parts: dict[str, float]
    completion_text: str
    """What was scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup(Group):
    """All completions of one prompt that one attempt produced; some samples may be missing."""

    trajectories: tuple[Trajectory, ...]


def validate(group: TrajectoryGroup) -> None:
    """Raises IntegrityError, with one reason, if `group` must not be trained on."""
    check_completions(group.group_id, group.trajectories, _problem)


def _problem(t: Trajectory) -> str | None:
    checks: tuple[tuple[bool, str], ...] = (
        (not math.isfinite(t.reward), f"reward is {t.reward}"),
        (not all(map(math.isfinite, t.reward_parts.values())), "reward_parts are not all finite"),
        (t.finish_reason not in ("stop", "length"), f"finish_reason is {t.finish_reason!r}"),
    )
    return next((message for failed, message in checks if failed), None)


def encode(group: TrajectoryGroup) -> bytes:
    """The object's bytes, which `decode` has been seen to accept.

    Raises IntegrityError if `group` is not valid or does not fit the schema and its limits.
    """
    validate(group)
    data = write_group(TABLE, group, group.trajectories)
    decode(data, run_id=group.run_id, group_id=group.group_id, attempt=group.attempt, max_version=ANY_VERSION)
    return data


def decode(
    data: bytes, *, run_id: str, group_id: str, attempt: str, max_version: int, max_bytes: int = MAX_BYTES
) -> TrajectoryGroup:
    """The group in `data`, safe to train on.

    `max_version` is the newest committed policy version: no token can come from a later one. Raises
    IntegrityError with one reason if anything is not as `bucket_layout.md` section 6.4 wants it.
    """
    header, rows = read_group(
        TABLE, data, run_id=run_id, group_id=group_id, attempt=attempt, max_bytes=max_bytes
    )
    group = TrajectoryGroup(**header, trajectories=tuple(Trajectory(**row) for row in rows))
    validate(group)
    check_versions(group.trajectories, max_version)
    return group
