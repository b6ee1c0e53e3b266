"""Optimizer steps: one update or several, nothing half done, AdamW, and a reward that rises."""

from pathlib import Path

import pytest
import torch
from tests.learner.worlds import (
    CPU,
    assert_same,
    make_config,
    make_group,
    never,
    perturbed,
    sample_group,
    stock_model,
)

from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.kernels.lora import LoraLayer, LoraLinears
from bucketrl.learner import checkpoint
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer, learning_rate
from bucketrl.learner.parts import Stopped
from bucketrl.learner.publish import save_adapter
from bucketrl.learner.trainer import Trainer


def state(policy: PolicyModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a step moves, copied."""
    moments = optimizer.moments().items()
    return {name: value.detach().clone() for name, value in policy.parameters.items()} | {
        f"{name} {i}": moment.clone() for name, pair in moments for i, moment in enumerate(pair)
    }


SEVERAL = {"groups_per_step": 3, "minibatches": 3, "proximal": "recomputed", "importance_weight": "token"}


def test_a_stop_anywhere_among_several_updates_undoes_them(
    model_folder: Path, groups: list[TrajectoryGroup]
) -> None:
    policy = perturbed(model_folder, make_config(algorithm=SEVERAL, learner={"tokens_per_microbatch": 20}))
    optimizer = Optimizer(policy.parameters, policy.config.algorithm)
    trainer = Trainer(policy, optimizer)
    trainer.train(groups, 1, never)
    before, asked = state(policy, optimizer), 0
    while True:
        calls = iter(range(asked + 1))
        try:
            trainer.train(groups, 2, lambda calls=calls: next(calls, None) is None)  # type: ignore[misc]
        except Stopped:
            assert_same(state(policy, optimizer), before)
            asked += 1
        else:
            break
    assert asked > 6  # three updates of several micro-batches each, and the forward passes before them
    fresh = perturbed(model_folder, policy.config)
    undisturbed = Optimizer(fresh.parameters, fresh.config.algorithm)
    for step in (1, 2):
        Trainer(fresh, undisturbed).train(groups, step, never)
    assert_same(state(policy, optimizer), state(fresh, undisturbed))


def test_an_update_that_fails_undoes_those_before_it(
    model_folder: Path, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = perturbed(model_folder, make_config(algorithm=SEVERAL))
    optimizer = Optimizer(policy.parameters, policy.config.algorithm)
    before, step = state(policy, optimizer), optimizer.step

    def poisoned(number: int, update: int) -> float:
        if update == 1:
            for parameter in policy.parameters.values():
                parameter.grad = torch.full_like(parameter, float("nan"))
        return step(number, update)

    monkeypatch.setattr(optimizer, "step", poisoned)
    with pytest.raises(UserError, match="step 1 is not finite"):
        Trainer(policy, optimizer).train(groups, 1, never)
    assert_same(state(policy, optimizer), before)


def test_minibatches_are_updates_in_a_row(model_folder: Path, groups: list[TrajectoryGroup]) -> None:
    """One step in three parts is, bit for bit, three steps of a group each."""
    once = perturbed(model_folder, make_config(algorithm={"groups_per_step": 3, "minibatches": 3}))
    of_once = Optimizer(once.parameters, once.config.algorithm)
    metrics = Trainer(once, of_once).train(groups, 1, never)
    thrice = perturbed(model_folder, make_config())
    of_thrice = Optimizer(thrice.parameters, thrice.config.algorithm)
    for step, group in enumerate(groups, start=1):
        Trainer(thrice, of_thrice).train([group], step, never)
    assert_same(state(once, of_once), state(thrice, of_thrice))
    assert metrics["updates"] == 3.0


def test_several_updates_resume_bit_for_bit(
    model_folder: Path, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    """Also after a step that had fewer groups than there are minibatches."""
    config = make_config(algorithm=SEVERAL)
    policy = PolicyModel.load(model_folder, config, CPU)
    optimizer = Optimizer(policy.parameters, config.algorithm)
    Trainer(policy, optimizer).train(groups[:1], 1, never)
    checkpoint.save(tmp_path, policy, optimizer, run_id="r", step=1)
    resumed = PolicyModel.load(model_folder, config, CPU)
    of_resumed = Optimizer(resumed.parameters, config.algorithm)
    checkpoint.load(tmp_path, resumed, of_resumed, run_id="r", step=1)
    metrics = Trainer(policy, optimizer).train(groups, 2, never)
    again = Trainer(resumed, of_resumed).train(groups, 2, never)
    assert_same(state(policy, optimizer), state(resumed, of_resumed))
    assert metrics | {"tokens_per_second": 0.0} == again | {"tokens_per_second": 0.0}


def test_a_recomputed_policy_is_that_before_the_first_update(
    model_folder: Path, groups: list[TrajectoryGroup]
) -> None:
    """The sampler's policy is the one that the step starts from: whatever the updates did, weights are 1."""
    config = make_config(algorithm=SEVERAL | {"learning_rate": 0.05})
    policy = PolicyModel.load(model_folder, config, CPU)
    metrics = Trainer(policy, Optimizer(policy.parameters, config.algorithm)).train(groups, 1, never)
    assert metrics["ratio_max"] > 1.1
    assert metrics["weight_max"] < 1.0001
    assert metrics["logprob_mismatch_max"] < 1e-4


def test_without_any_usable_completion_the_step_is_refused(model_folder: Path) -> None:
    policy = perturbed(model_folder, make_config())
    nothing = make_group(0, rewards=[0.0, 1.0], logprobs=[[float("nan")] * 3] * 2)
    with pytest.raises(IntegrityError, match="step 1: no completion has finite"):
        Trainer(policy, Optimizer(policy.parameters, policy.config.algorithm)).train([nothing], 1, never)


def test_a_stop_between_micro_batches_leaves_the_policy_as_it_was(
    model_folder: Path, groups: list[TrajectoryGroup]
) -> None:
    policy = perturbed(model_folder, make_config(learner={"tokens_per_microbatch": 20}))
    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    answers = iter([False, False, True])
    trainer = Trainer(policy, Optimizer(policy.parameters, policy.config.algorithm))
    with pytest.raises(Stopped):
        trainer.train(groups, 1, lambda: next(answers))
    assert all(torch.equal(value, before[name]) for name, value in policy.parameters.items())
    # And the step done afterwards is not polluted by what was accumulated.
    fresh = perturbed(model_folder, make_config(learner={"tokens_per_microbatch": 20}))
    Trainer(fresh, Optimizer(fresh.parameters, fresh.config.algorithm)).train(groups, 1, never)
    trainer.train(groups, 1, never)
    assert all(torch.equal(value, fresh.parameters[name]) for name, value in policy.parameters.items())


def test_a_gradient_that_is_not_finite_changes_nothing(model_folder: Path) -> None:
    policy = perturbed(model_folder, make_config())
    optimizer = Optimizer(policy.parameters, policy.config.algorithm)
    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    for parameter in policy.parameters.values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(UserError, match=r"step 9 is not finite.*algorithm\.learning_rate"):
        optimizer.step(9)
    assert all(torch.equal(value, before[name]) for name, value in policy.parameters.items())


def test_metrics_say_what_was_done(model_folder: Path, groups: list[TrajectoryGroup]) -> None:
    policy = PolicyModel.load(model_folder, make_config(), CPU)
    ticks = iter([10.0, 12.0])
    trainer = Trainer(
        policy, Optimizer(policy.parameters, policy.config.algorithm), clock=lambda: next(ticks)
    )
    metrics = trainer.train(groups, 1, never)
    tokens = sum(
        len(t.prompt_token_ids) + len(t.completion_token_ids) - 1 for g in groups for t in g.trajectories
    )
    assert metrics["tokens"] == tokens
    assert metrics["tokens_per_second"] == tokens / 2.0
    # The policy is the very one that sampled, so engine and learner differ by rounding only.
    assert metrics["logprob_mismatch_max"] < 1e-4
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["tokens_lag_0"] == metrics["loss_tokens"]


def test_learning_rate_warms_up_and_stays() -> None:
    config = AlgorithmConfig(learning_rate=0.4, warmup_steps=4)
    assert [learning_rate(config, step) for step in (1, 2, 4, 5, 100)] == [0.1, 0.2, 0.4, 0.4, 0.4]
    assert learning_rate(AlgorithmConfig(learning_rate=0.4), 1) == 0.4


def test_adamw_follows_its_formula() -> None:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, for three steps with warm-up and clipping."""
    config = AlgorithmConfig(
        learning_rate=0.1, warmup_steps=2, weight_decay=0.01, max_grad_norm=1.0, adam_beta2=0.99
    )
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = Optimizer({"w": parameter}, config)
    want, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step in (1, 2, 3):
        raw = [3.0 * step, 4.0]
        norm = (raw[0] ** 2 + raw[1] ** 2) ** 0.5
        parameter.grad = torch.tensor(raw, dtype=torch.float64)
        assert optimizer.step(step) == pytest.approx(norm)
        rate = 0.1 * min(1.0, step / 2)
        for i, value in enumerate(raw):
            gradient = value / norm
            m[i] = 0.9 * m[i] + 0.1 * gradient
            v[i] = 0.99 * v[i] + 0.01 * gradient**2
            update = (m[i] / (1 - 0.9**step)) / ((v[i] / (1 - 0.99**step)) ** 0.5 + 1e-8)
            want[i] -= rate * (update + 0.01 * want[i])
    assert parameter.tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(("lag", "steps"), [(0, 20), (3, 32)])
def test_the_reward_rises(model_folder: Path, tmp_path: Path, lag: int, steps: int) -> None:
    """Even tokens are rewarded. Also when every group is sampled by a policy that is `lag` steps old, if
    more slowly: the clip stops tokens that have moved too far since they were sampled."""
    config = make_config(
        sampling={"group_size": 8, "max_tokens": 6, "temperature": 1.0},
        algorithm={"learning_rate": 1e-2, "groups_per_step": 4},
    )
    policy = PolicyModel.load(model_folder, config, CPU)
    trainer = Trainer(policy, Optimizer(policy.parameters, config.algorithm))
    save_adapter(tmp_path / "v0", policy)
    stock = stock_model(model_folder, tmp_path / "v0")
    rewards = []
    for step in range(1, steps + 1):
        save_adapter(tmp_path / f"v{step - 1}", policy)
        stock.load_adapter(str(tmp_path / f"v{step - 1}"), f"v{step - 1}")
        version = max(0, step - 1 - lag)
        stock.set_adapter(f"v{version}")
        batch = [sample_group(stock, 4 * step + i, config=config, version=version) for i in range(4)]
        metrics = trainer.train(batch, step, never)
        assert metrics["staleness_max"] == step - 1 - version
        rewards.append(sum(t.reward for g in batch for t in g.trajectories) / 32)
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


def test_an_undone_update_is_seen_by_what_is_derived_from_the_parameters() -> None:
    """Fused blocks read a copy of the adapter, in the base's dtype, and renew it when they see a change."""
    a, b = torch.nn.Parameter(torch.randn(2, 8)), torch.nn.Parameter(torch.randn(4, 2))
    frozen = torch.nn.Parameter(torch.randn(4, 8), requires_grad=False)
    linears = LoraLinears([LoraLayer(frozen, a, b, 1.0)])
    optimizer = Optimizer({"a": a, "b": b}, AlgorithmConfig(minibatches=2))
    before = a.detach().clone()

    def updates() -> None:
        with optimizer.atomic():
            a.grad = torch.ones_like(a)
            optimizer.step(1)
            linears.refresh()  # the forward pass of the second update
            assert not torch.equal(linears.down_RH[:2], before)
            raise Stopped

    with pytest.raises(Stopped):
        updates()
    linears.refresh()
    assert torch.equal(linears.down_RH[:2], before)


def test_the_norm_of_millions_of_gradients_is_exact() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 23))
    optimizer = Optimizer({"w": parameter}, AlgorithmConfig())
    parameter.grad = torch.full_like(parameter, 0.1)
    assert optimizer.step(1) == pytest.approx(0.1 * 2**11.5, rel=1e-6)
