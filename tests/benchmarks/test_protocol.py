"""The protocol benchmark, in small: that it runs, and the numbers of it that are the same everywhere."""

from pathlib import Path

import pytest
from benchmarks.protocol import __main__ as protocol
from benchmarks.protocol import stores, workers
from benchmarks.protocol.records import large_run
from benchmarks.protocol.steps import GROUPS, MAX_STALENESS, PER_STEP, LongRun

from bucketrl.bucket import snapshots
from bucketrl.bucket.retention import least_keep

SHORT, LONG = 10, 1_000


def silent(_: str) -> None:
    """Nobody watches a test."""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LongRun]:
    """Runs of SHORT and LONG steps that keep as few as they may, so that both are collected all along."""
    runs = {}
    keep = least_keep(large_run(GROUPS, MAX_STALENESS).config)
    for length in (SHORT, LONG):
        runs[length] = LongRun(tmp_path_factory.mktemp(str(length)), keep)
        runs[length].grow(length, silent)
        runs[length].one_more_step()  # collects what is left since the last pass
    return runs


@pytest.mark.slow
def test_a_step_of_a_long_run_asks_the_store_for_what_a_step_of_a_short_one_asks(
    grown: dict[int, LongRun],
) -> None:
    short, long = grown[SHORT].one_more_step(), grown[LONG].one_more_step()
    for role in PER_STEP:
        assert long[role].requests == short[role].requests, role
    assert short["learner"].requests["list"] == 1


@pytest.mark.slow
def test_who_joins_late_asks_no_more_the_longer_the_run(grown: dict[int, LongRun]) -> None:
    joined = grown[LONG].one_more_step()
    assert joined["late joiner"].requests["list"] == 2
    # The snapshot, its commit, the records since, and the miss at the end.
    assert joined["late joiner"].requests["get"] <= snapshots.EVERY + 4


async def test_each_uploaded_group_costs_the_proxy_the_same_requests_whoever_else_there_is() -> None:
    for http in (False, True):
        costs = await workers.measure([1, 30], http=http, groups=30, rounds=1, progress=silent)
        assert all(row["request"] > 0 for rows in costs.values() for row in rows)
    fleet = workers.Fleet(30, http=False)
    await fleet.begin()
    await fleet.cycle()
    assert {kind: fleet.asked[kind] for kind in workers.REQUESTS} == {
        "heartbeat": 60, "lease": 30, "complete": 30, "policy": 30,
    }  # fmt: skip


def test_every_store_that_needs_no_server_is_measured(tmp_path: Path) -> None:
    rates = stores.measure(tmp_path, stores.Sizes(1, 1, 100_000), rounds=2, servers=False, progress=silent)
    assert sorted(rates) == ["hf stand-in", "local folder", "memory"]
    for rate in rates.values():
        assert all(len(values) == 2 and min(values) > 0 for values in vars(rate).values())


def test_the_command_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert protocol.main(quick=True) == 0
    printed = capsys.readouterr().out
    for title in ("one more step", "a worker's request to the proxy, by HTTP", "stores: per second"):
        assert title in printed
