"""`PUT /v1/log/{seq}`: the proxy as the one that serialises commits where the store cannot."""

import asyncio
from typing import Any

from tests.bucket.builders import NOW, RUN_ID, append, writer_on
from tests.proxy.worlds import Proxy, World, proxy_of

from bucketrl.bucket import keys
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.records import StartRecord, sha256_hex
from bucketrl.bucket.store import Store
from bucketrl.proxy.stray import STRAY_PUT_S


def start(name: str, *, seq: int = 0, epoch: int = 1, parent: str = "", run_id: str = RUN_ID) -> bytes:
    return StartRecord(
        run_id=run_id,
        seq=seq,
        parent_sha256=parent,
        epoch=epoch,
        write_id=name,
        written_at=NOW,
        learner_id=name,
    ).encode()


async def put(proxy: Proxy, seq: int, data: bytes) -> tuple[int, bytes]:
    reply = await proxy.http.put(f"/v1/log/{seq}", content=data)
    return reply.status_code, reply.content


async def test_a_record_is_created_once_and_its_own_repetition_succeeds() -> None:
    world = World()
    async with proxy_of(world, serialise_commits=True) as proxy:
        mine = start("a")
        assert (await put(proxy, 0, mine))[0] == 204
        assert (await put(proxy, 0, mine))[0] == 204
        assert await put(proxy, 0, start("b")) == (409, mine)
    assert world.store.get(keys.log(0)) == mine


async def test_of_many_that_race_exactly_one_wins_and_all_see_it() -> None:
    world = World()
    async with proxy_of(world, serialise_commits=True) as proxy:
        records = [start(f"learner-{n}") for n in range(16)]
        replies = await asyncio.gather(*(put(proxy, 0, record) for record in records))
    stored = world.store.get(keys.log(0))
    assert [status for status, _ in replies].count(204) == 1
    assert {body for status, body in replies if status == 409} == {stored}
    assert stored == records[[status for status, _ in replies].index(204)]


async def test_a_record_that_does_not_extend_the_chain_is_refused_and_not_written() -> None:
    world = World()
    async with proxy_of(world, serialise_commits=True) as proxy:
        for data, reason in [
            (start("a", run_id="another-run"), "run_id"),
            (start("a", parent="0" * 64), "parent_sha256"),
            (b'{"kind": "start"}', "not a log record"),
            (b"", "not a log record"),
        ]:
            status, body = await put(proxy, 0, data)
            assert status == 422
            assert reason.encode() in body
    assert list(world.store.list(keys.LOG_PREFIX)) == []


async def test_a_record_beyond_the_next_one_may_be_sent_again_later() -> None:
    world = World()
    async with proxy_of(world, serialise_commits=True) as proxy:
        status, body = await put(proxy, 3, start("a", seq=3))
    assert status == 503
    assert b"log/0" in body


async def test_a_whole_run_is_committed_through_the_proxy() -> None:
    """A learner's own log writer over the route: start, two steps, a second learner that fences the first."""
    world = World()
    async with proxy_of(world, serialise_commits=True) as proxy:
        loop = asyncio.get_running_loop()

        def create(key: str, data: bytes) -> bytes | None:
            seq = keys.parse_log(key)
            assert seq is not None
            status, body = asyncio.run_coroutine_threadsafe(put(proxy, seq, data), loop).result(10)
            assert status in (204, 409)
            return body if status == 409 else None

        def commit() -> None:
            first = writer_on(world.store, "a", create)
            first.start("learner-a")
            append(first)
            append(first)
            writer_on(world.store, "b", create).start("learner-b")

        await asyncio.to_thread(commit)
        status = await proxy.until(lambda status: status["version"] == 1)
        assert status["step"] == 1
    assert len(list(world.store.list(keys.LOG_PREFIX))) == 4


class FailingGet:
    """A store that cannot read one key."""

    def __init__(self, inner: Store, key: str) -> None:
        self._inner = inner
        self._key = key

    def get(self, key: str) -> bytes:
        if key == self._key:
            raise StoreError(f"{key}: 503")
        return self._inner.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_record_is_never_replaced_because_reading_it_failed() -> None:
    """The log has grown by two records behind the proxy's back; the second one cannot be read just now."""
    world = World()
    bucket, world.store = world.store, FailingGet(world.store, keys.log(1))
    async with proxy_of(world, serialise_commits=True, poll_s=60) as proxy:
        world.begin()
        first, second = bucket.get(keys.log(0)), bucket.get(keys.log(1))
        status, _ = await put(proxy, 1, start("rival", seq=1, epoch=2, parent=sha256_hex(first)))
        assert status == 503
    assert bucket.get(keys.log(1)) == second


class LatePut:
    """A store whose first put fails and is done later."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.late: list[tuple[str, bytes]] = []

    def put(self, key: str, data: bytes) -> None:
        if not self.late:
            self.late.append((key, data))
            raise StoreError(f"{key}: timeout")
        self._inner.put(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_nothing_is_appended_while_a_put_of_a_proxy_before_may_land() -> None:
    """The record that it had in flight would replace the one that a new learner has built upon."""
    world = World()
    async with proxy_of(world, serialise_commits=True, settled=False) as proxy:
        status, body = await put(proxy, 0, start("b"))
        assert status == 503
        assert b"an earlier put may still land" in body
        world.clock.now += STRAY_PUT_S - 1
        world.store.put(keys.log(0), start("a"))
        assert await put(proxy, 0, start("b")) == (409, start("a"))


async def test_a_put_that_failed_may_be_repeated_but_not_replaced() -> None:
    world = World()
    bucket, world.store = world.store, LatePut(world.store)
    async with proxy_of(world, serialise_commits=True) as proxy:
        assert (await put(proxy, 0, start("a")))[0] == 503
        assert (await put(proxy, 0, start("b")))[0] == 503
        assert (await put(proxy, 0, start("a")))[0] == 204
        bucket.put(*world.store.late[0])
        assert await put(proxy, 0, start("b")) == (409, start("a"))


async def test_after_a_while_a_put_that_failed_is_forgotten() -> None:
    world = World()
    world.store = LatePut(world.store)
    async with proxy_of(world, serialise_commits=True) as proxy:
        assert (await put(proxy, 0, start("a")))[0] == 503
        world.clock.now += STRAY_PUT_S
        assert (await put(proxy, 0, start("b")))[0] == 204


async def test_a_store_that_serialises_commits_itself_says_so() -> None:
    world = World()
    async with proxy_of(world) as proxy:
        status, body = await put(proxy, 0, start("a"))
    assert status == 404
    assert b"append to it directly" in body
    assert list(world.store.list(keys.LOG_PREFIX)) == []
