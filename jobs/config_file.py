"""A TOML file becomes a `RunConfig`, or one line that says what is wrong with it."""

import difflib
import tomllib
from pathlib import Path

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
    """The first error as `section.field: what is wrong, and what was found`."""
    errors = error.errors()
    first = errors[0]
    fields = _fields(model, first["loc"])
    path = ".".join(fields)
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        known = _fields_at(model, fields)
        near = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        return f"{'.'.join([*fields, key])}: unknown key; {hint}"
    if first["type"] == "missing":
        return f"{path}: is missing"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return f"{path}: {message}" if path else message
    # A field of several types has one error for each.
    allowed = dict.fromkeys(item["msg"] for item in errors if _fields(model, item["loc"]) == fields)
    return f"{path}: {', or '.join(allowed)} (found {_short(first['input'])})"


def _fields(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The part of pydantic's location that names fields of ours; the rest is its own business."""
    fields: list[str] = []
    for part in location:
        if part not in _fields_at(model, fields):
            break
        fields.append(str(part))
    return fields


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the fields of the section at `path`; none if that is no section."""
    for name in path:
        annotation = model.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
