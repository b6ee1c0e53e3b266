"""A worker that is told to go loses nothing: what it has drawn is saved, and others go on from there."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.bucket import keys, partials
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.partials import PartialGroup
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.rollout_worker.counters import Counters
from bucketrl.rollout_worker.engine import SamplingRequest
from bucketrl.rollout_worker.group import GroupSampler, VersionNotServed
from bucketrl.rollout_worker.prompts import Prompts
from bucketrl.rollout_worker.work import Work

from .conftest import World
from .fakes import (
    FakeEngine,
    FakeRewards,
    FakeTask,
    FakeTokenizer,
    logprob_of,
    make_run,
    until,
    uploaded_groups,
)

GROUP_SIZE, MAX_TOKENS = 3, 8


def whole(request: SamplingRequest) -> tuple[int, ...]:
    """The one completion that a sample of a prompt has, whoever draws it: a token depends on its place."""
    sample = request.request_id.rpartition("-")[2]
    name = f"{request.prompt_token_ids}/{sample}"
    length = 2 + hashlib.sha256(name.encode()).digest()[0] % (MAX_TOKENS - 1)
    return tuple(hashlib.sha256(f"{name}/{n}".encode()).digest()[0] for n in range(length))


def rest(request: SamplingRequest) -> tuple[int, ...]:
    """`FakeEngine.tokens`: what follows `prior`, which must begin the completion."""
    full = whole(request)
    assert request.prior == full[: len(request.prior)]
    assert request.max_tokens == MAX_TOKENS - len(request.prior)
    return full[len(request.prior) :]


async def never(request: SamplingRequest) -> None:
    """For `FakeEngine.before_draw`."""
    await asyncio.Event().wait()


def saved(store: Store, run_id: str, newest: int = 0) -> dict[str, PartialGroup]:
    """Every partial object, by group id."""
    found = {}
    for info in store.list(keys.PARTIAL_PREFIX):
        parsed = keys.parse_partial(info.key)
        assert parsed is not None, info.key
        group_id, attempt = parsed
        found[str(group_id)] = partials.decode(
            store.get(info.key), run_id=run_id, group_id=str(group_id), attempt=attempt, max_version=newest
        )
    return found


def another_engine(world: World, **attributes: Any) -> FakeEngine:
    """Replaces the world's, for the next worker."""
    world.engine = FakeEngine()
    for name, value in ({"tokens": rest} | attributes).items():
        setattr(world.engine, name, value)
    return world.engine


async def preempted(world: World, groups: int = 2, **options: Any) -> float:
    """Starts a worker, stops it in the middle of `groups` groups; how long it takes to end."""
    world.proxy.limit = groups
    async with world.working(**options) as working:
        await until(lambda: len(world.engine.running) == GROUP_SIZE * groups)
        working.worker.stop("drained")
        start = time.monotonic()
        assert await working.task == "drained"
        return time.monotonic() - start


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


class FixedAdapters:
    """Serves one version."""

    def __init__(self, version: int) -> None:
        self.newest = version

    async def wait_for(self, version: int) -> None:
        if version > self.newest:
            await asyncio.Event().wait()

    @contextmanager
    def use(self) -> Any:
        yield self.newest


def sampler_of(version: int, engine: FakeEngine, **sections: Any) -> GroupSampler:
    run = make_run(**({"algorithm": {"steps": 9, "groups_per_step": 2, "max_staleness": 4}} | sections))
    engine.folders[version] = Path()
    task = FakeTask()
    return GroupSampler(
        engine,
        FixedAdapters(version),  # type: ignore[arg-type]
        Prompts(task, FakeTokenizer(), run.config),
        FakeRewards(task),  # type: ignore[arg-type]
        run,
        f"w{version}",
        Counters(),
    )


def work(version: int = 0, seconds: float = 5.0) -> Work:
    return Work("lease", keys.GroupId(0, 7), version, seconds)


async def drawn_in_parts(cuts: list[tuple[int, ...]]) -> TrajectoryGroup:
    """Worker n serves version n and is cut when each sample has drawn `cuts[n][sample]` tokens, or one fewer
    than it needs; the last worker is not cut."""
    partial: PartialGroup | None = None
    for version, lengths in enumerate([*cuts, None]):
        engine = FakeEngine()
        engine.tokens = rest
        sampler = sampler_of(version, engine)
        if lengths is not None:
            engine.before_draw = never
            engine.drawn = lambda request, lengths=lengths: lengths[int(request.request_id[-1])]
        sampling = asyncio.create_task(sampler.sample(work(version), f"a{version}", partial))
        if lengths is None:
            group = await sampler.finish(await sampling)
            assert group is not None
            return group
        await until(lambda engine=engine: len(engine.running) == GROUP_SIZE)
        await sampler.cut()
        left = await sampling
        assert left.cut
        partial = sampler.as_partial(left)
        if partial is not None:  # through the bytes, as it goes through the bucket
            partial = partials.decode(
                partials.encode(partial),
                run_id=partial.run_id,
                group_id=partial.group_id,
                attempt=partial.attempt,
                max_version=version,
            )
    raise AssertionError


cut_points = st.tuples(*[st.integers(0, MAX_TOKENS)] * GROUP_SIZE)


@settings(max_examples=60)
@given(st.lists(cut_points, min_size=2, max_size=2))
def test_wherever_it_is_cut_twice_the_completion_is_the_same_and_stamped_right(
    cuts: list[tuple[int, ...]],
) -> None:
    undisturbed = asyncio.run(drawn_in_parts([]))
    group = asyncio.run(drawn_in_parts(cuts))
    assert len(group.trajectories) == GROUP_SIZE
    for got, wanted in zip(group.trajectories, undisturbed.trajectories, strict=True):
        assert got.completion_token_ids == wanted.completion_token_ids
        assert got.finish_reason == wanted.finish_reason
        assert got.completion_text == wanted.completion_text
        versions: list[int] = []
        for version, lengths in enumerate(cuts):
            left = len(got.completion_token_ids) - len(versions)
            versions += [version] * min(lengths[got.sample], left - 1)
        versions += [2] * (len(got.completion_token_ids) - len(versions))
        assert list(got.policy_versions) == versions
        assert got.behaviour_logprobs == tuple(map(logprob_of, got.completion_token_ids, versions))
        assert got.loss_mask == (True,) * len(versions)


async def begun(version: int, tokens: int, **sections: Any) -> PartialGroup:
    """A partial group whose samples have `tokens` tokens each."""
    engine = FakeEngine()
    engine.tokens, engine.before_draw, engine.drawn = rest, never, lambda request: tokens
    sampler = sampler_of(version, engine, **sections)
    sampling = asyncio.create_task(sampler.sample(work(version), "a0"))
    await until(lambda: len(engine.running) == GROUP_SIZE)
    await sampler.cut()
    left = sampler.as_partial(await sampling)
    assert left is not None
    return left


@pytest.mark.parametrize(("newest", "prior"), [(4, 1), (5, 0)])
async def test_tokens_that_would_be_stale_are_drawn_anew(newest: int, prior: int) -> None:
    """max_staleness is 4: with a token of version 0 at step 6, the learner could only skip the group."""
    partial = await begun(0, 1)
    engine = FakeEngine()
    engine.tokens = rest
    group = await sampler_of(newest, engine).sample(work(newest), "a1", partial)
    assert [len(request.prior) for request in engine.requests] == [prior] * GROUP_SIZE
    for completion in group.completions:
        assert completion.policy_versions.count(0) == prior


async def test_a_partial_group_of_another_prompt_is_drawn_anew() -> None:
    partial = await begun(0, 1)
    engine = FakeEngine()
    other = Work("lease", keys.GroupId(0, 8), 0, 5.0)
    await sampler_of(0, engine).sample(other, "a1", partial)
    assert [request.prior for request in engine.requests] == [()] * GROUP_SIZE


async def test_versions_of_a_completion_never_decrease() -> None:
    """A worker that lags behind the one that began waits for its version."""
    partial = await begun(3, 1)
    engine = FakeEngine()
    with pytest.raises(VersionNotServed, match="version 3"):
        await sampler_of(2, engine).sample(work(2, seconds=0.05), "a1", partial)
    assert engine.requests == []


async def test_a_group_that_waits_for_its_version_is_cut_at_once() -> None:
    engine = FakeEngine()
    sampler = sampler_of(0, engine)
    sampling = asyncio.create_task(sampler.sample(work(1, seconds=600.0), "a1"))
    await asyncio.sleep(0.01)
    await sampler.cut()
    left = await asyncio.wait_for(sampling, 1)
    assert (left.cut, sampler.as_partial(left)) == (True, None)
    assert engine.requests == []


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
