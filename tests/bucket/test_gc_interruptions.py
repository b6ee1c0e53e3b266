"""Garbage collection beside crashes, stale views and other collectors: nothing that is needed is gone."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.bucket.collected_runs import (
    KEEP,
    RUN,
    Crash,
    Interrupted,
    World,
    check_whole,
    collector_on,
    listed,
    steps,
)

from bucketrl.bucket import keys


def crash() -> None:
    raise Crash


EVENTS = ("step", "step", "step", "die", "restart", "early", "late", "mark", "view", "collect")
events = st.sampled_from(EVENTS)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    history=st.lists(
        st.tuples(events, st.integers(1, 60), st.lists(events, max_size=6)), min_size=4, max_size=14
    )
)
def test_whatever_happens_nothing_that_is_needed_is_gone(
    history: list[tuple[str, int, list[str]]],
) -> None:
    """A pass works by the view of the log that was taken at the last `view`; at some operation it crashes,
    or freezes while the run goes on and other passes are made."""
    world = World()
    steps(world, KEEP)
    view = world.state

    def happen(name: str) -> None:
        nonlocal view
        if name == "view":
            view = world.state
        elif name == "collect":
            collector_on(world.store).collect(world.state)
        else:
            getattr(world, name)()

    for name, at, meanwhile in history:
        if name == "collect":

            def interrupt(meanwhile: list[str] = meanwhile) -> None:
                for other in meanwhile:
                    happen(other)
                if not meanwhile:
                    raise Crash

            try:
                collector_on(Interrupted(world.store, at, interrupt)).collect(view)
            except Crash:
                pass
        else:
            happen(name)
    unconsumed = list(world.store.list(keys.TRAJECTORY_PREFIX))
    check_whole(world)
    # A fresh learner goes on, from the batch that a dead one has left if there is one.
    world.restart()
    world.step()
    collector_on(world.store).collect(world.state)
    check_whole(world)
    for info in unconsumed:
        parsed = keys.parse_trajectory(info.key)
        assert parsed is not None
        if parsed[0].ordinal(RUN.prompts_per_epoch) not in world.state.consumed:
            assert world.store.size(info.key) == info.size


@pytest.mark.parametrize("at", range(1, 60, 4))
def test_a_pass_that_was_killed_is_finished_by_the_next(at: int) -> None:
    world, undisturbed = World(), World()
    for one in (world, undisturbed):
        steps(one, 8)
    try:
        collector_on(Interrupted(world.store, at, crash)).collect(world.state)
    except Crash:
        check_whole(world)
    collector_on(world.store).collect(world.state)
    collector_on(undisturbed.store).collect(undisturbed.state)
    assert listed(world.store, "") == listed(undisturbed.store, "")
