"""The roles' client and the proxy understand each other, call by call."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.bucket.builders import group_text
from tests.proxy.worlds import Proxy, World, proxy_of

from bucketrl.api.client import ProxyClient, ProxyRefused
from bucketrl.api.messages import (
    Completion,
    Heartbeat,
    HeldLease,
    LearnerState,
    LeaseRequest,
    QuarantinedAttempt,
    RolloutState,
)
from bucketrl.bucket import keys
from bucketrl.proxy.auth import Tokens

TOKENS = Tokens("worker-token", "read-token")


class Wire(httpx.BaseTransport):
    """From the client's thread to the proxy in the event loop."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = httpx.ASGITransport(proxy.app)
        self._loop = asyncio.get_running_loop()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result(30)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        async with httpx.AsyncClient(transport=self._proxy) as http:
            given = http.build_request(
                request.method, request.url, headers=request.headers, content=request.read()
            )
            reply = await http.send(given)
            return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)


async def spoken(
    world: World, talk: Callable[[ProxyClient], Any], *, token: str = TOKENS.worker, **options: Any
) -> Any:
    async with proxy_of(world, tokens=TOKENS, **options) as proxy:
        return await asyncio.to_thread(talk, ProxyClient("http://proxy", token, transport=Wire(proxy)))


async def test_a_workers_day() -> None:
    world = World()
    world.begin()

    def day(client: ProxyClient) -> None:
        head = client.policy(-1, 0.0)
        assert head is not None
        assert client.policy(head.version, 0.05) is None
        first, second = client.lease(
            LeaseRequest(worker_id="w1", max_groups=2, loaded_version=head.version)
        ).leases
        held = tuple(HeldLease(lease_id=one.lease_id, group_id=one.group_id) for one in (first, second))
        state = RolloutState(worker_id="w1", engine="tiny", loaded_version=head.version, leases=held)
        reply = client.heartbeat(Heartbeat(state=state))
        assert (reply.version, reply.finished) == (0, False)
        assert client.renew(first.lease_id, "w1") == first
        ref = world.upload(0)
        completion = Completion(
            worker_id="w1", group_id=first.group_id, attempt=ref.attempt, size=ref.file.size,
            sha256=ref.file.sha256, tokens=6, mean_reward=0.5,
        )  # fmt: skip
        client.complete(first.lease_id, completion)
        client.complete(first.lease_id, completion)
        client.release(second.lease_id, "w1")
        assert client.group(first.group_id).attempts == (ref.attempt,)
        with pytest.raises(ProxyRefused) as over:
            client.renew(second.lease_id, "w1")
        assert over.value.status == 404
        assert [row.id for row in client.workers()] == ["w1"]

    await spoken(world, day)


async def test_a_learners_day() -> None:
    world = World()
    world.begin()
    world.upload(0, "bad")

    def day(client: ProxyClient) -> None:
        state = LearnerState(
            learner_id="learner-a",
            epoch=1,
            step=0,
            phase="waiting",
            pending_skips=(0,),
            quarantined=(QuarantinedAttempt(group_id=group_text(0), attempt="bad"),),
        )
        client.heartbeat(Heartbeat(state=state))
        assert client.group(group_text(0)).state == "not_issued"
        status = client.run_status()
        assert (status.run_id, status.learner_alive) == (world.run.run_id, True)
        assert [row.step for row in client.steps()] == [0]
        assert client.steps(after=0) == []
        stored = world.store.get(keys.log(0))
        assert client.append_log(0, stored) is None
        assert client.append_log(0, b"another") == stored

    await spoken(world, day, serialise_commits=True)


async def test_a_readers_token_looks_and_does_not_touch() -> None:
    def look(client: ProxyClient) -> None:
        client.run_status()
        with pytest.raises(ProxyRefused, match="BUCKETRL_WORKER_TOKEN") as refusal:
            client.lease(LeaseRequest(worker_id="w1", max_groups=1, loaded_version=0))
        assert refusal.value.status == 403
        assert TOKENS.read not in str(refusal.value)

    await spoken(World(), look, token=TOKENS.read)
