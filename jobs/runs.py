"""`run.json`: create a run in a bucket, or join the one that is there. Whatever is wrong shows before
anything is written."""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bucketrl
from bucketrl.bucket import conditional, keys
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import IntegrityError, NotFound, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.records import RunRecord, decode
from bucketrl.bucket.store import Store, Tier
from bucketrl.jobs.lora_targets import check_lora_targets
from bucketrl.jobs.models import identify_model, resolve_model
from bucketrl.tasks.base import Task
from bucketrl.tasks.load import load_task

Progress = Callable[[str], None]


def read_run(store: Store) -> RunRecord | None:
    """None for an empty bucket. Raises UserError if `run.json` is not one of this program's."""
    try:
        return decode(RunRecord, store.get(keys.RUN))
    except NotFound:
        return None
    except IntegrityError as error:
        raise UserError(f"bucket {store.url}: {keys.RUN}: {error}") from None


def open_run(store: Store) -> RunRecord:
    """The run that this bucket holds. Raises UserError if there is none."""
    run = read_run(store)
    if run is None:
        raise UserError(
            f"bucket {store.url}: holds no run; write one with: bucketrl create CONFIG --bucket {store.url}"
        )
    return run


def create_or_join(store: Store, config: RunConfig, *, progress: Progress) -> RunRecord:
    """The bucket's run if it has this very configuration, else a new one in an empty bucket.

    Raises UserError for a bucket of another run or one that cannot be written, and for a model, a task or
    LoRA targets that will not do.
    """
    existing = read_run(store)
    if existing is not None:
        return _joined(store, existing, config)
    task = load_task(config.task)
    folder = resolve_model(config.model, progress=progress)
    check_lora_targets(config.lora, folder)
    _refuse_foreign_objects(store)
    tier = probe(store, write_id=uuid.uuid4().hex).tier
    run = RunRecord(
        run_id=f"{config.name}-{uuid.uuid4().hex[:8]}",
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        bucketrl_version=bucketrl.__version__,
        config=config,
        model=identify_model(folder),
        prompts_per_epoch=task.size("train"),
        write_id=uuid.uuid4().hex,
    )
    data = run.encode()
    if tier < Tier.CREATE:
        store.put(keys.RUN, data)  # two creators at once would be one person's two commands
        return run
    winner = conditional.create(store, keys.RUN, data)
    return run if winner is None else _joined(store, decode(RunRecord, winner), config)


def load_parts(run: RunRecord, *, progress: Progress) -> tuple[Task, Path]:
    """The task and the base model of a run. Raises UserError if this machine has another model."""
    folder = resolve_model(run.config.model, progress=progress)
    found = identify_model(folder)
    for field in ("weights_sha256", "tokenizer_sha256"):
        have, want = getattr(found, field), getattr(run.model, field)
        if have != want:
            raise UserError(
                f"model.id {run.config.model.id}: {field} of {folder} is {have[:12]}…, run {run.run_id} was "
                f"made with {want[:12]}…; use the same model files"
            )
    return load_task(run.config.task), folder


def _joined(store: Store, existing: RunRecord, config: RunConfig) -> RunRecord:
    if existing.config == config:
        return existing
    path, there, here = _first_difference(existing.config.model_dump(), config.model_dump())
    raise UserError(
        f"bucket {store.url}: belongs to run {existing.run_id}, whose {path} is {there!r}, not {here!r}; "
        "use another bucket, or that run's configuration"
    )


def _first_difference(there: Any, here: Any, path: str = "") -> tuple[str, Any, Any]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            if there.get(key) != here.get(key):
                return _first_difference(there.get(key), here.get(key), f"{path}.{key}" if path else str(key))
    return path, there, here


def _refuse_foreign_objects(store: Store) -> None:
    for info in store.list(""):
        if not info.key.startswith(keys.PROBE_PREFIX):
            raise UserError(
                f"bucket {store.url}: holds {info.key} but no {keys.RUN}; a run needs an empty prefix"
            )
