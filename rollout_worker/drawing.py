"""One completion, drawn by one request to the engine after another.

request ─┬─ end of turn ──► single-turn task: ended
         │                └► environment answers ─┬─► ended
         │                                        └─► next request
         ├─ chunk is full ─► next request, with whichever policy version is the newest by then
         ├─ tokens used up ► ended
         └─ cut ───────────► left as it is, for whoever goes on with it
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Self

from bucketrl.bucket.completions import Completion
from bucketrl.rollout_worker.continuation import fresh, joined
from bucketrl.rollout_worker.counters import Counters
from bucketrl.rollout_worker.engine import DroppedCompletion, Engine, SamplingRequest
from bucketrl.rollout_worker.episode import Episode
from bucketrl.rollout_worker.prompts import Prompts, TemplatedPrompt
from bucketrl.rollout_worker.rewards import RewardPool
from bucketrl.tasks.base import Reward

logger = logging.getLogger(__name__)


class CompletionSampler:
    """Draws completions with one engine."""

    def __init__(
        self,
        engine: Engine,
        use_version: Callable[[], AbstractContextManager[int]],
        prompts: Prompts,
        rewards: RewardPool,
        counters: Counters,
        *,
        max_tokens: int,
        chunk_tokens: int,
        temperature: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`use_version` gives the version for a request and keeps it in the engine meanwhile; `max_tokens` is
        that of a completion, `chunk_tokens` that of a request, 0 for no bound but the first."""
        self._engine = engine
        self._use_version = use_version
        self._prompts = prompts
        self._rewards = rewards
        self._counters = counters
        self._max_tokens = max_tokens
        self._chunk_tokens = chunk_tokens
        self._temperature = temperature
        self._clock = clock
        self._running: set[str] = set()
        """Ids of the engine's requests."""
        self._cutting = asyncio.Event()

    @classmethod
    def of_version(
        cls,
        engine: Engine,
        version: int,
        prompts: Prompts,
        rewards: RewardPool,
        *,
        max_tokens: int,
        temperature: float,
    ) -> Self:
        """For measurements: one version draws all, and nobody counts."""
        return cls(
            engine,
            lambda: nullcontext(version),
            prompts,
            rewards,
            Counters(),
            max_tokens=max_tokens,
            chunk_tokens=0,
            temperature=temperature,
        )

    async def draw(
        self, name: str, prompt: TemplatedPrompt, so_far: Completion, seed: Callable[[int], int]
    ) -> tuple[Completion, Episode]:
        """The completion to its end, or to where it is cut (its finish reason is empty then).

        `name` is unique among those that are drawn at one time; `seed(n)` is that of the request which begins
        after n tokens. Raises DroppedCompletion, and RewardFailed if the environment fails.
        """
        episode = Episode(prompt, self._prompts, self._rewards, self._engine.stop_token_ids)
        begun_here, requests = not so_far.finish_reason, 0
        while not (so_far.finish_reason or self._cutting.is_set()):
            if episode.awaits_answer(so_far):
                so_far = await episode.answered(so_far, self._max_tokens)
            else:
                request_id = f"{name}.{requests}" if requests else name
                so_far = await self._request(request_id, so_far, seed(len(so_far.completion_token_ids)))
                requests += 1
        self._counters.completions += begun_here and bool(so_far.finish_reason)
        return so_far, episode

    async def measured(
        self, name: str, prompt: TemplatedPrompt, seed: Callable[[int], int]
    ) -> tuple[Completion, Reward]:
        """A whole completion and its reward, for measurements outside of any group. Raises as `draw` does."""
        completion, episode = await self.draw(name, prompt, fresh(prompt.token_ids, 0, seed(0), ""), seed)
        return completion, await episode.reward(completion)

    async def cut(self) -> None:
        """Ends all requests where they are: every running `draw` returns soon, and none asks for more."""
        self._cutting.set()
        aborts = [self._engine.abort(request_id) for request_id in self._running]
        for outcome in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.warning("a request could not be aborted: %s", outcome)

    async def cut_begins(self) -> None:
        """Waits for `cut`."""
        await self._cutting.wait()

    async def _request(self, request_id: str, so_far: Completion, seed: int) -> Completion:
        left = self._max_tokens - len(so_far.completion_token_ids)
        asked = min(left, self._chunk_tokens) if self._chunk_tokens else left
        start = self._clock()
        self._running.add(request_id)
        self._counters.running_requests += 1
        try:
            # The version is chosen here, where the request is sent, and stays with it to the end.
            with self._use_version() as version:
                drawn = await self._engine.generate(
                    SamplingRequest(
                        request_id=request_id,
                        prompt_token_ids=so_far.prompt_token_ids,
                        max_tokens=asked,
                        temperature=self._temperature,
                        seed=seed,
                        policy_version=version,
                        prior=so_far.completion_token_ids,
                    )
                )
        finally:
            self._running.discard(request_id)
            self._counters.running_requests -= 1
        self._counters.tokens_generated += len(drawn.token_ids)
        if drawn.finish_reason == "abort" and not self._cutting.is_set():
            raise DroppedCompletion("aborted by the engine")
        more = joined(so_far, drawn, self._clock() - start)
        goes_on = (drawn.finish_reason == "length" and asked < left) or (
            drawn.finish_reason == "stop" and self._prompts.multi_turn
        )
        return replace(more, finish_reason="") if goes_on else more
