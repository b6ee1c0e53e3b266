"""A model that can be judged: its weights are a digest of everything that it was trained on.

Each token and its log-probability follow from the weights, the context and a seed. So it shows from a
trajectory alone which weights really sampled a token, and from an adapter which batches really made it.
"""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bucketrl.bucket import artifacts, keys
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.records import Canary, CheckpointRef, ModelIdentity, PolicyRef, RunRecord, StepRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner.parts import Published, Stopped
from bucketrl.rollout_worker.engine import SampledCompletion, SamplingRequest
from bucketrl.simulator.scenario import Scenario
from bucketrl.tasks.base import FinishReason, Prompt, Reward, Split

CANARY_TOKENS = tuple(range(6))
UNTRAINED = "untrained"
BASE = "base"
TOKEN_S = 0.25
VOCAB = 40
MAX_TOKENS = 6
_STOP = 0


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
        "rollout": {"max_model_len": 64, "lease_seconds": 12.0},
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


class Engine:
    """Implements `rollout_worker.engine.Engine`."""

    name = "simulated"

    def __init__(self) -> None:
        self._weights: dict[int, str] = {}
        self._cut: set[str] = set()
        self._running: set[str] = set()

    async def start(self) -> None:
        await asyncio.sleep(1.0)

    async def add_adapter(self, version: int, folder: Path) -> None:
        try:
            self._weights[version] = (folder / "adapter_model.safetensors").read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"adapter cannot be read: {error}") from None
        await asyncio.sleep(0.1)

    async def remove_adapter(self, version: int) -> None:
        del self._weights[version]

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        weights = self._weights[request.policy_version]
        context = [*request.prompt_token_ids, *request.prior]
        tokens: list[int] = []
        logprobs: list[float] = []
        finish: str = "length"
        self._running.add(request.request_id)
        try:
            while len(tokens) < request.max_tokens:
                await asyncio.sleep(TOKEN_S)
                if request.request_id in self._cut:
                    finish = "abort"
                    break
                token = draw(weights, context, request.seed)
                logprobs.append(logprob(weights, context, token))
                tokens.append(token)
                context.append(token)
                if token == _STOP:
                    finish = "stop"
                    break
        finally:
            self._running.discard(request.request_id)
            self._cut.discard(request.request_id)
        return SampledCompletion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            policy_versions=(request.policy_version,) * len(tokens),
            finish_reason=finish,  # type: ignore[arg-type]
        )

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._cut.add(request_id)

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        assert token_ids == CANARY_TOKENS
        return canary(BASE if version is None else self._weights[version])

    async def close(self) -> None:
        self._weights.clear()


class Task:
    """Prompt n is the number n. The reward differs within most groups."""

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts

    def size(self, split: Split) -> int:
        return self._prompts

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(index, ({"role": "user", "content": str(index)},), reference=index)

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        score = float(int(hashed("reward", completion)[:2], 16) % 4)
        return Reward(score, {"correct": float(score > 0)})


class Rewards:
    """The part of RewardPool that a worker uses, without processes."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        await asyncio.sleep(0.02)
        return self._task.score(prompt, completion, finish_reason)

    async def close(self) -> None:
        pass


class Tokenizer:
    """One token per digit of the prompt."""

    eos_token_id: int | None = _STOP
    chat_template: str | None = "<content>"

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        return "".join(message["content"] for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [100 + int(digit) for digit in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))
