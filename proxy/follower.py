"""Keeps a `ProxyCore` up with the bucket, and wakes whoever waits for a newer policy version or for uploads.

The learner says when it has appended to the log, which is then read at once, and workers say what they have
uploaded. Looking without being told is for what got lost on the way, and for learners that know of no proxy.
"""

import asyncio
import logging
from collections.abc import Callable

from bucketrl.bucket.errors import BucketrlError, IntegrityError
from bucketrl.bucket.records import StartRecord, StepRecord
from bucketrl.proxy.core import ProxyCore

logger = logging.getLogger(__name__)

TOLD_POLL_S = 10.0
"""Between two looks at the log while a learner is heard, which tells of its commits."""
LIST_INTERVAL_S = 60.0
"""Uploads are announced; the listing finds those whose announcement was lost."""
TICK_S = 1.0
MAX_BACKOFF_S = 10.0


class Signal:
    """Something that happens again and again, and that any number of requests may wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._closed = False

    def happened(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def close(self) -> None:
        """Whoever waits returns now, and nobody waits any more."""
        self._closed = True
        self.happened()

    async def wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Returns when `holds` is true after the signal happened, after `seconds`, or at `close`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not (holds() or self._closed) and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait_for(self._event.wait(), left)
            except TimeoutError:
                return


class Follower:
    """Runs in the event loop; only its I/O happens in threads."""

    def __init__(self, core: ProxyCore, *, poll_s: float) -> None:
        """`poll_s`: between two looks at the log while no learner is heard."""
        self._core = core
        self._poll_s = poll_s
        self._told = asyncio.Event()
        self._moved = Signal()
        self._arrived = Signal()
        self.log_lock = asyncio.Lock()
        """Whoever reads or extends the log holds it."""
        self.ready = False
        """The log and the uploads have been read once."""
        self.trouble = ""
        """What keeps the proxy from reading the bucket; empty while all is well."""

    async def run(self) -> None:
        """Until cancelled. Whatever else ends it is a defect, and the proxy must not go on without it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self._core.tick()
            await asyncio.sleep(TICK_S)

    async def _follow(self) -> None:
        failures = 0
        listed_at = -LIST_INTERVAL_S
        loop = asyncio.get_running_loop()
        while True:
            self._told.clear()
            try:
                await self.refresh()
                if loop.time() - listed_at >= LIST_INTERVAL_S:
                    self._core.apply_attempts(await asyncio.to_thread(self._core.list_attempts))
                    listed_at = loop.time()
                    self._arrived.happened()
                self.ready, self.trouble, failures = True, "", 0
            except BucketrlError as error:
                failures += 1
                if str(error) != self.trouble:
                    level = logging.ERROR if isinstance(error, IntegrityError) else logging.WARNING
                    logger.log(level, "cannot follow the bucket: %s", error)
                self.trouble = str(error)
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        if failures:
            await asyncio.sleep(min(MAX_BACKOFF_S, self._poll_s * 2.0 ** min(failures, 10)))
            return
        told = self._core.learner_heard and not self._core.is_behind
        seconds = max(self._poll_s, TOLD_POLL_S) if told else self._poll_s
        try:
            await asyncio.wait_for(self._told.wait(), seconds)
        except TimeoutError:
            return

    def look(self) -> None:
        """After anything that may have told of records that have not been read: reads them at once."""
        if self._core.is_behind:
            self._told.set()

    def uploaded(self) -> None:
        """After an upload was announced."""
        self._arrived.happened()

    async def refresh(self) -> None:
        """Reads what is new in the log. Raises StoreError, IntegrityError."""
        async with self.log_lock:
            records = await asyncio.to_thread(self._core.read)
            self.apply(records)

    def apply(self, records: list[StartRecord | StepRecord]) -> None:
        """Records that were read or appended under `log_lock`."""
        if self._core.apply_records(records):
            self._moved.happened()
        if records:
            self._arrived.happened()

    async def wait_for_version_above(self, version: int, seconds: float) -> None:
        """Returns when a version above `version` is committed, after `seconds`, or when the proxy stops."""
        await self._moved.wait_until(lambda: self._core.version > version, seconds)

    async def wait_for_uploads(self, groups: int, log_seq: int, seconds: float) -> None:
        """Returns when so many groups wait that the log up to `log_seq` does not consume, after `seconds`, or
        when the proxy stops."""

        def there() -> bool:
            now = self._core.uploads()
            return now.log_seq >= log_seq and now.groups >= groups

        await self._arrived.wait_until(there, seconds)

    def end_waits(self) -> None:
        """The proxy stops: long polls are answered now."""
        self._moved.close()
        self._arrived.close()
