"""Sums of random integers, generated here: needs no package and suits a model with a few thousand weights."""

import random
from typing import Any

from bucketrl.tasks.answers import same_number
from bucketrl.tasks.base import Split
from bucketrl.tasks.config import ArithmeticConfig
from bucketrl.tasks.questions import Question
from bucketrl.tasks.splits import GeneratedSplits


class ArithmeticSource:
    """A `QuestionSource` (`tasks.questions`): `47+8-31`, answered by the integer."""

    def __init__(self, config: ArithmeticConfig) -> None:
        """Raises TaskError if there are too few different sums."""
        self._config = config
        self._splits = GeneratedSplits(self._generate, config.train_size, config.heldout_size)

    def size(self, split: Split) -> int:
        return self._splits.size(split)

    def question(self, split: Split, index: int) -> Question:
        return self._splits.question(split, index)

    def verify(self, answer: str, reference: Any) -> float:
        return float(same_number(answer, reference))

    def _generate(self, split: Split, ordinal: int) -> Question:
        config = self._config
        return draw_sum(
            random.Random(f"{config.seed}/{split}/{ordinal}"),
            terms=config.terms,
            max_operand=config.max_operand,
            operators=config.operators,
        )


def draw_sum(rng: random.Random, *, terms: int, max_operand: int, operators: str) -> Question:
    """Operands are uniform in [0, max_operand], operators uniform in `operators`."""
    total = rng.randint(0, max_operand)
    text = str(total)
    for _ in range(terms - 1):
        operator, operand = rng.choice(operators), rng.randint(0, max_operand)
        text += f"{operator}{operand}"
        total += operand if operator == "+" else -operand
    return Question(text, str(total))
