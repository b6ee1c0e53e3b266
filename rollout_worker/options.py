"""What differs between the rollout workers of one run."""

import re
from dataclasses import dataclass
from pathlib import Path

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.engines import EngineKind

_WORKER_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Choices of one machine; everything else is in the run's configuration."""

    worker_id: str
    """Lower case letters, digits, dashes; unique among the workers that live at the same time."""
    cache_dir: Path
    """Local disk for adapters. Several workers may share it."""
    engine: EngineKind = "auto"
    engine_url: str = ""
    """Of the `vllm serve` that engine `http` talks to; it must see `cache_dir` under the same path."""
    max_groups_in_flight: int | None = None
    """Groups generated at the same time, at most. None: as many as the engine has room for."""
    grace_s: float = 10.0
    """From SIGTERM to exit, in seconds."""
    kv_cache_bytes: int | None = None
    """None: the engine decides."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that the engine may use; without effect on CPU."""
    engines: int = 1
    """Copies of the model, each on GPUs of its own."""
    tensor_parallel: int = 1
    """GPUs that share each layer of one engine."""
    pipeline_parallel: int = 1
    """Groups of GPUs that share the layers of one engine."""
    reward_processes: int = 1
    reward_timeout_s: float = 10.0
    """For one completion; after that it is dropped."""

    def __post_init__(self) -> None:
        """Raises UserError for a value that cannot work."""
        if not _WORKER_ID.fullmatch(self.worker_id):
            raise UserError(
                f"worker_id: {self.worker_id[:80]!r} has to be 1 to 64 lower case letters, digits or dashes"
            )
        if self.grace_s < 0:
            raise UserError(f"grace_s: {self.grace_s} has to be 0 or more")
        for name in (
            "max_groups_in_flight", "engines", "tensor_parallel", "pipeline_parallel",
            "reward_processes", "reward_timeout_s",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name}: {value} has to be more than 0")
        if (self.engine == "http") != bool(self.engine_url):
            raise UserError(
                "engine_url: goes with engine http, and only with it; give --engine http --engine-url "
                "http://host:port, or neither"
            )
        if self.engine == "http" and self.engines > 1:
            raise UserError("engines: engine http is one server; start one rollout worker for each server")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(f"gpu_memory_utilization: {self.gpu_memory_utilization} has to be in (0, 1]")
