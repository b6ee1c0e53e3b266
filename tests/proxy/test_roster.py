"""Who is alive, counted without walking over everybody."""

from hypothesis import given
from hypothesis import strategies as st

from bucketrl.api.messages import LearnerState, RolloutState
from bucketrl.proxy.roster import Roster

EVENTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.booleans(), st.floats(0, 12)), max_size=40
)


@given(EVENTS)
def test_the_count_is_that_of_the_rollout_workers_heard_of_lately(
    events: list[tuple[str, bool, float]],
) -> None:
    roster, now = Roster(), 0.0
    for name, rollout, seconds in events:
        now += seconds
        if rollout:
            roster.heard(RolloutState(worker_id=name, engine="tiny 1", loaded_version=0), now)
        else:
            roster.heard(LearnerState(learner_id=name, epoch=1, step=0, phase="waiting"), now)
        assert roster.count_rollouts_alive(now) == len(roster.rollouts_alive(now))
