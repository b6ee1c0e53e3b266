"""What differs between the rollout workers of one run."""

from dataclasses import dataclass
from pathlib import Path

from bucketrl.rollout_worker.engines import EngineKind


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Choices of one machine; everything else is in the run's configuration."""

    worker_id: str
    """Lower case letters, digits, dashes; unique among the workers that live at the same time."""
    cache_dir: Path
    """Local disk for adapters. Several workers may share it."""
    engine: EngineKind = "auto"
    max_groups_in_flight: int = 8
    """Groups generated at the same time."""
    grace_s: float = 10.0
    """From SIGTERM to exit, in seconds."""
    kv_cache_bytes: int | None = None
    """None: the engine decides."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that the engine may use; without effect on CPU."""
    reward_processes: int = 1
    reward_timeout_s: float = 10.0
    """For one completion; after that it is dropped."""
