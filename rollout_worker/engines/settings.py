"""What an engine is started with, and the checks that need no engine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bucketrl.bucket.config import LoraConfig, RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.model_files import linear_modules
from bucketrl.rollout_worker.prompts import Tokenizer

MAX_TEMPERATURE = 2.0
"""vLLM's bound, held for every engine so that a run does not depend on which one a machine has."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine of one run on one machine."""

    model_path: Path
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    """Prompt plus completion, in tokens."""
    lora_rank: int
    lora_targets: tuple[str, ...]
    """Last name parts of the modules that adapters may change."""
    adapter_slots: int
    """Versions that may be sampled with at the same time."""
    max_requests: int
    """Requests that may run at the same time; more than that wait inside the engine."""
    stop_token_ids: tuple[int, ...]
    seed: int
    kv_cache_bytes: int | None = None
    """None: the engine decides."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that the engine may use; without effect on CPU."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    devices: tuple[str, ...] = ()
    """The GPUs that the engine may see, as CUDA_VISIBLE_DEVICES names them; empty: those of this process."""


def engine_settings(
    config: RunConfig,
    model_path: Path,
    tokenizer: Tokenizer,
    *,
    max_requests: int,
    kv_cache_bytes: int | None,
    gpu_memory_utilization: float,
) -> EngineSettings:
    """Settings that serve `config`. Raises UserError if the model cannot be served so."""
    model = read_json(model_path / "config.json")
    longest = model.get("max_position_embeddings")
    if isinstance(longest, int) and longest < config.rollout.max_model_len:
        raise UserError(
            f"rollout.max_model_len: {config.rollout.max_model_len} exceeds the model's "
            f"{longest} positions; choose at most {longest}"
        )
    if config.sampling.temperature > MAX_TEMPERATURE:
        raise UserError(
            f"sampling.temperature: {config.sampling.temperature:g} is more than engines accept; choose at "
            f"most {MAX_TEMPERATURE:g}"
        )
    return EngineSettings(
        model_path=model_path,
        dtype=config.model.dtype,
        max_model_len=config.rollout.max_model_len,
        lora_rank=config.lora.rank,
        lora_targets=lora_targets(config.lora, model_path),
        adapter_slots=config.algorithm.max_staleness + 2,
        max_requests=max_requests,
        stop_token_ids=stop_token_ids(model_path, tokenizer),
        # Requests carry their own seeds; engines want theirs within 32 bits.
        seed=config.seed % 2**31,
        kv_cache_bytes=kv_cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
    )


def lora_targets(config: LoraConfig, model_path: Path) -> tuple[str, ...]:
    """The run's targets, `all-linear` spelled out; empty if the folder has no safetensors files."""
    if config.target_modules != "all-linear":
        return tuple(sorted(config.target_modules))
    return tuple(sorted(linear_modules(model_path)))


def stop_token_ids(model_path: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every token that ends a turn, ascending: of generation_config.json, config.json and the tokenizer.

    They are handed to the engine one by one, because which of the three an engine reads by itself
    differs between engines and versions. Raises UserError if there is none.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = model_path / name
        eos = read_json(path).get("eos_token_id") if path.exists() else None
        found.update([eos] if isinstance(eos, int) else eos or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise UserError(
            f"model {model_path.name}: neither generation_config.json, config.json nor the tokenizer names "
            "an eos token, so no completion could ever end; set eos_token_id in generation_config.json"
        )
    return tuple(sorted(found))


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError if `path` is missing or no JSON object."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"model folder: {path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"model folder: cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"model folder: {path} holds no JSON object")
    return document
