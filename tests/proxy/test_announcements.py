"""The proxy looks at once when it is told, and rarely when it would be; whoever waits for uploads hears at once."""

import asyncio
import time

from tests.proxy.test_follower import observed
from tests.proxy.worlds import Proxy, World, learner, proxy_of

from bucketrl.proxy import follower


async def test_a_learner_that_is_heard_spares_the_log_its_polls_and_its_commits_are_known_at_once() -> None:
    world, store = observed()
    async with proxy_of(world) as proxy:
        await proxy.beat(**learner(log_seq=1))
        await asyncio.sleep(0.1)
        store.calls.clear()
        await asyncio.sleep(0.5)
        assert store.calls["get"] <= 1
        world.train(0, 1)
        poll = asyncio.create_task(proxy.get("/v1/policy?after=0&wait=5"))
        began = time.monotonic()
        await proxy.beat(**learner(log_seq=2))
        assert (await poll).json()["version"] == 1
        assert time.monotonic() - began < 0.3


async def test_a_record_that_is_announced_and_does_not_show_yet_is_looked_for_until_it_does() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        await proxy.beat(**learner(log_seq=2))
        await asyncio.sleep(0.2)
        assert (await proxy.get("/v1/run")).json()["version"] == 0
        world.train(0, 1)
        await proxy.until(lambda status: status["version"] == 1)


async def test_a_commit_whose_announcement_was_lost_is_found(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(follower, "TOLD_POLL_S", 0.2)
    world, _ = observed()
    async with proxy_of(world) as proxy:
        await proxy.beat(**learner(log_seq=1))
        world.train(0, 1)
        await proxy.until(lambda status: status["version"] == 1)


async def test_a_learner_that_fell_silent_is_polled_for_again() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        await proxy.beat(**learner(log_seq=1))
        world.clock.now += 60
        await proxy.beat(**learner(learner_id="old", epoch=0, log_seq=0))
        world.clock.now += 60
        world.train(0, 1)
        proxy.app.state.follower._told.set()  # the pause that began while the learner was heard
        await proxy.until(lambda status: status["version"] == 1)
        world.train(2, 3)
        await proxy.until(lambda status: status["version"] == 2)


async def test_a_fenced_learner_announces_nothing() -> None:
    world, store = observed()
    async with proxy_of(world) as proxy:
        await proxy.beat(**learner(epoch=0, log_seq=99))
        await asyncio.sleep(0.1)
        store.calls.clear()
        await asyncio.sleep(0.3)
        assert store.calls["get"] <= 1


async def complete(proxy: Proxy, world: World, ordinal: int) -> None:
    [lease] = (await proxy.lease())["leases"]
    assert lease["ordinal"] == ordinal
    world.upload(ordinal)
    body = {"worker_id": "w1", "group_id": lease["group_id"], "attempt": "w1-0001", "size": 1, "sha256": "",
            "tokens": 1, "mean_reward": 0.5}  # fmt: skip
    assert (await proxy.post(f"/v1/leases/{lease['lease_id']}/complete", body)).status_code == 204


async def test_the_last_upload_that_is_waited_for_answers_at_once() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        poll = asyncio.create_task(proxy.get("/v1/uploads?groups=2&log_seq=1&wait=10"))
        await complete(proxy, world, 0)
        await asyncio.sleep(0.1)
        assert not poll.done()
        began = time.monotonic()
        await complete(proxy, world, 1)
        assert (await poll).json() == {"groups": 2, "log_seq": 1}
        assert time.monotonic() - began < 0.5


async def test_uploads_that_a_commit_consumed_do_not_count_for_the_step_after_it() -> None:
    """Whoever asks with the commit's record tells the proxy of it as well."""
    world, _ = observed()
    async with proxy_of(world) as proxy:
        await proxy.beat(**learner(log_seq=1))
        for ordinal in range(3):
            await complete(proxy, world, ordinal)
        world.train(0, 1)
        assert (await proxy.get("/v1/uploads?groups=1&log_seq=2&wait=5")).json() == {
            "groups": 1,
            "log_seq": 2,
        }


async def test_too_few_uploads_are_told_when_the_wait_is_over() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        assert (await proxy.get("/v1/uploads?groups=1&wait=0.1")).json() == {"groups": 0, "log_seq": 1}


async def test_waits_for_uploads_end_when_the_proxy_stops() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        poll = asyncio.create_task(proxy.get("/v1/uploads?groups=1&wait=30"))
        await asyncio.sleep(0.1)
        proxy.app.state.follower.end_waits()
        assert (await asyncio.wait_for(poll, 5)).json()["groups"] == 0


async def test_the_newest_version_comes_with_the_record_that_commits_it() -> None:
    world, _ = observed()
    async with proxy_of(world) as proxy:
        head = (await proxy.get("/v1/policy")).json()
        assert head["record"].encode() == world.store.get("log/00000001.json")
        world.train(0, 1)
        head = (await proxy.get("/v1/policy?after=0&wait=5")).json()
        assert head["record"].encode() == world.store.get("log/00000002.json")


async def test_quarantine_is_listed_by_a_proxy_that_begins_and_no_more(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(follower, "LIST_INTERVAL_S", 0.0)
    world, _ = observed()
    listed: list[str] = []
    plain = world.store.list

    def listing(prefix: str, start_after: str = ""):  # type: ignore[no-untyped-def]
        listed.append(prefix)
        return plain(prefix, start_after)

    world.store.list = listing  # type: ignore[method-assign]
    async with proxy_of(world):
        await asyncio.sleep(0.3)
    assert listed.count("quarantine/") == 1
    assert listed.count("trajectories/") > 3
