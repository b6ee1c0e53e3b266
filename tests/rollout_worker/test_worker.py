"""The rollout worker end to end on fakes: what it samples, with which version, how much at a time, until when."""

import asyncio

import pytest

from bucketrl.bucket import keys
from bucketrl.rollout_worker.engine import EngineCapacity, SamplingRequest
from bucketrl.rollout_worker.flow import LEASE_BATCH
from bucketrl.rollout_worker.group import request_seed

from .conftest import World
from .fakes import FakeRewards, until, uploaded_groups


async def test_leased_groups_arrive_whole_and_decodable(world: World) -> None:
    world.proxy.limit = 12
    async with world.working():
        await until(lambda: len(world.proxy.completed) == 12)
    groups = uploaded_groups(world.store, world.run, max_version=0)
    assert [group.group_id for group in groups] == [str(keys.GroupId(0, n)) for n in range(12)]
    for group in groups:
        assert [t.sample for t in group.trajectories] == [0, 1, 2]
        for t in group.trajectories:
            index = keys.GroupId.parse(group.group_id).index
            assert "".join(map(chr, t.prompt_token_ids)) == group.prompt_text == f"<train {index}>"
            assert t.policy_versions == (0,) * len(t.completion_token_ids)
            assert t.loss_mask == (True,) * len(t.completion_token_ids)
            assert t.reward == t.reward_parts["correct"] == float(len(t.completion_text) % 2 == 0)
    for _, completion in world.proxy.completed:
        key = keys.trajectory(keys.GroupId.parse(completion.group_id), completion.attempt)
        data = world.store.get(key)
        [group] = [group for group in groups if group.group_id == completion.group_id]
        assert (completion.size, completion.worker_id) == (len(data), "w0")
        assert completion.tokens == sum(len(t.completion_token_ids) for t in group.trajectories)
    assert world.proxy.released == []


async def test_every_request_has_its_own_reproducible_seed(world: World) -> None:
    world.proxy.limit = 5
    async with world.working():
        await until(lambda: len(world.proxy.completed) == 5)
    seeds = []
    for group in uploaded_groups(world.store, world.run, max_version=0):
        group_id = keys.GroupId.parse(group.group_id)
        for t in group.trajectories:
            assert t.seed == request_seed(world.run.config.seed, group_id, t.sample, group.attempt)
            seeds.append(t.seed)
    assert len(set(seeds)) == len(seeds) == 15


async def test_a_restarted_worker_never_writes_under_an_old_key(world: World) -> None:
    """Its first attempt may be uploaded although the proxy issues the group again."""
    for _ in range(2):
        world.proxy._next, world.proxy.limit = 0, 1
        done = len(world.proxy.completed)
        async with world.working():
            await until(lambda done=done: len(world.proxy.completed) > done)
    attempts = {group.attempt for group in uploaded_groups(world.store, world.run, max_version=0)}
    assert len(attempts) == 2


async def test_tokens_carry_the_version_loaded_when_their_request_was_sent(world: World) -> None:
    """Requests that run across a version switch end with the version that they began with."""
    gate = asyncio.Event()

    async def wait_for_gate(request: SamplingRequest) -> None:
        if request.policy_version == 0:
            await gate.wait()

    world.engine.before_draw = wait_for_gate
    async with world.working():
        await until(lambda: len(world.engine.running) == 12)
        world.learner.commit(consume=(0,))
        await until(lambda: 1 in world.engine.folders)
        gate.set()
        await until(lambda: len(world.proxy.completed) >= 12)
    groups = uploaded_groups(world.store, world.run, max_version=1)
    versions = {
        group.group_id: {v for t in group.trajectories for v in t.policy_versions} for group in groups
    }
    first = {str(keys.GroupId(0, n)) for n in range(4)}
    assert all(versions[group_id] == {0} for group_id in first)
    assert all(versions[group_id] == {1} for group_id in versions.keys() - first)
    by_id = {request.request_id: request for request in world.engine.requests}
    for group in groups:
        for t in group.trajectories:
            request = by_id[f"{group.group_id}-{group.attempt}-{t.sample}"]
            assert set(t.policy_versions) == {request.policy_version}


async def test_a_lease_is_not_sampled_with_a_version_older_than_its_own(world: World) -> None:
    """The adapter of version 1 loads only at the second try; groups leased after its commit wait for it."""
    world.learner.commit(consume=(0,))
    world.engine.serves_base = 3
    world.proxy.limit = 3
    async with world.working():
        await until(lambda: len(world.proxy.completed) == 3)
    assert {request.policy_version for request in world.engine.requests} == {1}


async def test_old_versions_leave_the_engine_only_after_their_requests(world: World) -> None:
    """The fake engine fails if a version goes while a request uses it."""
    gate = asyncio.Event()

    async def wait_for_gate(request: SamplingRequest) -> None:
        if request.policy_version == 0:
            await gate.wait()

    world.engine.before_draw = wait_for_gate
    async with world.working(max_groups_in_flight=1):
        await until(lambda: len(world.engine.running) == 3)
        for step in range(1, 5):
            world.learner.commit(consume=(step,))
            await until(lambda step=step: step in world.engine.folders)
        folder = world.engine.folders[0]
        assert world.engine.removed == [1]  # max_staleness 1: versions 2, 3, 4 stay, and 0 has requests
        gate.set()
        await until(lambda: world.proxy.completed)
        world.learner.commit(consume=(5,))
        await until(lambda: 5 in world.engine.folders)
        await until(lambda: set(world.engine.removed) == {0, 1, 2})
        await until(lambda: not folder.exists())


async def test_the_worker_ends_when_the_run_is_finished(world: World) -> None:
    async with world.working() as working:
        await until(lambda: world.proxy.completed)
        world.proxy.finished = True
        assert await asyncio.wait_for(working.task, 5) == "finished"
    assert world.engine.closed


async def test_the_proxy_can_drain_a_worker(world: World) -> None:
    async with world.working() as working:
        await until(lambda: world.proxy.completed)
        world.proxy.drain = True
        assert await asyncio.wait_for(working.task, 5) == "drained"


async def test_one_long_completion_keeps_one_place_of_the_engine_only(world: World) -> None:
    """Sample 0 of each group never ends: with 6 places, groups of 3 begin until 4 wait for their last one."""
    most = 0

    async def hang_for_sample_0(request: SamplingRequest) -> None:
        nonlocal most
        most = max(most, len(world.engine.running))
        if request.request_id.endswith("-0"):
            await asyncio.Event().wait()

    world.engine.before_draw = hang_for_sample_0
    world.engine.capacity = EngineCapacity(kv_tokens=None, max_requests=6)
    async with world.working(max_groups_in_flight=None):
        await until(lambda: len(world.engine.requests) == 12 and len(world.engine.running) == 4)
        await asyncio.sleep(0.2)
        assert (len(world.engine.requests), most) == (12, 6)
        state = world.proxy.heartbeats[-1].state
        assert state.role == "rollout"
        assert (state.running_requests, state.target_requests) == (4, 6)
    assert set(world.proxy.released) == set(world.proxy.leased)
    partial = {info.key.split("/")[1] for info in world.store.list(keys.PARTIAL_PREFIX)}
    assert partial == {str(keys.GroupId(0, n)) for n in range(4)}


async def test_no_more_groups_begin_than_the_kv_cache_has_room_for(world: World) -> None:
    """A group has a prompt of 9 tokens and 3 completions of up to 8: room for 2, as long as nobody has seen that
    completions are shorter."""
    gate = asyncio.Event()

    async def wait_for_gate(request: SamplingRequest) -> None:
        await gate.wait()

    world.engine.before_draw = wait_for_gate
    world.engine.tokens = lambda request: (1,)
    world.engine.capacity = EngineCapacity(kv_tokens=75, max_requests=100)
    async with world.working(max_groups_in_flight=None):
        await until(lambda: len(world.engine.running) == 6)
        await asyncio.sleep(0.2)
        assert len(world.engine.requests) == 6
        assert world.proxy.heartbeats[-1].state.target_requests == 6
        gate.set()
        await until(lambda: world.proxy.heartbeats[-1].state.target_requests > 12)


async def test_no_more_groups_begin_than_rewards_keep_up_with(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions that wait for an environment are not in the engine, which must not look empty for that."""
    world.engine.capacity = EngineCapacity(kv_tokens=None, max_requests=6)
    monkeypatch.setattr(FakeRewards, "waiting", 4 * 6)
    async with world.working(max_groups_in_flight=None):
        await until(lambda: world.proxy.heartbeats and world.proxy.heartbeats[-1].state.state == "running")
        await asyncio.sleep(0.3)
        assert not world.engine.requests
        assert not world.proxy.leased
        monkeypatch.setattr(FakeRewards, "waiting", 4 * 6 - 1)
        await until(lambda: len(world.proxy.completed) > 5)


async def test_a_worker_asks_for_few_groups_at_a_time(world: World) -> None:
    """Others are to get some as well."""
    world.proxy.limit = 100
    async with world.working(max_groups_in_flight=None):
        await until(lambda: len(world.proxy.completed) == 100)
    assert max(request.max_groups for request in world.proxy.requests) == LEASE_BATCH


async def test_heartbeats_report_what_is_held_and_done(world: World) -> None:
    gate = asyncio.Event()

    async def wait_for_gate(request: SamplingRequest) -> None:
        await gate.wait()

    world.engine.before_draw = wait_for_gate
    async with world.working():
        await until(lambda: len(world.engine.running) == 12)
        await until(lambda: len(world.proxy.heartbeats[-1].state.leases) == 4 + 1)
        state = world.proxy.heartbeats[-1].state
        assert {lease.lease_id for lease in state.leases} == set(world.proxy.leased)
        assert (state.running_requests, state.loaded_version, state.state) == (12, 0, "running")
        gate.set()
        await until(lambda: world.proxy.heartbeats[-1].state.groups_uploaded > 4)
        state = world.proxy.heartbeats[-1].state
        assert state.tokens_generated > 0
        assert state.mean_completion_tokens > 0
