"""Tests of `tasks.verifiers_task` with verifiers itself; `test_verifiers.py` runs them where it is installed."""

import asyncio
import json
import pickle
import random
import signal
from typing import Any

import pytest
import verifiers as vf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketrl.tasks.base import Environment, Message, Prompt, Reward, TaskError
from bucketrl.tasks.load import load_task

EXAMPLES = "tests.tasks.verifiers_examples"


def load(kind: str, **more: Any) -> Environment:
    made = {"kind": "verifiers", "environment": EXAMPLES, "args": {"kind": kind}, "heldout_size": 5}
    task = load_task(made | more)
    assert isinstance(task, Environment)
    return task


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def episode(task: Environment, prompt: Prompt, texts: list[str]) -> tuple[tuple[Message, ...], bool]:
    """What is said if the policy says `texts`, and whether the environment ended it."""
    said: tuple[Message, ...] = ()
    for text in texts:
        said += (says(text),)
        answer = task.respond(prompt, said)
        if not answer:
            return said, True
        said += answer
    return said, False


def test_an_episode_of_one_turn() -> None:
    task = load("single")
    prompt = task.prompt("train", 3)
    assert prompt.messages == (
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "say 3"},
    )
    assert task.tools == ()
    assert task.respond(prompt, (says("3"),)) == ()
    parts = {"exact": 1.0, "brief": 1.0, "num_turns": 1.0}
    assert task.score_episode(prompt, (says("3"),), "stop") == Reward(1.5, parts)
    assert task.score(prompt, "four", "length") == Reward(0.0, {"exact": 0.0, "brief": 0.0, "num_turns": 1.0})


def test_the_splits_are_disjoint_and_bounded() -> None:
    task = load("single", train_size=20)
    assert (task.size("train"), task.size("heldout")) == (20, 5)
    held_out = [task.prompt("heldout", i).messages for i in range(5)]
    assert [messages[-1]["content"] for messages in held_out] == [f"say {i}" for i in range(27, 32)]
    everything = load("single")
    assert everything.size("train") == 27  # 3 of its 30 rows are in the evaluation dataset
    assert not {str(everything.prompt("train", i).messages) for i in range(27)} & set(map(str, held_out))
    with pytest.raises(IndexError):
        task.prompt("train", 20)


def test_without_an_evaluation_dataset_prompts_are_set_aside() -> None:
    tasks = [load("hunt"), load("hunt"), load("hunt", seed=1)]
    first, again, other = ([task.prompt("heldout", i).messages for i in range(5)] for task in tasks)
    assert first == again != other
    trained = [tasks[0].prompt("train", i).messages for i in range(tasks[0].size("train"))]
    assert len(trained) == 25
    assert not any(messages in trained for messages in first)


def hunt(task: Environment, prompt: Prompt) -> tuple[Message, ...]:
    """Halving, until the environment ends the episode."""
    low, high, said = 0, 100, ()
    while True:
        middle = (low + high) // 2
        said += (says(str(middle)),)
        answer = task.respond(prompt, said)
        if not answer:
            return said
        said += answer
        low, high = (middle + 1, high) if answer[0]["content"] == "higher" else (low, middle)


def test_another_process_goes_on_with_an_episode_whose_state_is_hidden() -> None:
    task = load("hunt")
    copy = pickle.loads(pickle.dumps(task))
    lengths = set()
    for index in range(5):
        prompt = task.prompt("train", index)
        random.seed(index)
        said = hunt(task, prompt)
        tries = len(said) // 2 + 1
        lengths.add(tries)
        assert copy.respond(prompt, said[:1]) == said[1:2]
        # The last word, "found", is the environment's: the policy does not hear it, and the rubric does.
        reward = copy.score_episode(prompt, said, "stop")
        assert reward == Reward(1 / tries, {"found": 1 / tries, "num_turns": float(tries)})
        # Cut off after an answer, or before one.
        for end in range(1, len(said)):
            assert task.score_episode(prompt, said[:end], "length").total == 0.0
    assert len(lengths) > 1


def test_loading_and_playing_leave_random_numbers_and_signals_alone() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    random.seed(5)
    expected = random.random()
    random.seed(5)
    task = load("hunt")
    hunt(task, task.prompt("train", 0))
    assert random.random() == expected
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_tool_is_called_and_its_errors_are_told() -> None:
    task = load("calculator")
    assert [tool["function"]["name"] for tool in task.tools] == ["add", "divide"]
    assert task.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    prompt = task.prompt("train", 4)
    said = (says("so " + call("add", a=1, b=3) + call("divide", a=1, b=0) + call("nothing")),)
    answer = task.respond(prompt, said)
    assert [m["role"] for m in answer] == ["tool"] * 3
    assert [m["content"] for m in answer] == ["4", "division by zero", "'nothing'"]
    said += (*answer, says(prompt.reference["answer"]))
    assert task.respond(prompt, said) == ()
    reward = task.score_episode(prompt, said, "stop")
    assert reward.total == 1.5
    assert reward.parts["add_calls"] == 1.0
    assert reward.parts["total_tool_calls"] == 3.0


class Scripted(vf.Client):  # type: ignore[misc]
    """Says one text after the other, as an engine with a hermes tool parser would."""

    def __init__(self, turns: list[tuple[str, list[tuple[str, dict[str, Any]]]]]) -> None:
        super().__init__(None)
        self._turns = iter(turns)

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, **_: Any) -> Any:
        content, calls = next(self._turns)
        made = [vf.types.ToolCall(id="x", name=n, arguments=json.dumps(a)) for n, a in calls]
        message = vf.types.ResponseMessage(
            content=content, tool_calls=made or None, finish_reason="stop", is_truncated=False
        )
        return vf.types.Response(id="", created=0, model=model, message=message)


Scripted.__abstractmethods__ = frozenset()  # those by which `get_response` is usually made

turns = st.lists(
    st.tuples(
        st.sampled_from(["", "7", "let me see"]),
        st.lists(
            st.tuples(
                st.sampled_from(["add", "divide", "no_such_tool"]),
                st.dictionaries(st.sampled_from("abc"), st.integers(-3, 3), max_size=3),
            ),
            max_size=2,
        ),
    ),
    min_size=3,  # the environment ends an episode after three turns
    max_size=3,
)


@pytest.fixture(scope="module")
def calculator() -> tuple[Environment, Any]:
    """The task, and verifiers' own object."""
    return load("calculator"), vf.load_environment(EXAMPLES, kind="calculator")


@given(turns)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_an_episode_goes_as_verifiers_itself_holds_it(
    calculator: tuple[Environment, Any], script: Any
) -> None:
    task, environment = calculator
    prompt = task.prompt("train", 7)
    said, ended = episode(
        task, prompt, [text + "".join(call(n, **a) for n, a in calls) for text, calls in script]
    )
    assert ended

    async def held() -> Any:
        state = await environment.rollout(prompt.reference, Scripted(script), "policy", {})
        await environment.rubric.score_rollout(state)
        return state

    state = asyncio.run(held())
    answers = [(m["role"], m["content"]) for m in state["completion"] if m["role"] != "assistant"]
    assert [(m["role"], m["content"]) for m in said if m["role"] != "assistant"] == answers
    assert len([m for m in said if m["role"] == "assistant"]) == len(state["trajectory"])
    assert task.score_episode(prompt, said, "stop") == Reward(state["reward"], state["metrics"])


def test_a_call_that_ends_the_episode_is_the_rubrics_to_judge() -> None:
    task = load("strict_calculator")
    prompt = task.prompt("train", 0)
    said = (says(call("divide", a=1, b=0)),)
    assert task.respond(prompt, said) == ()
    assert task.score_episode(prompt, said, "stop").total == 0.5  # brief


def test_a_group_of_environments() -> None:
    task = load("group", heldout_size=1)
    prompts = [task.prompt("train", i) for i in range(task.size("train"))]
    kinds = {prompt.reference["info"]["env_id"]: prompt for prompt in prompts}
    assert task.respond(kinds["env_0"], (says("1"),)) == ()
    assert hunt(task, kinds["env_1"])


def test_an_environment_that_does_not_repeat_itself_costs_the_completion() -> None:
    task = load("counting")
    prompt = task.prompt("train", 0)
    said = (says("a"), *task.respond(prompt, (says("a"),)), says("b"))
    with pytest.raises(RuntimeError, match="does not repeat itself"):
        task.respond(prompt, said)
    with pytest.raises(RuntimeError, match="does not repeat itself"):
        task.score_episode(prompt, said, "stop")


def test_an_episode_that_ends_otherwise_than_before_costs_the_completion() -> None:
    task = load("hunt")
    prompt = task.prompt("train", 0)
    said = hunt(task, prompt)
    with pytest.raises(RuntimeError, match="ends an episode"):
        task.score_episode(prompt, (*said, {"role": "user", "content": "higher"}), "length")
    with pytest.raises(RuntimeError, match="goes on with an episode"):
        task.score_episode(prompt, (says("1000"),), "stop")


@pytest.mark.parametrize(("kind", "raised"), [("fails", KeyError), ("returns_none", TypeError)])
def test_a_reward_function_that_fails_is_not_a_reward_of_zero(kind: str, raised: type[Exception]) -> None:
    task = load(kind)
    with pytest.raises(raised):
        task.score(task.prompt("train", 0), "x", "stop")


def test_a_failure_of_the_environment_is_raised() -> None:
    task = load("breaking")
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        task.respond(task.prompt("train", 0), (says("x"),))


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("judged", {}, "set the key in the environment"),
        ("ranked", {}, "compares the rollouts of a group"),
        ("no reward", {}, "no reward function"),
        ("eval_only", {}, "no dataset to train on"),
        ("rewording", {}, "its prompt is not the dataset's"),
        ("single", {"args": {"kind": "single", "rows": "x"}}, "cannot be loaded: TypeError"),
        ("single", {"args": {"knid": "single"}}, "knid"),
        ("single", {"environment": "no-such-environment"}, "no_such_environment"),
        ("hunt", {"heldout_size": 30}, "task.heldout_size 30 leaves nothing to train on"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    kind: str, more: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(TaskError) as caught:
        load(kind, **more)
    assert message in str(caught.value)
    assert "task.environment" in str(caught.value) or "task.heldout_size" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_judge_with_a_key_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-to-be-shown")
    with pytest.raises(TaskError, match="no reward function"):  # but this judge is asked by none
        load("judged")
