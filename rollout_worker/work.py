"""Which groups this worker samples: leased from the proxy, or found alone while the proxy is away.

take ─► Work ─► sampled, uploaded ─► done
             ├► cannot be sampled ──► give_back ─► the proxy issues it again
             └► cut at shutdown, saved as a partial group ──► give_back, naming it ─► another worker goes on
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from bucketrl.api.client import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import HeldLease, Lease, LeaseRequest
from bucketrl.bucket import keys
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.partials import fullest
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store
from bucketrl.rollout_worker import fallback
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.link import ProxyLink
from bucketrl.rollout_worker.policy import PolicyWatcher

logger = logging.getLogger(__name__)

RETRY_S = 0.5
MIN_WAIT_S, MAX_WAIT_S = 0.1, 10.0
"""Bounds on the pause that the proxy may ask for before the next request for leases."""
ALONE_PERIOD_S = 5.0
"""Mean time between two listings of the bucket in search of work."""
_REMEMBERED_FAILURES = 1024


@dataclass(frozen=True, slots=True)
class Work:
    """One group to sample."""

    lease_id: str
    group_id: keys.GroupId
    policy_version: int
    """Sample with this version or a newer one."""
    seconds: float
    """Lease time."""
    partial_attempt: str | None = None
    """Attempt whose `partial/` object holds what was drawn of the group before."""


class WorkSource:
    """The groups that this worker holds, and where more come from."""

    def __init__(
        self,
        link: ProxyLink,
        store: Store,
        run: RunRecord,
        policy: PolicyWatcher,
        worker_id: str,
        *,
        rng: random.Random,
        on_finished: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._store = store
        self._run = run
        self._policy = policy
        self._worker_id = worker_id
        self._rng = rng
        self._on_finished = on_finished
        self._clock = clock
        self._next_request = 0.0
        self._next_listing = 0.0
        self._failures: OrderedDict[keys.GroupId, int] = OrderedDict()
        self._asking: asyncio.Task[list[Work]] | None = None
        self.held: dict[str, Work] = {}
        """By lease id: not yet uploaded or given back."""

    def held_leases(self) -> tuple[HeldLease, ...]:
        return tuple(HeldLease(lease_id=w.lease_id, group_id=str(w.group_id)) for w in self.held.values())

    async def take(self, count: int, loaded_version: int) -> list[Work]:
        """Up to `count` more groups, after a pause if there were too few the last time."""
        if self._link.out:
            return await self._take_alone(count)
        await asyncio.sleep(max(0.0, self._next_request - self._clock()))
        # What the proxy grants to a call that is cancelled must be given back as well.
        self._asking = asyncio.create_task(self._lease(count, loaded_version))
        return await asyncio.shield(self._asking)

    async def settle(self, seconds: float) -> None:
        """After `take` was cancelled: until `held` has all that was granted."""
        if self._asking is not None:
            # Its failure no longer matters to anybody.
            await asyncio.wait([asyncio.gather(self._asking, return_exceptions=True)], timeout=seconds)

    async def _lease(self, count: int, loaded_version: int) -> list[Work]:
        request = LeaseRequest(worker_id=self._worker_id, max_groups=count, loaded_version=loaded_version)
        try:
            reply = await self._link.call(self._link.client.lease, request)
        except ProxyUnavailable:
            await asyncio.sleep(RETRY_S * self._rng.uniform(0.5, 1.5))
            return []
        if reply.reason == "finished":
            self._on_finished()
        if len(reply.leases) < count:
            pause = min(max(reply.wait_seconds, MIN_WAIT_S), MAX_WAIT_S)
            self._next_request = self._clock() + pause
        return self._hold(_work(lease) for lease in reply.leases if lease.lease_id not in self.held)

    async def _take_alone(self, count: int) -> list[Work]:
        await asyncio.sleep(max(0.0, self._next_listing - self._clock()))
        self._next_listing = self._clock() + ALONE_PERIOD_S * self._rng.uniform(0.7, 1.3)
        await self._policy.read_log()
        head = self._policy.head
        if head is None or head.finished or not self._link.out:
            return []
        try:
            uploaded = await in_thread(self._list_uploaded)
        except StoreError as error:
            logger.warning("cannot look for work in the bucket: %s", error)
            return []
        size = self._run.prompts_per_epoch
        held = {work.group_id.ordinal(size) for work in self.held.values()}
        ordinals = fallback.choose(
            self._worker_id,
            self._policy.consumed,
            uploaded | held,
            max_outstanding=self._run.config.max_outstanding_groups,
            count=count,
        )
        partial = await self._find_partial() if ordinals else {}
        return self._hold(
            Work(
                lease_id=f"{self._rng.getrandbits(64):016x}",
                group_id=keys.GroupId.from_ordinal(ordinal, size),
                policy_version=head.version,
                seconds=self._run.config.rollout.lease_seconds,
                partial_attempt=partial.get(ordinal),
            )
            for ordinal in ordinals
        )

    def _hold(self, granted: Iterable[Work]) -> list[Work]:
        taken = list(granted)
        self.held |= {work.lease_id: work for work in taken}
        return taken

    def _list_uploaded(self) -> set[int]:
        """Ordinals of the window that have a trajectory object."""
        size = self._run.prompts_per_epoch
        ordinals = fallback.window(self._policy.consumed, self._run.config.max_outstanding_groups)
        first = keys.GroupId.from_ordinal(ordinals.start, size)
        listing = self._store.list(keys.TRAJECTORY_PREFIX, start_after=f"{keys.TRAJECTORY_PREFIX}{first}")
        parsed = filter(None, (keys.parse_trajectory(info.key) for info in listing))
        return set(takewhile(lambda n: n in ordinals, (group.ordinal(size) for group, _ in parsed)))

    async def _find_partial(self) -> dict[int, str]:
        """What has been begun; nothing if the store does not say, for then groups are sampled from scratch."""
        try:
            return await in_thread(self._list_partial)
        except StoreError as error:
            logger.warning("cannot look for partial groups in the bucket: %s", error)
            return {}

    def _list_partial(self) -> dict[int, str]:
        """Ordinals of the window that somebody has begun, and the attempt to go on with."""
        size = self._run.prompts_per_epoch
        ordinals = fallback.window(self._policy.consumed, self._run.config.max_outstanding_groups)
        first, end = (keys.GroupId.from_ordinal(n, size) for n in (ordinals.start, ordinals.stop))
        listing = self._store.list(keys.PARTIAL_PREFIX, start_after=f"{keys.PARTIAL_PREFIX}{first}")
        return fullest(takewhile(lambda info: info.key < f"{keys.PARTIAL_PREFIX}{end}", listing), size)

    def done(self, work: Work) -> None:
        """The group is in the bucket."""
        self.held.pop(work.lease_id, None)
        self._failures.pop(work.group_id, None)

    async def fail(self, work: Work, *, hopeless: bool) -> None:
        """The group cannot be sampled: give it back, later each time it fails here.

        A group that nobody can sample (`hopeless`: its prompt does not fit) would else be issued again and
        again without a pause.
        """
        failures = self._failures.get(work.group_id, 0)
        self._failures[work.group_id] = failures + 1
        self._failures.move_to_end(work.group_id)
        while len(self._failures) > _REMEMBERED_FAILURES:
            self._failures.popitem(last=False)
        await asyncio.sleep(work.seconds if hopeless else min(2.0**failures - 1.0, work.seconds))
        await self.give_back(work)

    async def give_back(self, work: Work, partial_attempt: str | None = None) -> None:
        """Lets the proxy issue the group again at once, to be continued from `partial_attempt` if there is
        one. Without an answer the lease runs out by itself, and the partial object is found by listing."""
        if self.held.pop(work.lease_id, None) is None:
            return
        try:
            await self._link.call(self._link.client.release, work.lease_id, self._worker_id, partial_attempt)
        except (ProxyUnavailable, ProxyRefused) as error:
            logger.info("lease of group %s not released: %s", work.group_id, error)


def _work(lease: Lease) -> Work:
    return Work(
        lease_id=lease.lease_id,
        group_id=keys.GroupId.parse(lease.group_id),
        policy_version=lease.policy_version,
        seconds=lease.seconds,
        partial_attempt=lease.partial_attempt,
    )
