"""Small environments, written as people write them for `verifiers`: `load_environment(kind, ...)`."""

import itertools
import random
from typing import Any

import verifiers as vf
from datasets import Dataset

answers_given = itertools.count()


def words(count: int, start: int = 0) -> Any:
    rows = [{"question": f"say {i}", "answer": str(i), "info": {"i": i}} for i in range(start, start + count)]
    return Dataset.from_list(rows)


def last(completion: Any) -> str:
    return str(completion[-1]["content"])


def exact(completion: Any, answer: str) -> float:
    return float(last(completion) == answer)


async def brief(completion: Any) -> float:
    return float(len(last(completion)) < 3)


class Hunt(vf.MultiTurnEnv):
    """Finds a number that is drawn when the episode begins."""

    async def setup_state(self, state: Any) -> Any:
        state["secret"], state["tries"] = random.randrange(100), 0
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        state["tries"] += 1
        guess = int(messages[-1]["content"])
        if guess == state["secret"]:
            state["final_env_response"] = [{"role": "user", "content": "found"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"{'higher' if guess < state['secret'] else 'lower'}"}]


def found(completion: Any, state: Any) -> float:
    return float(last(completion) == "found") / state["tries"] if state["tries"] else 0.0


class Counting(vf.MultiTurnEnv):
    """Never says the same thing twice."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": str(next(answers_given))}]


class Breaking(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise vf.InfraError("the sandbox is gone")


class Rewording(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        state["prompt"] = [{"role": "user", "content": "another question"}]
        return state


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number
        b: another
    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divides a by b."""
    return a / b


def fails(completion: Any) -> float:
    raise KeyError("no such thing")


def returns_none(completion: Any) -> None: ...


def ranked(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(kind: str, rows: int = 30) -> Any:
    rubric = vf.Rubric(funcs=[exact, brief], weights=[1.0, 0.5])
    data: dict[str, Any] = {"dataset": words(rows)}
    match kind:
        case "single":
            return vf.SingleTurnEnv(
                **data, eval_dataset=lambda: words(8, rows - 3), rubric=rubric, system_prompt="Be exact."
            )
        case "hunt":
            return Hunt(**data, rubric=vf.Rubric(funcs=[found]), max_turns=8)
        case "calculator" | "strict_calculator":
            return vf.ToolEnv(
                **data,
                rubric=rubric,
                tools=[add, divide],
                max_turns=3,
                stop_errors=[ZeroDivisionError] if kind == "strict_calculator" else [],
            )
        case "group":
            return vf.EnvGroup(
                [vf.SingleTurnEnv(**data, rubric=rubric), Hunt(**data, rubric=vf.Rubric([found]))]
            )
        case "counting":
            return Counting(**data, rubric=rubric)
        case "breaking":
            return Breaking(**data, rubric=rubric)
        case "rewording":
            return Rewording(**data, rubric=rubric)
        case "judged":
            return vf.SingleTurnEnv(**data, rubric=vf.JudgeRubric())
        case "eval_only":
            return vf.SingleTurnEnv(eval_dataset=words(8), rubric=rubric)
    function = {"fails": fails, "returns_none": returns_none, "ranked": ranked}.get(kind)
    return vf.SingleTurnEnv(**data, rubric=vf.Rubric(funcs=[function] if function else []))
