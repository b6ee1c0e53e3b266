"""Tool calls in a policy's text, in the format of Hermes and Qwen.

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the policy asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """One message of the policy, taken apart."""

    content: str
    """What stands before the first call; the whole text if there is none."""
    calls: tuple[ToolCall, ...] = ()
    error: str = ""
    """Why the text has `<tool_call>` and yet no calls; empty if all is well."""


def parse_tool_calls(text: str) -> PolicyTurn:
    """Takes any text. Either all blocks are calls or none is, and the last one may lack its end tag: as in
    vLLM's `hermes` parser, so that a policy meets when it is served what it met in training."""
    first, *_ = text.partition("<tool_call>")
    try:
        calls = tuple(_call(match[1]) for match in _BLOCK.finditer(text))
    except (ValueError, RecursionError) as error:
        return PolicyTurn(text, error=f"malformed tool call: {error}")
    return PolicyTurn(first, calls)


def _call(block: str) -> ToolCall:
    """Raises ValueError."""
    value = json.loads(block, parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("no text in `name`")
    if not isinstance(arguments, dict):
        raise ValueError("no object in `arguments`")
    return ToolCall(name, arguments)


def _refuse(constant: str) -> None:
    """Python reads NaN and Infinity, which are not JSON."""
    raise ValueError(f"{constant} is not JSON")
