"""`bucketrl learner` whose steps only move the adapter a little, at a pace that the benchmark sets.

Everything else is the learner's own: intake, write-ahead, publishing, commit. It notes when each commit was made.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bucketrl.bucket.log import LogWriter
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.jobs.cli import main
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.trainer import Gradients, Trainer

FOLDER = "BUCKETRL_BENCHMARK_FOLDER"
"""Environment variable: where `commits` is written, and `go-<step>` waited for if PACE_S is not set."""
PACE_S = "BUCKETRL_BENCHMARK_PACE_S"
"""Environment variable: seconds from one commit to the beginning of the next step's publishing, at least."""


def commits(folder: Path) -> dict[int, float]:
    """By step: when the commit was in the bucket, in seconds of the wall clock."""
    path = folder / "commits"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): float(when) for step, when in (line.split() for line in lines)}


class PacedTrainer(Trainer):
    """Without the training."""

    def __init__(self, policy: PolicyModel, optimizer: Optimizer, gradients: Gradients | None = None) -> None:
        super().__init__(policy, optimizer, gradients)
        self._policy = policy

    def train(
        self, groups: Sequence[TrajectoryGroup], step: int, stopping: Callable[[], bool]
    ) -> dict[str, float]:
        import torch

        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, parameter in self._policy.parameters.items():
                if "lora_B" in name:
                    parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))
        wait_until_due(step, stopping)
        names = ("staleness_mean", "ratio_max", "grad_norm", "tokens", "tokens_per_second")
        return dict.fromkeys(names, 0.0)


def wait_until_due(step: int, stopping: Callable[[], bool]) -> None:
    from bucketrl.learner.parts import Stopped

    folder, pace = Path(os.environ[FOLDER]), os.environ.get(PACE_S)
    due = max(commits(folder).values(), default=0.0) + float(pace or 0)
    while time.time() < due if pace else not (folder / f"go-{step}").exists():
        if stopping():
            raise Stopped("told to stop")
        time.sleep(0.005)


def note_commits() -> None:
    from bucketrl.learner import main as learner

    append = LogWriter.append_step

    def noted(self: LogWriter, make: Any) -> Any:
        record = append(self, make)
        with (Path(os.environ[FOLDER]) / "commits").open("a") as file:
            file.write(f"{record.step} {time.time()}\n")
        return record

    LogWriter.append_step = noted  # type: ignore[method-assign]
    learner.Trainer = PacedTrainer  # type: ignore[misc, assignment]


if __name__ == "__main__":
    note_commits()
    sys.exit(main())
