"""What garbage collection keeps, as a pure function."""

import pytest
from tests.bucket.builders import run_record
from tests.bucket.tiny_runs import TinyLearner

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import StepRecord
from bucketrl.bucket.retention import DEFAULT_KEEP, Retained, least_keep, resolve_keep
from bucketrl.bucket.store import ObjectInfo
from bucketrl.bucket.stores.memory import MemoryStore

STEPS = 6
KEEP = 3
"""So the boundary is step 3, whose consumed groups are 0 to 5: 4 prompts an epoch, 2 groups a step."""


@pytest.fixture(scope="module")
def retained() -> Retained:
    """Epoch 1 commits steps 0 to 4, epoch 2 the rest."""
    store = MemoryStore()
    learner = TinyLearner(store)
    for step in range(STEPS):
        if step == 4:
            learner = TinyLearner(store, "b")
        learner.step()
    commits = [r for r in LogReader(store, learner.run).refresh() if isinstance(r, StepRecord)]
    return Retained.of(learner.run, commits[0], commits[-KEEP - 1 :], KEEP)


def group(ordinal: int) -> GroupId:
    return GroupId.from_ordinal(ordinal, run_record().prompts_per_epoch)


@pytest.mark.parametrize(
    ("key", "goes"),
    [
        (keys.batch(1, 1), True),
        (keys.batch(3, 1), True),
        (keys.batch(4, 1), False),
        (keys.batch(7, 1), False),  # written ahead
        (keys.policy(0, 1) + "adapter_model.safetensors", False),  # evaluations compare with it
        (keys.policy(0, 2) + "adapter_model.safetensors", True),
        (keys.policy(3, 1) + "adapter_model.safetensors", True),
        (keys.policy(4, 1) + "adapter_model.safetensors", False),
        (keys.policy(4, 2) + "adapter_model.safetensors", True),  # an orphan: epoch 1 committed step 4
        (keys.policy(5, 1) + "adapter_model.safetensors", True),  # likewise: epoch 2 committed step 5
        (keys.policy(6, 2) + "adapter_model.safetensors", False),
        (keys.policy(7, 1) + "adapter_model.safetensors", False),  # perhaps under construction
        (keys.policy(7, 3) + "adapter_model.safetensors", False),
        (keys.checkpoint(0, 1) + "state.safetensors", False),
        (keys.checkpoint(4, 1) + "state.safetensors", True),
        (keys.checkpoint(5, 2) + "state.safetensors", False),
        (keys.checkpoint(6, 2) + "state.safetensors", False),
        (keys.checkpoint(6, 1) + "state.safetensors", True),
        (keys.checkpoint(7, 2) + "state.safetensors", False),
        (keys.trajectory(group(5), "w1"), True),
        (keys.trajectory(group(5), "a-losing-attempt"), True),
        (keys.trajectory(group(6), "w1"), False),
        (keys.trajectory(group(99), "w1"), False),
        (keys.partial(group(5), "w1"), True),
        (keys.partial(group(6), "w1"), False),
        (keys.quarantine(group(0), "w1"), True),
        (keys.quarantine(group(6), "w1"), False),
        ("trajectories/0000-00000004/w1.parquet", False),  # beyond the epoch's prompts: foreign
        ("trajectories/0000-00000000/w1.parquet.tmp", False),
        ("policy/00000001/adapter_model.safetensors", False),
        ("batches/00000001.json", False),
        (keys.RUN, False),
        (keys.log(1), False),
        (keys.evaluation(1, "heldout-200-t0"), False),
        (keys.boundary(1), False),
        ("probe/w/put", False),
    ],
)
def test_what_goes_and_what_stays(retained: Retained, key: str, goes: bool) -> None:
    info = ObjectInfo(key, 1)
    assert retained.collectable([info]) == ([info] if goes else [])


def test_the_newest_two_snapshots_of_the_known_log_stay(retained: Retained) -> None:
    """One beyond it was written by somebody who knows more; it does not count."""
    listed = [ObjectInfo(keys.snapshot(seq), 1) for seq in (1, 3, 4, 7, 50)]
    assert [info.key for info in retained.collectable(listed)] == [keys.snapshot(1), keys.snapshot(3)]
    assert retained.collectable(listed[2:]) == []


@pytest.mark.parametrize("steps", [0, 1, KEEP - 1])
def test_a_run_of_no_more_than_keep_steps_has_no_boundary(steps: int) -> None:
    store = MemoryStore()
    learner = TinyLearner(store)
    for _ in range(steps):
        learner.step()
    commits = [r for r in LogReader(store, learner.run).refresh() if isinstance(r, StepRecord)]
    retained = Retained.of(learner.run, commits[0], commits, KEEP)
    assert retained.boundary == 0
    gone = [info.key for info in retained.collectable(store.list(""))]
    assert all(key.startswith(keys.CHECKPOINT_PREFIX) for key in gone)
    assert keys.checkpoint(0, 1) + "state.safetensors" not in gone


def test_how_many_are_kept() -> None:
    config = run_record(max_staleness=4).config
    assert least_keep(config) == 6
    assert resolve_keep(config, None) == DEFAULT_KEEP
    assert [resolve_keep(config, asked) for asked in (0, 6, 500)] == [0, 6, 500]
    with pytest.raises(UserError, match="--keep 5: a run with max_staleness 4 needs 6"):
        resolve_keep(config, 5)
    assert resolve_keep(run_record(max_staleness=100).config, None) == 102
