"""Cases that broke other learners, where no other test here has them: `docs/adversarial_cases.md`.

The numbers in the names are those of that table.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.worlds import CPU, make_config, never, untrained_groups
from torch import nn
from transformers import AutoModelForCausalLM

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.publish import save_adapter
from bucketrl.learner.trainer import Trainer


@pytest.fixture(scope="module")
def groups(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryGroup]:
    return untrained_groups(model_folder, tmp_path_factory.mktemp("adapter"), 2)


def learner(model_folder: Path, **algorithm: object) -> tuple[PolicyModel, Trainer]:
    policy = PolicyModel.load(model_folder, make_config(algorithm=algorithm), CPU)
    return policy, Trainer(policy, Optimizer(policy.parameters, policy.config.algorithm))


def changed(group: TrajectoryGroup, change: Callable[[Trajectory], dict[str, Any]]) -> TrajectoryGroup:
    made = [replace(trajectory, **change(trajectory)) for trajectory in group.trajectories]
    return replace(group, trajectories=tuple(made))


def adapter(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.parameters.items()}


def test_7_a_head_with_a_bias_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused head would leave it out."""
    causal = AutoModelForCausalLM.from_pretrained(model_folder)
    causal.lm_head.bias = nn.Parameter(torch.ones(causal.lm_head.out_features))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: causal)
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM has no plain output head \(linear, no bias\)"):
        PolicyModel.load(model_folder, make_config(), CPU)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_22_a_group_without_advantage_moves_the_adapter_by_its_divergence_alone(
    model_folder: Path, groups: list[TrajectoryGroup], kl: float
) -> None:
    """Where such groups are trained on at all. Without a divergence not even AdamW moves."""
    policy, trainer = learner(model_folder, kl_coefficient=kl, filter_zero_variance=False)
    trainer.train(groups, 1, never)  # away from the base, where the divergence has no gradient
    optimizer = Optimizer(policy.parameters, policy.config.algorithm)
    before = adapter(policy)
    flat = [changed(group, lambda _: {"reward": 0.5}) for group in groups]
    metrics = Trainer(policy, optimizer).train(flat, 1, never)
    assert metrics["groups_without_advantage"] == 2.0
    assert all(map(math.isfinite, metrics.values()))
    same = all(torch.equal(value, before[name]) for name, value in policy.parameters.items())
    assert same == (kl == 0.0)
    assert (metrics["grad_norm"] == 0.0) == (kl == 0.0)


def test_30_no_bit_of_the_base_model_changes_and_it_gets_no_gradient(
    model_folder: Path, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    """18 and 30: with the adapter switched off and on in each step, for the divergence, and published in each."""
    policy, trainer = learner(model_folder, kl_coefficient=0.1, minibatches=2)
    masters = {id(parameter) for parameter in policy.parameters.values()}
    base = {name: value for name, value in policy._peft.named_parameters() if id(value) not in masters}

    def digests() -> dict[str, str]:
        return {
            name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest() for name, value in base.items()
        }

    want, start = digests(), adapter(policy)
    for step in range(1, 6):
        trainer.train(groups, step, never)
        save_adapter(tmp_path, policy)
    assert digests() == want
    assert all(value.grad is None for value in base.values())
    assert any(not torch.equal(value, start[name]) for name, value in policy.parameters.items())


def test_33_log_probabilities_renormalised_over_the_top_tokens_show_as_a_bias(
    model_folder: Path, groups: list[TrajectoryGroup]
) -> None:
    """An engine that divides by the mass S of its top-k tokens reports log p - log S."""
    _, trainer = learner(model_folder)
    assert trainer.train(groups, 1, never)["logprob_mismatch_bias"] == pytest.approx(0.0, abs=1e-5)
    mass = 0.8
    renormalised = [
        changed(
            group, lambda t: {"behaviour_logprobs": tuple(p - math.log(mass) for p in t.behaviour_logprobs)}
        )
        for group in groups
    ]
    _, trainer = learner(model_folder)
    metrics = trainer.train(renormalised, 1, never)
    assert metrics["logprob_mismatch_bias"] == pytest.approx(math.log(mass), abs=1e-5)
