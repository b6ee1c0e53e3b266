"""The rollout worker end to end on fakes: what reaches the bucket and the proxy, whatever happens."""

import asyncio
import time
from collections.abc import Callable

import pytest

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker import worker as worker_module
from bucketrl.rollout_worker.engine import EngineCapacity, SamplingRequest
from bucketrl.rollout_worker.flow import LEASE_BATCH
from bucketrl.rollout_worker.group import request_seed

from .conftest import World
from .fake_engine import drop
from .fake_run import PROMPTS
from .fakes import until, uploaded_groups


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


async def test_a_worker_asks_for_few_groups_at_a_time(world: World) -> None:
    """Others are to get some as well."""
    world.proxy.limit = 100
    async with world.working(max_groups_in_flight=None):
        await until(lambda: len(world.proxy.completed) == 100)
    assert max(request.max_groups for request in world.proxy.requests) == LEASE_BATCH


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
