"""Whole runs of the learner that nothing disturbs, and runs that are not begun."""

from pathlib import Path

import pytest
import torch
from tests.learner.runs import CONFIG, STEPS, World
from tests.learner.worlds import make_config, make_group, make_run, put_group, stock_model

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError


def test_a_learner_keeps_house_while_it_trains(
    world: World, undisturbed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run too short for a boundary: old checkpoints go, a snapshot comes, and the training is the same."""
    monkeypatch.setattr("bucketrl.learner.housekeeping.LOOK_S", 0.005)
    monkeypatch.setattr("bucketrl.learner.housekeeping.MIN_GAP_S", 0.0)
    monkeypatch.setattr("bucketrl.bucket.snapshots.EVERY", 1)
    world.learn(keep=2 + CONFIG.algorithm.max_staleness)
    assert world.fingerprint() == undisturbed.fingerprint()
    assert len(list(world.store.list(keys.SNAPSHOT_PREFIX))) > 0
    kept = {keys.folder_number(info.key) for info in world.store.list(keys.CHECKPOINT_PREFIX)}
    assert {0, STEPS} <= kept < set(range(STEPS + 1))
    world.assert_sound()


def test_a_learner_refuses_to_keep_too_little(world: World) -> None:
    with pytest.raises(UserError, match="--keep 1: a run with max_staleness"):
        world.learn(keep=1)
    assert world.log == []


def test_an_undisturbed_run_commits_every_step(undisturbed: World) -> None:
    assert [commit.step for commit in undisturbed.commits] == list(range(STEPS + 1))
    assert [commit.policy.version for commit in undisturbed.commits] == list(range(STEPS + 1))
    assert len(undisturbed.log) == STEPS + 2
    digests = {commit.policy.files[1].sha256 for commit in undisturbed.commits}
    assert len(digests) == STEPS + 1
    undisturbed.assert_sound()


def test_the_group_without_signal_is_named_and_the_corrupt_attempt_never_trained(undisturbed: World) -> None:
    first = undisturbed.commits[1]
    assert [(skip.group_id, skip.reason) for skip in first.skipped] == [("0000-00000001", "zero_variance")]
    assert [ref.group_id for ref in first.groups] == ["0000-00000000", "0000-00000002"]
    attempts = {ref.group_id: ref.attempt for commit in undisturbed.commits for ref in commit.groups}
    assert attempts["0000-00000004"] == "worker-0-1"
    assert first.metrics["groups_skipped"] == 1.0
    assert first.metrics["logprob_mismatch_max"] < 1e-4
    assert undisturbed.commits[-1].metrics["staleness_max"] == STEPS - 1


def test_no_group_is_consumed_twice(undisturbed: World) -> None:
    consumed = [ref.group_id for commit in undisturbed.commits for ref in (*commit.groups, *commit.skipped)]
    assert len(consumed) == len(set(consumed)) == 2 * STEPS + 1


def test_the_canary_tells_trained_versions_from_the_base(undisturbed: World) -> None:
    first, *_, last = undisturbed.commits
    assert first.canary.logprobs == first.canary.base_logprobs
    assert last.canary.base_logprobs == first.canary.base_logprobs
    assert len(last.canary.token_ids) == 24
    difference = [abs(a - b) for a, b in zip(last.canary.logprobs, last.canary.base_logprobs, strict=True)]
    assert max(difference) > 1e-2


def test_the_published_adapter_is_a_plain_peft_folder(undisturbed: World, tmp_path: Path) -> None:
    """Loaded by PEFT alone, it gives the canary's log-probabilities."""
    commit = undisturbed.commits[-1]
    names = [Path(file.key).name for file in commit.policy.files]
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    for file in commit.policy.files:
        (tmp_path / Path(file.key).name).write_bytes(undisturbed.store.get(file.key))
    stock = stock_model(undisturbed._model_folder, tmp_path)
    tokens = torch.tensor(commit.canary.token_ids)
    logits = stock(input_ids=tokens[None]).logits[0, :-1]
    want = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
    assert list(commit.canary.logprobs) == pytest.approx(want.tolist(), abs=1e-5)


def test_a_finished_run_is_left_as_it_is(world: World, undisturbed: World) -> None:
    world.learn()
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()


def test_a_run_whose_groups_are_all_alike_ends_with_advice(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(algorithm={"groups_per_step": 1, "max_staleness": 0})
    flat = World(model_folder, tmp_path, None, make_run(config))
    for ordinal in range(10):
        put_group(flat.store, make_group(ordinal, rewards=[1.0, 1.0]))
    with pytest.raises(UserError, match="no learning signal"):
        flat.learn()
    assert [commit.step for commit in flat.commits] == [0]


def test_a_target_that_the_model_lacks_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path
) -> None:
    run = make_run(make_config(lora={"target_modules": ("c_attn",)}))
    wrong = World(model_folder, tmp_path, None, run)
    with pytest.raises(UserError, match="c_attn"):
        wrong.learn()
    assert [info.key for info in wrong.store.list("")] == [keys.RUN]
