"""Generators of reasoning-gym, with their own verifiers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bucketrl.tasks.base import Split, TaskError
from bucketrl.tasks.config import Component, ReasoningGymConfig
from bucketrl.tasks.questions import Question
from bucketrl.tasks.splits import GeneratedSplits

FIRST_SEED: dict[Split, int] = {"train": 0, "heldout": 1 << 30}
"""Entry i of a dataset is drawn from seed + i: the splits' ranges must not meet."""
CHUNK = 1000
"""Entries of one dataset object. Some generators make all of theirs at once, and refuse to make many."""
CHUNKS_KEPT = 32

NOT_REPRODUCIBLE = frozenset(
    {
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""These iterate over sets of strings or watch the clock, so that two processes get different entries."""


class ReasoningGymSource:
    """A `QuestionSource` (`tasks.questions`). The reference is the dataset's whole entry."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises TaskError for an unknown dataset, wrong params, or too few different questions."""
        self._config = config
        self._chunks: dict[int, Any] = {}
        self._splits = GeneratedSplits(self._generate, config.train_size, config.heldout_size)

    def __getstate__(self) -> dict[str, Any]:
        """Without the datasets, which are large and made again when they are needed."""
        return {**self.__dict__, "_chunks": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Now, while no completion waits: importing the generators may take longer than a reward may.
        self._dataset("train", 0)

    def size(self, split: Split) -> int:
        return self._splits.size(split)

    def question(self, split: Split, index: int) -> Question:
        return self._splits.question(split, index)

    def verify(self, answer: str, reference: Any) -> float:
        score = float(self._dataset("train", 0).score_answer(answer, reference))
        return score if self._config.partial_credit else float(score >= 1.0)

    def _generate(self, split: Split, ordinal: int) -> Question:
        chunk, position = divmod(ordinal, CHUNK)
        entry = self._dataset(split, chunk)[position]
        return Question(entry["question"], entry)

    def _dataset(self, split: Split, chunk: int) -> Any:
        seed = self._config.seed + FIRST_SEED[split] + chunk * CHUNK
        if seed not in self._chunks:
            while len(self._chunks) >= CHUNKS_KEPT:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[seed] = _create(self._config, seed)
        return self._chunks[seed]


def _create(config: ReasoningGymConfig, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
    except ImportError as error:
        raise TaskError("task.kind reasoning_gym needs a package: pip install 'bucketrl[tasks]'") from error
    for component in config.components:
        _check(component, reasoning_gym.factory.DATASETS)
    with _naming(", ".join(component.dataset for component in config.components)):
        if not config.mixture:
            return reasoning_gym.create_dataset(config.dataset, size=CHUNK, seed=seed, **config.params)
        specs = [DatasetSpec(part.dataset, part.weight, part.params) for part in config.mixture]
        return reasoning_gym.create_dataset("composite", size=CHUNK, seed=seed, datasets=specs)


def _check(component: Component, known: Mapping[str, Any]) -> None:
    name = component.dataset
    if name == "composite":
        raise TaskError(
            "task.dataset: a composite is written as task.mixture, one table for each of its datasets"
        )
    if name not in known:
        raise TaskError(f"task.dataset: reasoning-gym has no {name!r}")
    if name in NOT_REPRODUCIBLE:
        raise TaskError(f"task.dataset: {name!r} gives other questions in every process; choose another")
    with _naming(name):
        known[name][1](size=CHUNK, seed=0, **component.params).validate()


@contextmanager
def _naming(datasets: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise TaskError(f"task.params of {datasets}: {reason}") from error
