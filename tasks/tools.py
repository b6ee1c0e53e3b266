"""Functions that the policy may call: `tools = ["module:function", ...]` in the `[task]` table.

    def area(width: float, height: float) -> float:
        \"\"\"Area of a rectangle.\"\"\"

Name, type hints, defaults and docstring are what the policy sees of a function. It calls one in the format that
the chat templates of Qwen and others teach (`tasks.tool_calls`); the result, or what is wrong with the call, is
the next message. Functions run in reward processes, within the reward's time-out, and must depend on nothing
but their arguments: a worker that goes on with another's episode calls them again.
"""

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from bucketrl.tasks.base import FinishReason, Message, Prompt, Reward, TaskError
from bucketrl.tasks.config import CommonConfig
from bucketrl.tasks.custom import import_function
from bucketrl.tasks.questions import QuestionSource, QuestionTask
from bucketrl.tasks.tool_calls import ToolCall, parse_tool_calls


class ToolTask(QuestionTask):
    """A question that may be answered after some calls of tools. An `Environment` (`tasks.base`)."""

    def __init__(self, source: QuestionSource, config: CommonConfig) -> None:
        """Raises TaskError for a function that cannot be imported or described."""
        super().__init__(source, config)
        self._max_turns = config.max_turns
        self._functions = {name.rpartition(":")[2]: name for name in config.tools}
        if len(self._functions) < len(config.tools):
            raise TaskError(f"task.tools: two functions have the same name among {list(config.tools)}")
        self.tools: tuple[dict[str, Any], ...] = tuple(map(schema, config.tools))

    def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        """One message for each call of the newest turn. A turn without one is the answer."""
        if _turns(said) >= self._max_turns:
            return ()
        turn = parse_tool_calls(said[-1]["content"])
        if turn.error:
            return ({"role": "tool", "name": "", "content": f"error: {turn.error}"},)
        return tuple(
            {"role": "tool", "name": call.name, "content": self._result(call)} for call in turn.calls
        )

    def score_episode(self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason) -> Reward:
        """As `score` of the last turn; the part `turns` counts the policy's."""
        reward = self.score(prompt, said[-1]["content"], finish_reason)
        return Reward(reward.total, {**reward.parts, "turns": float(_turns(said))})

    def _result(self, call: ToolCall) -> str:
        if call.name not in self._functions:
            return f"error: no tool {call.name!r}; there are {', '.join(self._functions)}"
        name = self._functions[call.name]
        try:
            arguments = _arguments(name).model_validate(call.arguments)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return f"error: argument {where}: {first['msg']}"
        values = {field: getattr(arguments, field) for field in type(arguments).model_fields}
        try:
            result = import_function("tools", name)(**values)
        except Exception as error:  # noqa: BLE001 - the policy hears of it, and may try again
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)


def _turns(said: tuple[Message, ...]) -> int:
    """Of the policy."""
    return sum(message["role"] == "assistant" for message in said)


def schema(name: str) -> dict[str, Any]:
    """What chat templates get of the function `module:function`. Raises TaskError."""
    function = import_function("tools", name)
    parameters = _arguments(name).model_json_schema()
    parameters.pop("title", None)
    for described in parameters.get("properties", {}).values():
        described.pop("title", None)
    return {
        "type": "function",
        "function": {
            "name": name.rpartition(":")[2],
            "description": inspect.getdoc(function) or "",
            "parameters": parameters,
        },
    }


@functools.cache
def _arguments(name: str) -> type[BaseModel]:
    """A model whose fields are the function's parameters."""
    function: Callable[..., Any] = import_function("tools", name)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TaskError(f"task.tools: {name} has the parameter {parameter}; take named ones only")
        if parameter.annotation is parameter.empty:
            raise TaskError(
                f"task.tools: {name} has no type hint for {parameter.name}; the policy has to know it"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
