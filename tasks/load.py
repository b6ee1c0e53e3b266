"""From the `[task]` table to a task."""

from typing import Any

from bucketrl.tasks.base import Task, TaskError
from bucketrl.tasks.config import (
    ArithmeticConfig,
    EnvironmentConfig,
    JsonlConfig,
    ReasoningGymConfig,
    VerifiersConfig,
    parse_task_config,
)
from bucketrl.tasks.custom import import_function
from bucketrl.tasks.questions import QuestionSource, QuestionTask


def load_task(settings: dict[str, Any]) -> Task:
    """The same settings give the same prompts on every machine. Raises TaskError."""
    config = parse_task_config(settings)
    if isinstance(config, EnvironmentConfig):
        return _made(config)
    if isinstance(config, VerifiersConfig):
        from bucketrl.tasks.verifiers_task import VerifiersTask

        return VerifiersTask(config)
    if config.reward:
        import_function("reward", config.reward)
    if config.tools:
        from bucketrl.tasks.tools import ToolTask

        return ToolTask(_source(config), config)
    return QuestionTask(_source(config), config)


def _made(config: EnvironmentConfig) -> Task:
    task = import_function("factory", config.factory)(**config.args)
    missing = [name for name in ("size", "prompt", "score") if not callable(getattr(task, name, None))]
    if missing:
        raise TaskError(
            f"task.factory: {config.factory} returned a {type(task).__name__} without {', '.join(missing)}; "
            "return a Task or an Environment (bucketrl.tasks.base)"
        )
    made: Task = task
    return made


def _source(config: ReasoningGymConfig | JsonlConfig | ArithmeticConfig) -> QuestionSource:
    match config:
        case ReasoningGymConfig():
            from bucketrl.tasks.reasoning_gym_task import ReasoningGymSource

            return ReasoningGymSource(config)
        case JsonlConfig():
            from bucketrl.tasks.jsonl_task import JsonlSource

            return JsonlSource(config)
        case ArithmeticConfig():
            from bucketrl.tasks.arithmetic import ArithmeticSource

            return ArithmeticSource(config)
