"""Every JSON record in the bucket. Readers ignore fields that they do not know (`bucket_layout.md` 8).

A record is stored once, as the bytes of `encode`, and is named elsewhere by the sha256 of those bytes.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import IntegrityError

PROTOCOL_VERSION = 1
"""Readers refuse a record with a higher `protocol`; see `bucket_layout.md` section 8."""


R = TypeVar("R", bound="Record")
T = TypeVar("T")


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Record(BaseModel):
    """A JSON object in the bucket."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def encode(self) -> bytes:
        """Deterministic, readable JSON, with a final newline."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


class FileRef(Record):
    """One immutable object, named with what it takes to verify it."""

    key: str
    size: int
    sha256: str


class ModelIdentity(Record):
    """What the base model is, by content. A role that loads anything else refuses to start."""

    weights_sha256: str
    """Digest over the names and digests of the weight and config files."""
    tokenizer_sha256: str
    """Digest over the tokenizer files, chat template included."""


class RunRecord(Record):
    """`run.json`: created once, then immutable."""

    kind: Literal["run"] = "run"
    protocol: int = PROTOCOL_VERSION
    run_id: str
    created_at: str
    """RFC 3339; information only."""
    bucketrl_version: str
    config: RunConfig
    model: ModelIdentity
    prompts_per_epoch: Annotated[int, Field(gt=0)]
    """Size of the task's training split: the modulus of group ids."""
    write_id: str


class LogRecord(Record):
    """What `start` and `step` records share."""

    protocol: int = PROTOCOL_VERSION
    run_id: str
    seq: Annotated[int, Field(ge=0)]
    parent_sha256: str
    """sha256 of the bytes of record `seq - 1`; empty for seq 0."""
    epoch: Annotated[int, Field(ge=1)]
    """Fencing token: the learner incarnation that wrote this record."""
    write_id: str
    """Random; tells a writer that lost the reply whether the stored record is its own."""
    written_at: str
    """RFC 3339; information only."""


class StartRecord(LogRecord):
    """A learner begins: the fence against all earlier ones."""

    kind: Literal["start"] = "start"
    learner_id: str


class GroupRef(Record):
    """The attempt of a group that a step trains on."""

    group_id: str
    attempt: str
    file: FileRef


class SkippedGroup(Record):
    """A group that a step consumes without training on it."""

    group_id: str
    attempt: str
    reason: Literal["zero_variance", "stale"]
    file: FileRef


class PolicyRef(Record):
    """A committed adapter: a PEFT directory."""

    version: int
    files: tuple[FileRef, ...]


class CheckpointRef(Record):
    """Learner state after a step."""

    step: int
    files: tuple[FileRef, ...]


class Canary(Record):
    """What an engine must answer for a fixed probe if it really serves this version."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[len(token_ids) - 1] natural-log probabilities of token i+1 given tokens 0..i, at temperature 1."""
    base_logprobs: tuple[float, ...]
    """The same under the base model alone."""


class Consumed(Record):
    """Which groups the log has consumed, in O(outstanding) space."""

    cursor: Annotated[int, Field(ge=0)] = 0
    """Every group with a smaller ordinal is consumed."""
    above: tuple[int, ...] = ()
    """Ordinals >= cursor that are consumed too, ascending."""

    def __contains__(self, ordinal: int) -> bool:
        if ordinal < self.cursor:
            return True
        place = bisect_left(self.above, ordinal)
        return place < len(self.above) and self.above[place] == ordinal

    def add(self, ordinals: set[int]) -> "Consumed":
        """With `ordinals` consumed as well. Raises ValueError if one of them already was."""
        for ordinal in ordinals:
            if ordinal in self:
                raise ValueError(f"group ordinal {ordinal} would be consumed twice")
        above = set(self.above) | ordinals
        cursor = self.cursor
        while cursor in above:
            above.remove(cursor)
            cursor += 1
        return Consumed(cursor=cursor, above=tuple(sorted(above)))


class StepRecord(LogRecord):
    """The commit of one optimizer step. Step 0 publishes the initial adapter and consumes nothing."""

    kind: Literal["step"] = "step"
    step: Annotated[int, Field(ge=0)]
    policy: PolicyRef
    checkpoint: CheckpointRef
    batch: FileRef | None
    """The write-ahead batch; None for step 0."""
    groups: tuple[GroupRef, ...] = ()
    skipped: tuple[SkippedGroup, ...] = ()
    consumed: Consumed = Consumed()
    """After this step."""
    canary: Canary
    metrics: dict[str, float] = {}


class BatchRecord(Record):
    """`batches/<step>-e<epoch>.json`: written before the optimizer step, so that a step done twice is the same."""

    kind: Literal["batch"] = "batch"
    protocol: int = PROTOCOL_VERSION
    run_id: str
    step: Annotated[int, Field(ge=1)]
    epoch: int
    groups: tuple[GroupRef, ...]
    """In training order; packing is a pure function of this order and the token budget."""
    skipped: tuple[SkippedGroup, ...] = ()
    write_id: str


class QuarantineRecord(Record):
    """A trajectory object that failed verification. The object itself stays where it is."""

    kind: Literal["quarantine"] = "quarantine"
    protocol: int = PROTOCOL_VERSION
    key: str
    reason: str
    learner_id: str
    written_at: str


class SnapshotRecord(Record):
    """`snapshots/<seq>.json`: a commit to begin reading the log from. Its writer has verified the log up to
    there, so these bytes follow from the log alone: any two writers write the same."""

    kind: Literal["snapshot"] = "snapshot"
    protocol: int = PROTOCOL_VERSION
    run_id: str
    seq: Annotated[int, Field(ge=0)]
    """Of a `step` record."""
    record_sha256: str
    """Of that record's bytes; each record names its parent's digest, so it binds everything before."""


class BoundaryRecord(Record):
    """`gc/<step>.json`: what the commits from step 1 to this one name may have been collected."""

    kind: Literal["boundary"] = "boundary"
    protocol: int = PROTOCOL_VERSION
    run_id: str
    step: Annotated[int, Field(ge=1)]
    collector_id: str
    written_at: str


class EvaluationRecord(Record):
    """Held-out accuracy of one policy version."""

    kind: Literal["evaluation"] = "evaluation"
    protocol: int = PROTOCOL_VERSION
    run_id: str
    version: int
    problems: int
    temperature: float
    mean_reward: float
    engine: str
    seconds: float
    written_at: str


AnyLogRecord = Annotated[StartRecord | StepRecord, Field(discriminator="kind")]
_LOG_ADAPTER: TypeAdapter[StartRecord | StepRecord] = TypeAdapter(AnyLogRecord)


def decode_log(data: bytes) -> StartRecord | StepRecord:
    """Raises IntegrityError if `data` is no log record of a protocol that this reader knows."""
    return _checked(_LOG_ADAPTER.validate_json, data, "log record")


def decode(kind: type[R], data: bytes) -> R:
    """Raises IntegrityError if `data` is no such record of a protocol that this reader knows."""
    return _checked(kind.model_validate_json, data, kind.__name__)


def _checked(validate: Callable[[bytes], T], data: bytes, what: str) -> T:
    try:
        record = validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise IntegrityError(f"not a {what}: {where}: {first['msg']}") from None
    protocol = getattr(record, "protocol", PROTOCOL_VERSION)
    if protocol > PROTOCOL_VERSION:
        raise IntegrityError(
            f"{what} has protocol {protocol}, this bucketrl reads up to {PROTOCOL_VERSION}: upgrade it"
        )
    return record
