"""From the `[task]` table to a task."""

from typing import Any

from bucketrl.tasks.base import Task
from bucketrl.tasks.config import ArithmeticConfig, JsonlConfig, ReasoningGymConfig, parse_task_config
from bucketrl.tasks.custom import import_reward
from bucketrl.tasks.questions import QuestionSource, QuestionTask


def load_task(settings: dict[str, Any]) -> Task:
    """The same settings give the same prompts on every machine. Raises TaskError."""
    config = parse_task_config(settings)
    if config.reward:
        import_reward(config.reward)
    return QuestionTask(_source(config), config)


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
