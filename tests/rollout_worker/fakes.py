"""Hand-written stand-ins: a task, its rewards, a tokenizer, a store; and looking at what a worker did."""

import asyncio
from collections.abc import Callable
from typing import Any

from bucketrl.bucket import keys
from bucketrl.bucket.errors import StoreError
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.bucket.trajectories import TrajectoryGroup, decode
from bucketrl.tasks.base import FinishReason, Prompt, Reward, Split

from .fake_run import PROMPTS


class FakeTask:
    """Prompt n asks "n"; the reward is 1 for an even number of characters."""

    def size(self, split: Split) -> int:
        return PROMPTS if split == "train" else 20

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(index, ({"role": "user", "content": f"{split} {index}"},), reference=index)

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        even = float(len(completion) % 2 == 0)
        return Reward(even, {"correct": even, "finished": float(finish_reason == "stop")})


class FakeRewards:
    """RewardPool without processes."""

    waiting = 0

    def __init__(self, task: FakeTask) -> None:
        self._task = task

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        await asyncio.sleep(0)
        return self._task.score(prompt, completion, finish_reason)

    async def close(self) -> None:
        await asyncio.sleep(0)


class FakeTokenizer:
    """One token per character. The template marks the turns."""

    eos_token: str | None = ">"
    eos_token_id: int | None = 0
    chat_template: str | None = "<content>"

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        assert kwargs == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{message['content']}>" for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(97 + token % 26) for token in token_ids)


class FlakyStore(MemoryStore):
    """Fails puts of trajectories and partial groups while `broken`."""

    def __init__(self) -> None:
        super().__init__("flaky")
        self.broken = False
        self.failures = 0

    def put(self, key: str, data: bytes) -> None:
        if self.broken and key.startswith((keys.TRAJECTORY_PREFIX, keys.PARTIAL_PREFIX)):
            self.failures += 1
            raise StoreError(f"{key}: 503")
        super().put(key, data)


def uploaded_groups(store: Store, run: RunRecord, max_version: int) -> list[TrajectoryGroup]:
    """Every trajectory object of the store, decoded as the learner does."""
    groups = []
    for info in store.list(keys.TRAJECTORY_PREFIX):
        parsed = keys.parse_trajectory(info.key)
        assert parsed is not None, info.key
        group_id, attempt = parsed
        groups.append(
            decode(
                store.get(info.key),
                run_id=run.run_id,
                group_id=str(group_id),
                attempt=attempt,
                max_version=max_version,
            )
        )
    return groups


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for a condition that other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is anything, also what threads change
            await asyncio.sleep(0.005)
