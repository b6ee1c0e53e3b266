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
from bucketrl.bucket.errors import IntegrityError, NotFound, StoreError, UserError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.probe import probe
from bucketrl.bucket.records import RunRecord, StartRecord, StepRecord, decode
from bucketrl.bucket.store import Store, Tier
from bucketrl.jobs.lora_targets import check_lora_targets
from bucketrl.jobs.models import identify_model, resolve_model
from bucketrl.tasks.load import load_task

Progress = Callable[[str], None]

GROUPS_PER_TRAINED = 4
"""Groups that a run may consume for each one that it trains on, skipped ones included."""


def read_run(store: Store) -> RunRecord | None:
    """None for an empty bucket. Raises UserError if `run.json` cannot be read or is none of this program's."""
    try:
        return decode(RunRecord, store.get(keys.RUN))
    except NotFound:
        return None
    except IntegrityError as error:
        raise UserError(f"bucket {store.url}: {keys.RUN}: {error}") from None
    except StoreError as error:
        raise UserError(f"bucket {store.url}: cannot be read: {error}") from None


def open_run(store: Store) -> RunRecord:
    """The run that this bucket holds. Raises UserError if there is none."""
    run = read_run(store)
    if run is None:
        raise UserError(
            f"bucket {store.url}: holds no run; write one with: bucketrl create CONFIG --bucket {store.url}"
        )
    return run


def join(store: Store, config: RunConfig) -> RunRecord | None:
    """The bucket's run if it has this very configuration, None if the bucket has no run.

    Raises UserError for a bucket of another run.
    """
    existing = read_run(store)
    return None if existing is None else _same(store, existing, config)


def create(store: Store, config: RunConfig, *, progress: Progress) -> RunRecord:
    """A new run in an empty bucket; if somebody was faster with the same configuration, theirs.

    Raises UserError for a bucket that cannot be written or holds other objects, and for a model or LoRA
    targets that will not do; TaskError for the task.
    """
    run = draft_run(config, progress=progress)
    _refuse_foreign_objects(store)
    if probe(store, write_id=uuid.uuid4().hex).tier < Tier.CREATE:
        store.put(keys.RUN, run.encode())  # two creators at once would be one person's two commands
        return run
    winner = conditional.create(store, keys.RUN, run.encode())
    return run if winner is None else _same(store, decode(RunRecord, winner), config)


def create_or_join(store: Store, config: RunConfig, *, progress: Progress) -> RunRecord:
    """Raises what `join` and `create` raise."""
    return join(store, config) or create(store, config, progress=progress)


def draft_run(config: RunConfig, *, progress: Progress) -> RunRecord:
    """What `create` writes, not written. Raises UserError and TaskError."""
    task = load_task(config.task)
    _check_epochs(config, task.size("train"))
    folder = resolve_model(config.model, progress=progress)
    check_lora_targets(config.lora, folder)
    return RunRecord(
        run_id=f"{config.name}-{uuid.uuid4().hex[:8]}",
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        bucketrl_version=bucketrl.__version__,
        config=config,
        model=identify_model(folder),
        prompts_per_epoch=task.size("train"),
        write_id=uuid.uuid4().hex,
    )


def _check_epochs(config: RunConfig, prompts: int) -> None:
    """Raises UserError if the run would count its passes over the prompts beyond what a group id holds."""
    algorithm = config.algorithm
    passes = algorithm.steps * algorithm.groups_per_step / prompts
    if passes * GROUPS_PER_TRAINED > keys.MAX_PROMPT_EPOCH:
        raise UserError(
            f"task: {prompts} training prompts make {passes:.0f} passes or more in algorithm.steps "
            f"{algorithm.steps}, a run has {keys.MAX_PROMPT_EPOCH}; give it more prompts or fewer steps"
        )


def load_model(run: RunRecord, *, progress: Progress) -> Path:
    """The folder of the run's base model. Raises UserError if this machine has another one."""
    folder = resolve_model(run.config.model, progress=progress)
    found = identify_model(folder)
    for field in ("weights_sha256", "tokenizer_sha256"):
        have, want = getattr(found, field), getattr(run.model, field)
        if have != want:
            raise UserError(
                f"model.id {run.config.model.id}: {field} of {folder} is {have[:12]}…, run {run.run_id} was "
                f"made with {want[:12]}…; use the same model files"
            )
    return folder


def read_log(store: Store, run: RunRecord) -> list[StartRecord | StepRecord]:
    """All of it. Raises IntegrityError or StoreError if a record cannot be read."""
    reader = LogReader(store, run)
    records: list[StartRecord | StepRecord] = []
    while fresh := reader.refresh():
        records += fresh
    return records


def read_state(store: Store, run: RunRecord) -> LogState:
    """What the log says now, from its newest snapshot. Raises as `read_log` does."""
    reader = LogReader(store, run, from_snapshot=True)
    while reader.refresh():
        pass  # only the state counts
    return reader.state


def is_finished(store: Store, run: RunRecord) -> bool:
    """Whether the last step is committed."""
    step = read_state(store, run).step
    return step is not None and step.step >= run.config.algorithm.steps


def _same(store: Store, existing: RunRecord, config: RunConfig) -> RunRecord:
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
