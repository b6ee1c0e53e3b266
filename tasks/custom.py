"""Functions of one's own, named `module:function` in the `[task]` table. `reward`:

    def reward(prompt_messages, completion, reference, finish_reason) -> float | dict[str, float]

`prompt_messages` is a list of chat messages (`role`, `content`), `completion` the text without special
tokens, `reference` the row's answer, `finish_reason` "stop" or "length". A dict has `total`, which the policy
is trained on, and any named parts. The function runs in processes of its own; if it raises or takes too long,
the completion is dropped and counted. Its module must be importable on every rollout worker.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from bucketrl.tasks.base import FinishReason, Prompt, Reward, TaskError


@functools.cache
def import_function(field: str, name: str) -> Callable[..., Any]:
    """The function `module:function` that `task.<field>` names. Raises TaskError if it cannot be imported."""
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise TaskError(
            f"task.{field}: cannot import {name!r} ({error}); install its module or add its folder "
            "to PYTHONPATH"
        ) from error
    if not callable(function):
        raise TaskError(f"task.{field}: {name!r} is a {type(function).__name__}, not a function")
    called: Callable[..., Any] = function
    return called


def call_reward(name: str, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
    """Raises what the function raises, and TypeError if it returns something else than a float or a dict."""
    messages = [dict(message) for message in prompt.messages]
    result = import_function("reward", name)(messages, completion, prompt.reference, finish_reason)
    if isinstance(result, dict):
        if "total" not in result:
            raise TypeError(f"{name} returned a dict without `total`")
        parts = {str(key): float(value) for key, value in result.items()}
        return Reward(parts.pop("total"), parts)
    if isinstance(result, int | float):
        return Reward(float(result))
    raise TypeError(f"{name} returned a {type(result).__name__}; return a float or a dict with `total`")
