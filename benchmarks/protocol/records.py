"""Records of the size that a run writes, on objects that are there by name and size."""

from collections.abc import Sequence

from tests.bucket.builders import CANARY, file_ref, run_record

from bucketrl.bucket import keys
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import (
    CheckpointRef,
    Consumed,
    FileRef,
    GroupRef,
    LogRecord,
    PolicyRef,
    RunRecord,
    StepRecord,
)
from bucketrl.bucket.store import Store

METRICS = {f"metric_{number:02d}": 0.123456789 * (number + 1) for number in range(40)}
"""As many as a learner writes."""
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
CHECKPOINT = ("state.safetensors",)
ATTEMPT = "w1-1"


def large_run(groups_per_step: int, max_staleness: int) -> RunRecord:
    """A run that does not end."""
    record = run_record(steps=10**9, groups_per_step=groups_per_step, max_staleness=max_staleness)
    return record.model_copy(update={"prompts_per_epoch": 100_000})


def put_named(store: Store, key: str) -> FileRef:
    data = key.encode()
    store.put(key, data)
    return file_ref(key, data)


def put_files(store: Store, prefix: str, names: Sequence[str]) -> tuple[FileRef, ...]:
    return tuple(put_named(store, prefix + name) for name in names)


def group_ref(ordinal: int, run: RunRecord) -> GroupRef:
    """Nothing is put."""
    group_id = GroupId.from_ordinal(ordinal, run.prompts_per_epoch)
    key = keys.trajectory(group_id, ATTEMPT)
    return GroupRef(group_id=str(group_id), attempt=ATTEMPT, file=file_ref(key, key.encode()))


def commit(
    header: LogRecord,
    step: int,
    policy: Sequence[FileRef],
    checkpoint: Sequence[FileRef],
    batch: FileRef | None,
    groups: Sequence[GroupRef],
    consumed: Consumed,
) -> StepRecord:
    return StepRecord(
        **header.model_dump(),
        step=step,
        policy=PolicyRef(version=step, files=tuple(policy)),
        checkpoint=CheckpointRef(step=step, files=tuple(checkpoint)),
        batch=batch,
        groups=tuple(groups),
        consumed=consumed,
        canary=CANARY,
        metrics=METRICS,
    )


def unread_commit(
    header: LogRecord, consumed: Consumed, step: int, groups: int, run: RunRecord
) -> StepRecord:
    """The next `groups` groups after `consumed`; nobody has put or will read what it names."""
    ordinals = range(consumed.cursor, consumed.cursor + groups) if step else range(0)
    policy, checkpoint = keys.policy(step, header.epoch), keys.checkpoint(step, header.epoch)
    return commit(
        header,
        step,
        [file_ref(policy + name, name.encode()) for name in ADAPTER],
        [file_ref(checkpoint + name, name.encode()) for name in CHECKPOINT],
        file_ref(keys.batch(step, header.epoch), b"batch") if step else None,
        [group_ref(ordinal, run) for ordinal in ordinals],
        consumed.add(set(ordinals)),
    )
