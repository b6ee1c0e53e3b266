"""The shortest list of faults under which a seed still fails."""

from collections.abc import Callable

from bucketrl.simulator.scenario import Fault, Scenario


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """A scenario that still fails and from which no single fault can be left out (Zeller's ddmin)."""
    parts = 2
    while len(scenario.faults) > 0:
        size = max(1, len(scenario.faults) // parts)
        chunks = [scenario.faults[i : i + size] for i in range(0, len(scenario.faults), size)]
        smaller = _first_failing(scenario, chunks, fails)
        if smaller is not None:
            scenario, parts = smaller, max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(scenario.faults), 2 * parts)
    return scenario


def _first_failing(
    scenario: Scenario, chunks: list[tuple[Fault, ...]], fails: Callable[[Scenario], bool]
) -> Scenario | None:
    for chunk in chunks:
        smaller = scenario.without(set(chunk))
        if fails(smaller):
            return smaller
    return None
