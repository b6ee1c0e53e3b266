"""What a worker that has to go does with the groups it holds, so that no token is lost.

    not begun ──────────────────────────────────────────────► given back
    complete ───► scored, uploaded ─► done
          └─ not in time ──┐
    being sampled ─► cut ──┴─► saved as a partial group ────► given back, naming it ─► another worker goes on

All of it within the grace period, finished groups first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from bucketrl.bucket.errors import BucketrlError
from bucketrl.bucket.partials import PartialGroup
from bucketrl.rollout_worker.background import Background, in_time
from bucketrl.rollout_worker.group import GroupSampler, SampledGroup
from bucketrl.rollout_worker.partials import Partials
from bucketrl.rollout_worker.work import Work, WorkSource

logger = logging.getLogger(__name__)

SETTLE_SHARE = 0.1
"""Part of the grace period that may go into learning what is held."""
CUT_SHARE = 0.3
"""Part of the grace period that the engine has to end its requests: a decode step, or a long prompt."""
FINISH_SHARE = 0.3
"""Part of the grace period that finished groups have for themselves."""
RELEASE_SHARE = 0.1
"""Part of the grace period that is kept for giving leases back."""


class Preemption:
    """The end of one worker's sampling. Its producers have stopped."""

    def __init__(
        self,
        source: WorkSource,
        sampler: GroupSampler,
        partials: Partials,
        grace_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._sampler = sampler
        self._partials = partials
        self._grace_s = grace_s
        self._clock = clock
        self._deadline = clock() + grace_s

    async def collect(self, sampling: Background) -> None:
        """Cuts what `sampling` draws and waits until each group has been handed over by it."""
        await self._source.settle(self._grace_s * SETTLE_SHARE)
        if not await in_time(self._cut_all(sampling), self._grace_s * CUT_SHARE):
            logger.warning("the engine does not give back what it has drawn; it is lost")
            await sampling.cancel()

    async def _cut_all(self, sampling: Background) -> None:
        await self._sampler.cut()
        await sampling.join()

    async def hand_over(
        self,
        complete: Mapping[Work, SampledGroup],
        cut: Sequence[SampledGroup],
        drained: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`complete` loses each group that reaches the bucket, and `drained` returns when it is empty."""
        begun = {*complete, *(group.work for group in cut)}
        idle = [work for work in self._source.held.values() if work not in begun]
        giving = [asyncio.create_task(self._source.give_back(work)) for work in idle]
        draining = asyncio.create_task(drained())
        await asyncio.wait((draining,), timeout=self._grace_s * FINISH_SHARE)
        late = [self._leave(group, draining) for group in complete.values()]
        leaving = [self._leave(group, None) for group in cut]
        # What goes wrong with one group must not keep the others from being left in order.
        if not await in_time(asyncio.gather(*giving, *late, *leaving, return_exceptions=True), self.left()):
            logger.warning("grace period over: some leases are not given back and will run out")
        if complete:
            logger.warning("grace period over: %d complete groups not uploaded", len(complete))
        draining.cancel()

    def left(self) -> float:
        """Seconds of the grace period."""
        return max(0.0, self._deadline - self._clock())

    async def _leave(self, group: SampledGroup, finishing: "asyncio.Task[None] | None") -> None:
        """Saves it and gives it back, unless it is uploaded after all while `finishing` runs."""
        release_s = self._grace_s * RELEASE_SHARE
        partial = self._sampler.as_partial(group)
        saved = partial is not None and await self._save(partial, self.left() - release_s)
        if finishing is not None:
            await asyncio.wait((finishing,), timeout=max(0.0, self.left() - release_s))
        await self._source.give_back(group.work, group.attempt if saved else None)

    async def _save(self, partial: PartialGroup, seconds: float) -> bool:
        try:
            if await in_time(self._partials.save(partial), seconds):
                tokens = sum(len(one.completion_token_ids) for one in partial.completions)
                logger.info("partial group %s saved: %d tokens", partial.group_id, tokens)
                return True
            reason = "the grace period is over"
        except BucketrlError as error:
            reason = str(error)
        logger.warning("partial group %s is lost: %s", partial.group_id, reason)
        return False
