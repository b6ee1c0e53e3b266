"""A group that is cut while it is drawn, and goes on from its tokens: the same completions, stamped right."""

import asyncio
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.bucket import keys, partials
from bucketrl.bucket.partials import PartialGroup
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.rollout_worker.counters import Counters
from bucketrl.rollout_worker.group import GroupSampler, VersionNotServed
from bucketrl.rollout_worker.prompts import Prompts
from bucketrl.rollout_worker.work import Work

from .fake_engine import FakeEngine, logprob_of
from .fake_run import make_run
from .fakes import FakeRewards, FakeTask, FakeTokenizer, until
from .preempted import GROUP_SIZE, MAX_TOKENS, never, rest


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
