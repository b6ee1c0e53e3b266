"""The way from groups to the engine, on which `flow` is told of every request."""

from collections.abc import Callable
from contextvars import ContextVar

from bucketrl.rollout_worker.engine import Engine, EngineCapacity, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.flow import Flow, GroupInFlight

group_in_flight: ContextVar[GroupInFlight] = ContextVar("group_in_flight")
"""Whose requests the tasks of this context send."""


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
