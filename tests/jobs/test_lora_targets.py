"""LoRA targets are checked against the names in the weights' headers."""

import struct
from pathlib import Path

import pytest
from tests.jobs.worlds import LINEAR, save_model_files

from bucketrl.bucket.config import LoraConfig
from bucketrl.bucket.errors import UserError
from bucketrl.jobs.lora_targets import check_lora_targets
from bucketrl.rollout_worker.model_files import linear_modules


def test_linear_layers_are_found_without_embeddings_head_and_norms(tmp_path: Path) -> None:
    assert linear_modules(save_model_files(tmp_path)) == set(LINEAR)


def test_targets_that_exist_pass(tmp_path: Path) -> None:
    folder = save_model_files(tmp_path)
    check_lora_targets(LoraConfig(target_modules=("q_proj", "down_proj")), folder)
    check_lora_targets(LoraConfig(), folder)


@pytest.mark.parametrize("target", ["w_proj", "norm", "Q_PROJ"])
def test_a_target_that_the_model_lacks_is_named_with_those_it_has(tmp_path: Path, target: str) -> None:
    """The output head and the embeddings are refused before: test_engine_faults.py."""
    with pytest.raises(UserError) as caught:
        check_lora_targets(LoraConfig(target_modules=("q_proj", target)), save_model_files(tmp_path))
    assert f"no linear layer {target!r}" in str(caught.value)
    assert ", ".join(sorted(LINEAR)) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, struct.pack("<Q", 4) + b"nope"])
def test_weights_that_are_no_safetensors_file_are_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"model\.safetensors is no safetensors file"):
        check_lora_targets(LoraConfig(), tmp_path)
