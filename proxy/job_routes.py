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
    WorkerRef,
)
from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError
from bucketrl.proxy.core import ProxyCore
from bucketrl.proxy.follower import Follower

MAX_WAIT_S = 30.0
"""Of a long poll."""

LeaseId = Annotated[str, Path(pattern=r"^[A-Za-z0-9-]{1,64}$")]


def job_routes(core: ProxyCore, follower: Follower, *, serialise_commits: bool) -> APIRouter:
    router = APIRouter(prefix="/v1")
    _policy_routes(router, core, follower)
    _lease_routes(router, core)
    if serialise_commits:
        _log_route(router, core, follower)
    return router


def _policy_routes(router: APIRouter, core: ProxyCore, follower: Follower) -> None:
    @router.get("/policy", response_model=PolicyHead)
    async def policy(
        request: Request,
        response: Response,
        after: int = -1,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> PolicyHead | Response:
        """The newest committed version if above `after`; else 204 (304 to If-None-Match) after `wait` s."""
        known = request.headers.get("if-none-match", "").strip('"')
        await follower.wait_for_version_above(after, wait)
        head = core.policy_head()
        if head is None or head.version <= after:
            return Response(status_code=304 if head is not None and known == head.log_sha256 else 204)
        if known == head.log_sha256:
            return Response(status_code=304)
        response.headers["etag"] = f'"{head.log_sha256}"'
        return head

    @router.post("/heartbeats")
    async def heartbeat(beat: Heartbeat) -> HeartbeatReply:
        return core.heartbeat(beat)


def _lease_routes(router: APIRouter, core: ProxyCore) -> None:
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

    @router.post("/leases/{lease_id}/release", status_code=204)
    async def release(lease_id: LeaseId, who: WorkerRef) -> None:
        core.scheduler.release(lease_id, who.worker_id)


def _log_route(router: APIRouter, core: ProxyCore, follower: Follower) -> None:
    @router.put("/log/{seq}")
    async def append(seq: Annotated[int, Path(ge=0, lt=10**8)], request: Request) -> Response:
        """Creates log record `seq` in the name of a store that cannot create exclusively. 409 and the
        stored bytes if it exists with other content."""
        data = await request.body()
        async with follower.log_lock:
            follower.apply(await asyncio.to_thread(core.read))
            state = core.reader.state
            if seq > state.next_seq:
                raise IntegrityError(f"seq {seq}: the log's next record is {state.next_seq}")
            if seq < state.next_seq:
                existing = await asyncio.to_thread(core.store.get, keys.log(seq))
                return Response(status_code=204) if existing == data else Response(existing, 409)
            state.apply(data)
            await asyncio.to_thread(core.store.put, keys.log(seq), data)
            follower.apply([core.reader.accept(data)])
        return Response(status_code=204)
