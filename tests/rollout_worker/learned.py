"""Adapters as the learner writes them, and the learner's own judgement of what was sampled with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bucketrl.bucket.completions import Completion
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import Canary
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup, decode, encode
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.packing import pack, sequences
from bucketrl.learner.publish import probe_tokens, save_adapter

from .tiny_model import ALPHA, RANK, save_model

VERSIONS = (11, 12, 13)
TEMPERATURES = (1.0, 0.7)
BUDGET = 700
"""Tokens per micro-batch: three completions of most groups."""
Policies = Mapping[int, PolicyModel]


@dataclass(frozen=True)
class Learned:
    """Three trained policy versions of the tiny model."""

    model: Path
    adapters: dict[int, Path]
    policies: dict[float, dict[int, PolicyModel]]
    """By sampling temperature, then version."""

    def canary(self, version: int) -> Canary:
        """As `Publisher` makes it."""
        policy = self.policies[1.0][version]
        probe = probe_tokens(0, policy.vocab_size)
        with policy.base_only():
            base = tuple(policy.score(probe))
        return Canary(token_ids=probe, logprobs=tuple(policy.score(probe)), base_logprobs=base)


def make_config(temperature: float = 1.0) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "exact",
            "model": {"id": "tiny"},
            "task": {},
            "lora": {"rank": RANK, "alpha": ALPHA},
            "sampling": {"temperature": temperature},
        }
    )


def learn(folder: Path) -> Learned:
    """Noise stands for the training: no matrix B is zero, and all versions differ."""
    model = save_model(folder / "model")
    policies = {
        temperature: {version: _policy(model, version, temperature) for version in VERSIONS}
        for temperature in TEMPERATURES
    }
    adapters = {version: folder / f"learned{version}" for version in VERSIONS}
    for version, path in adapters.items():
        save_adapter(path, policies[1.0][version])
    return Learned(model, adapters, policies)


def _policy(model: Path, version: int, temperature: float) -> PolicyModel:
    policy = PolicyModel.load(model, make_config(temperature), torch.device("cpu"))
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def begun(sample: int, prompt: tuple[int, ...]) -> Completion:
    """Before its first token."""
    return Completion(
        sample=sample,
        prompt_token_ids=prompt,
        completion_token_ids=(),
        behaviour_logprobs=(),
        policy_versions=(),
        loss_mask=(),
        finish_reason="",
        seed=sample,
        started_at="2026-01-01T00:00:00Z",
        seconds=0.0,
    )


def uploaded(completions: Sequence[Completion]) -> TrajectoryGroup:
    """The group that a learner reads from the bucket."""
    rows = tuple(
        Trajectory(
            **{name: getattr(one, name) for name in Completion.__dataclass_fields__},
            reward=float(one.sample % 2),
            reward_parts={},
            completion_text="",
        )
        for one in completions
    )
    group = TrajectoryGroup(
        run_id="run",
        group_id=str(GroupId(0, 0)),
        attempt="a",
        worker_id="w",
        engine="e",
        prompt_text="",
        trajectories=rows,
    )
    return decode(
        encode(group), run_id="run", group_id=group.group_id, attempt="a", max_version=max(VERSIONS)
    )


@torch.no_grad()
def largest_difference(group: TrajectoryGroup, policies: Policies) -> float:
    """Between the engine's log-probabilities and the learner's, of any token under its own version."""
    largest = 0.0
    for batch in pack(sequences([group]), BUDGET):
        for version in np.unique(batch.versions).tolist():
            logprobs, _ = policies[version].logprobs(batch)
            differences = np.abs(logprobs.numpy() - batch.behaviour_logprobs)[batch.versions == version]
            largest = max(largest, float(differences.max()))
    return largest


def mixed_up(policies: Policies) -> Policies:
    """Each version with the next one's adapter."""
    return {version: policies[VERSIONS[(n + 1) % len(VERSIONS)]] for n, version in enumerate(VERSIONS)}
