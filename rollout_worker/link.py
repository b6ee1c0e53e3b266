"""The way to the proxy: one place that knows how long it has been silent."""

import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from bucketrl.api.client import ProxyClient, ProxyRefused, ProxyUnavailable
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.blocking import in_thread

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

OUTAGE_S = 10.0
"""A proxy silent for this long is taken as gone: workers then follow the log and find work by themselves."""


class ProxyLink:
    """Calls the proxy from the event loop and keeps account of its silence."""

    def __init__(self, client: ProxyClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._clock = clock
        self._silent_since: float | None = None

    async def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One call of a method of `client`.

        Raises ProxyUnavailable (try later), UserError if the token is refused, ProxyRefused for any other
        refusal.
        """
        try:
            reply = await in_thread(method, *args, **kwargs)
        except ProxyUnavailable as error:
            if self._silent_since is None:
                self._silent_since = self._clock()
                logger.warning("the proxy does not answer (%s); working on what is held", error)
            raise
        except ProxyRefused as error:
            self._answered()
            if error.status in (401, 403):
                raise UserError(
                    f"the proxy refuses this worker's token ({error}); set BUCKETRL_WORKER_TOKEN to the "
                    "value that the proxy was started with"
                ) from None
            raise
        self._answered()
        return reply

    @property
    def out(self) -> bool:
        """Whether every call of the last OUTAGE_S seconds has failed."""
        return self._silent_since is not None and self._clock() - self._silent_since >= OUTAGE_S

    def _answered(self) -> None:
        if self._silent_since is not None:
            logger.warning("the proxy answers again after %.0f s", self._clock() - self._silent_since)
            self._silent_since = None
