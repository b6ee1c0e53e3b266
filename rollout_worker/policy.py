"""Which policy version is the newest: asked of the proxy, read from the log while the proxy is away."""

import asyncio
import logging
import random
from collections.abc import Callable

from bucketrl.api.client import ProxyUnavailable
from bucketrl.api.messages import PolicyHead
from bucketrl.bucket.errors import IntegrityError, StoreError, UserError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import Consumed, RunRecord
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.link import ProxyLink

logger = logging.getLogger(__name__)

LONG_POLL_S = 20.0
RETRY_S = 1.0
LOG_POLL_S = 3.0
"""Mean time between looks at the log during an outage: one GET each."""


class PolicyWatcher:
    """Keeps `head` up to date. `follow_proxy` and `follow_log` run for the worker's whole life."""

    def __init__(
        self,
        link: ProxyLink,
        reader: LogReader,
        run: RunRecord,
        *,
        rng: random.Random,
        on_finished: Callable[[], None],
    ) -> None:
        self._link = link
        self._reader = reader
        self._run = run
        self._rng = rng
        self._on_finished = on_finished
        self._moved = asyncio.Condition()
        self._reading = asyncio.Lock()
        self.head: PolicyHead | None = None
        """The newest commit seen; None before the first."""

    @property
    def consumed(self) -> Consumed:
        """What the log has consumed as far as it was read: kept up only during an outage."""
        return self._reader.state.consumed

    async def newer_than(self, version: int) -> PolicyHead:
        """Waits for a commit of a version above `version`."""
        async with self._moved:
            while self.head is None or self.head.version <= version:
                await self._moved.wait()
            return self.head

    async def follow_proxy(self) -> None:
        """Raises UserError if the token is refused or the proxy serves another run."""
        while True:
            after = self.head.version if self.head else -1
            try:
                head = await self._link.call(self._link.client.policy, after, LONG_POLL_S)
            except ProxyUnavailable:
                head = None
            if head is not None and head.run_id != self._run.run_id:
                raise UserError(
                    f"the proxy serves run {head.run_id}, the bucket holds run {self._run.run_id}; "
                    "point --proxy and --bucket at the same run"
                )
            if head is not None:
                await self._publish(head)
            if head is None or head.version <= after:
                # Also when the proxy answers at once with nothing new, as one that lags behind may.
                await asyncio.sleep(self._jittered(RETRY_S))

    async def follow_log(self) -> None:
        while True:
            await asyncio.sleep(self._jittered(LOG_POLL_S))
            if self._link.out:
                await self.read_log()

    async def read_log(self) -> None:
        """Catches up with the log. A store that fails now is asked again next time."""
        async with self._reading:
            try:
                await in_thread(self._reader.refresh)
            except (StoreError, IntegrityError) as error:
                logger.warning("cannot follow the log: %s", error)
        state = self._reader.state
        if state.step is None:
            return
        await self._publish(
            PolicyHead(
                run_id=self._run.run_id,
                version=state.step.policy.version,
                step=state.step.step,
                log_seq=state.step_seq,
                log_sha256=state.step_sha256,
                consumed_cursor=state.consumed.cursor,
                finished=state.step.step >= self._run.config.algorithm.steps,
            )
        )

    async def _publish(self, head: PolicyHead) -> None:
        if self.head is None or head.version > self.head.version:
            async with self._moved:
                self.head = head
                self._moved.notify_all()
        if head.finished:
            self._on_finished()

    def _jittered(self, mean_s: float) -> float:
        return mean_s * self._rng.uniform(0.5, 1.5)
