"""Comparing a replay with its run."""

import multiprocessing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from tests.bucket.builders import NOW, Learner, file_ref, group, run_record, upload
from tests.learner.worlds import (
    make_config,
    make_run,
    put_group,
    sample_group,
    save_tiny_model,
    stock_model,
)

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.gc import GarbageCollector
from bucketrl.bucket.records import RunRecord, StepRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.jobs import replay as replay_module
from bucketrl.jobs.replay import Difference, compare, replay
from bucketrl.jobs.runs import read_log, read_state
from bucketrl.learner import data_parallel
from bucketrl.learner.checkpoint import DESCRIPTION_FILE
from bucketrl.learner.main import LearnerOptions, run_learner
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.publish import save_adapter


def store_of(steps: int, *, changed: int | None = None) -> Store:
    """A run of `steps` steps; the adapter of version `changed` has other bytes. A checkpoint is its description."""
    store = open_store(f"memory://{uuid4().hex}")
    learner = Learner(store, run_record(), "a")
    learner.start()
    for step in range(steps + 1):
        batch = learner.write_batch([upload(store, group(step))]) if step else None
        described = learner.publish(keys.checkpoint(step, 1), {DESCRIPTION_FILE: b"{}"})
        changes: dict[str, Any] = {"checkpoint": {"step": step, "files": described}}
        if step == changed:
            other = file_ref("policy/x/adapter_model.safetensors", b"other")
            changes["policy"] = {"version": step, "files": (other,)}
        learner.commit(batch, **changes)
    return store


def commits(store: Store, run: RunRecord | None = None) -> list[StepRecord]:
    return [record for record in read_log(store, run or run_record()) if isinstance(record, StepRecord)]


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


def test_a_run_whose_checkpoints_were_collected_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest two are kept, however many commits are: nothing else may be gone, and no boundary written."""
    monkeypatch.setattr("bucketrl.bucket.artifacts.RETRY_DELAYS_S", ())
    source, target, run = store_of(3), MemoryStore(), run_record()
    collector = GarbageCollector(source, run, keep=64, collector_id="c", now=lambda: NOW, clock=lambda: 0.0)
    report = collector.collect(read_state(source, run))
    assert (report.boundary, set(report.removed)) == (0, {keys.CHECKPOINT_PREFIX})
    with pytest.raises(UserError, match=r"checkpoints/00000001-e0001/checkpoint.json is gone.* --keep 0$"):
        replay(source, target, run, model_path=None, progress=print)  # type: ignore[arg-type]
    assert list(target.list("")) == []


@pytest.mark.slow
def test_each_step_is_replayed_with_the_number_of_processes_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps by two processes and one by one, which makes other bytes where it makes them all. The processes are
    forked: what is tested is what they sum, not how they start."""
    torch.set_num_threads(1)
    monkeypatch.setattr(data_parallel, "get_context", lambda _: multiprocessing.get_context("fork"))

    def run(steps: int) -> RunRecord:
        return make_run(make_config(algorithm={"steps": steps}, learner={"tokens_per_microbatch": 15}))

    def learn(store: Store, steps: int, processes: int) -> None:
        options = LearnerOptions(
            "l", tmp_path, device="cpu", poll_s=0.001, threads=processes, data_parallel=processes, keep=0
        )
        run_learner(store, run(steps), model_path=model, client=None, options=options)

    model, adapter = save_tiny_model(tmp_path / "model"), tmp_path / "adapter"
    save_adapter(adapter, PolicyModel.load(model, run(3).config, torch.device("cpu")))
    stock = stock_model(model, adapter)
    mixed, alone = MemoryStore(), MemoryStore()
    for ordinal in range(6):
        sampled = sample_group(stock, ordinal, config=run(3).config, version=0)
        for store in (mixed, alone):
            store.put(keys.RUN, run(3).encode())
            put_group(store, sampled)
    learn(alone, 3, 1)
    learn(mixed, 2, 2)
    learn(mixed, 3, 1)
    assert compare(commits(mixed, run(3)), commits(alone, run(3))) != []
    assert replay(mixed, MemoryStore(), run(3), model_path=model, progress=print) == (4, [])

    asked: list[int] = []
    monkeypatch.setattr(
        replay_module, "run_learner", lambda *_, options, **__: asked.append(options.data_parallel)
    )
    _, missing = replay(mixed, MemoryStore(), run(3), model_path=model, progress=print)
    assert {difference.here for difference in missing} == {"absent"}
    assert asked == [2]  # a replay that was asked to stop goes no further
