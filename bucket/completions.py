"""Completions and groups of them: what trajectory objects and partial objects have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.sealed_table import HEADER, Row, SealedTable

MAX_POSITIVE_LOGPROB = 1e-4
"""Rounding of a float32 log-softmax over large logits; anything above is no log-probability."""
ANY_VERSION = 2**31 - 1
"""For a writer, who knows the versions that it stamps."""

TOKEN_COLUMNS = [
    ("sample", pa.int32()),
    ("prompt_token_ids", pa.list_(pa.int32())),
    ("completion_token_ids", pa.list_(pa.int32())),
    ("behaviour_logprobs", pa.list_(pa.float32())),
    ("policy_versions", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.bool_())),
]
REQUEST_COLUMNS = [
    ("finish_reason", pa.string()),
    ("seed", pa.int64()),
    ("started_at", pa.string()),
    ("seconds", pa.float64()),
    ("prompt_text", pa.string()),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of T >= 1 tokens. If it was cut and continued, its tokens are of several versions."""

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
    finish_reason: str
    """`stop` or `length`; empty if the completion was cut and has not ended."""
    seed: int
    """Of the first sampling request, in [0, 2**63)."""
    started_at: str
    """RFC 3339, when the first request was sent; information only."""
    seconds: float
    """From request to last token, added up over all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What one attempt at a prompt says about itself."""

    run_id: str
    group_id: str
    attempt: str
    worker_id: str
    engine: str
    prompt_text: str


C = TypeVar("C", bound=Completion)


def check_completions(group_id: str, completions: Sequence[C], problem: Callable[[C], str | None]) -> None:
    """Raises IntegrityError, with one reason, unless these are completions of one prompt that may be trained
    on. `problem` names what is wrong with one beyond that."""
    GroupId.parse(group_id)
    if not completions:
        raise IntegrityError("no completions")
    prompt = completions[0].prompt_token_ids
    samples: set[int] = set()
    for completion in completions:
        found = _problem(completion) or problem(completion)
        if found is None and completion.sample in samples:
            found = "appears twice"
        if found is None and completion.prompt_token_ids != prompt:
            found = "has another prompt than the rest of the group"
        if found is not None:
            raise IntegrityError(f"sample {completion.sample}: {found}")
        samples.add(completion.sample)


def check_versions(completions: Sequence[Completion], newest_committed: int) -> None:
    """Raises IntegrityError for a token of a version that has not been committed."""
    newest = max(max(completion.policy_versions) for completion in completions)
    if newest > newest_committed:
        raise IntegrityError(
            f"policy version {newest} has not been committed; the newest is {newest_committed}"
        )


def write_group(table: SealedTable, group: Group, completions: Sequence[Completion]) -> bytes:
    """One row per completion. Raises IntegrityError if a value does not fit its column."""
    names = table.schema.names
    rows: list[Row] = [
        {name: getattr(group if name == "prompt_text" else completion, name) for name in names}
        for completion in completions
    ]
    return table.write(rows, {name: getattr(group, name) for name in HEADER})


def read_group(
    table: SealedTable, data: bytes, *, run_id: str, group_id: str, attempt: str, max_bytes: int
) -> tuple[dict[str, str], list[Row]]:
    """The fields of `Group`, and one row per completion. Raises IntegrityError."""
    rows, header = table.read(data, run_id=run_id, group_id=group_id, attempt=attempt, max_bytes=max_bytes)
    prompts = {row.pop("prompt_text") for row in rows}
    if len(prompts) > 1:
        raise IntegrityError("prompt_text differs within the group")
    return header | {"prompt_text": prompts.pop() if prompts else ""}, rows


def _problem(c: Completion) -> str | None:
    """What is wrong with one completion by itself, or None."""
    length = len(c.completion_token_ids)
    for name in ("behaviour_logprobs", "policy_versions", "loss_mask"):
        if len(getattr(c, name)) != length:
            return f"{name} has length {len(getattr(c, name))}, completion_token_ids {length}"
    checks: tuple[tuple[bool, str], ...] = (
        (length == 0, "empty completion"),
        (not c.prompt_token_ids, "empty prompt"),
        (c.sample < 0, "negative sample index"),
        (min((*c.prompt_token_ids, *c.completion_token_ids), default=0) < 0, "negative token id"),
        (not all(map(math.isfinite, c.behaviour_logprobs)), "behaviour_logprobs are not all finite"),
        (max(c.behaviour_logprobs, default=0.0) > MAX_POSITIVE_LOGPROB, "positive behaviour logprob"),
        (min(c.policy_versions, default=0) < 0, "negative policy version"),
        (not 0 <= c.seed < 1 << 63, f"seed {c.seed} is outside [0, 2**63)"),
        (not (math.isfinite(c.seconds) and c.seconds >= 0), f"seconds is {c.seconds}"),
    )
    return next((message for failed, message in checks if failed), None)
