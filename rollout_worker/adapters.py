"""Policy versions in the engine: fetched, verified, loaded, proved by the canary, counted, removed.

    commit in the log ─► record (digest) ─► files (digests) ─► adapter_config ─► engine ─► canary ─► newest
                                      any failure: not served, reported, tried again

A version is served only after all of it; requests that began with an older one end with it.
"""

import asyncio
import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bucketrl.api.messages import PolicyHead
from bucketrl.bucket import keys
from bucketrl.bucket.artifacts import fetch
from bucketrl.bucket.errors import IntegrityError, StoreError
from bucketrl.bucket.records import Canary, RunRecord, StepRecord, decode_log, sha256_hex
from bucketrl.bucket.store import Store
from bucketrl.rollout_worker.adapter_config import check_adapter_config
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.canary import canary_failure
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines.pool import EnginePool
from bucketrl.rollout_worker.policy import PolicyWatcher

logger = logging.getLogger(__name__)

RETRY_S = 1.0
RETRY_CAP_S = 30.0


class Adapters:
    """The versions that one engine serves. `folder` is private to this process."""

    def __init__(
        self, engine: Engine, store: Store, run: RunRecord, folder: Path, *, rng: random.Random
    ) -> None:
        self._engine = engine
        self._store = store
        self._run = run
        self._folder = folder
        self._rng = rng
        self._folders: dict[int, Path] = {}
        self._users: Counter[int] = Counter()
        self._fetched = 0
        self._loaded = asyncio.Condition()
        self.newest = -1
        """Version that new requests are sent with; -1 before the first."""
        self.problem = ""
        """Why the newest commit is not served; empty if it is."""

    @contextmanager
    def use(self) -> Iterator[int]:
        """The newest version, kept in the engine for as long as the request that is stamped with it runs."""
        version = self.newest
        if version < 0:
            raise RuntimeError("no policy version is loaded")
        self._users[version] += 1
        try:
            yield version
        finally:
            self._users[version] -= 1

    async def wait_for(self, version: int) -> None:
        """Until `version` or a newer one is served."""
        async with self._loaded:
            await self._loaded.wait_for(lambda: self.newest >= max(version, 0))

    async def keep_current(self, policy: PolicyWatcher) -> None:
        """Serves each new version as it is committed; skips those that are superseded while one loads."""
        failures = 0
        while True:
            head = await policy.newer_than(self.newest)
            try:
                await self.load(head)
            except (IntegrityError, StoreError, OSError) as error:
                self.problem = f"policy version {head.version} is not served: {error}"
                logger.error("%s; trying again", self.problem)
                delay = min(RETRY_S * 2**failures, RETRY_CAP_S) * self._rng.uniform(0.5, 1.0)
                failures += 1
                # A newer version may be sound, and is not to wait for this one.
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await policy.newer_than(head.version)
            else:
                self.problem = ""
                failures = 0
                await self.prune()

    async def load(self, head: PolicyHead) -> None:
        """Makes `head.version` the newest. Raises IntegrityError, StoreError or OSError (of the local disk), and
        then serves as before."""
        record = await in_thread(_read_commit, self._store, self._run, head)
        version = record.policy.version
        # A path never used before, for caches that know an adapter by its path.
        folder = self._folder / f"v{version:08d}-{self._fetched}"
        self._fetched += 1
        try:
            await in_thread(fetch, self._store, record.policy.files, folder)
            check_adapter_config(folder, self._run.config)
            await self._engine.add_adapter(version, folder)
            failure = await self._proof(version, record.canary)
            if failure is not None:
                await self._engine.remove_adapter(version)
                raise IntegrityError(f"the engine does not serve it: {failure}")
        except (IntegrityError, StoreError, OSError):
            await in_thread(_remove_folder, folder)
            raise
        self._folders[version] = folder
        async with self._loaded:
            self.newest = version
            self._loaded.notify_all()
        logger.info("serving policy version %d", version)

    async def _proof(self, version: int, canary: Canary) -> str | None:
        """Why the engine does not serve `version`; of several engines each is asked."""

        def judge(measured: Sequence[float]) -> str | None:
            return canary_failure(measured, canary, self._run.config.model.dtype)

        if isinstance(self._engine, EnginePool):
            return await self._engine.prove(version, canary.token_ids, judge)
        return judge(await self._engine.score(canary.token_ids, version))

    async def prune(self) -> None:
        """Removes versions that no request uses and that are too old for the staleness bound."""
        oldest = self.newest - (self._run.config.algorithm.max_staleness + 1)
        for version in [v for v in self._folders if v < oldest and self._users[v] == 0]:
            await self._engine.remove_adapter(version)
            await in_thread(_remove_folder, self._folders.pop(version))
            del self._users[version]


def _read_commit(store: Store, run: RunRecord, head: PolicyHead) -> StepRecord:
    """The log record that `head` points to, as the proxy gave it or from the bucket. Raises IntegrityError
    unless it is the one that was named."""
    key = keys.log(head.log_seq)
    data = head.record.encode()
    if sha256_hex(data) != head.log_sha256:
        data = store.get(key)
    if sha256_hex(data) != head.log_sha256:
        raise IntegrityError(f"{key}: digest is not the one that was announced")
    record = decode_log(data)
    if not isinstance(record, StepRecord) or record.policy.version != head.version:
        raise IntegrityError(f"{key}: does not commit policy version {head.version}")
    if record.run_id != run.run_id:
        raise IntegrityError(f"{key}: belongs to run {record.run_id}, not {run.run_id}")
    return record


def _remove_folder(folder: Path) -> None:
    """A failure costs disk space only: it is logged."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("cannot remove %s: %s", folder, error)
