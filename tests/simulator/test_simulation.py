"""Whole histories: reproducible, without a violated invariant, and blind to no planted fault."""

import os
import subprocess
import sys

import pytest

from bucketrl.simulator.campaign import Campaign, shortest
from bucketrl.simulator.planted import PLANTED
from bucketrl.simulator.scenario import scenario
from bucketrl.simulator.world import simulate

SEEDS = 500
PLANTED_LIMIT = 2000


def test_a_run_without_faults_is_quick_and_right() -> None:
    quiet = scenario(0).without(set(scenario(0).faults))
    outcome = simulate(quiet)
    assert outcome.violations == ()
    assert outcome.seconds < 120
    assert any("log/" in what for _, _, what in outcome.history)


def test_a_seed_is_one_history() -> None:
    """In every process, whatever its hash seed."""
    program = (
        "from bucketrl.simulator.scenario import scenario\n"
        "from bucketrl.simulator.world import simulate\n"
        "print(*(simulate(scenario(seed)).digest for seed in (3, 9)))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_invariant_is_violated_under_any_faults() -> None:
    with Campaign() as campaign:
        failed = [verdict for verdict in campaign.verdicts(range(SEEDS)) if verdict.violations]
    assert failed == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_planted_fault_is_found() -> None:
    with Campaign() as campaign:
        missed = [name for name in PLANTED if campaign.search(name, PLANTED_LIMIT) is None]
    assert missed == []


@pytest.mark.slow
def test_a_failure_is_cut_to_the_faults_that_it_needs() -> None:
    """Which of a seed's many faults shows a planted one."""
    with Campaign() as campaign:
        verdict = campaign.search("missing_fsync", PLANTED_LIMIT)
    assert verdict is not None
    outcome = shortest(verdict.seed, "missing_fsync", lambda _: None)
    assert outcome.violations
    assert len(outcome.scenario.faults) <= 2
