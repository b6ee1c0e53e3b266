"""The rollout side of a simulated run: an engine, tasks of one turn and of several, rewards, a tokenizer."""

import asyncio
from pathlib import Path
from typing import Any

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.engine import EngineCapacity, SampledCompletion, SamplingRequest
from bucketrl.simulator.model import BASE, CANARY_TOKENS, canary, draw, hashed, logprob
from bucketrl.tasks.base import FinishReason, Message, Prompt, Reward, Split

TOKEN_S = 0.25
KV_TOKENS, MAX_REQUESTS = 64, 6
STOP = 0
STOP_OFTEN = 10
"""Of 40 tokens, so many end a turn where there are several."""


class Engine:
    """Implements `rollout_worker.engine.Engine`."""

    name = "simulated"
    capacity = EngineCapacity(KV_TOKENS, MAX_REQUESTS)

    def __init__(self, *, turns: bool) -> None:
        self.stop_token_ids = tuple(range(STOP_OFTEN)) if turns else (STOP,)
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
                if token in self.stop_token_ids:
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


class Dialogue(Task):
    """Asks once or twice more: implements `tasks.base.Environment`."""

    tools: tuple[dict[str, Any], ...] = ()

    def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        answer = hashed("respond", *(message["content"] for message in said))
        over = len(said) > 2 or int(answer[:2], 16) % 3 == 0
        return () if over else ({"role": "user", "content": str(int(answer[2:4], 16) % 10)},)

    def score_episode(self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason) -> Reward:
        return self.score(prompt, said[-1]["content"], finish_reason)


class Rewards:
    """The part of RewardPool that a worker uses, without processes."""

    waiting = 0

    def __init__(self, task: Task) -> None:
        self._task = task

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        await asyncio.sleep(0.02)
        return self._task.score(prompt, completion, finish_reason)

    async def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        await asyncio.sleep(0.02)
        assert isinstance(self._task, Dialogue)
        return self._task.respond(prompt, said)

    async def score_episode(
        self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason
    ) -> Reward:
        await asyncio.sleep(0.02)
        assert isinstance(self._task, Dialogue)
        return self._task.score_episode(prompt, said, finish_reason)

    async def close(self) -> None:
        pass


class Tokenizer:
    """One token per digit of a message."""

    eos_token: str | None = "."
    eos_token_id: int | None = STOP
    chat_template: str | None = "<content>"

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> str:
        ends = {"assistant": self.eos_token or "", "user": ""}
        return "".join(message["content"] + ends[message["role"]] for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [100 + int(digit) for digit in text if digit.isdigit()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))
