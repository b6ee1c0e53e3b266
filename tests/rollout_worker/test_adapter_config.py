"""An adapter folder must be the run's LoRA, and one that engines can serve."""

import json
from pathlib import Path
from typing import Any

import pytest

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.adapter_config import check_adapter_config

from .fake_run import adapter_config, make_run


def check(folder: Path, lora: dict[str, Any] | None = None, **changes: Any) -> None:
    run = make_run(lora={"rank": 8, "alpha": 16.0} | (lora or {}))
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(run, **changes)))
    check_adapter_config(folder, run.config)


def test_what_peft_writes_for_the_runs_lora_passes(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, target_modules="all-linear")
    check(tmp_path, lora={"target_modules": ("v_proj", "q_proj")})
    check(tmp_path, lora_alpha=16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 16),
        ("lora_alpha", 0),
        ("lora_alpha", 32),
        ("base_model_name_or_path", "other"),
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("use_dora", True),
        ("use_rslora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("trainable_token_indices", [1]),
        ("target_modules", []),
        ("target_modules", None),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", ["model.embed_tokens"]),
    ],
)
def test_everything_else_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(IntegrityError, match=field):
        check(tmp_path, **{field: value})


def test_named_targets_must_be_exactly_those(tmp_path: Path) -> None:
    for targets in (["q_proj"], ["q_proj", "v_proj", "k_proj"], "all-linear"):
        with pytest.raises(IntegrityError, match="target_modules"):
            check(tmp_path, lora={"target_modules": ("q_proj", "v_proj")}, target_modules=targets)


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_a_file_that_is_no_configuration_is_one_clear_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(IntegrityError, match=r"adapter_config\.json"):
        check_adapter_config(tmp_path, make_run().config)
