"""Work found alone: bounded, never done twice by one worker, spread over workers."""

from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket.records import Consumed
from bucketrl.rollout_worker.fallback import choose, window

consumed_sets = st.builds(
    lambda cursor, above: Consumed(cursor=cursor, above=tuple(sorted(cursor + 1 + n for n in above))),
    st.integers(0, 1000),
    st.sets(st.integers(0, 60), max_size=20),
)


@given(consumed_sets, st.sets(st.integers(0, 1100)), st.integers(1, 40), st.integers(0, 50))
def test_only_open_groups_of_the_window_are_chosen(
    consumed: Consumed, taken: set[int], bound: int, count: int
) -> None:
    chosen = choose("w0", consumed, taken, max_outstanding=bound, count=count)
    assert len(chosen) == len(set(chosen)) <= count
    for ordinal in chosen:
        assert consumed.cursor <= ordinal < consumed.cursor + 2 * bound
        assert ordinal not in consumed
        assert ordinal not in taken


@given(consumed_sets, st.sets(st.integers(0, 1100)), st.integers(1, 40))
def test_no_open_group_is_out_of_reach(consumed: Consumed, taken: set[int], bound: int) -> None:
    everything = choose("w0", consumed, taken, max_outstanding=bound, count=10**6)
    closed = taken | set(consumed.above)
    assert set(everything) == set(window(consumed, bound)) - closed


@given(st.sets(st.integers(0, 79)), st.integers(1, 10))
def test_what_others_finish_does_not_change_the_order(taken: set[int], count: int) -> None:
    """So a worker that looks again goes on where it was."""
    before = choose("w0", Consumed(), (), max_outstanding=40, count=80)
    after = choose("w0", Consumed(), taken, max_outstanding=40, count=count)
    assert after == [ordinal for ordinal in before if ordinal not in taken][:count]


def test_workers_mostly_choose_different_groups() -> None:
    picks = [choose(f"w{n}", Consumed(), (), max_outstanding=40, count=4) for n in range(8)]
    distinct = {ordinal for pick in picks for ordinal in pick}
    # 32 draws from 80 leave 26.5 distinct on average; the same order for all would leave 4.
    assert len(distinct) >= 20
