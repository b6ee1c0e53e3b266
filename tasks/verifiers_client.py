"""The client through which an environment of `verifiers` hears the policy. Import it only where verifiers is."""

import importlib
import json
from typing import Any

from bucketrl.tasks.base import FinishReason, Message, Prompt
from bucketrl.tasks.tool_calls import PolicyTurn, parse_tool_calls

vf: Any = importlib.import_module("verifiers")


class Transcript(vf.Client):  # type: ignore[misc]
    """A model that says what was said. After its last turn its context is full: that ends the episode.

    Its native prompts, tools and responses are those of verifiers.
    """

    def __init__(
        self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason, tools: list[str]
    ) -> None:
        """`tools`: the names that the policy knows."""
        super().__init__(None)
        self.unsaid = list(said)
        """Of both sides, in order. Empty at the end, if the episode went as it did before."""
        self.answer: tuple[Message, ...] = ()
        """What the environment said when the policy had no more to say; none: the episode was over."""
        self._heard = [_spoken(message) for message in prompt.messages]
        self._finish_reason = finish_reason
        self._tools = tools

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Any:
        """The policy's next turn. Raises OverlongPromptError after the last one, and ValueError if this is
        another episode than before."""
        if [tool.name for tool in tools or ()] != self._tools:
            raise ValueError("tools that only some prompts have are not supported")
        messages = [_plain(message) for message in prompt]
        added = messages[len(self._heard) :]
        if [_spoken(message) for message in messages[: len(self._heard)]] != self._heard:
            raise ValueError("its prompt is not the dataset's, or it rewrites what was said")
        recorded = self._take_environments_turn()
        if not self.unsaid and not recorded:
            self.answer = tuple(added)
        elif [_spoken(message) for message in added] != [_spoken(message) for message in recorded]:
            raise ValueError("it does not repeat itself: the same episode got another answer")
        if not self.unsaid:
            raise vf.OverlongPromptError("the policy has said no more")
        message = self._message(self.unsaid.pop(0)["content"], place=len(messages))
        self._heard += [_spoken(m) for m in (*added, _plain(message))]
        return vf.types.Response(id="", created=0, model=model, message=message)

    def _take_environments_turn(self) -> list[Message]:
        """The messages before the policy's next one."""
        ends = (i for i, message in enumerate(self.unsaid) if message["role"] == "assistant")
        end = next(ends, len(self.unsaid))
        taken, self.unsaid = self.unsaid[:end], self.unsaid[end:]
        return taken

    def _message(self, text: str, place: int) -> Any:
        turn = parse_tool_calls(text) if self._tools else PolicyTurn(text)
        calls = [
            vf.types.ToolCall(id=f"call_{place}_{i}", name=call.name, arguments=json.dumps(call.arguments))
            for i, call in enumerate(turn.calls)
        ]
        cut_off = self._finish_reason == "length" and not self.unsaid
        return vf.types.ResponseMessage(
            content=turn.content,
            tool_calls=calls or None,
            finish_reason="length" if cut_off else "tool_calls" if calls else "stop",
            is_truncated=cut_off,
        )

    def setup_client(self, config: Any) -> Any: ...

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> Any:
        return messages, {}

    async def raise_from_native_response(self, response: Any) -> None: ...

    async def from_native_response(self, response: Any) -> Any:
        return response

    async def close(self) -> None: ...


def _plain(message: Any) -> Message:
    """A message as a chat template takes it. Raises ValueError if it is more than text."""
    fields = message if isinstance(message, dict) else message.model_dump()
    plain = {key: value for key, value in fields.items() if value is not None}
    if isinstance(plain.get("content"), list):
        if any(part.get("type") != "text" for part in plain["content"]):
            raise ValueError("messages with other parts than text are not supported")
        plain["content"] = "".join(part["text"] for part in plain["content"])
    return plain


def _spoken(message: Message) -> tuple[str, str]:
    return message["role"], message.get("content") or ""
