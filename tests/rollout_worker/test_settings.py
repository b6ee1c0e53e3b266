"""What an engine is started with follows from the run and the model folder; what cannot work is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from bucketrl.bucket.config import LoraConfig
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker import engines
from bucketrl.rollout_worker.engines import create_engine
from bucketrl.rollout_worker.engines.settings import (
    EngineSettings,
    engine_settings,
    lora_targets,
    stop_token_ids,
)

from .fake_run import make_run
from .fakes import FakeTokenizer
from .tiny_model import TARGETS, save_model


def model_folder(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def settings(folder: Path, **sections: Any) -> EngineSettings:
    return engine_settings(
        make_run(**sections).config,
        folder,
        FakeTokenizer(),
        max_requests=12,
        kv_cache_bytes=None,
        gpu_memory_utilization=0.5,
    )


def test_every_version_that_may_be_sampled_with_has_a_slot(tmp_path: Path) -> None:
    """A run of staleness s serves s + 2 versions: fewer would make requests wait for each other."""
    model_folder(tmp_path, {"eos_token_id": 1, "max_position_embeddings": 32})
    made = settings(tmp_path, algorithm={"max_staleness": 4})
    assert (made.adapter_slots, made.lora_rank, made.max_model_len, made.max_requests) == (6, 8, 32, 12)


def test_all_linear_means_every_matrix_but_embeddings_and_head(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    assert lora_targets(LoraConfig(), model) == TARGETS
    assert lora_targets(LoraConfig(target_modules=("v_proj", "q_proj")), model) == ("q_proj", "v_proj")


def test_all_end_tokens_of_the_model_stop(tmp_path: Path) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.eos_token_id = 7
    folder = model_folder(tmp_path, {"eos_token_id": 1}, {"eos_token_id": [1, 2]})
    assert stop_token_ids(folder, tokenizer) == (1, 2, 7)
    tokenizer.eos_token_id = None
    model_folder(tmp_path, {"eos_token_id": None}, {"eos_token_id": 3})
    assert stop_token_ids(folder, tokenizer) == (3,)


def test_a_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(UserError, match="eos"):
        stop_token_ids(model_folder(tmp_path, {}), tokenizer)


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    model_folder(tmp_path, {"eos_token_id": 1, "max_position_embeddings": 16})
    with pytest.raises(UserError, match=r"rollout\.max_model_len: 32 exceeds the model's 16"):
        settings(tmp_path)


def test_a_temperature_that_engines_refuse_is_refused_at_start(tmp_path: Path) -> None:
    model_folder(tmp_path, {"eos_token_id": 1})
    with pytest.raises(UserError, match=r"sampling\.temperature"):
        settings(tmp_path, sampling={"max_tokens": 8, "temperature": 2.5})


@pytest.mark.parametrize("content", [None, "[", "[]"])
def test_a_broken_model_folder_is_one_clear_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json|model folder"):
        settings(tmp_path)


def test_an_engine_that_is_not_installed_is_refused_and_auto_takes_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings(model_folder(tmp_path, {"eos_token_id": 1}))
    real = engines.find_spec
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "vllm" else real(name))
    with pytest.raises(UserError, match="vllm is not installed"):
        create_engine("vllm", made)
    assert create_engine("auto", made).name.startswith("transformers ")
