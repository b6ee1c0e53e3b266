"""One optimizer step: the right gradient however it is split, nothing half done, and a reward that rises."""

from pathlib import Path
from typing import cast

import pytest
import torch
from tests.learner.worlds import make_config, replace_first, sample_group, stock_model

from bucketrl.bucket.config import AlgorithmConfig, RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer, learning_rate
from bucketrl.learner.packing import sequences
from bucketrl.learner.parts import Stopped
from bucketrl.learner.publish import save_adapter
from bucketrl.learner.trainer import Trainer

CPU = torch.device("cpu")


class GradientRecorder:
    """Stands where the optimizer does; keeps the gradient of every parameter instead of applying it."""

    def __init__(self, policy: PolicyModel) -> None:
        self._parameters = policy.parameters
        self.gradients: dict[str, torch.Tensor] = {}

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, step: int) -> float:
        self.gradients = {name: value.grad.clone() for name, value in self._parameters.items()}
        return 1.0


def never() -> bool:
    return False


def perturbed(folder: Path, config: RunConfig) -> PolicyModel:
    """Both LoRA factors are non-zero, so that both have gradients."""
    policy = PolicyModel.load(folder, config, CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def gradients(
    folder: Path, groups: list[TrajectoryGroup], budget: int, *, double: bool
) -> dict[str, torch.Tensor]:
    policy = perturbed(folder, make_config(learner={"tokens_per_microbatch": budget}))
    if double:
        policy._peft.double()
    recorder = GradientRecorder(policy)
    Trainer(policy, cast(Optimizer, recorder)).train(groups, 3, never)
    return recorder.gradients


@pytest.fixture(scope="module")
def groups(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryGroup]:
    """Three groups of different prompts, slightly off-policy, one completion partly masked."""
    folder = tmp_path_factory.mktemp("adapter")
    config = make_config()
    save_adapter(folder, PolicyModel.load(model_folder, config, CPU))
    stock = stock_model(model_folder, folder)
    made = [sample_group(stock, ordinal, config=config, version=0) for ordinal in range(3)]
    first = made[0].trajectories[0]
    mask = (False, *first.loss_mask[1:])
    return [replace_first(made[0], loss_mask=mask), *made[1:]]


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-12), (False, 1e-6)])
def test_the_gradient_does_not_depend_on_the_split(
    model_folder: Path, groups: list[TrajectoryGroup], double: bool, tolerance: float
) -> None:
    whole = gradients(model_folder, groups, 10_000, double=double)
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    for budget in (1, 13, 40):
        for name, gradient in gradients(model_folder, groups, budget, double=double).items():
            torch.testing.assert_close(gradient, whole[name], rtol=0, atol=tolerance, msg=name)


def test_the_gradient_is_that_of_the_formula_on_full_logits(
    model_folder: Path, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    """Transformers' own forward, sequence by sequence, float64, the loss written out once more."""
    config = make_config()
    save_adapter(tmp_path, perturbed(model_folder, config))
    stock = stock_model(model_folder, tmp_path).double()
    parameters = {
        name.replace(".default.", "."): parameter.requires_grad_()
        for name, parameter in stock.named_parameters()
        if "lora_" in name
    }
    items = sequences(groups)
    for item in items:
        logits = stock(input_ids=torch.from_numpy(item.input_ids)[None]).logits[0, item.rows]
        log_softmax = torch.log_softmax(logits / config.sampling.temperature, dim=-1)
        logprobs = log_softmax.gather(1, torch.from_numpy(item.targets)[:, None])[:, 0]
        ratio = torch.exp(logprobs - torch.from_numpy(item.behaviour_logprobs).double())
        advantage = torch.from_numpy(item.advantages).double()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (loss.sum() / sum(len(one.targets) for one in items)).backward()
    ours = gradients(model_folder, groups, 40, double=True)
    assert ours.keys() == parameters.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=0, atol=1e-8, msg=name)


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
