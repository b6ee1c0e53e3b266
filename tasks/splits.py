"""Train and held-out splits of a generator, disjoint by construction and with random access."""

from collections.abc import Callable

from bucketrl.tasks.base import Split, TaskError
from bucketrl.tasks.questions import Question

TRIES = 64
"""Candidates for one place before the generator counts as having too few different questions."""

Generate = Callable[[Split, int], Question]
"""The candidate at an ordinal in [0, TRIES * size); a pure function. The splits use different seeds."""


class GeneratedSplits:
    """The held-out questions are drawn first, all different; whatever repeats one is never trained on.

    Training question i is the first of the candidates i, i + size, i + 2 size, ... that is not held out, so
    that it costs a draw or two and not the whole split. Training questions may repeat each other.
    """

    def __init__(self, generate: Generate, train_size: int, heldout_size: int) -> None:
        """Raises TaskError if there are not enough different questions."""
        self._generate = generate
        self._train_size = train_size
        heldout: dict[str, Question] = {}
        for ordinal in range(TRIES * heldout_size):
            question = generate("heldout", ordinal)
            heldout.setdefault(question.text, question)
            if len(heldout) == heldout_size:
                break
        else:
            raise TaskError(
                f"task.heldout_size {heldout_size}: the generator has only about {len(heldout)} different "
                "questions; make the split smaller or the questions more varied"
            )
        self._heldout = tuple(heldout.values())
        self._held_out_texts = frozenset(heldout)
        self.question("train", 0)

    def size(self, split: Split) -> int:
        return self._train_size if split == "train" else len(self._heldout)

    def question(self, split: Split, index: int) -> Question:
        """Raises TaskError if nothing is left to train on."""
        if split == "heldout":
            return self._heldout[index]
        for attempt in range(TRIES):
            question = self._generate("train", index + attempt * self._train_size)
            if question.text not in self._held_out_texts:
                return question
        raise TaskError(
            f"task.heldout_size {len(self._heldout)} takes nearly all different questions of the generator; "
            "make the split smaller or the questions more varied"
        )
