"""Prompts as token ids: the chat template is applied once, here, and nothing is encoded again later."""

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import BucketrlError, UserError
from bucketrl.tasks.base import Environment, Message, Prompt, Split, Task, TaskError

logger = logging.getLogger(__name__)

_MARK = "a4b1d7"
"""Stands for a turn of the policy while it is found out what the template puts around one."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token: str | None
    eos_token_id: int | None
    chat_template: str | None

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class PromptTooLong(BucketrlError):
    """The prompt leaves no room for a completion; it is dropped and counted."""


@dataclass(frozen=True, slots=True)
class TemplatedPrompt:
    """A prompt as the model sees it."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]


class Prompts:
    """Templated prompts of the run's task."""

    def __init__(self, task: Task, tokenizer: Tokenizer, config: RunConfig) -> None:
        """Raises UserError if the task has several turns and the chat template cannot take them apart."""
        self._task = task
        self._tokenizer = tokenizer
        self.multi_turn = isinstance(task, Environment)
        self._tools = list(task.tools) if isinstance(task, Environment) else []
        if self.multi_turn:
            self.between_turns(({"role": "user", "content": "and then?"},))
        if self._tools and not self._template_shows_tools():
            logger.warning(
                "the chat template says nothing of the task's tools: describe them, and how they are called, in "
                "task.system, or take a model that knows tools"
            )
        self._max_prompt_tokens = config.rollout.max_model_len - config.sampling.max_tokens

    def get(self, split: Split, index: int) -> TemplatedPrompt:
        """Raises PromptTooLong, IndexError outside the split, TaskError for a broken row."""
        prompt = self._task.prompt(split, index)
        text = self._templated(list(prompt.messages))
        # The template has put the special tokens in; a tokenizer would add its own once more.
        try:
            token_ids = self._encoded(text)
        except UnicodeEncodeError as error:
            raise TaskError(f"{split} prompt {index} is not Unicode text: {error}") from None
        if len(token_ids) > self._max_prompt_tokens:
            raise PromptTooLong(
                f"{split} prompt {index} has {len(token_ids)} tokens, but rollout.max_model_len - "
                f"sampling.max_tokens leaves {self._max_prompt_tokens}"
            )
        return TemplatedPrompt(prompt, text, token_ids)

    def between_turns(self, answer: tuple[Message, ...]) -> tuple[int, ...]:
        """The tokens between the token that ended the policy's turn and the first of its next turn.

        They are those that the template puts there in a short conversation of its own: the policy's tokens are
        neither decoded nor encoded again. Raises UserError for a template that ends a turn without its
        tokenizer's eos token or that refuses the roles of `answer`.
        """
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        _, found, after = self._templated([*turn, *answer]).partition(_MARK)
        end = self._tokenizer.eos_token or ""
        if not (found and end and after.startswith(end)):
            raise UserError(
                f"model.id: its chat template does not end the assistant's turn with the eos token {end!r}, so "
                "what stands between two turns is not known; take a model with such a template for this task"
            )
        try:
            return self._encoded(after[len(end) :])
        except UnicodeEncodeError as error:
            raise UserError(f"task: a message is not Unicode text: {error}") from None

    def _encoded(self, text: str) -> tuple[int, ...]:
        text.encode()  # half of a surrogate pair, as "\\ud83d" in JSON gives: tokenizers raise all sorts of errors
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _template_shows_tools(self) -> bool:
        names = [str(tool["function"]["name"]) for tool in self._tools]
        shown = self._templated([{"role": "user", "content": "?"}])
        return all(name in shown for name in names)

    def _templated(self, conversation: list[Message]) -> str:
        tools: dict[str, Any] = {"tools": self._tools} if self._tools else {}
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **tools
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in conversation)
            raise UserError(f"model.id: its chat template refuses messages of {roles}: {error}") from error
        return text

    def text_of(self, completion: tuple[int, ...]) -> str:
        """The completion without special tokens: what rewards see."""
        return self._tokenizer.decode(list(completion), skip_special_tokens=True)
