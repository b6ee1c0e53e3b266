"""One run in one process: the real trainer on samples that are exactly so many steps old."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.learner.advantages import has_zero_variance
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.trainer import Trainer
from bucketrl.rollout_worker.prompts import Prompts, TemplatedPrompt
from bucketrl.tasks.base import Split
from bucketrl.tasks.load import load_task

MOST_DRAWN = 4
"""Groups drawn for a step, in multiples of those trained on: enough of them have to be mixed."""


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
class Drawn:
    """One completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class Sampler:
    """The policy's adapters of earlier steps on a model of their own. Prompts are computed again for each token:
    for completions of a few tokens that costs less than a cache."""

    def __init__(self, policy: PolicyModel, folder: Path, config: RunConfig, stop: frozenset[int]) -> None:
        model = PolicyModel.load(folder, config, policy.device)
        model._causal.set_attn_implementation("sdpa")
        self._model = model
        self._config = config
        self._stop = torch.tensor(sorted(stop), device=policy.device)

    @torch.no_grad()
    def load(self, adapter: dict[str, Tensor]) -> None:
        for name, parameter in self._model.parameters.items():
            parameter.copy_(adapter[name])

    @torch.no_grad()
    def draw(self, prompts: Sequence[tuple[int, ...]], generator: torch.Generator) -> list[Drawn]:
        sampling, device = self._config.sampling, self._model.device
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        running = torch.ones(len(prompts), dtype=torch.bool, device=device)
        tokens, logprobs = [], []
        for _ in range(sampling.max_tokens):
            places = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self._model._causal(
                input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False
            ).logits[:, -1]
            scores = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
            token = torch.multinomial(scores.exp().cpu(), 1, generator=generator).to(device)
            tokens.append(torch.where(running, token[:, 0], -1))
            logprobs.append(scores.gather(1, token)[:, 0])
            ids, mask = torch.cat([ids, token], 1), torch.cat([mask, running[:, None].long()], 1)
            running = running & ~torch.isin(token[:, 0], self._stop)
            if not running.any():
                break
        return _rows(torch.stack(tokens, 1).cpu(), torch.stack(logprobs, 1).cpu(), running.cpu())


def _rows(tokens: Tensor, logprobs: Tensor, running: Tensor) -> list[Drawn]:
    found = []
    for row, still in enumerate(running.tolist()):
        count = int((tokens[row] >= 0).sum())
        found.append(
            Drawn(
                tuple(tokens[row, :count].tolist()),
                tuple(logprobs[row, :count].tolist()),
                "length" if still else "stop",
            )
        )
    return found


class Run:
    """Everything that one run works with."""

    def __init__(self, config: RunConfig, folder: Path, problems: int) -> None:
        from transformers import AutoTokenizer

        from bucketrl.rollout_worker.engines.settings import stop_token_ids

        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._config = config
        self._task = load_task(config.task)
        self._prompts = Prompts(self._task, tokenizer, config)
        self._problems = problems
        self._policy = PolicyModel.load(folder, config, torch.device("cpu"))
        self._trainer = Trainer(self._policy, Optimizer(self._policy.parameters, config.algorithm))
        stop = frozenset(stop_token_ids(folder, tokenizer))
        self._sampler = Sampler(self._policy, folder, config, stop)
        self._order = random.Random(config.seed)
        self._generator = torch.Generator().manual_seed(config.seed)

    def play(self, lag: int, every: int) -> Curve:
        steps = self._config.algorithm.steps
        adapters = deque([self._adapter()], maxlen=lag + 1)
        curve = Curve([0], [self._heldout()], [], 0.0)
        ratio = 1.0
        for step in range(1, steps + 1):
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

    def _heldout(self) -> float:
        self._sampler.load(self._adapter())
        prompts = [self._prompt("heldout", index) for index in range(self._problems)]
        drawn = self._sampler.draw(
            [p.token_ids for p in prompts], torch.Generator().manual_seed(self._config.seed)
        )
        return sum(self._reward(*pair) for pair in zip(prompts, drawn, strict=True)) / self._problems

    def _groups(self, step: int, version: int) -> tuple[list[TrajectoryGroup], float]:
        """As many mixed ones as a step trains on, if so many come; and the mean reward of all that were drawn."""
        wanted, size = self._config.algorithm.groups_per_step, self._config.sampling.group_size
        mixed: list[TrajectoryGroup] = []
        rewards: list[float] = []
        for _ in range(MOST_DRAWN):
            prompts = [
                self._prompt("train", self._order.randrange(self._task.size("train"))) for _ in range(wanted)
            ]
            drawn = self._sampler.draw([p.token_ids for p in prompts for _ in range(size)], self._generator)
            for index, prompt in enumerate(prompts):
                of_group = drawn[index * size : (index + 1) * size]
                scores = [self._reward(prompt, one) for one in of_group]
                rewards += scores
                if not has_zero_variance(scores):
                    mixed.append(_group(step * 1000 + len(mixed), version, prompt, of_group, scores))
            if len(mixed) >= wanted:
                break
        return mixed[:wanted], sum(rewards) / len(rewards)

    def _prompt(self, split: Split, index: int) -> TemplatedPrompt:
        return self._prompts.get(split, index)

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
