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

from bucketrl.rollout_worker.background import Background, in_time
from bucketrl.rollout_worker.group import GroupSampler, SampledGroup
from bucketrl.rollout_worker.partials import Partials
from bucketrl.rollout_worker.work import Work, WorkSource

logger = logging.getLogger(__name__)

COLLECT_SHARE = 0.1
"""Part of the grace period that may go into learning what is held, and again into cutting it."""
FINISH_SHARE = 0.4
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
        share = self._grace_s * COLLECT_SHARE
        await self._source.settle(share)
        if not await in_time(self._cut_all(sampling), share):
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
        giving = [self._source.give_back(work) for work in idle]
        draining = asyncio.create_task(drained())
        parts: asyncio.Future[list[None]] = asyncio.gather(*giving)
        await asyncio.wait((draining,), timeout=self._grace_s * FINISH_SHARE)
        late = [self._leave(group, draining) for group in complete.values()]
        leaving = asyncio.gather(parts, *late, *(self._leave(group, None) for group in cut))
        if not await in_time(leaving, self.left()):
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
        saved = False
        if partial is not None:
            saved = await in_time(self._partials.save(partial), self.left() - release_s)
            if not saved:
                logger.warning("grace period over: partial group %s not saved", group.work.group_id)
        if finishing is not None:
            await asyncio.wait((finishing,), timeout=max(0.0, self.left() - release_s))
        await self._source.give_back(group.work, group.attempt if saved else None)
