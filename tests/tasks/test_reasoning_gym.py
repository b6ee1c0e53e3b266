"""reasoning-gym tasks: their own verifiers behind every answer rule."""

import json
import pickle
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

from bucketrl.tasks.base import Task, TaskError
from bucketrl.tasks.load import load_task

WRAPPED = {
    "whole": "{}",
    "line": "Let me think.\n{}\n",
    "first_number": "{} is the result",
    "last_number": "The result is {}.",
    "boxed": "So \\boxed{{{}}}.",
    "tag": "Because. <answer>{}</answer>",
}
TEXT_RULES = ("whole", "line", "boxed", "tag")
NUMBER_DATASETS = (
    "chain_sum",
    "basic_arithmetic",
    "gcd",
    "lcm",
    "products",
    "letter_counting",
    "leg_counting",
)
TEXT_DATASETS = ("spell_backward", "number_sorting", "word_sorting", "base_conversion")


def settings_of(dataset: str, **more: Any) -> dict[str, Any]:
    return {"kind": "reasoning_gym", "dataset": dataset, "train_size": 50, "heldout_size": 10, **more}


def check(dataset: str, rule: str) -> None:
    task = load_task(settings_of(dataset, answer_rule=rule))
    for index in range(5):
        prompt = task.prompt("train", index)
        answer = prompt.reference["answer"]
        if "\n" in answer and rule == "line":
            continue
        right = task.score(prompt, WRAPPED[rule].format(answer), "stop")
        assert right.total == right.parts["correct"] == 1.0, (dataset, rule, answer)
        assert task.score(prompt, WRAPPED[rule].format(answer), "length").total == 0.0
        assert task.score(prompt, WRAPPED[rule].format("9876501234"), "stop").parts["correct"] == 0.0


def test_chain_sum_is_scored_by_its_own_verifier() -> None:
    check("chain_sum", "last_number")


@pytest.mark.slow
@pytest.mark.parametrize("rule", WRAPPED)
@pytest.mark.parametrize("dataset", NUMBER_DATASETS)
def test_numbers_are_scored_behind_every_rule(dataset: str, rule: str) -> None:
    check(dataset, rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("dataset", TEXT_DATASETS)
def test_texts_are_scored_behind_every_rule_for_text(dataset: str, rule: str) -> None:
    check(dataset, rule)


def test_prompts_are_stable_disjoint_and_picklable() -> None:
    """243 one-digit chains at most exist for this setting."""
    settings = settings_of(
        "chain_sum",
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        train_size=400,
        heldout_size=60,
    )
    task = load_task(settings)
    copy = pickle.loads(pickle.dumps(task))
    train = [task.prompt("train", i).messages[-1]["content"] for i in range(400)]
    assert train == [copy.prompt("train", i).messages[-1]["content"] for i in range(400)]
    held_out = {task.prompt("heldout", i).messages[-1]["content"] for i in range(60)}
    assert len(held_out) == 60
    assert held_out.isdisjoint(train)


def test_a_reward_process_can_score_as_soon_as_it_has_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward has a time limit, which an import would use up."""
    task = load_task(settings_of("chain_sum"))
    prompt = task.prompt("train", 0)
    copy = pickle.loads(pickle.dumps(task))
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert copy.score(prompt, prompt.reference["answer"], "stop").total == 1.0


@pytest.mark.parametrize(
    ("partial_credit", "expected"), [(False, 0.0), (True, pytest.approx(0.5))], ids=["off", "on"]
)
def test_an_answer_that_only_contains_the_right_one_is_wrong_unless_asked_for(
    partial_credit: bool, expected: float
) -> None:
    task = load_task(settings_of("chain_sum", answer_rule="last_number", partial_credit=partial_credit))
    prompt = task.prompt("train", 2)
    assert prompt.reference["answer"] == "6"
    reward = task.score(prompt, "96", "stop")
    assert reward.total == expected
    assert reward.parts["correct"] == 0.0


def test_a_dataset_that_differs_between_processes_is_refused() -> None:
    with pytest.raises(TaskError, match=r"word_ladder.*other questions in every process"):
        load_task(settings_of("word_ladder"))


def test_questions_do_not_depend_on_what_was_asked_before() -> None:
    """More places than one dataset object has entries, visited in two orders."""
    settings = settings_of("gsm_symbolic", train_size=5000)
    forward, backward = load_task(settings), load_task(settings)
    places = (0, 999, 1000, 4999)
    there = {i: forward.prompt("train", i).messages for i in places}
    back = {i: backward.prompt("train", i).messages for i in reversed(places)}
    assert there == back
    assert len({str(messages) for messages in there.values()}) == len(places)


@pytest.mark.slow
def test_a_generator_that_makes_all_its_entries_at_once_is_usable() -> None:
    start = time.monotonic()
    task = load_task({"kind": "reasoning_gym", "dataset": "acre"})
    task.prompt("train", task.size("train") - 1)
    assert time.monotonic() - start < 60


MIXTURE: list[dict[str, Any]] = [
    {"dataset": "chain_sum", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},
    {"dataset": "letter_counting", "params": {"max_words": 8}, "weight": 3.0},
    {"dataset": "spell_backward"},
]


def mixture(parts: list[dict[str, Any]], **more: Any) -> Task:
    return load_task(
        {"kind": "reasoning_gym", "mixture": parts, "train_size": 3000, "heldout_size": 20, **more}
    )


def test_a_mixture_scores_every_answer_by_the_generator_of_its_question() -> None:
    """That of `spell_backward` alone ignores case."""
    task = mixture(MIXTURE)
    for index in range(60):
        prompt = task.prompt("train", index)
        answer, source = prompt.reference["answer"], prompt.reference["metadata"]["source_dataset"]
        assert task.score(prompt, answer, "stop").total == 1.0
        assert task.score(prompt, "9876501234", "stop").parts["correct"] == 0.0
        if source == "spell_backward":
            assert task.score(prompt, answer.upper(), "stop").total == 1.0


def test_a_mixture_follows_its_weights() -> None:
    task = mixture(MIXTURE)
    drawn = Counter(
        task.prompt("train", i).reference["metadata"]["source_dataset"] for i in range(0, 3000, 5)
    )
    assert {name: count / drawn.total() for name, count in drawn.items()} == {
        "chain_sum": pytest.approx(0.2, abs=0.05),
        "letter_counting": pytest.approx(0.6, abs=0.06),
        "spell_backward": pytest.approx(0.2, abs=0.05),
    }


@pytest.mark.slow
def test_a_mixture_is_the_same_in_every_process() -> None:
    program = (
        "import json, sys; from bucketrl.tasks.load import load_task; task = load_task(json.load(sys.stdin));"
        "print(json.dumps([task.prompt('train', i).messages[-1]['content'] for i in range(40)]))"
    )
    settings = {"kind": "reasoning_gym", "mixture": MIXTURE}
    command = [sys.executable, "-W", "ignore", "-c", program]
    other = subprocess.run(command, input=json.dumps(settings), text=True, capture_output=True, check=True)
    task = load_task(settings)
    assert json.loads(other.stdout) == [task.prompt("train", i).messages[-1]["content"] for i in range(40)]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([MIXTURE[0], {"dataset": "gcd", "params": {"min_numbers": 0}}], r"task\.params of gcd: min_numbers"),
        ([MIXTURE[0], {"dataset": "gdc"}], r"no 'gdc'"),
        ([MIXTURE[0], {"dataset": "word_ladder"}], r"word_ladder.*in every process"),
        ([MIXTURE[0], {"dataset": "gcd", "params": {"seed": 3}}], r"params\.seed"),
        ([MIXTURE[0], {"dataset": "gcd", "weight": 0}], r"task\.mixture\.1\.weight"),
        ([MIXTURE[0], MIXTURE[0]], r"dataset twice.*chain_sum, chain_sum"),
        ([], r"either dataset .* or mixture"),
        ([{"dataset": "composite"}], r"written as task\.mixture"),
    ],
)
def test_a_wrong_mixture_names_what_is_wrong(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        mixture(parts)


def test_a_mixture_beside_a_dataset_is_refused() -> None:
    with pytest.raises(TaskError, match=r"either dataset .* or mixture"):
        mixture(MIXTURE, dataset="gcd")
