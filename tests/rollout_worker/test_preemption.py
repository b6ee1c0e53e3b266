"""A worker that is told to go loses nothing: what it has drawn is saved, and others go on from there."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from bucketrl.bucket import keys, partials
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.engine import SamplingRequest

from .conftest import World
from .fake_engine import logprob_of
from .fakes import FakeRewards, until, uploaded_groups
from .preempted import GROUP_SIZE, another_engine, never, preempted, saved


async def test_each_complete_group_is_uploaded_each_begun_one_saved_and_each_lease_given_back(
    world: World,
) -> None:
    """Groups 0 and 1 are drawn and wait for the store; 2 and 3 are being drawn; 4 and 5 have not begun."""
    engine = another_engine(world, drawn=lambda request: 1)

    async def hang_for_others(request: SamplingRequest) -> None:
        if not request.request_id.startswith(("0000-00000000", "0000-00000001")):
            await asyncio.Event().wait()

    engine.before_draw = hang_for_others
    world.store.broken = True
    async with world.working(grace_s=5.0) as working:
        await until(lambda: world.store.failures > 3 and len(engine.running) == 4 * GROUP_SIZE)
        begun = {request.request_id.rpartition("-")[0] for request in engine.requests}
        working.worker.stop("drained")
        await asyncio.sleep(0.1)
        world.store.broken = False
        await working.task
    assert [group.group_id for group in uploaded_groups(world.store, world.run, 0)] == [
        str(keys.GroupId(0, n)) for n in (0, 1)
    ]
    left = saved(world.store, world.run.run_id)
    assert {f"{group.group_id}-{group.attempt}" for group in left.values()} == {
        name for name in begun if not name.startswith(("0000-00000000", "0000-00000001"))
    }
    for group in left.values():
        assert [(c.sample, len(c.completion_token_ids)) for c in group.completions] == [
            (0, 1),
            (1, 1),
            (2, 1),
        ]
        assert all(c.finish_reason == "" for c in group.completions)
    assert {str(keys.GroupId(0, n)): attempt for n, attempt in world.proxy.partial.items()} == {
        group_id: group.attempt for group_id, group in left.items()
    }
    completed = {lease_id for lease_id, _ in world.proxy.completed}
    assert completed | set(world.proxy.released) == set(world.proxy.leased)
    assert not completed & set(world.proxy.released)
    assert engine.closed


async def test_another_worker_goes_on_and_each_token_keeps_who_drew_it(world: World) -> None:
    """Sample 0 had ended, sample 1 had two tokens, sample 2 none. A commit comes in between."""

    async def hang_but_for_sample_0(request: SamplingRequest) -> None:
        if not request.request_id.endswith("-0"):
            await asyncio.Event().wait()

    drawn = {"1": 2, "2": 0}
    another_engine(
        world, before_draw=hang_but_for_sample_0, drawn=lambda request: drawn[request.request_id[-1]]
    )
    world.proxy.limit = 1
    async with world.working(worker_id="first") as working:
        await until(lambda: len(world.engine.running) == 2 and len(world.engine.requests) == 3)
        working.worker.stop("drained")
    [left] = saved(world.store, world.run.run_id).values()
    assert [(c.sample, c.finish_reason != "") for c in left.completions] == [(0, True), (1, False)]

    world.learner.commit(consume=(7,))
    second = another_engine(world)
    async with world.working(worker_id="second"):
        await until(lambda: world.proxy.completed)
    assert [request.request_id[-1] for request in second.requests] == ["1", "2"]
    [group] = uploaded_groups(world.store, world.run, 1)
    assert (group.worker_id, group.attempt.startswith("second-")) == ("second", True)
    ended, continued, fresh = group.trajectories
    assert set(ended.policy_versions) == {0}
    assert continued.policy_versions == (0, 0) + (1,) * (len(continued.policy_versions) - 2)
    assert set(fresh.policy_versions) == {1}
    for before, after in zip(left.completions, (ended, continued), strict=True):
        assert (after.seed, after.started_at) == (before.seed, before.started_at)
        assert after.seconds >= before.seconds
    assert second.requests[0].seed != continued.seed, "the first request's random numbers must not come again"
    for trajectory in group.trajectories:
        assert trajectory.behaviour_logprobs == tuple(
            map(logprob_of, trajectory.completion_token_ids, trajectory.policy_versions)
        )


def corrupt(world: World, key: str) -> None:
    data = bytearray(world.store.get(key))
    data[len(data) // 2] ^= 1
    world.store.put(key, bytes(data))


def foreign(world: World, key: str) -> None:
    [group] = saved(world.store, world.run.run_id).values()
    world.store.put(key, partials.encode(replace(group, run_id="run-2")))


def missing(world: World, key: str) -> None:
    world.store.delete([key])


@pytest.mark.parametrize("damage", [corrupt, foreign, missing])
async def test_a_partial_group_that_cannot_be_relied_on_costs_its_tokens_only(
    world: World, damage: Callable[[World, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    another_engine(world, before_draw=never, drawn=lambda request: 1)
    await preempted(world, 1)
    [info] = world.store.list(keys.PARTIAL_PREFIX)
    damage(world, info.key)
    engine = another_engine(world)
    async with world.working(worker_id="second"):
        await until(lambda: world.proxy.completed)
    assert [request.prior for request in engine.requests] == [()] * GROUP_SIZE
    assert f"{info.key} cannot be continued" in caplog.text
    assert len(uploaded_groups(world.store, world.run, 0)) == 1


async def test_stopping_ends_in_time_although_the_store_refuses(world: World) -> None:
    """Nothing is saved then, and no release claims that it was."""
    another_engine(world, before_draw=never, drawn=lambda request: 1)
    world.store.broken = True
    assert await preempted(world, grace_s=0.5) < 1.5
    assert world.store.failures > 0
    assert set(world.proxy.released) == set(world.proxy.leased)
    assert world.proxy.partial == {}


async def test_a_store_that_denies_access_keeps_no_lease_from_being_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(key: str, data: bytes) -> None:
        raise UserError(f"{key}: access denied")

    another_engine(world, before_draw=never, drawn=lambda request: 1)
    monkeypatch.setattr(world.store, "put", denied)
    assert await preempted(world, grace_s=5.0) < 2.0
    assert set(world.proxy.released) == set(world.proxy.leased)
    assert world.proxy.partial == {}


async def test_stopping_ends_in_time_although_the_store_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_engine(world, before_draw=never, drawn=lambda request: 1)
    released = threading.Event()
    monkeypatch.setattr(world.store, "put", lambda key, data: released.wait(30))
    try:
        assert await preempted(world, grace_s=0.5) < 1.5
    finally:
        released.set()
    assert set(world.proxy.released) == set(world.proxy.leased)
    assert world.proxy.partial == {}


async def test_stopping_ends_in_time_although_the_engine_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_engine(world, before_draw=never)

    async def hang(request_id: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(world.engine, "abort", hang)
    assert await preempted(world, grace_s=0.5) < 1.5
    assert set(world.proxy.released) == set(world.proxy.leased)


async def test_stopping_ends_in_time_although_the_proxy_is_away(world: World) -> None:
    """The partial groups are in the bucket all the same, where the next proxy finds them."""
    another_engine(world, before_draw=never, drawn=lambda request: 1)
    world.proxy.limit = 2
    async with world.working(grace_s=2.0) as working:
        await until(lambda: len(world.engine.running) == 2 * GROUP_SIZE)
        world.proxy.down = True
        working.worker.stop("drained")
        start = time.monotonic()
        await working.task
        assert time.monotonic() - start < 3.0
    assert len(saved(world.store, world.run.run_id)) == 2


async def test_a_group_whose_rewards_take_too_long_is_saved_as_well(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its completions have ended: the next worker only scores them."""

    async def slow(*_: object) -> None:
        await asyncio.Event().wait()

    another_engine(world)
    world.proxy.limit = 1
    with monkeypatch.context() as patch:
        patch.setattr(FakeRewards, "score", slow)
        async with world.working(grace_s=0.5) as working:
            await until(lambda: len(world.engine.requests) == GROUP_SIZE and not world.engine.running)
            await asyncio.sleep(0.05)
            working.worker.stop("drained")
    [left] = saved(world.store, world.run.run_id).values()
    assert all(completion.finish_reason for completion in left.completions)
    assert world.proxy.partial == {0: left.attempt}
    engine = another_engine(world)
    async with world.working(worker_id="second"):
        await until(lambda: world.proxy.completed)
    assert engine.requests == []
    assert len(uploaded_groups(world.store, world.run, 0)) == 1


async def test_without_a_proxy_what_others_have_begun_is_found_by_listing(world: World) -> None:
    another_engine(world, before_draw=never, drawn=lambda request: 1)
    await preempted(world, 2)
    engine = another_engine(world)
    world.proxy.down = True
    async with world.working(worker_id="second"):
        await until(lambda: len(uploaded_groups(world.store, world.run, 0)) >= 8)
    left = saved(world.store, world.run.run_id)
    assert len(left) == 2
    for request in engine.requests:
        group_id = request.request_id[:13]
        assert len(request.prior) == (1 if group_id in left else 0)


async def test_a_worker_that_is_stopped_before_it_goes_on_forgets_nothing(world: World) -> None:
    """Three workers: the second is told to go as soon as it has the lease, the third has all the tokens."""
    another_engine(world, before_draw=never, drawn=lambda request: 1)
    await preempted(world, 1)
    another_engine(world, before_draw=never, drawn=lambda request: 0)
    await preempted(world, 1, worker_id="second")
    engine = another_engine(world)
    async with world.working(worker_id="third"):
        await until(lambda: world.proxy.completed)
    assert [len(request.prior) for request in engine.requests] == [1] * GROUP_SIZE
