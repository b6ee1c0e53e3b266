"""JSONL tasks: splits, verifiers, rows that are refused."""

import hashlib
import json
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from bucketrl.tasks.base import Prompt, TaskError
from bucketrl.tasks.jsonl_task import same_mathematics
from bucketrl.tasks.load import load_task


def write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(count)]


def settings_of(path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "jsonl", "path": str(path), "heldout_size": 5, "verifier": "number", **more}


def test_every_question_is_in_one_split_and_train_keeps_the_order(tmp_path: Path) -> None:
    task = load_task(settings_of(write(tmp_path, rows(30))))
    train = [task.prompt("train", i).messages[-1]["content"] for i in range(task.size("train"))]
    held_out = [task.prompt("heldout", i).messages[-1]["content"] for i in range(task.size("heldout"))]
    assert len(held_out) == 5
    assert sorted(train + held_out) == sorted(row["question"] for row in rows(30))
    assert train == [row["question"] for row in rows(30) if row["question"] in train]


def test_the_split_does_not_depend_on_the_order_of_the_file(tmp_path: Path) -> None:
    first = load_task(settings_of(write(tmp_path, rows(30))))
    second = load_task(settings_of(write(tmp_path, rows(30)[::-1])))
    assert [first.prompt("heldout", i) for i in range(5)] == [second.prompt("heldout", i) for i in range(5)]


def test_a_repeated_question_never_crosses_the_splits(tmp_path: Path) -> None:
    task = load_task(settings_of(write(tmp_path, rows(10) * 3)))
    train = {task.prompt("train", i).messages[-1]["content"] for i in range(task.size("train"))}
    held_out = {task.prompt("heldout", i).messages[-1]["content"] for i in range(5)}
    assert task.size("train") == 15
    assert train.isdisjoint(held_out)


@pytest.mark.parametrize(
    ("verifier", "reference", "right", "wrong"),
    [
        ("number", "0.5", "1/2", "0.6"),
        ("exact", "Paris", " Paris ", "paris"),
        ("math_verify", r"\frac{1}{2}", "0.5", "0.6"),
        ("math_verify", "12", "$12$", "13"),
        ("math_verify", "x^2 + 2x + 1", "(x+1)^2", "(x+2)^2"),
    ],
)
def test_verifiers(tmp_path: Path, verifier: str, reference: str, right: str, wrong: str) -> None:
    path = write(tmp_path, [{"q": "a", "a": reference}, {"q": "b", "a": reference}])
    task = load_task(settings_of(path, verifier=verifier, heldout_size=1, prompt_field="q", answer_field="a"))
    prompt = pickle.loads(pickle.dumps(task)).prompt("train", 0)
    assert task.score(prompt, right, "stop").parts["correct"] == 1.0
    assert task.score(prompt, right, "length").parts["correct"] == 0.0
    assert task.score(prompt, wrong, "stop").total == 0.0


def test_math_verify_sets_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own time limit would be silently wrong outside the main thread, and would count slow as wrong."""
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    assert same_mathematics("0.5", r"\frac{1}{2}")
    assert not same_mathematics("0.6", r"\frac{1}{2}")
    assert alarms == []


def test_math_verify_works_outside_the_main_thread() -> None:
    outcomes: list[bool] = []
    thread = threading.Thread(target=lambda: outcomes.append(same_mathematics("0.5", r"\frac{1}{2}")))
    thread.start()
    thread.join()
    assert outcomes == [True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a list"),
        ('{"question": "x"}', "line 2: no text or number in 'answer'"),
        ('{"answer": "x"}', "line 2: no text or number in 'question'"),
        ('{"question": "x", "answer": "twelve"}', "line 2: answer 'twelve' is not a number"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(rows(1)[0]) + "\n" + line + "\n")
    with pytest.raises(TaskError, match=message.replace("[", r"\[")) as caught:
        load_task(settings_of(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_small_file_and_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.path"):
        load_task(settings_of(tmp_path / "none.jsonl"))
    path = write(tmp_path, rows(5))
    with pytest.raises(TaskError, match=r"task\.heldout_size 5 leaves nothing"):
        load_task(settings_of(path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    load_task(settings_of(path, heldout_size=1, sha256=digest))
    path.write_text(path.read_text() + "\n")
    with pytest.raises(TaskError, match=r"task\.sha256"):
        load_task(settings_of(path, heldout_size=1, sha256=digest))


REWARD_MODULE = """
def by_length(prompt_messages, completion, reference, finish_reason):
    assert prompt_messages[-1]["role"] == "user"
    return {"total": -len(completion), "right": completion == reference, "cut": finish_reason == "length"}

def as_number(prompt_messages, completion, reference, finish_reason):
    return int(completion == reference)

def wrong(prompt_messages, completion, reference, finish_reason):
    return "good" if completion else {"right": 1.0}
"""


def score_with(function: str, path: Path, completion: str) -> Any:
    task = load_task(settings_of(path, reward=f"my_rewards_for_tests:{function}"))
    prompt: Prompt = task.prompt("train", 0)
    return pickle.loads(pickle.dumps(task)).score(prompt, completion, "stop")


def test_a_reward_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_tests.py").write_text(REWARD_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path, rows(10))
    scored = score_with("by_length", path, "abc")
    assert scored.total == -3.0
    assert scored.parts == {"right": 0.0, "cut": 0.0, "finished": 1.0}
    assert score_with("as_number", path, "abc").total == 0.0
    for completion in ("abc", ""):
        with pytest.raises(TypeError, match="total"):
            score_with("wrong", path, completion)
