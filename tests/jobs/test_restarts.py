"""When a role that died is started again."""

from hypothesis import given
from hypothesis import strategies as st

from bucketrl.jobs.restarts import HEALTHY_S, LONGEST_DELAY_S, MAX_QUICK_DEATHS, RestartPolicy

QUICK = st.floats(0, HEALTHY_S, exclude_max=True)


def test_delays_double_up_to_a_bound() -> None:
    policy = RestartPolicy()
    delays = [policy.died(1.0) for _ in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]


@given(st.lists(QUICK, min_size=MAX_QUICK_DEATHS + 1, max_size=MAX_QUICK_DEATHS + 1))
def test_a_role_that_keeps_dying_is_given_up(lives: list[float]) -> None:
    """After so many quick deaths in a row, and not one earlier."""
    policy = RestartPolicy()
    delays = [policy.died(lived) for lived in lives]
    assert delays[-1] is None
    assert None not in delays[:-1]


@given(st.lists(st.one_of(QUICK, st.just(HEALTHY_S)), max_size=200))
def test_a_healthy_life_starts_the_count_anew(lives: list[float]) -> None:
    """A run of many days survives any number of rare deaths; the delay after a healthy life is the first."""
    policy = RestartPolicy()
    for number, lived in enumerate(lives, 1):
        delay = policy.died(lived)
        assert policy.total == number
        if lived >= HEALTHY_S:
            assert delay == 1.0
        if delay is None:
            assert all(life < HEALTHY_S for life in lives[number - MAX_QUICK_DEATHS - 1 + 1 : number])
            break
