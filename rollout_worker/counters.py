"""What a worker counts: for heartbeats, for its last log line, and for how much it takes on."""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from bucketrl.rollout_worker.engine import Engine, EngineCapacity, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.flow import Flow, GroupInFlight

group_in_flight: ContextVar[GroupInFlight] = ContextVar("group_in_flight")
"""Whose requests the tasks of this context send."""


@dataclass(slots=True)
class Counters:
    """Since the worker started."""

    running_requests: int = 0
    tokens_generated: int = 0
    completions: int = 0
    """Generated, whether or not they could be used."""
    groups_uploaded: int = 0
    groups_failed: int = 0
    """Given back: fewer than two completions survived, or the prompt is too long."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Completions dropped, by reason. The reasons are few: what varies is cut off."""
    last_problem: str = ""
    """The newest reason, in full."""

    def drop(self, reason: str) -> None:
        self.dropped[reason.split(":")[0]] += 1
        self.last_problem = reason

    def mean_completion_tokens(self) -> float:
        return self.tokens_generated / self.completions if self.completions else 0.0

    def summary(self) -> str:
        """One line for people."""
        dropped = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common()) or "none"
        return (
            f"{self.groups_uploaded} groups uploaded, {self.groups_failed} failed, "
            f"{self.tokens_generated} tokens; completions dropped: {dropped}"
        )


class MeteredEngine:
    """An engine whose requests `flow` is told of."""

    def __init__(
        self, engine: Engine, flow: Flow, *, on_ended: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._flow = flow
        self._on_ended = on_ended
        self._clock = clock
        self.name = engine.name
        self.stop_token_ids = engine.stop_token_ids
        self.start = engine.start
        self.add_adapter = engine.add_adapter
        self.remove_adapter = engine.remove_adapter
        self.abort = engine.abort
        self.score = engine.score
        self.close = engine.close

    @property
    def capacity(self) -> EngineCapacity:
        return self._engine.capacity

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        metered = self._flow.begin_request(
            group_in_flight.get(),
            prompt_tokens=len(request.prompt_token_ids),
            prior=len(request.prior),
            max_tokens=request.max_tokens,
            now=self._clock(),
        )
        tokens, stopped = 0, False
        try:
            drawn = await self._engine.generate(request)
            tokens, stopped = len(drawn.token_ids), drawn.finish_reason == "stop"
            return drawn
        finally:
            self._flow.end_request(metered, tokens, self._clock(), stopped=stopped)
            self._on_ended()
