"""The staleness study samples with the policy that it says, and reports what its runs ended with."""

from collections.abc import Sequence

import pytest
import torch
from benchmarks.staleness.__main__ import figures
from benchmarks.staleness.grid import METHODS, config_of
from benchmarks.staleness.play import Curve, Run

from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.jobs.models import TINY_ARITHMETIC
from bucketrl.learner import packing


def curve(*heldout: float) -> Curve:
    return Curve(list(range(len(heldout))), list(heldout), [], 1.0)


def test_the_figures_are_means_over_the_end_and_over_the_seeds() -> None:
    found = figures(
        {
            ("clip", 0, 0): curve(0.0, 0.5, 0.6, 0.7),
            ("clip", 0, 1): curve(0.0, 0.7, 0.8, 0.9),
            ("tis", 4, 0): curve(0.0, 0.1),
        }
    )
    assert found["reward_by_method_and_lag"]["clip"]["0"] == [0.7, pytest.approx(0.1414, abs=1e-4)]
    assert found["reward_by_method_and_lag"]["tis"] == {"4": [0.05, 0.0]}
    assert found["sync_reward"] == 0.7


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_configuration(method: str) -> None:
    assert config_of(method, 0, 10).algorithm.steps == 10


@pytest.mark.slow
def test_a_step_trains_on_what_the_policy_of_lag_steps_before_has_drawn() -> None:
    run = Run(config_of("clip", 3, 4), TINY_ARITHMETIC, 8)
    adapters = [run._adapter()]
    seen: list[int] = []
    train = run._trainer.train

    def checked(groups: Sequence[TrajectoryGroup], step: int, stopping: object) -> dict[str, float]:
        now = run._adapter()
        [version] = {v for g in groups for t in g.trajectories for v in t.policy_versions}
        seen.append(version)
        with torch.no_grad():
            for name, parameter in run._policy.parameters.items():
                parameter.copy_(adapters[version][name])
        [batch] = packing.pack(packing.sequences(groups), 1 << 20)
        logprobs, _ = run._policy.logprobs(batch)
        assert logprobs.detach().numpy() == pytest.approx(batch.behaviour_logprobs, abs=1e-4)
        with torch.no_grad():
            for name, parameter in run._policy.parameters.items():
                parameter.copy_(now[name])
        metrics = train(groups, step, lambda: False)
        adapters.append(run._adapter())
        return metrics

    run._trainer.train = checked  # type: ignore[method-assign]
    run.play(lag=2, every=2)
    assert seen == [0, 0, 0, 1]
