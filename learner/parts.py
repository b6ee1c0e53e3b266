"""What the loop asks of the parts that need a model, so that it can be read, tested and simulated without one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bucketrl.bucket.errors import BucketrlError
from bucketrl.bucket.records import Canary, CheckpointRef, PolicyRef, StepRecord
from bucketrl.bucket.trajectories import TrajectoryGroup


class Stopped(BucketrlError):
    """The learner was asked to stop; the step under way is abandoned and nothing of it is visible."""


@dataclass(frozen=True, slots=True)
class Published:
    """What a commit says about the state after its step."""

    policy: PolicyRef
    checkpoint: CheckpointRef
    canary: Canary


class Trains(Protocol):
    """One optimizer step; hides how many devices take part (`trainer.Trainer`)."""

    def train(
        self, groups: Sequence[TrajectoryGroup], step: int, stopping: Callable[[], bool]
    ) -> dict[str, float]: ...


class Publishes(Protocol):
    """The state after a step, out to the bucket and back in (`publish.Publisher`)."""

    def publish(self, step: int, epoch: int) -> Published: ...

    def restore(self, commit: StepRecord) -> None: ...
