"""The rollout worker on fakes when the store, the proxy, the engine or a prompt fails it: no group is lost, held or
uploaded twice."""

import asyncio
import time
from collections.abc import Callable

import pytest

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker import worker as worker_module
from bucketrl.rollout_worker.engine import SamplingRequest

from .conftest import World
from .fake_engine import drop
from .fake_run import PROMPTS
from .fakes import until, uploaded_groups


async def test_stopping_uploads_complete_groups_and_gives_the_rest_back(world: World) -> None:
    """Groups 0 and 1 are generated but the store is down; groups 2 and 3 are still being generated."""

    async def hang_for_others(request: SamplingRequest) -> None:
        if not request.request_id.startswith(("0000-00000000", "0000-00000001")):
            await asyncio.Event().wait()

    world.engine.before_draw = hang_for_others
    world.store.broken = True
    async with world.working(grace_s=3.0) as working:
        await until(lambda: world.store.failures > 3 and len(world.engine.running) == 12)
        working.worker.stop("drained")
        await asyncio.sleep(0.1)
        world.store.broken = False
        start = time.monotonic()
        assert await working.task == "drained"
        assert time.monotonic() - start < 3.0
    assert [group.group_id for group in uploaded_groups(world.store, world.run, 0)] == [
        str(keys.GroupId(0, n)) for n in (0, 1)
    ]
    completed = {lease_id for lease_id, _ in world.proxy.completed}
    assert completed | set(world.proxy.released) == set(world.proxy.leased)
    assert not completed & set(world.proxy.released)
    assert world.engine.running == set()
    assert world.engine.closed


async def test_stopping_ends_within_the_grace_period_although_the_store_is_down(world: World) -> None:
    world.store.broken = True
    async with world.working(grace_s=0.5) as working:
        await until(lambda: world.store.failures > 3)
        working.worker.stop("drained")
        start = time.monotonic()
        await working.task
        assert time.monotonic() - start < 2.0
    assert set(world.proxy.released) == set(world.proxy.leased)


async def test_uploads_survive_an_outage_of_the_store(world: World) -> None:
    world.proxy.limit = 6
    world.store.broken = True
    async with world.working():
        await until(lambda: world.store.failures > 20)
        assert not world.proxy.completed
        world.store.broken = False
        await until(lambda: len(world.proxy.completed) == 6)
    assert len(uploaded_groups(world.store, world.run, 0)) == 6


async def test_leasing_stops_while_too_many_uploads_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_BACKLOG", 5)
    world.store.broken = True
    async with world.working(max_groups_in_flight=2):
        await until(lambda: world.store.failures > 50)
        leased = len(world.proxy.leased)
        assert 5 <= leased <= 5 + 2 + 1
        world.store.broken = False
        await until(lambda: len(world.proxy.completed) > leased)


async def test_without_the_proxy_the_worker_finds_work_and_policies_by_itself(world: World) -> None:
    """And goes back to leases when it answers. No group is uploaded twice by one worker."""
    async with world.working():
        await until(lambda: len(world.proxy.completed) >= 3)
        world.proxy.down = True
        leases = len(world.proxy.leased)
        seen = {group.group_id for group in uploaded_groups(world.store, world.run, 0)}
        world.learner.commit(consume=tuple(range(3)))
        await until(lambda: 1 in world.engine.folders)
        await until(lambda: len(uploaded_groups(world.store, world.run, 1)) >= len(seen) + 3)
        alone = uploaded_groups(world.store, world.run, 1)
        # Nothing beyond the window of 2 x max_outstanding = 8 groups behind the cursor, apart from leases.
        limit = 3 + 8 + leases
        assert all(keys.GroupId.parse(group.group_id).ordinal(PROMPTS) < limit for group in alone)
        world.proxy.down = False
        await until(lambda: len(world.proxy.leased) > leases)
    groups = [group.group_id for group in uploaded_groups(world.store, world.run, 1)]
    before = groups[: len(alone)]
    assert len(set(before)) == len(before)


async def test_work_found_alone_is_bounded_by_what_the_learner_consumes(world: World) -> None:
    """2 x max_outstanding groups, then nothing until the cursor moves."""
    world.proxy.limit = 0
    async with world.working():
        await until(lambda: world.proxy.requests)
        world.proxy.down = True
        await until(lambda: len(uploaded_groups(world.store, world.run, 0)) == 8)
        await asyncio.sleep(0.5)
        ordinals = [g.group_id for g in uploaded_groups(world.store, world.run, 0)]
        assert ordinals == [str(keys.GroupId(0, n)) for n in range(8)]
        world.learner.commit(consume=(0, 1))
        await until(lambda: len(uploaded_groups(world.store, world.run, 1)) == 10)


async def test_a_run_that_finishes_during_an_outage_ends_the_worker(make_world: Callable[..., World]) -> None:
    world = make_world(algorithm={"steps": 1, "groups_per_step": 2, "max_staleness": 1})
    world.learner.commit()
    async with world.working() as working:
        await until(lambda: world.proxy.completed)
        world.proxy.down = True
        world.learner.commit(consume=(0,))
        assert await asyncio.wait_for(working.task, 5) == "finished"


async def test_a_worker_that_starts_without_a_proxy_works(world: World) -> None:
    world.proxy.down = True
    async with world.working():
        await until(lambda: len(uploaded_groups(world.store, world.run, 0)) >= 4)


async def test_a_group_without_two_usable_completions_is_given_back_later_each_time(world: World) -> None:
    world.engine.before_draw = drop
    world.proxy.limit = 1
    async with world.working() as working:
        await until(lambda: len(world.proxy.released) == 1)
        await asyncio.sleep(0.6)
        # The second failure waits a second before it gives back: no hot loop.
        assert len(world.proxy.leased) == 2
        assert working.worker.counters.dropped == {"logprob not finite": 6}
        state = world.proxy.heartbeats[-1].state
        assert "logprob not finite" in state.note
        assert state.role == "rollout"
        assert state.completions_dropped == 6
    assert uploaded_groups(world.store, world.run, 0) == []
    assert set(world.proxy.released) == set(world.proxy.leased)


async def test_one_lost_completion_costs_nothing_else(world: World) -> None:
    async def drop_sample_1(request: SamplingRequest) -> None:
        if request.request_id.endswith("-1"):
            await drop(request)

    world.engine.before_draw = drop_sample_1
    world.proxy.limit = 2
    async with world.working():
        await until(lambda: len(world.proxy.completed) == 2)
    for group in uploaded_groups(world.store, world.run, 0):
        assert [t.sample for t in group.trajectories] == [0, 2]


async def test_a_prompt_that_does_not_fit_is_reported_and_not_issued_again_at_once(
    make_world: Callable[..., World],
) -> None:
    """Room for 10 prompt tokens: "<train 9>" fits, "<train 10>" has 10 and fits, "<train 100>" does not."""
    world = make_world(rollout={"max_model_len": 18, "lease_seconds": 5.0})
    world.learner.commit()
    world.proxy._next, world.proxy.limit = 99, 102
    async with world.working():
        await until(lambda: len(world.proxy.completed) == 1)
        await until(lambda: "has 11 tokens" in world.proxy.heartbeats[-1].state.note)
        await asyncio.sleep(0.2)
        assert world.proxy.released == []
        assert len(world.proxy.leased) == 3
    assert len(world.proxy.released) == 2


async def test_an_engine_that_dies_ends_the_worker_and_frees_its_leases(world: World) -> None:
    async def die(request: SamplingRequest) -> None:
        raise RuntimeError("engine dead")

    world.engine.before_draw = die
    with pytest.raises(RuntimeError, match="engine dead"):
        async with world.working() as working:
            await working.task
    assert world.proxy.leased
    assert set(world.proxy.released) == set(world.proxy.leased)


async def test_a_refused_token_names_the_variable_to_set(world: World) -> None:
    world.proxy.refuse = 401
    with pytest.raises(UserError, match="BUCKETRL_WORKER_TOKEN"):
        async with world.working() as working:
            await working.task


async def test_a_proxy_of_another_run_is_refused(world: World) -> None:
    world.proxy.run_id = "run-2"
    with pytest.raises(UserError, match="run-2"):
        async with world.working() as working:
            await working.task
