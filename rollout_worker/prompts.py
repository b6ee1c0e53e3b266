"""Prompts as token ids: the chat template is applied once, here, and nothing is encoded again later."""

from dataclasses import dataclass
from typing import Any, Protocol

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import BucketrlError
from bucketrl.tasks.base import Prompt, Split, Task


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None
    chat_template: str | None

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...

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
        self._task = task
        self._tokenizer = tokenizer
        self._max_prompt_tokens = config.rollout.max_model_len - config.sampling.max_tokens

    def get(self, split: Split, index: int) -> TemplatedPrompt:
        """Raises PromptTooLong, IndexError outside the split, TaskError for a broken row."""
        prompt = self._task.prompt(split, index)
        text = self._tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=False, add_generation_prompt=True
        )
        # The template has put the special tokens in; a tokenizer would add its own once more.
        token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if len(token_ids) > self._max_prompt_tokens:
            raise PromptTooLong(
                f"{split} prompt {index} has {len(token_ids)} tokens, but rollout.max_model_len - "
                f"sampling.max_tokens leaves {self._max_prompt_tokens}"
            )
        return TemplatedPrompt(prompt, text, token_ids)

    def text_of(self, completion: tuple[int, ...]) -> str:
        """The completion without special tokens: what rewards see."""
        return self._tokenizer.decode(list(completion), skip_special_tokens=True)
