"""Keeps a `ProxyCore` up with the bucket, and wakes whoever waits for a newer policy version."""

import asyncio
import logging

from bucketrl.bucket.errors import BucketrlError, IntegrityError
from bucketrl.bucket.records import StartRecord, StepRecord
from bucketrl.proxy.core import ProxyCore

logger = logging.getLogger(__name__)

LIST_INTERVAL_S = 30.0
"""Uploads are announced; the listing finds those whose announcement was lost."""
TICK_S = 1.0
MAX_BACKOFF_S = 10.0


class Follower:
    """Runs in the event loop; only its I/O happens in threads."""

    def __init__(self, core: ProxyCore, *, poll_s: float) -> None:
        self._core = core
        self._poll_s = poll_s
        self._changed = asyncio.Event()
        self._closed = False
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
            try:
                await self.refresh()
                if loop.time() - listed_at >= LIST_INTERVAL_S:
                    self._core.apply_attempts(await asyncio.to_thread(self._core.list_attempts))
                    listed_at = loop.time()
                self.ready, self.trouble, failures = True, "", 0
            except BucketrlError as error:
                failures += 1
                if str(error) != self.trouble:
                    level = logging.ERROR if isinstance(error, IntegrityError) else logging.WARNING
                    logger.log(level, "cannot follow the bucket: %s", error)
                self.trouble = str(error)
            await asyncio.sleep(min(MAX_BACKOFF_S, self._poll_s * 2.0 ** min(failures, 10)))

    async def refresh(self) -> None:
        """Reads what is new in the log. Raises StoreError, IntegrityError."""
        async with self.log_lock:
            records = await asyncio.to_thread(self._core.read)
            self.apply(records)

    def apply(self, records: list[StartRecord | StepRecord]) -> None:
        """Records that were read or appended under `log_lock`."""
        if self._core.apply_records(records):
            self._wake()

    async def wait_for_version_above(self, version: int, seconds: float) -> None:
        """Returns when a version above `version` is committed, after `seconds`, or when the proxy stops."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._core.version <= version and not self._closed and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return

    def end_waits(self) -> None:
        """The proxy stops: long polls are answered now."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
