"""The `[task]` table of a run's configuration, one class for each kind. Unknown keys are refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from bucketrl.tasks.answers import AnswerRule
from bucketrl.tasks.base import TaskError

KINDS = ("reasoning_gym", "jsonl", "arithmetic", "environment", "verifiers")

Size = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 30)]
Verifier = Literal["math_verify", "number", "exact", "python_tests"]
FunctionName = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Example(Section):
    """A few-shot example: one user and one assistant message in front of the question."""

    question: str
    answer: str
    """The whole reply, not only what the answer rule finds in it."""


class CommonConfig(Section):
    """What every kind of task has."""

    template: str = "{question}"
    """The user message; `{question}` is replaced, in few-shot examples too."""
    system: str = ""
    """The system message; empty for none (the chat template may add its own)."""
    few_shot: tuple[Example, ...] = ()
    answer_rule: AnswerRule = "whole"
    """Where the answer stands in a completion (`tasks.answers`)."""
    reward: FunctionName = ""
    """`module:function`, an importable reward in place of the verifier (`tasks.custom`)."""
    tools: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")], ...] = ()
    """`module:function`, each one a function that the policy may call (`tasks.tools`)."""
    max_turns: Annotated[int, Field(ge=2)] = 8
    """Of the policy, with tools: the last one is its answer."""

    @model_validator(mode="after")
    def _template_asks(self) -> Self:
        if "{question}" not in self.template:
            raise ValueError("template has no {question}; put it where the question belongs")
        return self


class Component(Section):
    """One generator of a mixture."""

    dataset: str
    params: dict[str, Any] = {}
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Questions are drawn from it in proportion to its weight."""


class ReasoningGymConfig(CommonConfig):
    """A generator of reasoning-gym with its own verifier, or a mixture of several."""

    kind: Literal["reasoning_gym"]
    dataset: str = ""
    """`chain_sum`, `gcd`, ...: a name registered in reasoning-gym."""
    params: dict[str, Any] = {}
    """Settings of the generator, `size` and `seed` excepted."""
    mixture: tuple[Component, ...] = ()
    """In place of `dataset` and `params`. Every question goes to the verifier of its own generator."""
    partial_credit: bool = False
    """Whether a verifier's score between 0 and 1 counts. Many give it to any text that contains the answer:
    12 where 2 is right."""
    train_size: Size = 10_000
    heldout_size: Size = 200
    seed: Seed = 0

    @property
    def components(self) -> tuple[Component, ...]:
        """At least one."""
        return self.mixture or (Component(dataset=self.dataset, params=self.params),)

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if bool(self.mixture) == bool(self.dataset or self.params):
            raise ValueError("needs either dataset (with its params) or mixture")
        names = [component.dataset for component in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"mixture names a dataset twice, found {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _size_and_seed_are_ours(self) -> Self:
        for component in self.components:
            for name in ("size", "seed"):
                if name in component.params:
                    raise ValueError(f"params.{name} is not allowed; use train_size, heldout_size and seed")
        return self


class SandboxConfig(Section):
    """Limits of a program that a verifier runs (`tasks.sandbox`)."""

    cpu_seconds: Annotated[int, Field(ge=1, le=3600)] = 5
    memory_mb: Annotated[int, Field(ge=64, le=1 << 20)] = 512
    """Address space, in MiB."""
    wall_seconds: Annotated[float, Field(gt=0, le=3600)] = 6.0
    """For all tests of a completion together. Keep it some seconds below the worker's `reward_timeout_s`, which
    drops the completion instead of calling it wrong."""


class JsonlConfig(CommonConfig):
    """Question and answer rows, one JSON object a line."""

    kind: Literal["jsonl"]
    path: str
    """A file, relative to the working directory, or any URL that fsspec opens. All machines read it."""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Digest of the file; if given, other contents are refused."""
    prompt_field: str = "question"
    answer_field: str = "answer"
    heldout_size: Size
    """Distinct questions set aside; their rows are never trained on."""
    seed: Seed = 0
    """Chooses the held-out questions."""
    verifier: Verifier = "math_verify"
    """`python_tests`: the answer is a program, the row's answer its tests (`tasks.code_tests`)."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where `python_tests` runs programs."""
    partial_credit: bool = False
    """`python_tests`: whether the share of tests that a program passes counts, or all of them only."""


class ArithmeticConfig(CommonConfig):
    """Sums of random integers: `47+8-31`."""

    kind: Literal["arithmetic"]
    terms: Annotated[int, Field(ge=2, le=8)] = 2
    max_operand: Annotated[int, Field(ge=1, le=10**9)] = 99
    operators: Literal["+", "-", "+-"] = "+"
    train_size: Size = 10_000
    heldout_size: Size = 200
    seed: Seed = 0


class EnvironmentConfig(Section):
    """A task of one's own, of one turn or of several (`tasks.base.Task`, `tasks.base.Environment`)."""

    kind: Literal["environment"]
    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """`module:function`, called with `args` on every machine; what it returns must be picklable."""
    args: dict[str, Any] = {}


class VerifiersConfig(Section):
    """An installed environment of Prime Intellect's `verifiers`, with its own prompts and rubric."""

    kind: Literal["verifiers"]
    environment: Annotated[str, Field(min_length=1)]
    """What `vf.load_environment` takes: `gsm8k`, `owner/name`, the name of a module of one's own."""
    args: dict[str, Any] = {}
    """Arguments of its `load_environment`."""
    train_size: Size = 10_000
    """Rows of its dataset, at most."""
    heldout_size: Size = 200
    """Rows of its evaluation dataset, at most; without one, distinct prompts of its dataset set aside."""
    seed: Seed = 0
    """Chooses the prompts that are set aside."""


TaskConfig = ReasoningGymConfig | JsonlConfig | ArithmeticConfig | EnvironmentConfig | VerifiersConfig
_ADAPTER: TypeAdapter[TaskConfig] = TypeAdapter(Annotated[TaskConfig, Field(discriminator="kind")])


def parse_task_config(settings: dict[str, Any]) -> TaskConfig:
    """Raises TaskError that names the first wrong field."""
    try:
        return _ADAPTER.validate_python(settings)
    except ValidationError as error:
        raise TaskError(_one_line(error, settings)) from None


def _one_line(error: ValidationError, settings: dict[str, Any]) -> str:
    first = error.errors()[0]
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        found = f"{settings['kind']!r} is unknown" if "kind" in settings else "is missing"
        return f"task.kind {found}; use one of {', '.join(KINDS)}"
    # Pydantic puts the discriminator's value in front of the field's name.
    path = ".".join(["task", *(str(part) for part in first["loc"][1:])])
    if first["type"] == "extra_forbidden":
        return f"{path} is unknown; remove it or correct its spelling"
    if first["type"] == "missing":
        return f"{path} is missing"
    if first["type"] == "value_error":
        return f"{path}: {first['ctx']['error']}"
    return f"{path}: {first['msg']}, found {first['input']!r}"
