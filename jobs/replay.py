"""Trains a run's batches again, undisturbed, and compares every adapter with what the run committed.

The learner finds `batches/` already written (they are its write-ahead log) and the trajectories in place,
so it needs neither workers nor a proxy. On CPU, with the torch of the run and the threads and processes that each
step's checkpoint names, every digest must come out equal, however often the run's own learner was killed.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bucketrl.bucket import artifacts, keys
from bucketrl.bucket.errors import Missing, UserError
from bucketrl.bucket.gc import newest_boundary
from bucketrl.bucket.records import RunRecord, StepRecord
from bucketrl.bucket.retention import CHECKPOINTS_KEPT
from bucketrl.bucket.store import Store
from bucketrl.jobs.runs import read_log
from bucketrl.learner.checkpoint import DESCRIPTION_FILE, Description, Environment
from bucketrl.learner.main import LearnerOptions, run_learner

KEEP = "keep everything with: bucketrl learner --keep 0"


@dataclass(frozen=True, slots=True)
class Difference:
    """A file of a version whose bytes differ."""

    version: int
    file: str
    there: str
    """sha256 in the run."""
    here: str
    """sha256 in the replay, or `absent`."""


def replay(
    source: Store, target: Store, run: RunRecord, *, model_path: Path, progress: Callable[[str], None]
) -> tuple[int, list[Difference]]:
    """(versions compared, differences). `target` must be empty. Raises UserError."""
    boundary = newest_boundary(source, run)
    if boundary:
        raise UserError(
            f"bucket {source.url}: garbage collection has removed what steps 1 to {boundary} trained on, and a "
            f"replay begins with step 1; {KEEP}"
        )
    if any(True for _ in target.list("")):
        raise UserError(f"bucket {target.url}: is not empty; give a fresh one for the replay")
    commits = _commits(source, run)
    if len(commits) < 2:
        raise UserError(f"bucket {source.url}: run {run.run_id} has no optimizer step to replay")
    environments = {commit.step: _environment(source, commit) for commit in commits[1:]}
    stretches = [
        (environment, list(steps))
        for environment, steps in groupby(environments, key=environments.__getitem__)
    ]
    # A run that was stopped early is replayed as far as it came.
    target.put(keys.RUN, _until(run, commits[-1].step).encode())
    progress(f"{_copy(source, target, commits)} objects copied")
    for environment, steps in stretches:
        progress(
            f"training steps {steps[0]} to {steps[-1]} again: {environment.data_parallel} process(es) of "
            f"{environment.threads} thread(s)"
        )
        with tempfile.TemporaryDirectory() as scratch:
            options = LearnerOptions(
                learner_id="replay",
                cache_dir=Path(scratch),
                device="cpu",
                threads=environment.threads * environment.data_parallel,
                data_parallel=environment.data_parallel,
                keep=0,
            )
            run_learner(target, _until(run, steps[-1]), model_path=model_path, client=None, options=options)
        if len(_commits(target, run)) <= steps[-1]:
            break  # asked to stop: the next stretch would make the missing steps in the wrong environment
    return len(commits), compare(commits, _commits(target, run))


def compare(there: Sequence[StepRecord], here: Sequence[StepRecord]) -> list[Difference]:
    """Files of `there`'s adapters that `here` lacks or has with other bytes."""
    found = {commit.policy.version: _digests(commit) for commit in here}
    return [
        Difference(
            commit.policy.version, file, digest, found.get(commit.policy.version, {}).get(file, "absent")
        )
        for commit in there
        for file, digest in sorted(_digests(commit).items())
        if found.get(commit.policy.version, {}).get(file) != digest
    ]


def _copy(source: Store, target: Store, commits: Sequence[StepRecord]) -> int:
    """The batches, as if a learner before the first had left them behind, and the trajectories that they name."""
    copies = {keys.batch(commit.step, 0): commit.batch.key for commit in commits if commit.batch}
    for commit in commits:
        copies |= {ref.file.key: ref.file.key for ref in commit.groups}
        copies |= {ref.file.key: ref.file.key for ref in commit.skipped}
    for name, original in copies.items():
        target.put(name, source.get(original))
    return len(copies)


def _until(run: RunRecord, step: int) -> RunRecord:
    algorithm = run.config.algorithm.model_copy(update={"steps": step})
    return run.model_copy(update={"config": run.config.model_copy(update={"algorithm": algorithm})})


def _environment(store: Store, commit: StepRecord) -> Environment:
    """Under what a step was made. Raises UserError if this process cannot know it or do the same."""
    [file] = [file for file in commit.checkpoint.files if file.key.endswith(f"/{DESCRIPTION_FILE}")]
    try:
        description = Description.model_validate_json(artifacts.read_verified(store, file))
    except Missing:
        # Checkpoints are collected long before what steps trained on, and without a boundary.
        raise UserError(
            f"bucket {store.url}: {file.key} is gone, and only it says with how many threads and processes step "
            f"{commit.step} was made; garbage collection leaves the newest {CHECKPOINTS_KEPT} checkpoints only; "
            f"{KEEP}"
        ) from None
    if description.environment.device != "cpu":
        raise UserError(
            f"bucket {store.url}: was trained on {description.environment.device}, whose kernels do not repeat "
            "bit for bit; only runs on CPU can be replayed"
        )
    return description.environment


def _commits(store: Store, run: RunRecord) -> list[StepRecord]:
    return [record for record in read_log(store, run) if isinstance(record, StepRecord)]


def _digests(commit: StepRecord) -> dict[str, str]:
    """File name -> sha256 of the adapter."""
    return {file.key.rpartition("/")[2]: file.sha256 for file in commit.policy.files}
