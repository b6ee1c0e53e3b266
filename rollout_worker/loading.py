"""Tokenizer and engine of a run, from a local model folder."""

from pathlib import Path

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import RunRecord
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import create_engine
from bucketrl.rollout_worker.engines.settings import engine_settings
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.prompts import Tokenizer


def load_engine(run: RunRecord, model_path: Path, options: WorkerOptions) -> tuple[Tokenizer, Engine]:
    """The model's tokenizer, and an engine that has not been started. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.id {run.config.model.id}: cannot load its tokenizer: {reason[:300]}"
        ) from error
    if not tokenizer.chat_template:
        # transformers makes up an empty tokenizer where a folder has no tokenizer files.
        raise UserError(
            f"model.id {run.config.model.id}: its tokenizer has no chat template; take an instruct model, or add "
            "chat_template.jinja to the model folder"
        )
    settings = engine_settings(
        run.config,
        model_path,
        tokenizer,
        max_requests=options.max_groups_in_flight * run.config.sampling.group_size,
        kv_cache_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )
    return tokenizer, create_engine(options.engine, settings)
