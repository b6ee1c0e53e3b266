"""A task made of question and answer pairs: the source differs, formatting and scoring are the same."""

from dataclasses import dataclass
from typing import Any, Protocol

from bucketrl.tasks.answers import AnswerRule, extract_answer
from bucketrl.tasks.base import FinishReason, Prompt, Reward, Split
from bucketrl.tasks.config import CommonConfig
from bucketrl.tasks.custom import call_reward


@dataclass(frozen=True, slots=True)
class Question:
    """One problem."""

    text: str
    reference: Any


class QuestionSource(Protocol):
    """Where questions come from and what accepts their answers. Picklable."""

    def size(self, split: Split) -> int: ...

    def question(self, split: Split, index: int) -> Question:
        """`index` is within the split."""

    def verify(self, answer: str, reference: Any) -> float:
        """Score in [0, 1]; 1 is a right answer."""


class QuestionTask:
    """A `Task` (`tasks.base`)."""

    def __init__(self, source: QuestionSource, config: CommonConfig) -> None:
        self._source = source
        self._template = config.template
        self._reward = config.reward
        self._answer_rule: AnswerRule = config.answer_rule
        self._prefix: tuple[dict[str, str], ...] = (
            ({"role": "system", "content": config.system},) if config.system else ()
        )
        for example in config.few_shot:
            self._prefix += (
                self._user_message(example.question),
                {"role": "assistant", "content": example.answer},
            )

    def size(self, split: Split) -> int:
        return self._source.size(split)

    def prompt(self, split: Split, index: int) -> Prompt:
        if not 0 <= index < self.size(split):
            raise IndexError(f"{split} prompt {index} is outside [0, {self.size(split)})")
        question = self._source.question(split, index)
        return Prompt(index, (*self._prefix, self._user_message(question.text)), question.reference)

    def answer(self, completion: str) -> str | None:
        """What the answer rule finds."""
        return extract_answer(self._answer_rule, completion)

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        """Total is the verifier's score of the answer, 0 for a completion that was cut off.

        Parts: `correct` (right and finished), `finished`, `answered` (the answer rule found something).
        With a reward function, total and parts are its own, and `finished`.
        """
        finished = float(finish_reason == "stop")
        if self._reward:
            custom = call_reward(self._reward, prompt, completion, finish_reason)
            return Reward(custom.total, {"finished": finished, **custom.parts})
        answer = self.answer(completion)
        score = 0.0 if answer is None else finished * self._source.verify(answer, prompt.reference)
        parts = {
            "correct": float(score >= 1.0),
            "finished": finished,
            "answered": float(answer is not None),
        }
        return Reward(score, parts)

    def _user_message(self, question: str) -> dict[str, str]:
        return {"role": "user", "content": self._template.replace("{question}", question)}
