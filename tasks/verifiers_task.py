"""Environments of Prime Intellect's `verifiers` package, their own or anybody's that is installed.

Supported are those written with `vf.SingleTurnEnv`, `vf.MultiTurnEnv`, `vf.ToolEnv` or a class below them, in
verifiers 0.1.14 to 0.3. Version 0.4 has removed these classes.

Such an environment holds an episode with a model behind a client. The client that it gets here
(`tasks.verifiers_client`) says what the policy has said so far, and what the environment answers to that is its
turn. So its own loop, stop conditions and state do what they always do, but every turn holds the episode again
from the beginning: tools are called again, and the random numbers of Python and numpy are seeded with the
prompt. An environment that does not repeat itself costs the completion.
"""

import asyncio
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import logging
import random
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property, wraps
from typing import Any

from bucketrl.tasks.base import FinishReason, Message, Prompt, Reward, Split, TaskError
from bucketrl.tasks.config import VerifiersConfig

SUPPORTED = ((0, 1, 14), (0, 4, 0))
"""The first version, and the first one that is no longer."""
KEY_HINT = "; set the key in the environment, here and on every rollout worker"


class VerifiersTask:
    """An `Environment` (`tasks.base`). The reference of a prompt is its row of the environment's dataset."""

    def __init__(self, config: VerifiersConfig) -> None:
        """Loads the environment and puts its first prompt before no model. Raises TaskError."""
        self._load(config)
        first = self.prompt("train", 0)
        try:
            # In a thread, since whoever loads a task may be inside an event loop.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(asyncio.run, self._hold(first, (), "length", score=False)).result()
        except Exception as error:
            raise _refused(config, f"cannot begin an episode: {_reason(error)}") from error

    def _load(self, config: VerifiersConfig) -> None:
        self._config = config
        self._failures: list[Exception] = []
        """What reward functions have raised. verifiers itself logs it and takes 0 for the reward."""
        self._environment = _load_environment(config, self._failures)
        self.tools: tuple[dict[str, Any], ...] = tuple(
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}
            for tool in self._environment.tool_defs or ()
        )
        # One loop for all episodes: a judge's client keeps connections that belong to a loop.
        self._runner = asyncio.Runner()

    def __getstate__(self) -> dict[str, Any]:
        """The name alone: an environment holds clients, locks and functions made on the spot."""
        return {"config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._load(state["config"])

    def size(self, split: Split) -> int:
        return len(self._rows[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        if not 0 <= index < self.size(split):
            raise IndexError(f"{split} prompt {index} is outside [0, {self.size(split)})")
        row = self._rows[split][index]
        if not isinstance(row["prompt"], list):
            raise _refused(self._config, "its prompts are not chat messages")
        messages = ({key: value for key, value in m.items() if value is not None} for m in row["prompt"])
        return Prompt(index, tuple(messages), row)

    def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        """Raises RuntimeError if the environment fails or does not repeat what it had said."""
        _, answer = self._runner.run(self._hold(prompt, said, "stop", score=False))
        return answer

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        return self.score_episode(prompt, ({"role": "assistant", "content": completion},), finish_reason)

    def score_episode(self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason) -> Reward:
        """Total and parts are the rubric's reward and metrics, each reward function by its name.

        Raises what a reward function raises, and RuntimeError as `respond` does.
        """
        state, answer = self._runner.run(self._hold(prompt, said, finish_reason, score=True))
        if answer and finish_reason == "stop":
            raise RuntimeError("the environment goes on with an episode that it had ended")
        parts = {name: float(value) for name, value in state["metrics"].items()}
        return Reward(float(state["reward"]), parts)

    async def _hold(
        self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason, *, score: bool
    ) -> tuple[Any, tuple[Message, ...]]:
        """The environment's state after what was said, and its answer to that: none if the episode is over."""
        from bucketrl.tasks.verifiers_client import Transcript

        vf, environment = _verifiers(), self._environment
        tools = [tool["function"]["name"] for tool in self.tools]
        client = Transcript(prompt, said, finish_reason, tools)
        with _seeded(f"{self._config.environment}/{prompt.index}"):
            state = await environment.rollout(prompt.reference, client, "policy", {})
            error = state.get("error")
            # A call that a tool refused is the policy's doing, and the rubric's to judge.
            if error is not None and not isinstance(error, vf.ToolError):
                raise RuntimeError(f"the environment failed: {_reason(error)}") from error
            if client.unsaid:
                raise RuntimeError("the environment ends an episode that it had gone on with")
            self._failures.clear()
            try:
                if score:
                    await environment.rubric.score_rollout(state)
            finally:
                await environment.rubric.cleanup(state)
        if self._failures:
            raise self._failures[0]
        return state, client.answer

    @cached_property
    def _rows(self) -> dict[Split, list[dict[str, Any]]]:
        config, environment = self._config, self._environment
        try:
            with _seeded(config.environment):
                dataset, eval_dataset = environment.build_dataset(), environment.build_eval_dataset()
        except Exception as error:
            raise _refused(config, f"cannot make its dataset: {_reason(error)}") from error
        if dataset is None:
            raise _refused(config, "has no dataset to train on, only one for evaluation")
        keys = [_digest(prompt) for prompt in dataset["prompt"]]
        if eval_dataset is None:
            chosen = sorted(set(keys), key=lambda key: _digest([config.seed, key]))[: config.heldout_size]
            place = {key: i for i, key in reversed(list(enumerate(keys)))}
            heldout = dataset.select([place[key] for key in chosen])
        else:
            heldout = eval_dataset.select(range(min(config.heldout_size, len(eval_dataset))))
        held_out = {_digest(prompt) for prompt in heldout["prompt"]}
        train = [i for i, key in enumerate(keys) if key not in held_out][: config.train_size]
        if not train or not held_out:
            raise TaskError(
                f"task.heldout_size {config.heldout_size} leaves nothing to "
                f"{'train on' if held_out else 'evaluate on'}: {config.environment} has "
                f"{len(set(keys))} different prompts"
            )
        return {"train": dataset.select(train).to_list(), "heldout": heldout.to_list()}


def _load_environment(config: VerifiersConfig, failures: list[Exception]) -> Any:
    """An environment that can be trained on, its reward functions watched. Raises TaskError."""
    vf = _verifiers()
    # It takes these signals for itself, in every process that loads it.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _seeded(config.environment):
            environment = vf.load_environment(config.environment, **config.args)
    except Exception as error:
        hint = KEY_HINT if _lacks_key(error) else ""
        raise _refused(config, f"cannot be loaded: {_reason(error)}{hint}") from error
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    if not isinstance(environment, vf.Environment):
        raise _refused(config, f"is a {type(environment).__name__}, not a verifiers.Environment")
    if environment.rubric.has_group_rewards:
        raise _refused(config, "compares the rollouts of a group; rewards of one rollout each are supported")
    rubrics = list(_rubrics(environment.rubric))
    if any(getattr(rubric, "judge_client", None) and not rubric.judge_client.api_key for rubric in rubrics):
        raise _refused(config, f"has a judge without a key{KEY_HINT}")
    if not environment.score_rollouts or not any(weight for rubric in rubrics for weight in rubric.weights):
        raise _refused(config, "has no reward function with a weight")
    for rubric in rubrics:
        rubric.funcs = [_watched(function, failures) for function in rubric.funcs]
    return environment


@cache
def _verifiers() -> Any:
    """The package. Raises TaskError if it is missing or of another version."""
    try:
        version = importlib.metadata.version("verifiers")
        if not SUPPORTED[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < SUPPORTED[1]:
            raise TaskError(
                f"task.kind verifiers works with verifiers 0.1.14 to 0.3, found {version}: "
                "pip install 'bucketrl[verifiers]'"
            )
        # Making a dataset draws progress bars.
        importlib.import_module("datasets").disable_progress_bars()
        vf = importlib.import_module("verifiers")
        vf.load_environment  # noqa: B018 - 0.3 imports the rest of itself here, and sets its log level
    except ImportError as error:
        raise TaskError(
            f"task.kind verifiers needs a package ({error}): pip install 'bucketrl[verifiers]'"
        ) from error
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    return vf


def _rubrics(rubric: Any) -> Iterator[Any]:
    """It and those that it is made of."""
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(environment.rubric)


def _watched(function: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    """`function`, whose exceptions go to `failures` too."""

    @wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> float:
        try:
            value = function(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            failures.append(error)
            raise

    return watched


@contextmanager
def _seeded(seed: str) -> Iterator[None]:
    """Random numbers that depend on `seed` alone; afterwards they go on as before."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16))
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _refused(config: VerifiersConfig, reason: str) -> TaskError:
    return TaskError(f"task.environment {config.environment!r} {reason}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """It and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _reason(error: BaseException) -> str:
    """One line; the first cause says most."""
    *_, first = _chain(error)
    return f"{type(first).__name__}: {' '.join(str(first).split())}"[:400]


def _lacks_key(error: BaseException) -> bool:
    """verifiers and openai each have an exception for a key that is not set."""
    return any(type(cause).__name__ in ("MissingKeyError", "OpenAIError") for cause in _chain(error))
