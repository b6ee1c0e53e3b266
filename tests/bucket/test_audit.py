"""The audit: silent on a valid run, and names each planted violation by invariant and key."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.bucket.builders import (
    Learner,
    file_ref,
    group,
    group_text,
    partial_group,
    run_record,
    skip,
    step_record,
    trajectory,
    upload,
    worked_example,
)

from bucketrl.bucket import keys, partials
from bucketrl.bucket.audit import AuditReport, audit
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import BatchRecord, GroupRef, SkippedGroup, StepRecord, decode, decode_log
from bucketrl.bucket.store import Store


def test_a_run_with_a_dead_worker_and_a_restarted_learner_is_clean(memory: Store) -> None:
    worked_example(memory)
    assert audit(memory) == AuditReport(
        run_id=run_record().run_id,
        violations=(),
        notes=(),
        records=5,
        steps=3,
        trained=4,
        skipped=1,
        unconsumed=1,
        duplicates=1,
        quarantined=0,
        partials=1,
        orphans=0,
    )


def test_progress_ends_at_the_total(memory: Store) -> None:
    worked_example(memory)
    calls: list[tuple[int, int]] = []
    audit(memory, lambda done, total: calls.append((done, total)))
    done, total = calls[-1]
    assert done == total >= 3 * 2 + 1 + 2 + 5


def test_a_bucket_without_a_run_is_the_users_error(memory: Store) -> None:
    with pytest.raises(UserError, match=r"holds no run: run\.json is missing"):
        audit(memory)


def test_a_run_that_has_not_begun_is_clean(memory: Store) -> None:
    memory.create(keys.RUN, run_record().encode())
    assert audit(memory) == AuditReport(run_id=run_record().run_id, violations=())


def flip(key: str) -> Callable[[Store], None]:
    def change(store: Store) -> None:
        data = bytearray(store.get(key))
        data[len(data) // 2] ^= 1
        store.put(key, bytes(data))

    return change


def remove(key: str) -> Callable[[Store], None]:
    return lambda store: store.delete([key])


def rewrite_head(**changes: Any) -> Callable[[Store], None]:
    """Edits the newest record, whose digest nothing names yet."""

    def change(store: Store) -> None:
        value = json.loads(store.get(keys.log(4)))
        store.put(keys.log(4), (json.dumps(value | changes) + "\n").encode())

    return change


def change_committed_metric(store: Store) -> None:
    value = json.loads(store.get(keys.log(2)))
    value["metrics"]["reward_mean"] = 0.75
    store.put(keys.log(2), json.dumps(value).encode())


ADAPTER = "policy/00000001-e0001/adapter_model.safetensors"
CHECKPOINT = "checkpoints/00000002-e0002/state.safetensors"
TRAINED = "trajectories/0000-00000001/w2-0001.parquet"
SKIPPED = "trajectories/0000-00000003/w1-0003.parquet"


@pytest.mark.parametrize(
    ("plant", "invariant", "key", "reason"),
    [
        (flip("run.json"), 1, "run.json", "not a RunRecord"),
        (rewrite_head(run_id="other"), 1, "log/00000004.json", "run_id is 'other'"),
        (rewrite_head(parent_sha256="0" * 64), 1, "log/00000004.json", "parent_sha256"),
        (rewrite_head(step=3), 1, "log/00000004.json", "step is 3, want 2"),
        (change_committed_metric, 1, "log/00000003.json", "parent_sha256"),
        (remove("log/00000003.json"), 1, "log/00000003.json", "missing, but log/00000004.json exists"),
        (flip("batches/00000001-e0001.json"), 1, "batches/00000001-e0001.json", "the commit says"),
        (
            remove("batches/00000002-e0002.json"),
            1,
            "batches/00000002-e0002.json",
            "missing, but a commit names it",
        ),
        (rewrite_head(groups=[]), 2, "log/00000004.json", "names no batch or no group"),
        (rewrite_head(consumed={"cursor": 4, "above": []}), 2, "log/00000004.json", "consumed is cursor 4"),
        (rewrite_head(consumed={"cursor": 9, "above": []}), 2, "log/00000004.json", "consumed is cursor 9"),
        (rewrite_head(epoch=1), 3, "log/00000004.json", "step has epoch 1, the newest start has 2"),
        (flip(TRAINED), 4, TRAINED, "the commit says"),
        (remove(TRAINED), 4, TRAINED, "missing, but a commit names it"),
        (remove(SKIPPED), 4, SKIPPED, "missing, but a commit names it"),
        (flip(ADAPTER), 5, ADAPTER, "the commit says"),
        (remove(ADAPTER), 5, ADAPTER, "missing, but a commit names it"),
        (
            rewrite_head(canary={"token_ids": [1, 2], "logprobs": [], "base_logprobs": [-1.0]}),
            5,
            "log/00000004.json",
            "canary of 2 tokens with 0 logprobs",
        ),
        (flip(CHECKPOINT), 6, CHECKPOINT, "the commit says"),
        (remove(CHECKPOINT), 6, CHECKPOINT, "missing, but a commit names it"),
    ],
)
def test_a_planted_violation_is_found_and_named(
    memory: Store, plant: Callable[[Store], None], invariant: int, key: str, reason: str
) -> None:
    worked_example(memory)
    plant(memory)
    (violation,) = audit(memory).violations
    assert violation.invariant == invariant
    assert violation.key.startswith(key)
    assert reason in violation.message


def begun(store: Store, **algorithm: Any) -> Learner:
    """A learner after step 0."""
    run = run_record(**algorithm)
    store.create(keys.RUN, run.encode())
    learner = Learner(store, run, "learner-a")
    learner.start()
    learner.commit()
    return learner


def commit_group(learner: Learner, ref: GroupRef | SkippedGroup) -> None:
    """Commits a step with a good group and `ref`, as a learner that does not check would."""
    good = upload(learner.store, group(100 + learner.next_step))
    if isinstance(ref, SkippedGroup):
        learner.commit(learner.write_batch([good], [ref]))
    else:
        learner.commit(learner.write_batch([ref, good]))


def only_violation(store: Store) -> tuple[int, str, str]:
    (violation,) = audit(store).violations
    return violation


def test_a_group_trained_in_two_steps_is_found(memory: Store) -> None:
    learner = begun(memory)
    ref = upload(memory, group(0))
    learner.commit(learner.write_batch([ref]))
    state = learner.reader.state
    header = decode_log(memory.get(keys.log(state.head_seq))).model_copy(
        update={"seq": state.next_seq, "parent_sha256": state.head_sha256}
    )
    forged = step_record(header, state, ordinals=(1,)).model_copy(update={"groups": (ref,)})
    memory.put(keys.log(state.next_seq), forged.encode())
    invariant, key, message = only_violation(memory)
    assert (invariant, key) == (2, keys.log(3))
    assert "group 0000-00000000 is consumed twice" in message


def test_a_batch_that_is_not_what_was_trained_is_found(memory: Store) -> None:
    learner = begun(memory)
    first, second = upload(memory, group(0)), upload(memory, group(1))
    batch = learner.write_batch([first, second])
    swapped = batch.model_copy(update={"groups": (second, first)})
    learner.commit(batch, groups=swapped.groups)
    assert only_violation(memory)[:2] == (1, "batches/00000001-e0001.json")
    assert "its groups differ" in only_violation(memory)[2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "policy version 1 has not been committed; the newest is 0"),
        ({"run_id": "other"}, "run_id is 'other'"),
    ],
)
def test_training_on_what_no_committed_policy_sampled_is_found(
    memory: Store, changes: dict[str, Any], reason: str
) -> None:
    learner = begun(memory)
    ref = upload(memory, group(0, **changes))
    commit_group(learner, ref)
    invariant, key, message = only_violation(memory)
    assert (invariant, key) == (4, ref.file.key)
    assert reason in message


def test_training_on_an_object_that_does_not_verify_is_found(memory: Store) -> None:
    learner = begun(memory)
    ref = upload(memory, group(0))
    torn = memory.get(ref.file.key)[:-1]
    memory.put(ref.file.key, torn)
    commit_group(learner, ref.model_copy(update={"file": file_ref(ref.file.key, torn)}))
    assert only_violation(memory)[:2] == (4, ref.file.key)
    assert "cut short" in only_violation(memory)[2]


def test_training_on_another_groups_object_is_found(memory: Store) -> None:
    learner = begun(memory)
    other = upload(memory, group(1))
    commit_group(learner, other.model_copy(update={"group_id": group_text(0)}))
    assert only_violation(memory)[:2] == (4, other.file.key)
    assert "names it for trajectories/0000-00000000/" in only_violation(memory)[2]


def test_a_version_that_no_commit_has_is_found(memory: Store) -> None:
    learner = begun(memory)
    ref = upload(memory, group(0))
    batch = learner.write_batch([ref])
    policy = learner.publish(keys.policy(5, 1), {"adapter_model.safetensors": b"x"})
    learner.commit(batch, policy={"version": 5, "files": policy})
    between = upload(memory, group(1, version=3))
    learner.commit(learner.write_batch([between]), policy={"version": 6, "files": ()})
    assert only_violation(memory)[:2] == (4, between.file.key)
    assert "policy version 3, which no earlier commit has" in only_violation(memory)[2]


def test_staleness_counts_steps_and_is_bounded(memory: Store) -> None:
    """max_staleness 1: version 0 may be trained at steps 1 and 2, not at 3; the oldest token decides."""
    learner = begun(memory, max_staleness=1)
    for _ in range(2):
        commit_group(learner, upload(memory, group(learner.next_step, version=0)))
    assert audit(memory).violations == ()
    mixed = group(10, trajectories=(trajectory(0, version=2), trajectory(1, policy_versions=(0, 2, 2))))
    ref = upload(memory, mixed)
    commit_group(learner, ref)
    found = {violation.key: violation.message for violation in audit(memory).violations}
    assert found[ref.file.key] == "trained at staleness 2, beyond max_staleness 1"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("stale", "skipped as stale at staleness 0, within max_staleness 1"),
        ("zero_variance", "skipped as zero_variance, but its rewards differ"),
    ],
)
def test_a_trainable_group_skipped_under_a_false_reason_is_found(
    memory: Store, reason: str, message: str
) -> None:
    learner = begun(memory)
    ref = skip(upload(memory, group(0)), reason)
    commit_group(learner, ref)
    assert only_violation(memory) == (4, ref.file.key, message)


@pytest.mark.parametrize(
    ("name", "changes", "key", "reason"),
    [
        ("policy", {"epoch": 1}, "policy/00000001-e0009/a.bin", "not in policy/00000001-e0001/"),
        (
            "checkpoint",
            {"epoch": 1},
            "checkpoints/00000001-e0009/a.bin",
            "not in checkpoints/00000001-e0001/",
        ),
    ],
)
def test_artefacts_outside_their_incarnations_folder_are_found(
    memory: Store, name: str, changes: dict[str, Any], key: str, reason: str
) -> None:
    learner = begun(memory)
    batch = learner.write_batch([upload(memory, group(0))])
    memory.put(key, b"x")
    files = (file_ref(key, b"x"),)
    number = {"policy": {"version": 1}, "checkpoint": {"step": 1}}[name]
    learner.commit(batch, **{name: number | {"files": files}})
    assert only_violation(memory)[1] == key
    assert reason in only_violation(memory)[2]


def test_a_batch_under_another_steps_key_is_found(memory: Store) -> None:
    learner = begun(memory)
    batch = learner.write_batch([upload(memory, group(0))])
    memory.put(keys.batch(7, 1), batch.encode())
    learner.commit(batch, batch=file_ref(keys.batch(7, 1), batch.encode()))
    assert only_violation(memory)[:2] == (1, keys.batch(7, 1))


def test_what_is_merely_odd_is_noted(memory: Store) -> None:
    worked_example(memory)
    for key in ("log/notes.txt", "policy/readme.md", "trajectories/x", "batches/a.json", "quarantine/b"):
        memory.put(key, b"x")
    beyond = "trajectories/0000-00000099/w1-0001.parquet"
    memory.put(beyond, b"x")
    memory.put(keys.policy(3, 2) + "adapter_model.safetensors", b"unfinished")
    memory.put(keys.batch(3, 1), b"written ahead")
    memory.delete(["checkpoints/00000000-e0001/state.safetensors"])
    trained = decode_log(memory.get(keys.log(2)))
    assert isinstance(trained, StepRecord)
    quarantined = keys.quarantine(keys.GroupId.parse(trained.groups[0].group_id), trained.groups[0].attempt)
    memory.put(quarantined, b"{}")
    report = audit(memory)
    assert report.violations == ()
    assert (report.orphans, report.quarantined) == (1, 1)
    assert sorted(report.notes) == sorted(
        [
            *(f"{key}: foreign key" for key in ("log/notes.txt", "policy/readme.md", "trajectories/x")),
            *(f"{key}: foreign key" for key in ("batches/a.json", "quarantine/b", beyond)),
            "batches/00000003-e0001.json: written ahead, not committed yet",
            "checkpoints of 1 older steps are gone; only the newest is needed",
            f"{quarantined}: quarantined, yet trained: another reading found the object whole",
        ]
    )


@pytest.mark.parametrize("step", ["corrupt", "foreign", "gone", "ahead"])
def test_a_partial_group_that_cannot_be_continued_is_noted_and_no_violation(memory: Store, step: str) -> None:
    worked_example(memory)
    sound = partial_group(6, "w9-0001", version=2)
    key = keys.partial(keys.GroupId.parse(sound.group_id), sound.attempt)
    data, reason = partials.encode(sound), "digest"
    match step:
        case "corrupt":
            data = data[:-40] + b"?" + data[-39:]
        case "foreign":
            data, reason = partials.encode(replace(sound, run_id="other")), "run_id is 'other'"
        case "ahead":
            data = partials.encode(partial_group(6, "w9-0001", version=3))
            reason = "policy version 3 has not been committed"
    if step != "gone":
        memory.put(key, data)
    memory.put(keys.PARTIAL_PREFIX + "README", b"x")
    report = audit(memory)
    assert (report.violations, report.partials) == ((), 1)
    notes = [note for note in report.notes if note != "partial/README: foreign key"]
    assert len(notes) == (step != "gone")
    assert all(note.startswith(f"{key}: cannot be continued: ") and reason in note for note in notes)


def test_several_violations_are_all_found(memory: Store) -> None:
    worked_example(memory)
    for plant in (flip(ADAPTER), remove(TRAINED), remove(CHECKPOINT)):
        plant(memory)
    assert [(v.invariant, v.key) for v in audit(memory).violations] == [
        (4, TRAINED),
        (5, ADAPTER),
        (6, CHECKPOINT),
    ]


def test_the_batch_of_a_step_that_was_done_again_is_the_first_ones(memory: Store) -> None:
    worked_example(memory)
    left, taken = (decode(BatchRecord, memory.get(keys.batch(2, epoch))) for epoch in (1, 2))
    assert (left.groups, left.skipped) == (taken.groups, taken.skipped)
    assert decode_log(memory.get(keys.log(4))).epoch == 2
