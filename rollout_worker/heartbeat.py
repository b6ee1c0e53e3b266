"""Heartbeats: what this worker does, told to the proxy every few seconds; they renew its leases."""

import asyncio
import logging
import time
from collections.abc import Callable

from bucketrl.api.client import ProxyUnavailable
from bucketrl.api.messages import Heartbeat, RolloutState
from bucketrl.rollout_worker.link import ProxyLink

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0


class Heartbeats:
    """`snapshot` gives the state without its rate, which is measured here between two heartbeats."""

    def __init__(
        self,
        link: ProxyLink,
        snapshot: Callable[[], RolloutState],
        *,
        on_finished: Callable[[], None],
        on_drain: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._snapshot = snapshot
        self._on_finished = on_finished
        self._on_drain = on_drain
        self._clock = clock
        self._last = (clock(), 0)

    async def run(self) -> None:
        """For ever; an absent proxy is tried again next time. Raises UserError if the token is refused."""
        while True:
            await self.send()
            await asyncio.sleep(HEARTBEAT_S)

    async def send(self) -> None:
        state = self._snapshot()
        (then, tokens_then), self._last = self._last, (self._clock(), state.tokens_generated)
        seconds = self._last[0] - then
        rate = (state.tokens_generated - tokens_then) / seconds if seconds > 0 else 0.0
        state = state.model_copy(update={"tokens_per_second": rate})
        try:
            reply = await self._link.call(self._link.client.heartbeat, Heartbeat(state=state))
        except ProxyUnavailable:
            return
        if reply.finished:
            self._on_finished()
        elif "drain" in reply.directives:
            self._on_drain()
