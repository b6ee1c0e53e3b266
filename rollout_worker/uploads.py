"""Trajectory objects on their way to the bucket, in the background, through any outage of store or proxy."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from bucketrl.api.client import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import Completion
from bucketrl.bucket import keys
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.records import sha256_hex
from bucketrl.bucket.store import Store
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.link import ProxyLink
from bucketrl.rollout_worker.work import Work

logger = logging.getLogger(__name__)

PARALLEL = 4
RETRY_S = 0.5
RETRY_CAP_S = 30.0
ANNOUNCE_ATTEMPTS = 6
"""Tries to tell the proxy. Afterwards it finds the object in its own listing of the bucket."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An encoded group."""

    work: Work
    attempt: str
    data: bytes
    tokens: int
    mean_reward: float


class Uploads:
    """A queue of uploads and the tasks that work on it."""

    def __init__(
        self,
        store: Store,
        link: ProxyLink,
        worker_id: str,
        *,
        rng: random.Random,
        on_uploaded: Callable[[Work], None],
    ) -> None:
        self._store = store
        self._link = link
        self._worker_id = worker_id
        self._rng = rng
        self._on_uploaded = on_uploaded
        self._queue: asyncio.Queue[Upload] = asyncio.Queue()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Uploads not finished yet."""
        return self._waiting

    def submit(self, upload: Upload) -> None:
        self._waiting += 1
        self._queue.put_nowait(upload)

    async def serve(self) -> None:
        """One upload after the other, for ever; PARALLEL of these run.

        Raises what the store raises beyond StoreError (UserError: access denied).
        """
        while True:
            upload = await self._queue.get()
            await self._put(upload)
            await self._announce(upload)
            self._on_uploaded(upload.work)
            self._waiting -= 1

    async def _put(self, upload: Upload) -> None:
        """Puts the object, however long it takes: the same bytes under the same key, harmless to repeat."""
        key = keys.trajectory(upload.work.group_id, upload.attempt)
        failures = 0
        while True:
            try:
                return await in_thread(self._store.put, key, upload.data)
            except StoreError as error:
                logger.warning("upload of group %s failed (%s); trying again", upload.work.group_id, error)
            await asyncio.sleep(self._backoff(failures))
            failures += 1

    async def _announce(self, upload: Upload) -> None:
        completion = Completion(
            worker_id=self._worker_id,
            group_id=str(upload.work.group_id),
            attempt=upload.attempt,
            size=len(upload.data),
            sha256=sha256_hex(upload.data),
            tokens=upload.tokens,
            mean_reward=upload.mean_reward,
        )
        for failures in range(ANNOUNCE_ATTEMPTS):
            try:
                return await self._link.call(self._link.client.complete, upload.work.lease_id, completion)
            except ProxyRefused as error:
                logger.warning("the proxy refuses the completion of %s: %s", upload.work.group_id, error)
                return
            except ProxyUnavailable:
                if self._link.out:
                    return
            await asyncio.sleep(self._backoff(failures))

    def _backoff(self, failures: int) -> float:
        """Full jitter, so that workers do not come back in step after an outage."""
        return self._rng.uniform(0.0, min(RETRY_S * 2**failures, RETRY_CAP_S))
