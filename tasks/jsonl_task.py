"""Question and answer rows from a JSONL file."""

import hashlib
import json
import logging
from typing import Any

import fsspec

from bucketrl.tasks.answers import same_number, same_text
from bucketrl.tasks.base import Split, TaskError
from bucketrl.tasks.code_tests import CallTests, OutputTests, parse_tests, share_passed
from bucketrl.tasks.config import JsonlConfig
from bucketrl.tasks.questions import Question
from bucketrl.tasks.sandbox import Limits


class JsonlSource:
    """A `QuestionSource` (`tasks.questions`). Rows that repeat a held-out question are in no split."""

    def __init__(self, config: JsonlConfig) -> None:
        """Reads the whole file. Raises TaskError that names the file or the row."""
        self._config = config
        rows = _read(config)
        texts = sorted(
            {row.text for row in rows},
            key=lambda text: hashlib.sha256(f"{config.seed}/{text}".encode()).digest(),
        )
        if config.heldout_size >= len(texts):
            raise TaskError(
                f"task.heldout_size {config.heldout_size} leaves nothing to train on: {config.path} has "
                f"{len(texts)} different questions"
            )
        by_text = {row.text: row for row in reversed(rows)}
        held_out = texts[: config.heldout_size]
        self._questions: dict[Split, tuple[Question, ...]] = {
            "train": tuple(row for row in rows if row.text not in set(held_out)),
            "heldout": tuple(by_text[text] for text in held_out),
        }

    def size(self, split: Split) -> int:
        return len(self._questions[split])

    def question(self, split: Split, index: int) -> Question:
        return self._questions[split][index]

    def verify(self, answer: str, reference: Any) -> float:
        match self._config.verifier:
            case "math_verify":
                return float(same_mathematics(answer, reference))
            case "number":
                return float(same_number(answer, reference))
            case "exact":
                return float(same_text(answer, reference))
            case "python_tests":
                partial = self._config.partial_credit
                limits = Limits(**self._config.sandbox.model_dump())
                share = share_passed(answer, reference, limits, stop_at_failure=not partial)
                return share if partial else float(share == 1.0)


def same_mathematics(answer: str, reference: str) -> bool:
    """math-verify's judgement. May take for ever on a hostile answer: the caller bounds its time.

    math-verify's own limit is off: it uses SIGALRM, which works in the main thread only and turns a slow
    answer into a wrong one.
    """
    import math_verify

    # It warns in every process that its limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold, target = (math_verify.parse(_as_latex(text), parsing_timeout=None) for text in (reference, answer))
    return bool(math_verify.verify(gold, target, timeout_seconds=None))


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _read(config: JsonlConfig) -> list[Question]:
    try:
        with fsspec.open(config.path, "rb") as file:
            data: bytes = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise TaskError(f"task.path {config.path}: cannot read it ({error})") from error
    if config.sha256 and hashlib.sha256(data).hexdigest() != config.sha256:
        raise TaskError(
            f"task.sha256: {config.path} has other contents; use the file that the run was created with"
        )
    return [
        _row(line, f"{config.path} line {number}", config)
        for number, line in enumerate(data.splitlines(), start=1)
        if line.strip()
    ]


def _row(line: bytes, where: str, config: JsonlConfig) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a {type(row).__name__}, not an object")
    tests = config.verifier == "python_tests"
    for field, name in (("prompt_field", config.prompt_field), ("answer_field", config.answer_field)):
        kinds = (list, dict, str) if tests and field == "answer_field" else (str, int, float)
        if not isinstance(row.get(name), kinds):
            raise TaskError(f"{where}: no text or number in {name!r}; task.{field} names the field")
    text = str(row[config.prompt_field])
    if tests:
        return Question(text, row[config.answer_field] if config.reward else _tests(row, where, config))
    reference = str(row[config.answer_field])
    if config.verifier == "number" and not config.reward:
        _check_number(reference, where)
    return Question(text, reference)


def _tests(row: dict[str, Any], where: str, config: JsonlConfig) -> CallTests | OutputTests:
    try:
        return parse_tests(row[config.answer_field])
    except ValueError as error:
        raise TaskError(f"{where}: {config.answer_field!r}: {error}") from None


def _check_number(reference: str, where: str) -> None:
    try:
        same_number("0", reference)
    except (ValueError, ZeroDivisionError):
        raise TaskError(f"{where}: answer {reference!r} is not a number; use another task.verifier") from None
