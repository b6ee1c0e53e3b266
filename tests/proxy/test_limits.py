"""Body sizes and request rates."""

import httpx
import pytest
from tests.proxy.worlds import Clock, World, proxy_of

from bucketrl.proxy.limits import MAX_BODY, MAX_CLIENTS, MAX_LOG_BODY, RateLimiter


@pytest.mark.parametrize(
    ("method", "path", "limit"), [("POST", "/v1/heartbeats", MAX_BODY), ("PUT", "/v1/log/0", MAX_LOG_BODY)]
)
async def test_a_body_over_the_limit_is_refused_and_one_at_it_is_read(
    method: str, path: str, limit: int
) -> None:
    async with proxy_of(World(), serialise_commits=True) as proxy:
        over = await proxy.http.request(method, path, content=b" " * (limit + 1))
        at = await proxy.http.request(method, path, content=b" " * limit)
    assert over.status_code == 413
    assert str(limit) in over.json()["error"]
    assert at.status_code == 422


async def test_a_body_that_does_not_say_its_size_is_cut_as_well() -> None:
    sent = 0

    async def endless() -> object:
        nonlocal sent
        while True:
            sent += 1 << 14
            yield b"x" * (1 << 14)

    async with proxy_of(World()) as proxy:
        reply = await proxy.http.post("/v1/heartbeats", content=endless())  # type: ignore[arg-type]
    assert reply.status_code == 413
    assert sent <= MAX_BODY + (1 << 15)


async def test_a_client_that_runs_wild_is_slowed_down_and_others_are_not() -> None:
    world = World()
    async with proxy_of(world) as proxy:
        statuses = [(await proxy.get("/healthz")).status_code for _ in range(1100)]
        assert statuses.count(429) > 50
        slow = await proxy.get("/healthz")
        assert slow.headers["retry-after"] == "1"
        elsewhere = httpx.ASGITransport(proxy.app, client=("192.0.2.1", 9))
        async with httpx.AsyncClient(transport=elsewhere, base_url="http://proxy") as other:
            assert (await other.get("/healthz")).status_code == 200
        world.clock.now += 1
        assert (await proxy.get("/healthz")).status_code == 200


def test_a_rate_up_to_the_limit_is_never_refused() -> None:
    clock = Clock()
    limiter = RateLimiter(clock, rate=10.0, burst=10.0)
    for _ in range(1000):
        clock.now += 0.1
        assert limiter.allow("a")


def test_beyond_the_burst_only_the_rate_passes() -> None:
    clock = Clock()
    limiter = RateLimiter(clock, rate=10.0, burst=20.0)
    passed = 0
    for _ in range(1000):
        passed += limiter.allow("a")
        clock.now += 0.01
    assert passed == pytest.approx(20 + 10 * 10, abs=2)


def test_memory_is_bounded_by_forgetting_who_asked_longest_ago() -> None:
    clock = Clock()
    limiter = RateLimiter(clock, rate=1.0, burst=1.0)
    assert limiter.allow("busy")
    for number in range(MAX_CLIENTS + 10):
        limiter.allow(f"client-{number}")
        limiter.allow("busy")
    assert len(limiter._buckets) <= MAX_CLIENTS
    assert not limiter.allow("busy")
