"""The shortest failing history: minimal, and found without the faults that do not matter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.simulator.scenario import Scenario, scenario
from bucketrl.simulator.shrink import shrink

BUSY = next(candidate for n in range(1000) if len((candidate := scenario(n)).faults) == 12)


@given(st.sets(st.integers(0, 11), max_size=4))
def test_what_remains_is_what_is_needed(needed: set[int]) -> None:
    guilty = {BUSY.faults[n] for n in needed}

    def fails(candidate: Scenario) -> bool:
        return guilty <= set(candidate.faults)

    assert set(shrink(BUSY, fails).faults) == guilty


@pytest.mark.parametrize("most", [0, 3, 11])
def test_no_single_fault_can_be_left_out(most: int) -> None:
    """Any `most + 1` faults fail together."""

    def fails(candidate: Scenario) -> bool:
        return len(candidate.faults) > most

    assert len(shrink(BUSY, fails).faults) == most + 1


def test_a_seed_is_one_scenario() -> None:
    assert scenario(17) == scenario(17)
    assert scenario(17) != scenario(18)
