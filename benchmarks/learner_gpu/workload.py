"""What is drawn: random tokens, as groups for the learner and as rows of equal length for its peer."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.learner_gpu.shapes import Shape
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.learner import packing
from bucketrl.learner.advantages import batch_advantages
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.packing import Floats, Ints

GROUPS = {"separate": 16, "group": 2}
"""Groups that the completions of a step fall into. A group of one shares no prompt: both sides do the same work."""
NOISE = 0.05
"""Of behaviour log-probabilities, in nats: the sampler's policy is near the learner's, as in a run."""


@dataclass(frozen=True)
class Batch:
    """Of one step. Suffixes: S completions, L tokens of prompt and completion, C of the completion."""

    step: int
    """From 1 on."""
    groups: tuple[TrajectoryGroup, ...]
    input_ids: Ints
    """[S, L]"""
    prompt_length: int
    behaviour_logprobs: Floats
    """[S, C]"""
    advantages: Floats
    """[S]"""


def run_config(shape: Shape, microbatch_tokens: int, checkpointing: bool) -> RunConfig:
    """GRPO with TRL's defaults: clip 0.2, mean over tokens, no KL. The baseline is the batch's, so that groups of
    one have a gradient too."""
    return RunConfig.model_validate(
        {
            "name": "learner-gpu",
            "model": {"id": "random-qwen3", "dtype": shape.dtype},
            "lora": {"rank": 16, "alpha": 32.0},
            "task": {"kind": "arithmetic"},
            "sampling": {"group_size": 8, "max_tokens": shape.length - min(shape.prompts.values())},
            "algorithm": {
                "groups_per_step": shape.completions // 8,
                "baseline": "batch_mean",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "learning_rate": 1e-6,
            },
            "rollout": {"max_model_len": shape.length},
            "learner": {
                "tokens_per_microbatch": microbatch_tokens,
                "activation_checkpointing": checkpointing,
            },
        }
    )


def draw(policy: PolicyModel, step: int, *, groups: int, completions: int, length: int, prompt: int) -> Batch:
    """Behaviour log-probabilities are those of `policy` as it is, with noise."""
    random = np.random.default_rng(step)
    size = completions // groups
    ids = random.integers(0, policy.vocab_size, (completions, length))
    ids[:, :prompt] = np.repeat(ids[::size, :prompt], size, axis=0)
    rewards = random.random((groups, size)).tolist()
    blank = np.zeros((completions, length - prompt), dtype=np.float32)
    logprobs = _score(policy, _groups(step, ids, prompt, blank, rewards), blank)
    noise = random.normal(0.0, NOISE, logprobs.shape)
    behaviour = np.minimum(logprobs + noise, 0.0).astype(np.float32)
    algorithm = policy.config.algorithm
    advantages = batch_advantages(rewards, algorithm.baseline, algorithm.advantage_scale)
    return Batch(
        step=step,
        groups=_groups(step, ids, prompt, behaviour, rewards),
        input_ids=ids,
        prompt_length=prompt,
        behaviour_logprobs=behaviour,
        advantages=np.array(advantages, dtype=np.float32).reshape(-1),
    )


@torch.no_grad()
def _score(policy: PolicyModel, groups: tuple[TrajectoryGroup, ...], blank: Floats) -> Floats:
    """[S, C]"""
    logprobs = blank.copy()
    for batch in packing.pack(packing.sequences(groups), policy.config.learner.tokens_per_microbatch):
        found = policy.logprobs(batch)[0].cpu().numpy()
        for sequence in np.unique(batch.sequence_ids):
            logprobs[sequence] = found[batch.sequence_ids == sequence]
    return logprobs


def _groups(
    step: int, ids: Ints, prompt: int, behaviour: Floats, rewards: list[list[float]]
) -> tuple[TrajectoryGroup, ...]:
    size = len(rewards[0])
    rows, logprobs, count = ids.tolist(), behaviour.tolist(), behaviour.shape[1]
    one = Trajectory(
        sample=0,
        prompt_token_ids=(),
        completion_token_ids=(),
        behaviour_logprobs=(),
        policy_versions=(step - 1,) * count,
        loss_mask=(True,) * count,
        finish_reason="length",
        seed=0,
        started_at="2026-01-01T00:00:00Z",
        seconds=1.0,
        reward=0.0,
        reward_parts={},
        completion_text="",
    )
    return tuple(
        TrajectoryGroup(
            run_id="learner-gpu",
            group_id=str(GroupId.from_ordinal(index, len(rewards))),
            attempt="drawn",
            worker_id="none",
            engine="none",
            prompt_text="",
            trajectories=tuple(
                replace(
                    one,
                    sample=sample,
                    prompt_token_ids=tuple(rows[row][:prompt]),
                    completion_token_ids=tuple(rows[row][prompt:]),
                    behaviour_logprobs=tuple(logprobs[row]),
                    reward=of_group[sample],
                )
                for sample, row in enumerate(range(index * size, (index + 1) * size))
            ),
        )
        for index, of_group in enumerate(rewards)
    )
