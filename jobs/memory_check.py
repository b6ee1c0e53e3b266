"""Says how much memory a role will need before it loads anything, and refuses what cannot fit."""

import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.planner.memory_model import GIB, ModelShape, engine_bytes, learner_bytes

logger = logging.getLogger(__name__)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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


def check_engine(config: RunConfig, model_folder: Path, groups_in_flight: int) -> None:
    """Logs what a rollout engine will take. Raises UserError if it cannot fit."""
    shape = model_shape(model_folder)
    if shape is None:
        return
    sequences = groups_in_flight * config.sampling.group_size
    needed = engine_bytes(
        shape,
        dtype_bytes=DTYPE_BYTES[config.model.dtype],
        rank=config.lora.rank,
        adapters=config.algorithm.max_staleness + 2,
        kv_tokens=sequences * config.rollout.max_model_len,
    )
    _check("the engine", needed, "lower --groups-in-flight or rollout.max_model_len, or use a larger machine")


def check_learner(config: RunConfig, model_folder: Path) -> None:
    """Logs what the learner will take. Raises UserError if it cannot fit."""
    shape = model_shape(model_folder)
    if shape is None:
        return
    needed = learner_bytes(
        shape,
        dtype_bytes=DTYPE_BYTES[config.model.dtype],
        rank=config.lora.rank,
        tokens=config.learner.tokens_per_microbatch,
        longest=config.rollout.max_model_len,
    )
    _check("the learner", needed, "lower learner.tokens_per_microbatch, or use a larger machine")


def _check(what: str, needed: int, advice: str) -> None:
    installed, where = _memory()
    if needed > installed:
        raise UserError(
            f"{what} needs about {needed / GIB:.1f} GiB and {where} has {installed / GIB:.1f} GiB: {advice}"
        )
    logger.info("%s needs about %.1f of the %.1f GiB of %s", what, needed / GIB, installed / GIB, where)


def _memory() -> tuple[int, str]:
    """Bytes and name of the memory that models go to: the first GPU's, else the machine's."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(answer.split()[0]) << 20, "the GPU"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
