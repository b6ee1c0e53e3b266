"""What workers and the learner ask: the newest policy, leases, heartbeats, and commits at tier 0."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response

from bucketrl.api.messages import (
    Completion,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    PolicyHead,
    Release,
    UploadedGroups,
    WorkerRef,
)
from bucketrl.bucket import keys
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.log_state import LogViolation
from bucketrl.proxy.core import ProxyCore
from bucketrl.proxy.follower import Follower
from bucketrl.proxy.stray import StrayPuts

MAX_WAIT_S = 30.0
"""Of a long poll."""

LeaseId = Annotated[str, Path(pattern=r"^[A-Za-z0-9-]{1,64}$")]


def job_routes(core: ProxyCore, follower: Follower, *, serialise_commits: bool) -> APIRouter:
    router = APIRouter(prefix="/v1")
    _policy_routes(router, core, follower)
    _lease_routes(router, core, follower)
    _log_route(router, core, follower if serialise_commits else None)
    return router


def _policy_routes(router: APIRouter, core: ProxyCore, follower: Follower) -> None:
    @router.get("/policy", response_model=PolicyHead)
    async def policy(
        request: Request,
        response: Response,
        after: int = -1,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> PolicyHead | Response:
        """The newest committed version if it is above `after` and not the one that If-None-Match names;
        otherwise 204 or 304, after `wait` seconds without such a one."""
        etag = request.headers.get("if-none-match", "")
        head = core.policy_head()
        known = head is not None and etag == _etag(head)
        await follower.wait_for_version_above(core.version if known else after, wait)
        head = core.policy_head()
        if head is not None and etag == _etag(head):
            return Response(status_code=304, headers={"etag": etag})
        if head is None or head.version <= after:
            return Response(status_code=204)
        response.headers["etag"] = _etag(head)
        return head

    @router.get("/uploads")
    async def uploads(
        groups: Annotated[int, Query(ge=0)],
        log_seq: int = -1,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> UploadedGroups:
        """How many unconsumed groups are in the bucket: once there are `groups` and the log is read up to
        `log_seq`, or after `wait` seconds."""
        core.announced(log_seq)
        follower.look()
        await follower.wait_for_uploads(groups, log_seq, wait)
        return core.uploads()

    @router.post("/heartbeats")
    async def heartbeat(beat: Heartbeat) -> HeartbeatReply:
        reply = core.heartbeat(beat)
        follower.look()
        return reply


def _etag(head: PolicyHead) -> str:
    return f'"{head.log_sha256}"'


def _lease_routes(router: APIRouter, core: ProxyCore, follower: Follower) -> None:
    @router.post("/leases")
    async def lease(request: LeaseRequest) -> LeaseReply:
        return core.lease(request)

    @router.post("/leases/{lease_id}/renew")
    async def renew(lease_id: LeaseId, who: WorkerRef) -> Lease:
        renewed = core.renew(lease_id, who.worker_id)
        if renewed is None:
            raise HTTPException(404, f"lease {lease_id}: is over; its group may be another worker's")
        return renewed

    @router.post("/leases/{lease_id}/complete", status_code=204)
    async def complete(lease_id: LeaseId, completion: Completion) -> None:
        core.complete(lease_id, completion)
        follower.uploaded()

    @router.post("/leases/{lease_id}/release", status_code=204)
    async def release(lease_id: LeaseId, body: Release) -> None:
        core.release(lease_id, body)


def _log_route(router: APIRouter, core: ProxyCore, follower: Follower | None) -> None:
    """Without a follower the store serialises commits, and the route says so."""
    stray = StrayPuts(core.clock())

    @router.put("/log/{seq}")
    async def append(seq: Annotated[int, Path(ge=0, lt=10**8)], request: Request) -> Response:
        """Creates log record `seq` in the name of a store that cannot create exclusively. 409 and the
        stored bytes if it exists with other content."""
        if follower is None:
            raise HTTPException(
                404, f"log/{seq}: {core.store.url} creates objects exclusively; append to it directly"
            )
        data = await request.body()
        async with follower.log_lock:
            # Until a read finds nothing more: a failure in between ends a read early without a word, and
            # what is put below must never replace a record.
            while records := await asyncio.to_thread(core.read):
                follower.apply(records)
            state = core.reader.state
            if seq > state.next_seq:
                raise StoreError(f"log/{seq} cannot be appended: log/{state.next_seq} is not to be seen yet")
            if seq < state.next_seq:
                existing = await asyncio.to_thread(core.store.get, keys.log(seq))
                return Response(status_code=204) if existing == data else Response(existing, 409)
            try:
                state.apply(data)  # raises before anything is written
            except LogViolation:
                # Perhaps because the newest record was damaged on its way to this proxy.
                healed = await asyncio.to_thread(core.reader.verify_head)
                if healed is None:
                    raise
                follower.apply([healed])
                core.reader.state.apply(data)
            if wait := stray.seconds_until_safe(data, core.clock()):
                raise StoreError(
                    f"log/{seq} cannot be appended for another {wait:.0f} s: an earlier put may still land on it"
                )
            try:
                await asyncio.to_thread(core.store.put, keys.log(seq), data)
            except StoreError:
                stray.failed(data, core.clock())
                raise
            follower.apply([core.reader.accept(data)])
        return Response(status_code=204)
