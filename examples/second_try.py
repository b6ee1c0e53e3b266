"""An environment of one's own: who answers a sum wrongly is asked once more.

PYTHONPATH=examples bucketrl run examples/second_try.toml
"""

from typing import Any

from bucketrl.tasks.base import FinishReason, Message, Prompt, Reward, Split
from bucketrl.tasks.load import load_task


class SecondTry:
    """Implements `bucketrl.tasks.base.Environment`. All it remembers is in the conversation."""

    def __init__(self, max_operand: int) -> None:
        self.tools: tuple[dict[str, Any], ...] = ()
        self._sums = load_task({"kind": "arithmetic", "terms": 2, "max_operand": max_operand})

    def size(self, split: Split) -> int:
        return self._sums.size(split)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._sums.prompt(split, index)

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        return self._sums.score(prompt, completion, finish_reason)

    def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        right = self.score(prompt, said[-1]["content"], "stop").total == 1.0
        return () if right or len(said) > 1 else (prompt.messages[-1],)

    def score_episode(self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason) -> Reward:
        last = self.score(prompt, said[-1]["content"], finish_reason)
        tries = len(said) // 2 + 1
        return Reward(last.total / tries, {**last.parts, "tries": float(tries)})
