"""What the learner's tests are made of: a tiny random model, a run, trajectories sampled by transformers."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bucketrl.bucket import keys, trajectories
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import ModelIdentity, RunRecord
from bucketrl.bucket.store import ObjectInfo, Store
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.publish import save_adapter

CPU = torch.device("cpu")
VOCAB = 64
END = 1
PROMPTS_PER_EPOCH = 10
RUN_ID = "run-of-the-tests"

DEFAULTS: dict[str, Any] = {
    "name": "tests",
    "seed": 7,
    "model": {"id": "tiny-random"},
    "lora": {"rank": 8, "alpha": 16.0},
    "task": {"kind": "arithmetic"},
    "sampling": {"group_size": 4, "max_tokens": 6, "temperature": 0.8},
    "algorithm": {"steps": 4, "groups_per_step": 2, "max_staleness": 4, "learning_rate": 5e-3},
    "rollout": {"max_model_len": 32},
    "learner": {"tokens_per_microbatch": 40},
}


def make_config(**sections: Any) -> RunConfig:
    """DEFAULTS, with some keys of some sections replaced."""
    merged = {
        name: value | sections.get(name, {}) if isinstance(value, dict) else sections.get(name, value)
        for name, value in DEFAULTS.items()
    }
    return RunConfig.model_validate(merged)


def make_run(config: RunConfig | None = None) -> RunRecord:
    return RunRecord(
        run_id=RUN_ID,
        created_at="2026-01-01T00:00:00Z",
        bucketrl_version="0",
        config=config or make_config(),
        model=ModelIdentity(weights_sha256="0" * 64, tokenizer_sha256="0" * 64),
        prompts_per_epoch=PROMPTS_PER_EPOCH,
        write_id="run",
    )


def save_tiny_model(folder: Path, **changes: Any) -> Path:
    """A seeded random Qwen3 of 0.1 M parameters."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).save_pretrained(folder)
    return folder


def stock_model(model_folder: Path, adapter_folder: Path) -> Any:
    """Base and adapter as transformers and PEFT load them: independent of the learner's own forward."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
    return PeftModel.from_pretrained(base, str(adapter_folder)).eval()


def perturbed(folder: Path, config: RunConfig) -> PolicyModel:
    """Both LoRA factors are non-zero, so that both have gradients."""
    policy = PolicyModel.load(folder, config, CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def never() -> bool:
    """Whether a step is to stop."""
    return False


def count_even(tokens: Sequence[int]) -> float:
    """A reward that a policy can raise and that differs within most groups."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


@torch.no_grad()
def untrained_groups(model_folder: Path, folder: Path, count: int) -> list[TrajectoryGroup]:
    """`count` groups of the adapter of version 0, which is written into the empty `folder`."""
    config = make_config()
    save_adapter(folder, PolicyModel.load(model_folder, config, CPU))
    stock = stock_model(model_folder, folder)
    return [sample_group(stock, ordinal, config=config, version=0) for ordinal in range(count)]


def sample_group(
    model: Any,
    ordinal: int,
    *,
    config: RunConfig,
    version: int,
    reward: Callable[[Sequence[int]], float] = count_even,
    attempt: str = "worker-0-1",
) -> TrajectoryGroup:
    """Draws a group with `model`, as a rollout worker would; deterministic in `ordinal`."""
    sampling = config.sampling
    generator = torch.Generator().manual_seed(ordinal)
    prompt = tuple(torch.randint(2, VOCAB, (3 + ordinal % 4,), generator=generator).tolist())
    ids = torch.tensor([prompt] * sampling.group_size)
    logprobs = torch.empty(sampling.group_size, 0)
    for _ in range(sampling.max_tokens):
        log_softmax = torch.log_softmax(model(input_ids=ids).logits[:, -1] / sampling.temperature, dim=-1)
        drawn = torch.multinomial(log_softmax.exp(), 1, generator=generator)
        ids = torch.cat([ids, drawn], dim=1)
        logprobs = torch.cat([logprobs, log_softmax.gather(1, drawn)], dim=1)
    completions = [_until_end(row) for row in ids[:, len(prompt) :].tolist()]
    return make_group(
        ordinal,
        prompt=prompt,
        completions=completions,
        logprobs=[row[: len(c)] for row, c in zip(logprobs.tolist(), completions, strict=True)],
        rewards=[reward(completion) for completion in completions],
        version=version,
        attempt=attempt,
    )


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def make_group(
    ordinal: int,
    *,
    rewards: Sequence[float],
    prompt: Sequence[int] = (5, 6, 7),
    completions: Sequence[Sequence[int]] | None = None,
    logprobs: Sequence[Sequence[float]] | None = None,
    version: int = 0,
    attempt: str = "worker-0-1",
) -> TrajectoryGroup:
    """A group by hand; by default each completion is three tokens."""
    group_id = str(GroupId.from_ordinal(ordinal, PROMPTS_PER_EPOCH))
    completions = completions or [(8 + i, 9, 10) for i in range(len(rewards))]
    logprobs = logprobs or [[-1.0] * len(completion) for completion in completions]
    trajectories = [
        Trajectory(
            sample=i,
            prompt_token_ids=tuple(prompt),
            completion_token_ids=tuple(completion),
            behaviour_logprobs=tuple(logprobs[i]),
            policy_versions=(version,) * len(completion),
            loss_mask=(True,) * len(completion),
            reward=rewards[i],
            reward_parts={"correct": float(rewards[i] > 0.5)},
            finish_reason="stop" if completion[-1] == END else "length",
            seed=i,
            started_at="2026-01-01T00:00:00Z",
            seconds=0.1,
            completion_text="",
        )
        for i, completion in enumerate(completions)
    ]
    return TrajectoryGroup(
        run_id=RUN_ID,
        group_id=group_id,
        attempt=attempt,
        worker_id="worker-0",
        engine="tests",
        prompt_text="",
        trajectories=tuple(trajectories),
    )


def replace_first(group: TrajectoryGroup, **changes: Any) -> TrajectoryGroup:
    """`group` with fields of its first trajectory changed."""
    first, *others = group.trajectories
    return dataclasses.replace(group, trajectories=(dataclasses.replace(first, **changes), *others))


def put_group(store: Store, group: TrajectoryGroup) -> str:
    """Uploads `group` as a rollout worker does; returns its key."""
    key = keys.trajectory(GroupId.parse(group.group_id), group.attempt)
    store.put(key, trajectories.encode(group))
    return key


class Crash(BaseException):
    """The process dies here: nothing may catch it."""


Trigger = Callable[[str, str, bytes], bool]
"""Operation, key, data (empty for files): whether the event is this one."""


class EventStore:
    """A store that does something before or after the first write that `trigger` recognises."""

    def __init__(
        self, inner: Store, trigger: Trigger, action: Callable[[], None], *, after: bool = False
    ) -> None:
        self._inner = inner
        self._trigger = trigger
        self._action = action
        self._after = after
        self.fired = False
        self.url = inner.url
        self.tier = inner.tier

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, data, lambda: self._inner.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._write("create", key, data, lambda: self._inner.create(key, data))

    def put_file(self, key: str, path: Path) -> None:
        self._write("put_file", key, b"", lambda: self._inner.put_file(key, path))

    def _write(self, operation: str, key: str, data: bytes, write: Callable[[], None]) -> None:
        now = not self.fired and self._trigger(operation, key, data)
        self.fired = self.fired or now
        if now and not self._after:
            self._action()
        write()
        if now and self._after:
            self._action()

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_file(self, key: str, path: Path) -> None:
        self._inner.get_file(key, path)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, start_after)

    def delete(self, keys: Iterable[str]) -> None:
        self._inner.delete(keys)

    def sweep(self, older_than_s: float) -> int:
        return self._inner.sweep(older_than_s)


def die() -> None:
    raise Crash
