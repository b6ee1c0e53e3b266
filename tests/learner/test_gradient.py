"""The gradient of one optimizer step: that of the formula on full logits, however it is split."""

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.learner.worlds import assert_same, make_config, never, perturbed, replace_first, stock_model
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.advantages import batch_advantages
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.packing import TokenSequence, sequences
from bucketrl.learner.publish import save_adapter
from bucketrl.learner.trainer import Trainer


class GradientRecorder:
    """Stands where the optimizer does; keeps the gradient of every parameter instead of applying it."""

    def __init__(self, policy: PolicyModel) -> None:
        self._parameters = policy.parameters
        self.gradients: dict[str, torch.Tensor] = {}

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, step: int, update: int = 0) -> float:
        self.gradients = {name: value.grad.clone() for name, value in self._parameters.items()}
        return 1.0


@pytest.fixture(autouse=True)
def _norms_keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's norms compute in float32 whatever they are given: what a prompt's token gets from several
    completions at once would be rounded otherwise than what it gets from each."""
    rounded = Qwen3RMSNorm.forward

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != torch.float64:
            return rounded(self, hidden_states)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


def gradients(
    folder: Path, groups: list[TrajectoryGroup], budget: int, *, double: bool, **algorithm: object
) -> dict[str, torch.Tensor]:
    policy = perturbed(folder, make_config(learner={"tokens_per_microbatch": budget}, algorithm=algorithm))
    if double:
        policy._peft.double()
    recorder = GradientRecorder(policy)
    Trainer(policy, cast(Optimizer, recorder)).train(groups, 3, never)
    return recorder.gradients


BY_SEQUENCE = {
    "name": "gspo",
    "proximal": "interpolated",
    "importance_weight": "sequence",
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.1,
}


@pytest.mark.parametrize(
    ("double", "tolerance", "algorithm"), [(True, 1e-12, {}), (True, 1e-12, BY_SEQUENCE), (False, 1e-6, {})]
)
def test_the_gradient_does_not_depend_on_the_split(
    model_folder: Path,
    groups: list[TrajectoryGroup],
    double: bool,
    tolerance: float,
    algorithm: dict[str, object],
) -> None:
    whole = gradients(model_folder, groups, 10_000, double=double, **algorithm)
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    for budget in (1, 13, 40):
        for name, gradient in gradients(model_folder, groups, budget, double=double, **algorithm).items():
            torch.testing.assert_close(gradient, whole[name], rtol=0, atol=tolerance, msg=name)


def stock_with_gradients(
    model_folder: Path, folder: Path, config: RunConfig
) -> tuple[Any, dict[str, nn.Parameter]]:
    """Transformers' own model in float64 with the adapter of `perturbed`, and its parameters by our names."""
    save_adapter(folder, perturbed(model_folder, config))
    stock = stock_model(model_folder, folder).double()
    return stock, {
        name.replace(".default.", "."): parameter.requires_grad_()
        for name, parameter in stock.named_parameters()
        if "lora_" in name
    }


def test_the_gradient_is_that_of_the_formula_on_full_logits(
    model_folder: Path, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    """Transformers' own forward, sequence by sequence, float64, the loss written out once more."""
    config = make_config()
    stock, parameters = stock_with_gradients(model_folder, tmp_path, config)
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


def test_reference_and_entropy_are_those_of_full_logits(
    model_folder: Path, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    """The same for a loss that needs the base model, a differentiable entropy and whole completions."""
    algorithm = {"name": "gspo", "kl_coefficient": 0.3, "entropy_coefficient": 0.2, "clip_low": 0.1}
    config = make_config(algorithm=algorithm | {"clip_high": 0.1})
    stock, parameters = stock_with_gradients(model_folder, tmp_path, config)
    advantages = batch_advantages(
        [[t.reward for t in g.trajectories] for g in groups], "group_mean", "group_std"
    )
    items = sequences(groups, advantages)

    def log_softmax(item: TokenSequence) -> torch.Tensor:
        logits = stock(input_ids=torch.from_numpy(item.input_ids)[None]).logits[0, item.rows]
        return torch.log_softmax(logits / config.sampling.temperature, dim=-1)

    for item in items:
        targets = torch.from_numpy(item.targets)[:, None]
        whole = log_softmax(item)
        with torch.no_grad(), stock.disable_adapter():
            base = log_softmax(item).gather(1, targets)[:, 0]
        logprobs = whole.gather(1, targets)[:, 0]
        advantage = float(item.advantages[0])
        ratio = (logprobs - torch.from_numpy(item.behaviour_logprobs).double()).mean().exp()
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        divergence = (base - logprobs).exp() - 1 - (base - logprobs)
        entropy = -(whole.exp() * whole).sum(-1)
        (surrogate + (0.3 * divergence - 0.2 * entropy).mean()).div(len(items)).backward()
    ours = gradients(model_folder, groups, 40, double=True, **algorithm, clip_high=0.1)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=0, atol=1e-8, msg=name)


def test_a_completion_without_finite_logprobs_is_dropped_and_counted(
    model_folder: Path, groups: list[TrajectoryGroup]
) -> None:
    """What is left is the step without its tokens; its reward still counts for the baseline. NaN on tokens
    that no policy sampled is nobody's business."""
    first = groups[0].trajectories[0]
    length = len(first.completion_token_ids)
    silent = [replace_first(groups[0], loss_mask=(False,) * length), *groups[1:]]
    want = gradients(model_folder, silent, 40, double=False)
    for value in (float("nan"), float("-inf")):
        poisoned = [replace_first(groups[0], behaviour_logprobs=(value,) * length), *groups[1:]]
        policy = perturbed(model_folder, make_config())
        recorder = GradientRecorder(policy)
        metrics = Trainer(policy, cast(Optimizer, recorder)).train(poisoned, 3, never)
        assert metrics["completions_dropped_not_finite"] == 1.0
        assert all(map(math.isfinite, metrics.values()))
        assert_same(recorder.gradients, want)
    masked = (float("nan"), *first.behaviour_logprobs[1:])
    harmless = [replace_first(groups[0], behaviour_logprobs=masked), *groups[1:]]
    assert_same(
        gradients(model_folder, harmless, 40, double=False), gradients(model_folder, groups, 40, double=False)
    )
