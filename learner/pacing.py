"""When the learner looks into the bucket again, while it waits for groups.

A listing is the dearest request there is. With a proxy that hears of every upload, the learner lists when the
groups that it lacks are there, and every UNTOLD_S otherwise, for uploads whose announcement was lost. Without
one it lists at a pace that slows down while nothing arrives.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import UploadedGroups

logger = logging.getLogger(__name__)

UNTOLD_S = 30.0
"""Between two listings while the proxy says that too few groups are there."""
ASK_S = 2.0
"""Of one long poll: what a signal to stop may have to wait for."""
SLOWER = 1.5
MAX_SLOWER = 4.0
"""By how much the pace drops with each listing that finds nothing, and how far."""

AskUploads = Callable[[int, int, float], UploadedGroups]
"""`api.client.ProxyClient.uploads`."""


@dataclass
class Pace:
    """Pure: what has been learned from listings and announcements."""

    poll_s: float
    """Between two listings while groups arrive that nobody announced."""
    delay_s: float = 0.0
    """The same now."""
    told: int = 0
    """Uploaded groups that the proxy spoke of last."""

    def listed(self, found: int) -> None:
        """After a listing that found so many new groups."""
        slower = min(MAX_SLOWER * self.poll_s, max(self.poll_s, SLOWER * self.delay_s))
        self.delay_s = self.poll_s if found else slower

    def target(self, wanted: int) -> int:
        """Uploaded groups at which a listing will show something new: what was told of before is listed already,
        or does not show yet."""
        return max(wanted, self.told + 1)

    def patience_s(self, wanted: int, doubtful: bool) -> float:
        """Until a listing without such news. Short while an object is to be read again (`doubtful`), and while
        what was told of does not show: the listing lags, or an upload is corrupt."""
        return self.delay_s if doubtful or self.told >= wanted else UNTOLD_S


class Arrivals:
    """Waits for groups to arrive."""

    def __init__(self, ask: AskUploads | None, *, poll_s: float, stop: threading.Event) -> None:
        """`ask`: None without a proxy."""
        self._ask = ask
        self._stop = stop
        self._pace = Pace(poll_s)

    def begin(self) -> None:
        """A step begins: what is uploaded is counted anew."""
        self._pace.told = 0

    def wait(self, *, wanted: int, log_seq: int, found: int, doubtful: bool) -> None:
        """Returns when the bucket is worth a look, or soon after `stop` is set.

        `wanted`: unconsumed groups, counting those that are known, that there must be for a step. `log_seq`: newest
        record of the log. `found`, `doubtful`: new groups of the last listing, and whether an object there was
        found invalid and has to be read again.
        """
        pace = self._pace
        pace.listed(found)
        target, left = pace.target(wanted), pace.patience_s(wanted, doubtful)
        while left > 0 and not self._stop.is_set():
            seconds = min(ASK_S, left)
            told = self._told(target, log_seq, seconds)
            if told is None:
                self._stop.wait(pace.delay_s)
                return
            pace.told = told
            if told >= target:
                return
            left -= seconds

    def _told(self, target: int, log_seq: int, seconds: float) -> int | None:
        """None: there is no proxy to ask."""
        if self._ask is None:
            return None
        try:
            answer = self._ask(target, log_seq, seconds)
        except ProxyUnavailable:
            return None
        except ProxyRefused as error:
            logger.warning("the proxy does not tell of uploads (%s); looking for them", error)
            self._ask = None
            return None
        return answer.groups if answer.log_seq >= log_seq else 0
