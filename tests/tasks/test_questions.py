"""Formatting, scoring and splits of the tasks that are generated."""

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.tasks.base import Prompt, Reward, TaskError
from bucketrl.tasks.load import load_task
from bucketrl.tasks.questions import Question
from bucketrl.tasks.splits import GeneratedSplits

ARITHMETIC: dict[str, Any] = {"kind": "arithmetic", "train_size": 500, "heldout_size": 50}


def solve(prompt: Prompt) -> str:
    """The sum in the last message, as Python adds it up."""
    expression = prompt.messages[-1]["content"].replace("+", " +").replace("-", " -")
    return str(sum(int(term) for term in expression.split()))


@given(
    st.integers(2, 5),
    st.integers(20, 10**6),
    st.sampled_from(["+", "-", "+-"]),
    st.integers(0, 2**29),
    st.integers(0, 99),
)
@settings(max_examples=50)
def test_arithmetic_references_are_right(
    terms: int, most: int, operators: str, seed: int, index: int
) -> None:
    task = load_task(
        {
            "kind": "arithmetic",
            "terms": terms,
            "max_operand": most,
            "operators": operators,
            "seed": seed,
            "train_size": 100,
            "heldout_size": 10,
        }
    )
    prompt = task.prompt("train", index)
    assert prompt.reference == solve(prompt)
    assert task.score(prompt, solve(prompt), "stop").total == 1.0
    assert task.score(prompt, solve(prompt) + "1", "stop").total == 0.0


def test_messages_are_system_examples_then_the_templated_question() -> None:
    task = load_task(
        ARITHMETIC
        | {
            "system": "Be brief.",
            "template": "{question} = ?",
            "few_shot": [{"question": "1+1", "answer": "It is 2"}],
        }
    )
    *prefix, last = task.prompt("train", 3).messages
    assert prefix == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1 = ?"},
        {"role": "assistant", "content": "It is 2"},
    ]
    assert last["role"] == "user"
    assert last["content"].endswith(" = ?")


def test_a_completion_that_was_cut_off_earns_nothing() -> None:
    task = load_task(ARITHMETIC)
    prompt = task.prompt("train", 0)
    right = solve(prompt)
    assert task.score(prompt, right, "stop") == Reward(1.0, {"correct": 1, "finished": 1, "answered": 1})
    assert task.score(prompt, right, "length") == Reward(0.0, {"correct": 0, "finished": 0, "answered": 1})
    assert task.score(prompt, "", "stop") == Reward(0.0, {"correct": 0, "finished": 1, "answered": 0})


def test_the_same_settings_give_the_same_prompts() -> None:
    first, second = load_task(ARITHMETIC), load_task(dict(ARITHMETIC))
    for split in ("train", "heldout"):
        assert [first.prompt(split, i) for i in range(50)] == [second.prompt(split, i) for i in range(50)]
    other = load_task(ARITHMETIC | {"seed": 1})
    assert [first.prompt("train", i) for i in range(50)] != [other.prompt("train", i) for i in range(50)]


@pytest.mark.parametrize("index", [-1, 500])
def test_an_index_outside_the_split_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        load_task(ARITHMETIC).prompt("train", index)


@given(st.integers(0, 2**29), st.integers(10, 60))
@settings(max_examples=20)
def test_splits_are_disjoint_even_where_questions_are_few(seed: int, heldout_size: int) -> None:
    """121 sums exist, and the training split draws 300 times from them."""
    task = load_task(
        {
            "kind": "arithmetic",
            "max_operand": 10,
            "train_size": 300,
            "heldout_size": heldout_size,
            "seed": seed,
        }
    )
    trained = {task.prompt("train", i).messages[-1]["content"] for i in range(300)}
    held_out = [task.prompt("heldout", i).messages[-1]["content"] for i in range(heldout_size)]
    assert len(set(held_out)) == heldout_size
    assert trained.isdisjoint(held_out)


def test_a_generator_with_nothing_left_to_train_on_is_an_error() -> None:
    with pytest.raises(TaskError, match="heldout_size 3"):
        GeneratedSplits(lambda split, i: Question(f"q{i % 3}", "a"), train_size=5, heldout_size=3)


def test_a_task_is_picklable() -> None:
    task = load_task(ARITHMETIC)
    copy = pickle.loads(pickle.dumps(task))
    prompt = task.prompt("heldout", 7)
    assert copy.prompt("heldout", 7) == prompt
    assert copy.score(prompt, solve(prompt), "stop").total == 1.0
