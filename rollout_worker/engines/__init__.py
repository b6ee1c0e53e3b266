"""The engines that implement `rollout_worker.engine.Engine`, and the choice between them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines.settings import EngineSettings

EngineKind = Literal["auto", "vllm", "transformers", "http"]


def create_engine(
    kind: EngineKind, settings: EngineSettings, *, url: str = "", cache_dir: Path = Path()
) -> Engine:
    """An engine that has not been started. `auto` is vLLM where it is installed, else transformers.

    `url` and `cache_dir` (seen by the server, too) are those of kind `http`. Raises UserError if `kind` is
    not installed or `url` is none.
    """
    if kind == "http":
        from bucketrl.rollout_worker.engines.http_engine import HttpEngine

        return HttpEngine(settings, url, cache_dir=cache_dir)
    if kind == "auto":
        kind = "vllm" if find_spec("vllm") is not None else "transformers"
    if kind == "vllm":
        _require("vllm", "pip install 'bucketrl[rollout]' (GPU) or 'bucketrl[rollout-cpu]'")
        from bucketrl.rollout_worker.engines.vllm_engine import VllmEngine

        return VllmEngine(settings)
    if settings.tensor_parallel * settings.pipeline_parallel > 1:
        raise UserError(
            f"tensor_parallel, pipeline_parallel: {settings.tensor_parallel} x {settings.pipeline_parallel}, but "
            "the transformers engine runs on one device; both have to be 1, or take --engine vllm"
        )
    for package in ("torch", "transformers", "peft"):
        _require(package, "pip install 'bucketrl[learner]'")
    from bucketrl.rollout_worker.engines.transformers_engine import TransformersEngine

    return TransformersEngine(settings)


def _require(package: str, remedy: str) -> None:
    if find_spec(package) is None:
        raise UserError(f"engine: {package} is not installed here; {remedy}")
