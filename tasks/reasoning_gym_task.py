"""Generators of reasoning-gym, with their own verifiers."""

from typing import Any

from bucketrl.tasks.base import Split, TaskError
from bucketrl.tasks.config import ReasoningGymConfig
from bucketrl.tasks.questions import Question
from bucketrl.tasks.splits import TRIES, GeneratedSplits

HELDOUT_SEED_OFFSET = 1 << 30
"""Entry i of a dataset is drawn from seed + i: the splits' ranges must not meet."""


class ReasoningGymSource:
    """A `QuestionSource` (`tasks.questions`). The reference is the dataset's whole entry."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises TaskError for an unknown dataset, wrong params, or too few different questions."""
        self._datasets: dict[Split, Any] = {
            "train": _create(config, config.train_size, config.seed),
            "heldout": _create(config, config.heldout_size, config.seed + HELDOUT_SEED_OFFSET),
        }
        self._splits = GeneratedSplits(self._generate, config.train_size, config.heldout_size)

    def size(self, split: Split) -> int:
        return self._splits.size(split)

    def question(self, split: Split, index: int) -> Question:
        return self._splits.question(split, index)

    def verify(self, answer: str, reference: Any) -> float:
        return float(self._datasets["train"].score_answer(answer, reference))

    def _generate(self, split: Split, ordinal: int) -> Question:
        entry = self._datasets[split][ordinal]
        return Question(entry["question"], entry)


def _create(config: ReasoningGymConfig, size: int, seed: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise TaskError("task.kind reasoning_gym needs a package: pip install 'bucketrl[tasks]'") from error
    if config.dataset not in reasoning_gym.factory.DATASETS:
        raise TaskError(f"task.dataset: reasoning-gym has no {config.dataset!r}")
    try:
        return reasoning_gym.create_dataset(config.dataset, size=TRIES * size, seed=seed, **config.params)
    except (TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise TaskError(f"task.params of {config.dataset}: {reason}") from error
