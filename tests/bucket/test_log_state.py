"""What may follow what in the log (`bucket_layout.md` 7.1)."""

from typing import Any

import pytest
from tests.bucket.builders import (
    NOW,
    RUN_ID,
    append,
    file_ref,
    step_record,
    writer_on,
)

from bucketrl.bucket.log_state import LogState, LogViolation
from bucketrl.bucket.records import (
    LogRecord,
    SkippedGroup,
    StartRecord,
    StepRecord,
)
from bucketrl.bucket.store import Store

GROUP_KEY = "trajectories/0000-00000000/a.parquet"


@pytest.mark.parametrize(
    ("invariant_number", "changes", "reason"),
    [
        (1, {"run_id": "other"}, f"run_id is 'other', want '{RUN_ID}'"),
        (1, {"seq": 3}, "seq is 3, want 2"),
        (1, {"parent_sha256": "0" * 64}, "parent_sha256 is"),
        (1, {"step": 2}, "step is 2, want 1"),
        (1, {"step": 0}, "step is 0, want 1"),
        (1, {"checkpoint": {"step": 0, "files": []}}, "checkpoint is of step 0, not 1"),
        (1, {"policy": {"version": 0, "files": []}}, "policy version 0 is not above 0"),
        (1, {"protocol": 2}, "protocol 2, this bucketrl reads up to 1"),
        (2, {"batch": None}, "names no batch or no group"),
        (2, {"groups": []}, "names no batch or no group"),
        (2, {"consumed": {"cursor": 1, "above": []}}, "consumed is cursor 1 . 0 above"),
        (2, {"consumed": {"cursor": 0, "above": []}}, "consumed is cursor 0 "),
        (2, {"consumed": {"cursor": 3, "above": []}}, "consumed is cursor 3 "),
        (2, {"consumed": {"cursor": 1, "above": [1]}}, "consumed is cursor 1 . 1 above"),
        (3, {"epoch": 2}, "step has epoch 2, the newest start has 1"),
    ],
)
def test_a_step_that_may_not_follow_is_refused(
    memory: Store, invariant_number: int, changes: dict[str, Any], reason: str
) -> None:
    state, valid = one_step_ahead(memory)
    bad = StepRecord.model_validate(valid.model_dump() | changes)
    with pytest.raises(LogViolation, match=rf"log/00000002\.json: .*{reason}") as caught:
        state.apply(bad.encode())
    assert caught.value.invariant == invariant_number
    assert state.apply(valid.encode()).step == valid


@pytest.mark.parametrize(
    ("group_ids", "reason"),
    [
        (["0000-00000001", "0000-00000001"], "0000-00000001 is consumed twice"),
        (["0000-00000004"], "beyond the epoch's 4 prompts"),
        (["1"], "not a group id"),
    ],
)
def test_a_step_cannot_train_a_group_twice_or_one_that_does_not_exist(
    memory: Store, group_ids: list[str], reason: str
) -> None:
    state, valid = one_step_ahead(memory)
    groups = [{"group_id": text, "attempt": "a", "file": file_ref(GROUP_KEY, b"x")} for text in group_ids]
    with pytest.raises(LogViolation, match=reason) as caught:
        state.apply(StepRecord.model_validate(valid.model_dump() | {"groups": groups}).encode())
    assert caught.value.invariant == 2


def test_a_group_is_not_both_trained_and_skipped_nor_consumed_again_later(memory: Store) -> None:
    state, valid = one_step_ahead(memory)
    again = SkippedGroup.model_validate(valid.groups[0].model_dump() | {"reason": "stale"})
    with pytest.raises(LogViolation, match="consumed twice"):
        state.apply(valid.model_copy(update={"skipped": (again,)}).encode())
    after = state.apply(valid.encode())
    repeated = valid.model_copy(
        update={"seq": 3, "parent_sha256": after.head_sha256, "step": 2}
        | {"policy": valid.policy.model_copy(update={"version": 2})}
        | {"checkpoint": valid.checkpoint.model_copy(update={"step": 2})}
    )
    with pytest.raises(LogViolation, match="0000-00000000 is consumed twice"):
        after.apply(repeated.encode())


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_start_needs_an_epoch_above_every_earlier_one(memory: Store, epoch: int) -> None:
    writer_on(memory, "a").start("a")
    newest = writer_on(memory, "b")
    newest.start("b")
    start = StartRecord(
        run_id=RUN_ID,
        seq=2,
        parent_sha256=newest.parent_sha256,
        epoch=epoch,
        write_id="w",
        written_at=NOW,
        learner_id="c",
    )
    with pytest.raises(LogViolation, match=f"start has epoch {epoch}, not above 2") as caught:
        newest.state.apply(start.encode())
    assert caught.value.invariant == 3
    assert newest.state.apply(start.model_copy(update={"epoch": 7}).encode()).epoch == 7


def test_step_0_consumes_nothing(memory: Store) -> None:
    writer = writer_on(memory)
    writer.start("learner-a")
    with pytest.raises(LogViolation, match="step 0 trains on nothing"):
        append(writer, ordinals=(0,))


def one_step_ahead(store: Store) -> tuple[LogState, StepRecord]:
    """The state after `start` and step 0, and a valid step 1."""
    writer = writer_on(store)
    writer.start("learner-a")
    append(writer)
    header = LogRecord(
        run_id=RUN_ID,
        seq=2,
        parent_sha256=writer.parent_sha256,
        epoch=1,
        write_id="w",
        written_at=NOW,
    )
    return writer.state, step_record(header, writer.state)
