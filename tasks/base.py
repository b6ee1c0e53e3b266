"""What a task is: a prompt stream with a stable index, and a reward."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "heldout"]
FinishReason = Literal["stop", "length"]


class TaskError(ValueError):
    """Wrong task settings or data: one line that names the field or the row and says what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt at one index of a split. The same index gives the same prompt on every machine."""

    index: int
    messages: tuple[dict[str, str], ...]
    """Chat messages (`role`, `content`), not yet templated."""
    reference: Any
    """What `score` compares with; opaque to everybody else."""


@dataclass(frozen=True, slots=True)
class Reward:
    """Score of one completion."""

    total: float
    """What the policy is trained on."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components, for people (`correct`, `finished`, ...)."""


class Task(Protocol):
    """Pure and picklable: rewards may run in other processes."""

    def size(self, split: Split) -> int:
        """Number of prompts."""

    def prompt(self, split: Split, index: int) -> Prompt:
        """Raises IndexError outside [0, size)."""

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        """Reward of `completion` (special tokens removed). May raise: the completion is dropped and counted."""
