"""Does a task give a learning signal? Measured before a run, with the run's own model, prompts and rewards.

GRPO learns from groups whose completions differ in reward; a task where all groups are solved or all fail
trains nothing, however long it runs.
"""

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Literal

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.rollout_worker.drawing import CompletionSampler
from bucketrl.rollout_worker.engine import DroppedCompletion, Engine
from bucketrl.rollout_worker.group import request_seed
from bucketrl.rollout_worker.prompts import Prompts, PromptTooLong, TemplatedPrompt, Tokenizer
from bucketrl.rollout_worker.rewards import RewardFailed, RewardPool
from bucketrl.tasks.base import Reward, Task, TaskError
from bucketrl.tasks.questions import QuestionTask

CONCURRENT_GROUPS = 8
EXAMPLES = 4
MIXED_LEAST = 0.2
"""Below it most samples teach nothing."""
MIXED_MOST = 0.8
"""Above it the reward may be noise: a task usually has some problems that are always or never solved."""
TRUNCATED_MOST = 0.5
ANSWERED_LEAST = 0.1
Z95 = 1.96

Verdict = Literal["signal", "weak", "none"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion that was scored."""

    question: str
    """The last message of the prompt."""
    completion: str
    answer: str | None
    """What the answer rule found; None also where a task has no such rule."""
    reward: Reward
    tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class TaskProbe:
    """What was measured. Shares are of groups or completions that could be used."""

    groups: int
    completions: int
    dropped: int
    """Completions without a reward, and all those of prompts that are too long."""
    mean_reward: float
    mixed: float
    """Share of groups with different rewards."""
    mixed_low: float
    mixed_high: float
    """95 % Wilson interval of `mixed`."""
    best: int
    """Groups whose completions all have the highest reward seen."""
    worst: int
    """The other groups whose completions are all alike."""
    truncated: float
    answered: float | None
    """Share of completions in which the answer rule found something; None where a task does not tell."""
    mean_tokens: float
    verdict: Verdict
    advice: str
    """One line."""
    examples: tuple[Sample, ...]


async def probe_task(
    engine: Engine,
    rewards: RewardPool,
    tokenizer: Tokenizer,
    task: Task,
    run_config: RunConfig,
    *,
    prompts: int,
    group_size: int,
    seed: int,
    policy_version: int = 0,
) -> TaskProbe:
    """Samples `group_size` completions of each of `prompts` random training prompts.

    `engine` serves `policy_version`, an adapter as the run starts with (it changes nothing).
    Raises TaskError for a broken row, and what the engine raises when it dies.
    """
    size = task.size("train")
    indexes = random.Random(seed).sample(range(size), min(prompts, size))
    templated = Prompts(task, tokenizer, run_config)
    slots = asyncio.Semaphore(CONCURRENT_GROUPS)
    sampler = CompletionSampler.of_version(
        engine,
        policy_version,
        templated,
        rewards,
        max_tokens=run_config.sampling.max_tokens,
        temperature=run_config.sampling.temperature,
    )

    async def draw(prompt: TemplatedPrompt, sample: int) -> Sample | None:
        name = f"probe-{seed}"

        def seeds(drawn: int) -> int:
            return request_seed(seed, GroupId(0, prompt.prompt.index), sample, name, drawn)

        try:
            completion, reward = await sampler.measured(
                f"{name}-{prompt.prompt.index}-{sample}", prompt, seeds
            )
        except (DroppedCompletion, RewardFailed):
            return None
        text = templated.text_of(completion.completion_token_ids)
        return Sample(
            question=prompt.prompt.messages[-1]["content"],
            completion=text,
            answer=task.answer(text) if isinstance(task, QuestionTask) else None,
            reward=reward,
            tokens=sum(completion.loss_mask),
            truncated=completion.finish_reason == "length",
        )

    async def group(index: int) -> list[Sample | None]:
        async with slots:
            try:
                prompt = templated.get("train", index)
            except PromptTooLong:
                return [None] * group_size
            return list(await asyncio.gather(*(draw(prompt, sample) for sample in range(group_size))))

    return summarise(await asyncio.gather(*(group(index) for index in indexes)))


def summarise(drawn: list[list[Sample | None]]) -> TaskProbe:
    """[groups][samples]; None is a completion that was dropped. Raises TaskError if nothing is left."""
    groups = [kept for group in drawn if len(kept := [s for s in group if s is not None]) >= 2]
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise TaskError(
            "task: no completion could be scored; see the warnings above, or raise rollout.max_model_len if "
            "the prompts are too long for it"
        )
    rewards = [[sample.reward.total for sample in group] for group in groups]
    highest = max(max(group) for group in rewards)
    alike = [group[0] for group in rewards if min(group) == max(group)]
    mixed = len(groups) - len(alike)
    low, high = wilson(mixed, len(groups))
    answered = [s.reward.parts["answered"] for s in samples if "answered" in s.reward.parts]
    # With a single reward level nobody knows whether it is a good one, unless it is above zero.
    best = sum(reward == highest and highest > 0 for reward in alike)
    truncated = _mean([float(sample.truncated) for sample in samples])
    answered_share = _mean(answered) if answered else None
    verdict, advice = judge(
        mixed / len(groups), best=best, worst=len(alike) - best, truncated=truncated, answered=answered_share
    )
    return TaskProbe(
        groups=len(groups),
        completions=len(samples),
        dropped=sum(len(group) for group in drawn) - len(samples),
        mean_reward=_mean([sample.reward.total for sample in samples]),
        mixed=mixed / len(groups),
        mixed_low=low,
        mixed_high=high,
        best=best,
        worst=len(alike) - best,
        truncated=truncated,
        answered=answered_share,
        mean_tokens=_mean([float(sample.tokens) for sample in samples]),
        verdict=verdict,
        advice=advice,
        examples=_examples(samples),
    )


def judge(
    mixed: float, *, best: int, worst: int, truncated: float, answered: float | None
) -> tuple[Verdict, str]:
    """The verdict on a share of mixed groups, and one line of advice. `best` and `worst` as in TaskProbe."""
    if mixed > MIXED_MOST:
        return "signal", "nearly all groups differ in reward: start the run, unless the rewards look random"
    if mixed >= MIXED_LEAST:
        return "signal", "enough groups differ in reward: start the run"
    verdict: Verdict = "none" if mixed < MIXED_LEAST / 4 else "weak"
    if truncated > TRUNCATED_MOST:
        return verdict, "most completions are cut off: raise sampling.max_tokens or ask for short answers"
    if answered is not None and answered < ANSWERED_LEAST:
        return verdict, (
            "the answer rule finds hardly any answer: choose another task.answer_rule, or show the format "
            "in task.system or task.few_shot"
        )
    if best > worst:
        return verdict, "too easy: nearly all completions are right; choose a harder task"
    return verdict, (
        "too hard: nearly all completions are wrong; choose an easier task, add task.few_shot examples, or "
        "check in the examples that right answers are recognised"
    )


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson, 1927). `trials` is at least 1."""
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def render(probe: TaskProbe) -> str:
    """For people; several lines without a final newline."""
    lines = [
        f"{probe.groups} groups, {probe.completions} completions, {probe.dropped} dropped",
        f"mean reward      {probe.mean_reward:.3f}",
        f"mixed groups     {probe.mixed:.0%} (95 % interval {probe.mixed_low:.0%} to {probe.mixed_high:.0%})",
        f"all best, alike  {probe.best}, {probe.worst}",
        f"cut off          {probe.truncated:.0%}",
    ]
    if probe.answered is not None:
        lines.append(f"answer found     {probe.answered:.0%}")
    lines.append(f"tokens, mean     {probe.mean_tokens:.1f}")
    for sample in probe.examples:
        lines.append(f"  {_short(sample.question)!r} -> {_short(sample.completion)!r}")
        lines.append(f"      answer {sample.answer!r}, reward {sample.reward.total:g}")
    lines.append(f"signal: {probe.verdict}; {probe.advice}")
    return "\n".join(lines)


def _examples(samples: list[Sample]) -> tuple[Sample, ...]:
    """The lowest and the highest rewards, and some between, from different questions where there are."""
    by_question = list({sample.question: sample for sample in samples}.values())
    ranked = sorted(by_question, key=lambda sample: sample.reward.total)
    if len(ranked) <= EXAMPLES:
        return tuple(ranked)
    return tuple(ranked[round(i * (len(ranked) - 1) / (EXAMPLES - 1))] for i in range(EXAMPLES))


def _short(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
