"""The chaos benchmark in small: a dozen signals to all roles, over a store that fails, then audit and replay."""

from pathlib import Path

import pytest
from benchmarks.chaos.forked_roles import imported
from benchmarks.chaos.plan import draw
from benchmarks.chaos.runs import Setting, replay, run
from benchmarks.chaos.store_faults import StoreFaults
from tests.support.relay import Answer
from tests.support.s3 import S3Server

STEPS = 8
KILLS = 12
SEED = 7


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("s3_credentials")
def test_a_dozen_signals_and_a_faulty_store_lose_nothing(tmp_path: Path, s3_server: S3Server) -> None:
    setting = Setting("transformers", workers=2, steps=STEPS, seed=SEED, folder=tmp_path)
    strikes = draw(SEED, kills=KILLS, steps=STEPS, workers=2)
    faults = StoreFaults(SEED, 0.04)
    with imported():
        result = run(setting, "chaos", s3_server, strikes, faults=faults, say=lambda _: None)
    assert result.audit.violations == ()
    assert result.log_changed == ()
    assert result.outcome.crashes == []
    assert result.steps == STEPS
    assert result.outcome.strikes.total() >= KILLS - 4  # a quick machine may be through before the last ones
    assert faults.injected.total() > 0
    assert replay(setting, "chaos", s3_server)


def test_a_seed_draws_the_same_strikes_again_over_all_roles_and_signals() -> None:
    strikes = draw(0, kills=200, steps=100, workers=2)
    assert strikes == draw(0, kills=200, steps=100, workers=2)
    assert strikes != draw(1, kills=200, steps=100, workers=2)
    assert {strike.role for strike in strikes} == {"proxy", "learner", "rollout-0", "rollout-1"}
    assert {strike.signal.name for strike in strikes} == {"SIGKILL", "SIGTERM", "SIGSTOP"}
    assert [strike.at_step for strike in strikes] == sorted(strike.at_step for strike in strikes)
    assert max(strike.at_step for strike in strikes) < 100
    seconds = [strike for strike in strikes if strike.second_after_s is not None]
    assert seconds
    assert all(strike.second_after_s <= strike.frozen_s for strike in seconds)


def test_store_faults_are_of_the_seed_and_of_about_the_share() -> None:
    requests = [
        (method, f"/bucket/run/{prefix}/{number}", 0)
        for number in range(1000)
        for method, prefix in (("GET", "log"), ("PUT", "log"), ("PUT", "trajectories"))
    ]
    faults = StoreFaults(0, 0.04)
    met = [faults(*request) for request in requests]
    again = StoreFaults(0, 0.04)
    assert met == [again(*request) for request in requests]
    assert 0.02 < faults.injected.total() / faults.requests < 0.06
    plain_puts = [fault for (_, path, _), fault in zip(requests, met, strict=True) if "trajectories" in path]
    assert {fault.status for fault in met if isinstance(fault, Answer)} >= {409, 412, 429, 500, 503}
    assert 412 not in {fault.status for fault in plain_puts if isinstance(fault, Answer)}
