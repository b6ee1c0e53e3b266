"""Keeping up with the bucket, also with one that fails, and at a bounded number of calls."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.bucket.builders import append, writer_on
from tests.proxy.worlds import World, proxy_of

from bucketrl.bucket import keys
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.store import ObjectInfo, Store


class Observed:
    """A store that counts calls and fails when told."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()
        self.error: Exception | None = None

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        if self.error:
            raise self.error
        return self._inner.get(key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self.calls["list"] += 1
        if self.error:
            raise self.error
        return self._inner.list(prefix, start_after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def observed() -> tuple[World, Observed]:
    world = World()
    world.begin()
    store = Observed(world.store)
    world.store = store
    return world, store


async def test_an_idle_run_costs_one_get_a_poll_and_no_listing() -> None:
    world, store = observed()
    async with proxy_of(world, poll_s=0.02):
        store.calls.clear()
        await asyncio.sleep(0.5)
        assert set(store.calls) == {"get"}
        assert 3 <= store.calls["get"] <= 26


async def test_a_bucket_that_fails_is_reported_and_asked_less_often_until_it_answers() -> None:
    world, store = observed()
    async with proxy_of(world) as proxy:
        store.error = StoreError("s3: 503 slow down")
        await asyncio.sleep(0.5)
        ready = await proxy.get("/readyz")
        assert ready.status_code == 503
        assert "slow down" in ready.json()["error"]
        assert (await proxy.get("/v1/run")).json()["version"] == 0, "what is known is still told"
        assert store.calls["get"] < 20
        store.error = None
        world.train(0, 1)
        await proxy.until(lambda status: status["version"] == 1)
        await proxy.until_ready()


async def test_a_broken_log_is_named_and_what_came_before_it_is_kept() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        world.store.put(keys.log(2), b"{}")
        for _ in range(200):
            ready = await proxy.get("/readyz")
            if ready.status_code == 503:
                break
            await asyncio.sleep(0.01)
        assert "log/00000002.json" in ready.json()["error"]
        assert (await proxy.get("/v1/policy")).json()["version"] == 0


async def test_a_commit_reaches_every_waiting_poll() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        polls = [asyncio.create_task(proxy.get("/v1/policy?after=0&wait=30")) for _ in range(50)]
        await asyncio.sleep(0.1)
        world.train(0, 1)
        replies = await asyncio.wait_for(asyncio.gather(*polls), 10)
    assert {reply.json()["version"] for reply in replies} == {1}


async def test_a_start_record_wakes_nobody() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        poll = asyncio.create_task(proxy.get("/v1/policy?after=0&wait=0.5"))
        second = writer_on(world.store, "b")
        second.start("learner-b")
        assert (await poll).status_code == 204
        append(second)
        assert (await proxy.get("/v1/policy?after=0&wait=10")).json()["version"] == 1


async def test_long_polls_end_when_the_proxy_stops() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        poll = asyncio.create_task(proxy.get("/v1/policy?after=0&wait=30"))
        await asyncio.sleep(0.1)
        proxy.app.state.follower.end_waits()
        assert (await asyncio.wait_for(poll, 5)).status_code == 204


async def test_a_defect_in_following_is_handed_on_and_shown() -> None:
    """A proxy that no longer sees the log must not pretend that all is well."""
    world, store = observed()
    failures: list[BaseException] = []
    async with proxy_of(world, on_failure=failures.append) as proxy:
        store.error = RuntimeError("a defect")
        for _ in range(200):
            if failures:
                break
            await asyncio.sleep(0.01)
        assert (await proxy.get("/readyz")).json() == {"error": "internal error: RuntimeError"}
    assert [str(failure) for failure in failures] == ["a defect"]
