"""Tokenizer and engine of a run, from a local model folder."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import RunRecord
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import create_engine
from bucketrl.rollout_worker.engines.placement import check_split, place, visible_gpus
from bucketrl.rollout_worker.engines.pool import EnginePool
from bucketrl.rollout_worker.engines.settings import engine_settings, read_json
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.prompts import Tokenizer

GPU_REQUESTS = 512
"""That vLLM may run at once on a GPU; how many do run follows from its KV cache (flow.py). It records CUDA graphs
for batches up to this size; with 1,024 requests a model of 135M parameters is slower on an H200 than with 512."""
DEFAULT_GROUPS = 8
"""On a CPU, which more requests would not make faster, and where nobody counts the memory of a KV cache."""


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
    width, depth = options.tensor_parallel, options.pipeline_parallel
    group_size = run.config.sampling.group_size
    check_split(read_json(model_path / "config.json"), width, depth)
    gpus = visible_gpus()
    placed = place(options.engines, width, depth, gpus)
    settings = engine_settings(
        run.config,
        model_path,
        tokenizer,
        max_requests=_max_requests(options, group_size, on_gpu=bool(gpus)),
        kv_cache_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )

    def make(index: int) -> Engine:
        # A single engine takes what it finds: nothing has to be kept from it.
        devices = placed[index] if options.engines > 1 else ()
        return create_engine(
            options.engine,
            replace(settings, tensor_parallel=width, pipeline_parallel=depth, devices=devices),
            url=options.engine_url,
            cache_dir=options.cache_dir,
        )

    return tokenizer, EnginePool(make, options.engines, group_size=group_size)


def _max_requests(options: WorkerOptions, group_size: int, *, on_gpu: bool) -> int:
    """Of each engine."""
    groups = options.max_groups_in_flight
    if groups is None:
        if on_gpu and options.engine != "transformers" and find_spec("vllm") is not None:
            return GPU_REQUESTS
        if options.engine == "http":
            return GPU_REQUESTS
        groups = DEFAULT_GROUPS
    # With one group more than its share, so that groups stay together while engines are not equally busy.
    return min(-(-groups // options.engines) + 1, groups) * group_size
