"""What a task is: a prompt stream with a stable index, and a reward."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Split = Literal["train", "heldout"]
FinishReason = Literal["stop", "length"]
Message = dict[str, Any]
"""A chat message: `role`, `content`, and what else the chat template knows (`tool_calls`, `name`)."""


class TaskError(ValueError):
    """Wrong task settings or data: one line that names the field or the row and says what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt at one index of a split. The same index gives the same prompt on every machine."""

    index: int
    messages: tuple[Message, ...]
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


@runtime_checkable
class Environment(Task, Protocol):
    """A task of several turns. Like every task it is pure: what it answers depends on the prompt and on what
    was said, so that any worker goes on with an episode that another one began."""

    tools: tuple[dict[str, Any], ...]
    """JSON schemas of the functions that the policy may call, for the chat template; empty for none."""

    def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        """The environment's messages after the policy's newest one; none: the episode is over.

        `said` is what followed the prompt: messages of the policy (role `assistant`, special tokens removed)
        and of the environment; the last one is the policy's. Runs in a reward process and may raise: the
        completion is dropped and counted.
        """

    def score_episode(self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason) -> Reward:
        """Reward of the whole episode, in place of `score`. `length`: it ran out of tokens."""
