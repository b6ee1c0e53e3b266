"""Tools, environments of one's own, and what a policy hears of a call that is wrong."""

import json
import pickle
from typing import Any, Literal

import pytest

from bucketrl.tasks.base import Environment, FinishReason, Message, Prompt, Reward, Split, TaskError
from bucketrl.tasks.load import load_task

SUMS = {"kind": "arithmetic", "answer_rule": "last_number", "max_operand": 99}


def add(a: int, b: int = 1) -> int:
    """Sum of two numbers."""
    return a + b


def describe(kind: Literal["short", "long"]) -> dict[str, Any]:
    return {"kind": kind}


def broken(a: int) -> int:
    raise ZeroDivisionError("by hand")


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    return 1


def variadic(*a: int) -> int:
    return 1


class Echo:
    """An environment that says what it heard, once."""

    def __init__(self, times: int) -> None:
        self.tools: tuple[dict[str, Any], ...] = ()
        self._times = times

    def size(self, split: Split) -> int:
        return 3

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(index, ({"role": "user", "content": "hello"},), None)

    def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        if len(said) > self._times:
            return ()
        return ({"role": "user", "content": said[-1]["content"]},)

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        raise NotImplementedError

    def score_episode(self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason) -> Reward:
        return Reward(float(len(said)))


def names(*functions: str) -> dict[str, Any]:
    return {**SUMS, "tools": [f"{__name__}:{function}" for function in functions]}


def call(name: str, **arguments: Any) -> Message:
    text = json.dumps({"name": name, "arguments": arguments})
    return {"role": "assistant", "content": f"Let me see.\n<tool_call>\n{text}\n</tool_call>"}


def environment(settings: dict[str, Any]) -> Environment:
    task = pickle.loads(pickle.dumps(load_task(settings)))
    assert isinstance(task, Environment)
    return task


def answers(task: Environment, *said: Message) -> list[str]:
    return [message["content"] for message in task.respond(task.prompt("train", 0), said)]


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    task = environment(names("add", "describe"))
    assert task.tools[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    assert task.tools[1]["function"]["parameters"]["properties"]["kind"]["enum"] == ["short", "long"]


@pytest.mark.parametrize(
    ("turn", "wanted"),
    [
        (call("add", a=40, b=2), "42"),
        (call("add", a=41), "42"),
        (call("describe", kind="short"), '{"kind": "short"}'),
        (call("add", b=2), "error: argument a: Field required"),
        (call("add", a="x"), "error: argument a: Input should be a valid integer"),
        (call("add", a=1, c=2), "error: argument c: Extra inputs are not permitted"),
        (call("subtract", a=1), "error: no tool 'subtract'; there are add, describe, broken"),
        (call("broken", a=1), "error: ZeroDivisionError: by hand"),
        ({"role": "assistant", "content": "<tool_call>{</tool_call>"}, "error: malformed tool call"),
    ],
)
def test_a_policy_hears_the_result_or_what_is_wrong(turn: Message, wanted: str) -> None:
    [answer] = answers(environment(names("add", "describe", "broken")), turn)
    assert answer.startswith(wanted)


def test_a_turn_without_a_call_is_the_answer_and_is_scored() -> None:
    task = environment(names("add"))
    prompt = task.prompt("train", 0)
    last = {"role": "assistant", "content": f"It is {prompt.reference}"}
    said = (call("add", a=1), {"role": "tool", "name": "add", "content": "2"}, last)
    assert task.respond(prompt, said) == ()
    reward = task.score_episode(prompt, said, "stop")
    assert reward.total == 1.0
    assert reward.parts["turns"] == 2.0
    assert task.score_episode(prompt, said, "length").total == 0.0


def test_turns_are_bounded() -> None:
    task = environment({**names("add"), "max_turns": 2})
    once = call("add", a=1)
    assert answers(task, once) == ["2"]
    assert answers(task, once, {"role": "tool", "name": "add", "content": "2"}, once) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (names("nothing"), r"task.tools: cannot import '.*:nothing'"),
        (names("untyped"), r"task.tools: .*:untyped has no type hint for a"),
        (names("variadic"), r"task.tools: .*:variadic has the parameter \*a"),
        (names("add", "add"), "task.tools: two functions have the same name"),
        ({**SUMS, "tools": ["add"]}, "task.tools.0"),
        ({"kind": "environment", "factory": "no.such:thing"}, "task.factory: cannot import"),
        ({"kind": "environment", "factory": f"{__name__}:add", "args": {"a": 1}}, "int without size, prompt"),
        ({"kind": "environment"}, "task.factory is missing"),
    ],
)
def test_wrong_settings_name_the_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(settings)


def test_an_environment_of_ones_own() -> None:
    task = environment({"kind": "environment", "factory": f"{__name__}:Echo", "args": {"times": 2}})
    assert answers(task, {"role": "assistant", "content": "hm"}) == ["hm"]
    assert task.size("train") == 3
