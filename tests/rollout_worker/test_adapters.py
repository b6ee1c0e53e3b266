"""No version is served that is not, byte for byte and token for token, the one that the learner committed."""

import asyncio
import errno
import random
from pathlib import Path
from typing import Any

import pytest

from bucketrl.api.messages import PolicyHead
from bucketrl.bucket import keys
from bucketrl.bucket.artifacts import fetch
from bucketrl.bucket.counting import requests_of
from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker import adapters as adapters_module
from bucketrl.rollout_worker.adapters import Adapters

from .conftest import World
from .fakes import until


@pytest.fixture
async def adapters(world: World, tmp_path: Path) -> Adapters:
    folder = tmp_path / "cache"
    folder.mkdir()
    return Adapters(world.engine, world.store, world.run, folder, rng=random.Random(0))


def head(world: World) -> PolicyHead:
    newest = world.learner.head()
    assert newest is not None
    return newest


async def test_a_committed_version_is_served(world: World, adapters: Adapters) -> None:
    await adapters.load(head(world))
    assert adapters.newest == 0
    with adapters.use() as version:
        assert version == 0
    local = world.engine.folders[0]
    for ref in world.learner.reader.state.step.policy.files:
        assert (local / Path(ref.key).name).read_bytes() == world.store.get(ref.key)


async def test_an_engine_that_serves_the_base_model_is_found_out(world: World, adapters: Adapters) -> None:
    world.engine.serves_base = 1
    with pytest.raises(IntegrityError, match="it serves the base model"):
        await adapters.load(head(world))
    assert (adapters.newest, world.engine.folders, world.engine.removed) == (-1, {}, [0])
    assert list((world.folder / "cache").iterdir()) == []
    await adapters.load(head(world))
    assert adapters.newest == 0


async def test_an_engine_that_serves_an_older_version_is_found_out(world: World, adapters: Adapters) -> None:
    await adapters.load(head(world))
    old = world.engine.folders[0]
    world.learner.commit(consume=(0,))
    scored = world.engine.score

    async def stale(token_ids: tuple[int, ...], version: int | None) -> list[float]:
        world.engine.folders[1] = old
        return await scored(token_ids, version)

    world.engine.score = stale  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="canary is off"):
        await adapters.load(head(world))
    assert adapters.newest == 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
async def test_files_that_are_not_the_committed_ones_never_reach_the_engine(
    world: World, adapters: Adapters, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bucketrl.bucket.artifacts.RETRY_DELAYS_S", ())
    [ref] = [ref for ref in world.learner.reader.state.step.policy.files if ref.key.endswith(".safetensors")]
    data = world.store.get(ref.key)
    if damage == "missing":
        world.store.delete([ref.key])
    else:
        world.store.put(ref.key, data[:-1] + (b"" if damage == "truncate" else bytes([data[-1] ^ 1])))
    with pytest.raises(IntegrityError, match=r"adapter_model\.safetensors"):
        await adapters.load(head(world))
    assert world.engine.folders == {}
    world.store.put(ref.key, data)
    await adapters.load(head(world))
    assert adapters.newest == 0


async def test_a_record_other_than_the_announced_one_is_refused(world: World, adapters: Adapters) -> None:
    announced = head(world)
    with pytest.raises(IntegrityError, match="digest"):
        await adapters.load(announced.model_copy(update={"log_sha256": "0" * 64}))
    with pytest.raises(IntegrityError, match="does not commit policy version 5"):
        await adapters.load(announced.model_copy(update={"version": 5}))
    assert world.engine.folders == {}


async def test_an_adapter_that_is_not_the_runs_is_refused(world: World, adapters: Adapters) -> None:
    world.learner.commit(consume=(0,), use_dora=True)
    with pytest.raises(IntegrityError, match="use_dora"):
        await adapters.load(head(world))
    assert world.engine.folders == {}


async def test_versions_leave_when_old_and_unused_and_take_their_files_along(
    world: World, adapters: Adapters
) -> None:
    """max_staleness 1: the newest and two before it stay."""
    await adapters.load(head(world))
    folder = world.engine.folders[0]
    with adapters.use():
        for step in range(1, 5):
            world.learner.commit(consume=(step,))
            await adapters.load(head(world))
            await adapters.prune()
        assert sorted(world.engine.folders) == [0, 2, 3, 4]
        assert folder.exists()
    await adapters.prune()
    assert sorted(world.engine.folders) == [2, 3, 4]
    assert not folder.exists()
    assert len(list((world.folder / "cache").iterdir())) == 3


async def test_waiting_for_a_version_ends_with_a_newer_one(world: World, adapters: Adapters) -> None:
    waiting = asyncio.create_task(adapters.wait_for(0))
    world.learner.commit(consume=(0,))
    await asyncio.sleep(0)
    assert not waiting.done()
    await adapters.load(head(world))
    await asyncio.wait_for(waiting, 1)


async def test_failures_are_reported_until_the_version_is_served(world: World) -> None:
    world.engine.serves_base = 3
    async with world.working() as working:
        adapters = working.worker._adapters
        await until(lambda: "policy version 0 is not served" in adapters.problem)
        await asyncio.wait_for(adapters.wait_for(0), 5)
        assert adapters.problem == ""


async def test_a_full_disk_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter(range(2))

    def full(*arguments: Any) -> Path:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fetch(*arguments)

    monkeypatch.setattr(adapters_module, "fetch", full)
    async with world.working() as working:
        await until(lambda: "No space left" in working.worker._adapters.problem)
        await asyncio.wait_for(working.worker._adapters.wait_for(0), 5)


async def test_a_newer_version_does_not_wait_for_one_that_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "RETRY_S", 60.0)
    world.engine.serves_base = 1
    async with world.working() as working:
        await until(lambda: working.worker._adapters.problem)
        world.learner.commit(consume=(0,))
        await asyncio.wait_for(working.worker._adapters.wait_for(1), 5)


@pytest.mark.parametrize("handed_on", ["the record", "another text", "nothing"])
async def test_the_record_is_got_from_the_bucket_unless_the_proxy_hands_it_on(
    world: World, adapters: Adapters, handed_on: str
) -> None:
    """What the proxy gives is held against the digest as well."""
    newest = head(world)
    key = keys.log(newest.log_seq)
    text = {"the record": world.store.get(key).decode(), "another text": "{}", "nothing": ""}[handed_on]
    before = requests_of(world.store).by_kind["get"]
    await adapters.load(newest.model_copy(update={"record": text}))
    assert adapters.newest == 0
    assert requests_of(world.store).by_kind["get"] - before == (2 if handed_on == "the record" else 3)
