"""Tool calls are found in any text, and malformed ones are refused with the reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.tasks.tool_calls import PolicyTurn, ToolCall, parse_tool_calls

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3)),
    min_size=1,
    max_size=3,
)


def block(name: str, arguments: Any) -> str:
    # Qwen's template writes a call so. A tag inside a string would end the block; JSON can escape its "<".
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False).replace("<", "\\u003c")
    return f"<tool_call>\n{written}\n</tool_call>"


@given(st.text().filter(lambda text: "<tool_call>" not in text), calls, st.booleans())
def test_what_is_written_is_read(said: str, written: list[tuple[str, dict[str, Any]]], ended: bool) -> None:
    text = said + "\n" + "\n".join(block(name, arguments) for name, arguments in written)
    turn = parse_tool_calls(text if ended else text.removesuffix("</tool_call>"))
    assert turn == PolicyTurn(said + "\n", tuple(ToolCall(*call) for call in written))


fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {}}',
        '{"name":',
        "}",
        "[" * 50,
        "NaN",
        "\n",
        "x",
    ]
)


@given(st.lists(fragments | st.text(max_size=5)).map("".join))
def test_any_text_gives_calls_or_the_reason_why_not(text: str) -> None:
    turn = parse_tool_calls(text)
    if "<tool_call>" not in text:
        assert turn == PolicyTurn(text)
    elif turn.calls:
        assert turn.error == ""
        assert text.startswith(turn.content + "<tool_call>")
    else:
        assert turn.error
        assert turn.content == text


GOOD = block("f", {"a": 1})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{</tool_call>", "malformed tool call"),
        ("<tool_call></tool_call>", "malformed tool call"),
        ("so <tool_call>", "malformed tool call"),
        ("<tool_call>[1]</tool_call>", "a list, not an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no text in `name`"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "no text in `name`"),
        ('<tool_call>{"name": "f"}</tool_call>', "no object in `arguments`"),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "no object in `arguments`"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        (f"<tool_call>{GOOD}</tool_call>", "malformed tool call"),
        ("<tool_call>" + "[" * 100_000, "malformed tool call"),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "malformed tool call"),
    ],
)
def test_one_malformed_call_and_none_counts(text: str, reason: str) -> None:
    for said in (text, GOOD + text):
        turn = parse_tool_calls(said)
        assert turn.calls == ()
        assert turn.content == said
        assert reason in turn.error
