"""What the rollout loop asks of an inference engine. Token ids in, token ids out; never text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from bucketrl.bucket.errors import BucketrlError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One completion to draw."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Of new tokens."""
    temperature: float
    seed: int
    policy_version: int
    """Must have been added with `add_adapter`; else the engine raises KeyError, never serves the base."""
    prior: tuple[int, ...] = ()
    """Tokens of the completion that were drawn before, by whichever version: what is drawn follows them."""

    @property
    def context(self) -> tuple[int, ...]:
        """What the first new token follows."""
        return self.prompt_token_ids + self.prior


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """What this request drew, T tokens including the end-of-turn token if one was sampled. T is 0 only if the
    request was aborted before its first token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[T] natural log of the probability with which each token was sampled (temperature applied)."""
    policy_versions: tuple[int, ...]
    """[T] the version that sampled each token."""
    finish_reason: FinishReason
    accepted_draft_tokens: int = 0
    """Tokens that came from a drafter; 0 while speculation is off."""


class DroppedCompletion(BucketrlError):
    """A completion that cannot be trained on. The message is the reason; the worker counts it and goes on."""


class EngineDied(BucketrlError):
    """The engine has ended by itself and does nothing more: every call of it raises this until it is closed."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What an engine holds at the same time."""

    kv_tokens: int | None
    """Tokens in its KV cache; requests with the same prompt share the prompt's. None: nobody knows."""
    max_requests: int
    """More than that wait inside the engine."""


class Engine(Protocol):
    """One engine serves several adapter versions at once. All methods are safe to call concurrently."""

    name: str
    """`vllm 0.32.0`, `transformers 5.19.0`: shown to people and recorded with trajectories."""
    stop_token_ids: tuple[int, ...]
    """Each ends a completion, whose last token it is then."""

    @property
    def capacity(self) -> EngineCapacity:
        """Known when `start` has returned; it may change later."""

    async def start(self) -> None:
        """Loads the base model; may take minutes. Raises UserError if it cannot be served as configured."""

    async def add_adapter(self, version: int, folder: Path) -> None:
        """Makes a verified local PEFT folder available as `version`, without pausing running requests.

        Raises IntegrityError if the engine cannot load it; `version` is then not available.
        """

    async def remove_adapter(self, version: int) -> None:
        """The caller has drained the version's requests."""

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        """Draws one completion. Cancelling the task aborts the request and loses what it drew.

        Raises KeyError for a version that is not loaded and DroppedCompletion if what was drawn is unusable
        (nothing sampled, a logprob that is missing or not finite) or the engine is closed.
        """

    async def abort(self, request_id: str) -> None:
        """Ends a request early: its `generate` returns, with finish reason `abort`, all that was drawn. It
        does so within one decode step. A request that is not running is no error."""

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        """[len - 1] logprobs of token i+1 given 0..i at temperature 1; `None` is the base model alone."""

    async def close(self) -> None:
        """Frees everything; what running requests drew is lost, and their callers get DroppedCompletion."""
