"""The queue of groups to be issued again against a plain list, under random use."""

from hypothesis import given
from hypothesis import strategies as st

from bucketrl.proxy.reissue import ReissueQueue

ACTIONS = st.lists(st.tuples(st.sampled_from("ABDCP"), st.integers(0, 6)), max_size=60)


@given(ACTIONS)
def test_it_hands_out_what_waits_begun_ones_first_then_the_oldest(actions: list[tuple[str, int]]) -> None:
    """A: a group; B: one that somebody has begun; D: it does not wait any more; C: all below; P: the next one."""
    queue, plain = ReissueQueue(), dict[int, bool]()
    for action, ordinal in actions:
        match action:
            case "A":
                if ordinal not in plain:  # what is begun stays begun
                    queue.add(ordinal, begun=False)
                    plain[ordinal] = False
            case "B":
                queue.add(ordinal, begun=True)
                plain[ordinal] = True
            case "D":
                queue.discard(ordinal)
                plain.pop(ordinal, None)
            case "C":
                queue.discard_if(lambda one, first=ordinal: one < first)
                plain = {one: begun for one, begun in plain.items() if one >= ordinal}
            case _:
                wanted = min(plain, key=lambda one: (not plain[one], one), default=None)
                assert queue.pop() == wanted
                plain.pop(wanted, None)
        assert set(queue) == plain.keys()
