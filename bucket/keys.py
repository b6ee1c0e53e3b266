"""The only module that builds or parses an object key. `bucket_layout.md` section 4 is its grammar."""

import re
from dataclasses import dataclass

from bucketrl.bucket.errors import IntegrityError

RUN = "run.json"
LOG_PREFIX = "log/"
POLICY_PREFIX = "policy/"
CHECKPOINT_PREFIX = "checkpoints/"
BATCH_PREFIX = "batches/"
TRAJECTORY_PREFIX = "trajectories/"
PARTIAL_PREFIX = "partial/"
QUARANTINE_PREFIX = "quarantine/"
EVALUATION_PREFIX = "evaluations/"
SNAPSHOT_PREFIX = "snapshots/"
BOUNDARY_PREFIX = "gc/"
PROBE_PREFIX = "probe/"

MAX_PROMPT_EPOCH = 9999
"""What the four digits of a group id hold."""
_GROUP_ID = re.compile(r"^(\d{4})-(\d{8})$", re.ASCII)
_ATTEMPT = re.compile(r"^[a-z0-9][a-z0-9-]{0,80}$", re.ASCII)
_TRAJECTORY = re.compile(r"^trajectories/(\d{4}-\d{8})/([a-z0-9][a-z0-9-]{0,80})\.parquet$", re.ASCII)
_PARTIAL = re.compile(r"^partial/(\d{4}-\d{8})/([a-z0-9][a-z0-9-]{0,80})\.parquet$", re.ASCII)
_LOG = re.compile(r"^log/(\d{8})\.json$", re.ASCII)
_ARTIFACT = re.compile(
    r"^((?:policy|checkpoints)/\d{8}-e\d{4,}/)((?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*)$",
    re.ASCII,
)
_SNAPSHOT = re.compile(r"^snapshots/(\d{8})\.json$", re.ASCII)
_BOUNDARY = re.compile(r"^gc/(\d{8})\.json$", re.ASCII)
_BATCH = re.compile(r"^batches/(\d{8})-e(\d{4,})\.json$", re.ASCII)
_QUARANTINE = re.compile(r"^quarantine/(\d{4}-\d{8})/([a-z0-9][a-z0-9-]{0,80})\.json$", re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class GroupId:
    """`<prompt epoch>-<prompt index>`: text order is issue order."""

    epoch: int
    index: int

    def __str__(self) -> str:
        return f"{self.epoch:04d}-{self.index:08d}"

    @classmethod
    def parse(cls, text: str) -> "GroupId":
        """Raises IntegrityError if `text` is not a group id."""
        match = _GROUP_ID.fullmatch(text)
        if match is None:
            raise IntegrityError(f"not a group id: {text[:64]!r} (want 0000-00000000)")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def from_ordinal(cls, ordinal: int, prompts_per_epoch: int) -> "GroupId":
        """The `ordinal`-th group of the run, counted from 0."""
        return cls(*divmod(ordinal, prompts_per_epoch))

    def ordinal(self, prompts_per_epoch: int) -> int:
        """Inverse of `from_ordinal`."""
        return self.epoch * prompts_per_epoch + self.index


def log(seq: int) -> str:
    return f"{LOG_PREFIX}{seq:08d}.json"


def parse_log(key: str) -> int | None:
    """The record's sequence number, or None for a foreign key."""
    match = _LOG.fullmatch(key)
    return int(match[1]) if match else None


def policy(version: int, epoch: int) -> str:
    """Folder of a PEFT adapter. The epoch is part of it so that two incarnations of the learner
    never write one key with different bytes."""
    return f"{POLICY_PREFIX}{version:08d}-e{epoch:04d}/"


def checkpoint(step: int, epoch: int) -> str:
    return f"{CHECKPOINT_PREFIX}{step:08d}-e{epoch:04d}/"


def parse_artifact(key: str) -> tuple[str, str] | None:
    """Folder of an adapter or a checkpoint (as `policy` and `checkpoint` build it) and the file's path
    below it, safe to join to a local folder; None for a foreign key."""
    match = _ARTIFACT.fullmatch(key)
    return (match[1], match[2]) if match else None


def folder_number(folder: str) -> int:
    """Version of an adapter's folder, step of a checkpoint's, as `parse_artifact` returns them."""
    return int(folder.partition("/")[2].partition("-")[0])


def batch(step: int, epoch: int) -> str:
    """The epoch is part of it for the same reason as in `policy`: no two learners ever write one key."""
    return f"{BATCH_PREFIX}{step:08d}-e{epoch:04d}.json"


def parse_batch(key: str) -> tuple[int, int] | None:
    """Step and epoch, or None for a foreign key."""
    match = _BATCH.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def trajectory(group_id: GroupId, attempt: str) -> str:
    return f"{TRAJECTORY_PREFIX}{group_id}/{_attempt(attempt)}.parquet"


def parse_trajectory(key: str) -> tuple[GroupId, str] | None:
    """Group and attempt, or None for a foreign key."""
    match = _TRAJECTORY.fullmatch(key)
    return (GroupId.parse(match[1]), match[2]) if match else None


def partial(group_id: GroupId, attempt: str) -> str:
    return f"{PARTIAL_PREFIX}{group_id}/{_attempt(attempt)}.parquet"


def parse_partial(key: str) -> tuple[GroupId, str] | None:
    """Group and attempt, or None for a foreign key."""
    match = _PARTIAL.fullmatch(key)
    return (GroupId.parse(match[1]), match[2]) if match else None


def _attempt(attempt: str) -> str:
    """Raises IntegrityError if `attempt` is not an attempt id."""
    if not _ATTEMPT.fullmatch(attempt):
        raise IntegrityError(f"not an attempt id: {attempt[:96]!r} (want lower case letters, digits, dashes)")
    return attempt


def quarantine(group_id: GroupId, attempt: str) -> str:
    return f"{QUARANTINE_PREFIX}{group_id}/{attempt}.json"


def parse_quarantine(key: str) -> tuple[GroupId, str] | None:
    """Group and attempt, or None for a foreign key."""
    match = _QUARANTINE.fullmatch(key)
    return (GroupId.parse(match[1]), match[2]) if match else None


def evaluation(version: int, name: str) -> str:
    return f"{EVALUATION_PREFIX}{version:08d}/{name}.json"


def snapshot(seq: int) -> str:
    return f"{SNAPSHOT_PREFIX}{seq:08d}.json"


def parse_snapshot(key: str) -> int | None:
    """Sequence number of the record that it points to, or None for a foreign key."""
    match = _SNAPSHOT.fullmatch(key)
    return int(match[1]) if match else None


def boundary(step: int) -> str:
    return f"{BOUNDARY_PREFIX}{step:08d}.json"


def parse_boundary(key: str) -> int | None:
    """The step, or None for a foreign key."""
    match = _BOUNDARY.fullmatch(key)
    return int(match[1]) if match else None
