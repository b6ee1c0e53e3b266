"""With what vLLM is started. Written against the public API that vLLM 0.24 to 0.33 share."""

import importlib.metadata
import os
from importlib.util import find_spec
from typing import Any

from bucketrl.rollout_worker.engines import parent_watch
from bucketrl.rollout_worker.engines.settings import EngineSettings, read_json
from bucketrl.rollout_worker.engines.worker_extension import WorkerExtension

EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__name__}"
"""vLLM's `worker_extension_cls`."""

_GPU_STEP_TOKENS = 2048
"""Tokens that one engine step computes on a GPU, at most: its largest CUDA graph. A step without a graph takes
50 to 90 ms of launches even for a small model, and so long every request waits."""
_CPU_STEP_TOKENS = 4096
"""Prompt tokens that one engine step computes on CPU, at most."""
_SPARE_CPU_ADAPTERS = 2
"""Host slots beyond the GPU's: the version being added, and one whose last requests still run."""
_CPU_BLOCK_TOKENS = 128
"""Tokens per KV block of vLLM's CPU attention."""
_CPU_KV_MIN, _CPU_KV_MAX = 64 << 20, 1 << 30
"""Bounds of the KV cache that is chosen on CPU when nobody names its size, in bytes."""


def set_environment() -> None:
    """Must run before vllm is imported. What the user has set stays."""
    wanted = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # The model is a local folder: nothing is to be looked up on a hub.
        "HF_HUB_OFFLINE": "1",
        # After a fork the engine hangs once the parent has used torch's threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The default pins every engine of the machine to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ[parent_watch.PARENT_VARIABLE] = str(os.getpid())


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Of vLLM's `EngineArgs`. Call `set_environment` before."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    kv_cache_bytes = settings.kv_cache_bytes
    if kv_cache_bytes is None and on_cpu:
        kv_cache_bytes = _cpu_kv_cache_bytes(read_json(settings.model_path / "config.json"), settings)
    arguments: dict[str, Any] = {
        "model": str(settings.model_path),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_requests,
        "enable_lora": True,
        "max_lora_rank": settings.lora_rank,
        # Without it vLLM prepares the head for adapters too: slow on CPU, and there prompt logprobs next to
        # other requests end the engine with a shape error.
        "lora_target_modules": list(settings.lora_targets) or None,
        "max_loras": settings.adapter_slots,
        "max_cpu_loras": settings.adapter_slots + _SPARE_CPU_ADAPTERS,
        # Behaviour logprobs are those of the distribution sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        # The model card's sampling defaults must not apply silently.
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "disable_log_stats": True,
    }
    if not on_cpu:
        step_tokens = max(_GPU_STEP_TOKENS, settings.max_requests)
        arguments |= {
            "max_num_batched_tokens": step_tokens,
            "compilation_config": {"cudagraph_capture_sizes": capture_sizes(step_tokens)},
        }
    else:
        # A request with a seed whose prompt is computed in parts ends the engine there ("CPU Generator does not
        # use offset"): every prompt is computed in one piece.
        arguments |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_STEP_TOKENS, settings.max_model_len),
        }
    return arguments


def capture_sizes(largest: int) -> list[int]:
    """Of the CUDA graphs, in tokens, ascending. Each is at most a quarter larger than the one before, from 32 on:
    little is padded, and there are few to record (vLLM's own are 51 up to 512)."""
    sizes = {1, 2, 4, largest}
    size = 8
    while size < largest:
        sizes.add(size)
        size += max(8, (1 << size.bit_length()) // 8)
    return sorted(sizes)


def kv_tokens(cache: Any) -> int | None:
    """Of a started engine. Only newer versions count for models whose layers need different blocks."""
    counted = getattr(cache, "kv_cache_size_tokens", None)
    return counted or (cache.num_gpu_blocks or 0) * cache.block_size or None


def installed_version() -> str:
    """vLLM's CPU build is a distribution of another name."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _cpu_kv_cache_bytes(model: dict[str, Any], settings: EngineSettings) -> int:
    """KV cache for `max_requests` requests of full length, within bounds, in bytes.

    2 (key and value) x layers x KV heads x head size x bytes per element, per token.
    """
    heads = int(model["num_attention_heads"])
    kv_heads = int(model.get("num_key_value_heads") or heads)
    head_dim = int(model.get("head_dim") or model["hidden_size"] // heads)
    element = 4 if settings.dtype == "float32" else 2
    per_token = 2 * int(model["num_hidden_layers"]) * kv_heads * head_dim * element
    blocks = -(-settings.max_model_len // _CPU_BLOCK_TOKENS)
    wanted = per_token * blocks * _CPU_BLOCK_TOKENS * settings.max_requests
    # One request of full length must fit, whatever the upper bound says.
    return max(min(max(wanted, _CPU_KV_MIN), _CPU_KV_MAX), per_token * (blocks + 1) * _CPU_BLOCK_TOKENS)
