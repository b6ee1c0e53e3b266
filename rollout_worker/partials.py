"""Partial groups on their way to the bucket and out of it again. Neither may ever be in anybody's way."""

import asyncio
import logging
import random

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, NotFound, StoreError
from bucketrl.bucket.partials import PartialGroup, decode, encode
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.work import Work

logger = logging.getLogger(__name__)

RETRY_S = 0.25
"""Mean time between two tries to save one: a grace period is short."""


class Partials:
    """The `partial/` objects that one worker reads and writes."""

    def __init__(self, store: Store, run: RunRecord, *, rng: random.Random) -> None:
        self._store = store
        self._run = run
        self._rng = rng

    async def fetch(self, work: Work, newest_committed: int) -> PartialGroup | None:
        """What another attempt has drawn of the group. None, and the group is sampled from scratch, if there
        is nothing or nothing that can be relied on."""
        if work.partial_attempt is None:
            return None
        key = keys.partial(work.group_id, work.partial_attempt)
        try:
            data = await in_thread(self._store.get, key)
            return await in_thread(
                decode,
                data,
                run_id=self._run.run_id,
                group_id=str(work.group_id),
                attempt=work.partial_attempt,
                max_version=newest_committed,
            )
        except (NotFound, IntegrityError, StoreError) as error:
            logger.warning("%s cannot be continued, the group is sampled from scratch: %s", key, error)
            return None

    async def save(self, group: PartialGroup) -> None:
        """Puts the object, however long it takes: whoever has no more time cancels it.

        Raises IntegrityError if it cannot be encoded.
        """
        data = await in_thread(encode, group)
        key = keys.partial(keys.GroupId.parse(group.group_id), group.attempt)
        while True:
            try:
                return await in_thread(self._store.put, key, data)
            except StoreError as error:
                logger.warning("%s not saved (%s); trying again", key, error)
            await asyncio.sleep(RETRY_S * self._rng.uniform(0.5, 1.5))
