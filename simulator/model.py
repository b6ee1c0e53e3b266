"""A model that can be judged: its weights are a digest of everything that it was trained on.

Each token and its log-probability follow from the weights, the context and a seed. So it shows from a
trajectory alone which weights really sampled a token, and from an adapter which batches really made it.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bucketrl.bucket import artifacts, keys
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.records import Canary, CheckpointRef, ModelIdentity, PolicyRef, RunRecord, StepRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.parts import Published, Stopped
from bucketrl.simulator.scenario import Scenario

CANARY_TOKENS = tuple(range(6))
UNTRAINED = "untrained"
BASE = "base"
VOCAB = 40
MAX_TOKENS = 6


def hashed(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()


def logprob(weights: str, context: Sequence[int], token: int) -> float:
    """Of `token` after `context`. Exact in float32; differs between weights by more than the canary allows."""
    return -(1 + int(hashed("logprob", weights, tuple(context), token)[:3], 16)) / 1024


def draw(weights: str, context: Sequence[int], seed: int) -> int:
    return int(hashed("token", weights, tuple(context), seed)[:6], 16) % VOCAB


def trained(weights: str, groups: Sequence[TrajectoryGroup]) -> str:
    """The weights after an optimizer step on `groups`."""
    return hashed("step", weights, *(content(group) for group in groups))


def content(group: TrajectoryGroup) -> str:
    return hashed(
        group.group_id,
        *(
            (t.completion_token_ids, t.behaviour_logprobs, t.policy_versions, t.reward)
            for t in group.trajectories
        ),
    )


def run_record(scenario: Scenario) -> RunRecord:
    settings: dict[str, Any] = {
        "name": "simulated",
        "seed": scenario.seed,
        "model": {"id": "simulated"},
        "lora": {"rank": 8, "alpha": 16.0},
        "task": {"kind": "simulated"},
        "sampling": {"group_size": scenario.group_size, "max_tokens": MAX_TOKENS},
        "algorithm": {
            "steps": scenario.steps,
            "groups_per_step": scenario.groups_per_step,
            "max_staleness": scenario.max_staleness,
        },
        "rollout": {"max_model_len": 64, "lease_seconds": 12.0, "chunk_tokens": scenario.chunk_tokens},
    }
    return RunRecord(
        run_id=f"simulated-{scenario.seed}",
        created_at="2026-01-01T00:00:00Z",
        bucketrl_version="0",
        config=RunConfig(**settings),
        model=ModelIdentity(weights_sha256="0" * 64, tokenizer_sha256="0" * 64),
        prompts_per_epoch=scenario.prompts,
        write_id="run",
    )


class Trainer:
    """Implements `learner.parts.Trains`."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.weights = UNTRAINED
        self._sleep = sleep

    def train(
        self, groups: Sequence[TrajectoryGroup], step: int, stopping: Callable[[], bool]
    ) -> dict[str, float]:
        for _ in groups:
            if stopping():
                raise Stopped(f"asked to stop in step {step}")
            self._sleep(0.4)
        self.weights = trained(self.weights, groups)
        lags = [step - 1 - v for group in groups for t in group.trajectories for v in t.policy_versions]
        return {
            "staleness_mean": sum(lags) / len(lags),
            "staleness_max": float(max(lags)),
            "ratio_max": 1.0,
            "grad_norm": 1.0,
            "tokens": float(len(lags)),
            "tokens_per_second": 1.0,
        }


class Publisher:
    """Implements `learner.parts.Publishes`."""

    def __init__(self, store: Store, run: RunRecord, trainer: Trainer, folder: Path) -> None:
        self._store = store
        self._run = run
        self._trainer = trainer
        self._folder = folder

    def publish(self, step: int, epoch: int) -> Published:
        weights = self._trainer.weights
        adapter = {
            "adapter_model.safetensors": weights,
            "adapter_config.json": json.dumps(_adapter_config(self._run)),
        }
        return Published(
            policy=PolicyRef(version=step, files=self._upload(keys.policy(step, epoch), adapter)),
            checkpoint=CheckpointRef(
                step=step, files=self._upload(keys.checkpoint(step, epoch), {"state.safetensors": weights})
            ),
            canary=Canary(
                token_ids=CANARY_TOKENS, logprobs=tuple(canary(weights)), base_logprobs=tuple(canary(BASE))
            ),
        )

    def restore(self, commit: StepRecord) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = artifacts.fetch(self._store, commit.checkpoint.files, Path(name) / "checkpoint")
            self._trainer.weights = (folder / "state.safetensors").read_text()

    def _upload(self, prefix: str, files: dict[str, str]) -> Any:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            for file, text in files.items():
                (Path(name) / file).write_text(text)
            return artifacts.publish(self._store, prefix, Path(name))


def canary(weights: str) -> list[float]:
    return [
        logprob(weights, CANARY_TOKENS[: n + 1], CANARY_TOKENS[n + 1]) for n in range(len(CANARY_TOKENS) - 1)
    ]


def _adapter_config(run: RunRecord) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": run.config.model.id,
        "r": run.config.lora.rank,
        "lora_alpha": run.config.lora.alpha,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
