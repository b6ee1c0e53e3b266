"""Comparing a replay with its run."""

from uuid import uuid4

import pytest
from tests.bucket.builders import Learner, file_ref, group, run_record, upload

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import StepRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.replay import Difference, compare, replay
from bucketrl.jobs.runs import read_log


def store_of(steps: int, *, changed: int | None = None) -> Store:
    """A run of `steps` steps; the adapter of version `changed` has other bytes."""
    store = open_store(f"memory://{uuid4().hex}")
    learner = Learner(store, run_record(), "a")
    learner.start()
    for step in range(steps + 1):
        batch = learner.write_batch([upload(store, group(step))]) if step else None
        if step == changed:
            policy = {"version": step, "files": (file_ref("policy/x/adapter_model.safetensors", b"other"),)}
            learner.commit(batch, policy=policy)
        else:
            learner.commit(batch)
    return store


def commits(store: Store) -> list[StepRecord]:
    return [record for record in read_log(store, run_record()) if isinstance(record, StepRecord)]


def test_equal_bytes_are_no_difference() -> None:
    """Whatever the epochs, and so the keys, of the two learners."""
    assert compare(commits(store_of(2)), commits(store_of(2))) == []


def test_other_bytes_are_named_by_version_and_file() -> None:
    [model, config] = sorted(
        compare(commits(store_of(2)), commits(store_of(2, changed=1))), key=lambda d: d.file, reverse=True
    )
    assert (model.version, model.file) == (1, "adapter_model.safetensors")
    assert len(model.there) == len(model.here) == 64
    assert config == Difference(1, "adapter_config.json", config.there, "absent")


def test_a_version_that_the_replay_lacks_is_a_difference() -> None:
    """A replay that stopped early proves nothing."""
    found = compare(commits(store_of(2)), commits(store_of(1)))
    assert {(item.version, item.here) for item in found} == {(2, "absent")}


def test_a_target_that_is_not_empty_is_refused() -> None:
    target = store_of(0)
    with pytest.raises(UserError, match="is not empty"):
        replay(store_of(1), target, run_record(), model_path=None, progress=print)  # type: ignore[arg-type]


def test_a_run_without_a_step_is_refused() -> None:
    empty = open_store(f"memory://{uuid4().hex}")
    with pytest.raises(UserError, match="no optimizer step to replay"):
        replay(store_of(0), empty, run_record(), model_path=None, progress=print)  # type: ignore[arg-type]
