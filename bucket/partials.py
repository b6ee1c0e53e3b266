"""One partial object: a group that its worker had to leave, with the completions as far as they were drawn.

    worker that is stopped: PartialGroup -> encode -> one PUT      another worker: GET -> decode -> goes on

A completion is continued from its tokens; each token keeps its own policy version and logprob. There are no
rewards: the worker that ends the group scores all of it. `bucket_layout.md` section 6.10 is the schema.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from bucketrl.bucket import keys
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
from bucketrl.bucket.store import ObjectInfo

TABLE = SealedTable(pa.schema([*TOKEN_COLUMNS, *REQUEST_COLUMNS]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup(Group):
    """What one attempt had drawn of a group. Samples without a token are missing: they are drawn anew."""

    completions: tuple[Completion, ...]
    """`finish_reason` is empty where the completion was cut."""


def validate(group: PartialGroup) -> None:
    """Raises IntegrityError, with one reason, if `group` must not be continued."""
    check_completions(group.group_id, group.completions, _problem)


def _problem(completion: Completion) -> str | None:
    known = completion.finish_reason in ("stop", "length", "")
    return None if known else f"finish_reason is {completion.finish_reason!r}"


def encode(group: PartialGroup) -> bytes:
    """The object's bytes, which `decode` has been seen to accept. Raises IntegrityError."""
    validate(group)
    data = write_group(TABLE, group, group.completions)
    decode(data, run_id=group.run_id, group_id=group.group_id, attempt=group.attempt, max_version=ANY_VERSION)
    return data


def decode(
    data: bytes, *, run_id: str, group_id: str, attempt: str, max_version: int, max_bytes: int = MAX_BYTES
) -> PartialGroup:
    """The group in `data`, safe to continue: as strict as `trajectories.decode`, with the same arguments.

    Raises IntegrityError with one reason.
    """
    header, rows = read_group(
        TABLE, data, run_id=run_id, group_id=group_id, attempt=attempt, max_bytes=max_bytes
    )
    group = PartialGroup(**header, completions=tuple(Completion(**row) for row in rows))
    validate(group)
    check_versions(group.completions, max_version)
    return group


def fullest(listing: Iterable[ObjectInfo], prompts_per_epoch: int) -> dict[int, str]:
    """Ordinal of each group in a listing of `partial/`, and of its attempts the one whose object is the
    largest: who continues an attempt and is stopped as well leaves all of its tokens, and more."""
    best: dict[int, tuple[int, str]] = {}
    for info in listing:
        parsed = keys.parse_partial(info.key)
        if parsed is not None and parsed[0].index < prompts_per_epoch:
            ordinal = parsed[0].ordinal(prompts_per_epoch)
            best[ordinal] = max(best.get(ordinal, (0, "")), (info.size, parsed[1]))
    return {ordinal: attempt for ordinal, (_, attempt) in best.items()}
