"""A TOML file becomes a `RunConfig`, or one line that says what is wrong with it."""

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.tasks.base import TaskError
from bucketrl.tasks.config import parse_task_config


def load_config(path: Path) -> RunConfig:
    """Raises UserError naming the file, the field, what was found and what to do."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, RunConfig)}") from None
    try:
        parse_task_config(config.task)
    except TaskError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first error as `section.field: what is wrong`."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        known = _fields_at(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if kind == "missing":
        return f"{path}: is missing"
    message = first["msg"].removeprefix("Value error, ")
    found = first.get("input")
    shown = f" (found {found!r})" if isinstance(found, str | int | float | bool) else ""
    return f"{path}: {message}{shown}" if path else message


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return []
        model = field.annotation
    return list(model.model_fields)
