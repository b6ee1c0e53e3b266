"""A checkpoint brings back everything, and nothing that is not its own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.learner.worlds import RUN_ID, make_config, make_group

from bucketrl.bucket.errors import IntegrityError
from bucketrl.learner import checkpoint
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.trainer import Trainer

CPU = torch.device("cpu")
GROUPS = [make_group(ordinal, rewards=[0.0, 1.0, 0.25]) for ordinal in range(2)]


def fresh(model_folder: Path, **lora: object) -> tuple[PolicyModel, Optimizer]:
    policy = PolicyModel.load(model_folder, make_config(lora=lora), CPU)
    return policy, Optimizer(policy.parameters, policy.config.algorithm)


def train(policy: PolicyModel, optimizer: Optimizer, step: int) -> None:
    Trainer(policy, optimizer).train(GROUPS, step, lambda: False)


@pytest.fixture
def saved(model_folder: Path, tmp_path: Path) -> Path:
    """The checkpoint after step 2."""
    policy, optimizer = fresh(model_folder)
    train(policy, optimizer, 1)
    train(policy, optimizer, 2)
    checkpoint.save(tmp_path, policy, optimizer, run_id=RUN_ID, step=2)
    return tmp_path


def test_continuing_from_a_checkpoint_is_bit_identical(model_folder: Path, saved: Path) -> None:
    undisturbed = fresh(model_folder)
    for step in (1, 2, 3):
        train(*undisturbed, step)
    resumed = fresh(model_folder)
    checkpoint.load(saved, *resumed, run_id=RUN_ID, step=2)
    train(*resumed, 3)
    for name, value in undisturbed[0].parameters.items():
        assert torch.equal(value, resumed[0].parameters[name]), name
        for one, two in zip(undisturbed[1].moments()[name], resumed[1].moments()[name], strict=True):
            assert torch.equal(one, two), name


def test_the_random_generator_is_part_of_it(model_folder: Path, tmp_path: Path) -> None:
    pair = fresh(model_folder)
    torch.manual_seed(123)
    checkpoint.save(tmp_path, *pair, run_id=RUN_ID, step=0)
    want = torch.rand(3)
    torch.manual_seed(5)
    checkpoint.load(tmp_path, *pair, run_id=RUN_ID, step=0)
    assert torch.equal(torch.rand(3), want)


def test_tensors_are_addressed_by_the_names_of_the_adapter_file(saved: Path, model_folder: Path) -> None:
    tensors = load_file(saved / "state.safetensors")
    policy, _ = fresh(model_folder)
    kinds = ("adapter", "exp_avg", "exp_avg_sq")
    assert tensors.keys() == {f"{kind}/{name}" for kind in kinds for name in policy.parameters} | {"rng"}
    assert "adapter/base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors


@pytest.mark.parametrize(("run_id", "step"), [("another-run", 2), (RUN_ID, 3)])
def test_a_checkpoint_of_something_else_is_refused(
    model_folder: Path, saved: Path, run_id: str, step: int
) -> None:
    with pytest.raises(IntegrityError, match="checkpoint of run run-of-the-tests step 2"):
        checkpoint.load(saved, *fresh(model_folder), run_id=run_id, step=step)


def test_a_checkpoint_of_another_adapter_is_refused(model_folder: Path, saved: Path) -> None:
    with pytest.raises(IntegrityError, match="does not fit"):
        checkpoint.load(saved, *fresh(model_folder, rank=1), run_id=RUN_ID, step=2)


def test_a_missing_tensor_is_named(model_folder: Path, saved: Path) -> None:
    tensors = load_file(saved / "state.safetensors")
    gone = sorted(name for name in tensors if name.startswith("exp_avg_sq/"))[0]
    del tensors[gone]
    save_file(tensors, saved / "state.safetensors")
    with pytest.raises(IntegrityError, match=gone.replace(".", r"\.")):
        checkpoint.load(saved, *fresh(model_folder), run_id=RUN_ID, step=2)


@pytest.mark.parametrize("name", ["state.safetensors", "checkpoint.json"])
def test_a_torn_file_is_refused(model_folder: Path, saved: Path, name: str) -> None:
    (saved / name).write_bytes((saved / name).read_bytes()[:-20])
    with pytest.raises(IntegrityError, match="unreadable"):
        checkpoint.load(saved, *fresh(model_folder), run_id=RUN_ID, step=2)


@pytest.mark.parametrize("field", ["threads", "data_parallel"])
def test_another_number_of_threads_or_processes_is_warned_about(
    model_folder: Path, saved: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    description = json.loads((saved / "checkpoint.json").read_text())
    description["environment"][field] += 1
    (saved / "checkpoint.json").write_text(json.dumps(description))
    checkpoint.load(saved, *fresh(model_folder), run_id=RUN_ID, step=2)
    assert "not bit for bit" in caplog.text


def test_a_checkpoint_from_before_processes_were_counted_is_that_of_one(
    model_folder: Path, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    description = json.loads((saved / "checkpoint.json").read_text())
    del description["environment"]["data_parallel"]
    (saved / "checkpoint.json").write_text(json.dumps(description))
    checkpoint.load(saved, *fresh(model_folder), run_id=RUN_ID, step=2)
    assert caplog.text == ""
    checkpoint.load(saved, *fresh(model_folder), run_id=RUN_ID, step=2, data_parallel=2)
    assert "not bit for bit" in caplog.text
