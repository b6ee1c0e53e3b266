"""Says how much memory a role needs before it loads anything, and refuses what cannot fit."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.planner.memory_model import ModelShape, engine_bytes, learner_bytes

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
THE_GPU = "the GPU"
UNKNOWN = "how much memory it takes cannot be told from this model's config.json"


def model_shape(model_folder: Path) -> ModelShape | None:
    """From `config.json`; None for an architecture that does not describe itself in the usual words."""
    config: dict[str, Any] = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocabulary=int(config["vocab_size"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError):
        return None


def check_engine(
    config: RunConfig,
    model_folder: Path,
    *,
    kv_cache_bytes: int | None = None,
    engines: int = 1,
    gpus_per_engine: int = 1,
) -> str:
    """One line for people. Raises UserError if rollout engines cannot fit: on GPUs each has its own, which share
    its weights evenly; on CPU all are in one memory."""
    needed = _engine(config, model_shape(model_folder), kv_cache_bytes)
    if _memory()[1] == THE_GPU:
        return _check("an engine", needed // gpus_per_engine)
    return _check("an engine" if engines == 1 else f"{engines} engines", engines * needed)


def check_learner(config: RunConfig, model_folder: Path, processes: int = 1) -> str:
    """One line for people. Raises UserError if a learner cannot fit: on CPU its processes share one memory."""
    copies = 1 if _memory()[1] == THE_GPU else processes
    return _check("the learner", copies * _learner(config, model_shape(model_folder)))


def check_all(config: RunConfig, model_folder: Path, *, workers: int, kv_cache_bytes: int | None) -> str:
    """One line for people. Raises UserError if `workers` engines and a learner cannot fit together."""
    shape = model_shape(model_folder)
    needed = workers * _engine(config, shape, kv_cache_bytes) + _learner(config, shape)
    return _check(f"{workers} engine(s) and the learner", needed)


def _engine(config: RunConfig, shape: ModelShape | None, kv_cache_bytes: int | None) -> int:
    """0 if the shape is unknown."""
    if shape is None:
        return 0
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    # Without a size the engine chooses one; a single request of full length is what it cannot do without.
    kv_bytes = kv_cache_bytes or config.rollout.max_model_len * shape.kv_bytes_per_token(dtype_bytes)
    return engine_bytes(
        shape,
        dtype_bytes=dtype_bytes,
        rank=config.lora.rank,
        adapters=config.algorithm.max_staleness + 2,
        kv_bytes=kv_bytes,
    )


def _learner(config: RunConfig, shape: ModelShape | None) -> int:
    """0 if the shape is unknown. The learner itself measures what it needs once the model is loaded."""
    if shape is None:
        return 0
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    longest = config.rollout.max_model_len
    step = config.algorithm.groups_per_step * config.sampling.group_size * longest
    tokens = config.learner.largest_microbatch(longest, step)
    per_token = shape.activation_bytes_per_token(dtype_bytes)
    if config.learner.activation_checkpointing is not False:
        # The input of each block, and all of the one that is computed again.
        per_token = per_token // shape.layers + shape.layers * shape.hidden * dtype_bytes
    resident = learner_bytes(shape, dtype_bytes=dtype_bytes, rank=config.lora.rank, tokens=0)
    return resident + tokens * per_token


def _check(what: str, needed: int) -> str:
    if needed == 0:
        return f"{what}: {UNKNOWN}"
    installed, where = _memory()
    if needed > installed:
        raise UserError(
            f"{what} needs at least {needed / GIB:.1f} GiB and {where} has {installed / GIB:.1f} GiB: use a "
            "smaller model, lower learner.tokens_per_microbatch or rollout.max_model_len, or take a larger "
            "machine"
        )
    return f"{what} needs at least {needed / GIB:.1f} of the {installed / GIB:.1f} GiB of {where}"


def _memory() -> tuple[int, str]:
    """Bytes and name of the memory that models go to: the first GPU's, else the machine's."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(answer.split()[0]) << 20, THE_GPU
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
