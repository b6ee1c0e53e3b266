"""One run in one process: the real trainer on samples that are exactly so many steps old."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.staleness.sampler import Drawn, Sampler
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.learner.advantages import has_zero_variance
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.trainer import Trainer
from bucketrl.rollout_worker.prompts import Prompts, TemplatedPrompt
from bucketrl.tasks.load import load_task


@dataclass(frozen=True)
class Curve:
    """Share of held-out problems that the policy solves at the run's temperature."""

    steps: list[int]
    heldout: list[float]
    drawn_reward: list[float]
    """Of what was sampled for each step, by the policy of that time."""
    largest_ratio: float
    """Of any token to its behaviour policy, in the whole run."""


@dataclass(frozen=True)
class Drawing:
    """Groups that are drawn for a step: enough of them have to be mixed."""

    groups: int
    """At once."""
    times: int
    """At most."""


Report = Callable[[int, float], bool]
"""Called with the number of steps made and the reward there; True ends the run."""


class Run:
    """Everything that one run works with."""

    def __init__(
        self, config: RunConfig, folder: Path, problems: int, drawing: Drawing, device: torch.device
    ) -> None:
        from transformers import AutoTokenizer

        from bucketrl.rollout_worker.engines.settings import stop_token_ids

        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._config = config
        self._drawing = drawing
        self._task = load_task(config.task)
        self._prompts = Prompts(self._task, tokenizer, config)
        self._problems = [self._prompts.get("heldout", index) for index in range(problems)]
        self._policy = PolicyModel.load(folder, config, device)
        self._trainer = Trainer(self._policy, Optimizer(self._policy.parameters, config.algorithm))
        stop = frozenset(stop_token_ids(folder, tokenizer))
        self._sampler = Sampler(folder, config, device, stop)
        self._order = random.Random(config.seed)
        self._generator = self._seeded()

    def play(self, lag: int, every: int, report: Report) -> Curve:
        steps = self._config.algorithm.steps
        adapters = deque([self._adapter()], maxlen=lag + 1)
        curve = Curve([0], [self._heldout()], [], 0.0)
        ratio = 1.0
        for step in range(1, steps + 1):
            if report(step - 1, curve.heldout[-1]):
                break
            self._sampler.load(adapters[0])
            groups, reward = self._groups(step, max(0, step - 1 - lag))
            curve.drawn_reward.append(reward)
            if groups:
                metrics = self._trainer.train(groups, step, lambda: False)
                ratio = max(ratio, metrics["ratio_max"])
            adapters.append(self._adapter())
            if step % every == 0 or step == steps:
                curve.steps.append(step)
                curve.heldout.append(self._heldout())
        return Curve(curve.steps, curve.heldout, curve.drawn_reward, ratio)

    def _adapter(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._policy.parameters.items()}

    def _seeded(self) -> torch.Generator:
        return torch.Generator(self._policy.device).manual_seed(self._config.seed)

    def _heldout(self) -> float:
        self._sampler.load(self._adapter())
        drawn = self._sampler.draw([p.token_ids for p in self._problems], 1, self._seeded())
        rewards = [self._reward(*pair) for pair in zip(self._problems, drawn, strict=True)]
        return sum(rewards) / len(rewards)

    def _groups(self, step: int, version: int) -> tuple[list[TrajectoryGroup], float]:
        """As many mixed ones as a step trains on, if so many come; and the mean reward of all that were drawn."""
        wanted, size = self._config.algorithm.groups_per_step, self._config.sampling.group_size
        mixed: list[TrajectoryGroup] = []
        rewards: list[float] = []
        for _ in range(self._drawing.times):
            indices = [self._order.randrange(self._task.size("train")) for _ in range(self._drawing.groups)]
            prompts = [self._prompts.get("train", index) for index in indices]
            drawn = self._sampler.draw([p.token_ids for p in prompts], size, self._generator)
            for index, prompt in enumerate(prompts):
                of_group = drawn[index * size : (index + 1) * size]
                scores = [self._reward(prompt, one) for one in of_group]
                rewards += scores
                if not has_zero_variance(scores):
                    mixed.append(_group(step * 1000 + len(mixed), version, prompt, of_group, scores))
            if len(mixed) >= wanted:
                break
        return mixed[:wanted], sum(rewards) / len(rewards)

    def _reward(self, prompt: TemplatedPrompt, drawn: Drawn) -> float:
        text = self._prompts.text_of(drawn.token_ids)
        return float(self._task.score(prompt.prompt, text, drawn.finish_reason).total)  # type: ignore[arg-type]


def _group(
    number: int, version: int, prompt: TemplatedPrompt, drawn: Sequence[Drawn], rewards: Sequence[float]
) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(
            sample=sample,
            prompt_token_ids=prompt.token_ids,
            completion_token_ids=one.token_ids,
            behaviour_logprobs=one.logprobs,
            policy_versions=(version,) * len(one.token_ids),
            loss_mask=(True,) * len(one.token_ids),
            finish_reason="stop" if one.finish_reason == "stop" else "length",
            seed=0,
            started_at="",
            seconds=0.0,
            reward=reward,
            reward_parts={},
            completion_text="",
        )
        for sample, (one, reward) in enumerate(zip(drawn, rewards, strict=True))
    )
    return TrajectoryGroup(
        run_id="staleness",
        group_id=str(GroupId(0, number)),
        attempt="a",
        worker_id="w",
        engine="e",
        prompt_text=prompt.text,
        trajectories=trajectories,
    )
