"""Trains a run's batches again, undisturbed, and compares every adapter with what the run committed.

The learner finds `batches/` already written (they are its write-ahead log) and the trajectories in place,
so it needs neither workers nor a proxy. On the same machine type and thread count, on CPU, every digest
must come out equal, however often the run's own learner was killed.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import RunRecord, StepRecord
from bucketrl.bucket.store import Store

COPIED = (keys.BATCH_PREFIX, keys.TRAJECTORY_PREFIX)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A version whose bytes differ."""

    version: int
    file: str
    there: str
    """sha256 in the run."""
    here: str
    """sha256 in the replay."""


def replay(
    source: Store, target: Store, run: RunRecord, *, model_path: Path, progress: Callable[[str], None]
) -> tuple[int, list[Difference]]:
    """(versions compared, differences). `target` must be empty. Raises UserError."""
    if any(True for _ in target.list("")):
        raise UserError(f"bucket {target.url}: is not empty; give a fresh one for the replay")
    steps = max(_adapters(source, run), default=0)
    if steps < 1:
        raise UserError(f"bucket {source.url}: run {run.run_id} has no optimizer step to replay")
    # A run that was stopped early is replayed as far as it came.
    algorithm = run.config.algorithm.model_copy(update={"steps": steps})
    shorter = run.model_copy(update={"config": run.config.model_copy(update={"algorithm": algorithm})})
    target.put(keys.RUN, shorter.encode())
    copied = 0
    for prefix in COPIED:
        for info in source.list(prefix):
            target.put(info.key, source.get(info.key))
            copied += 1
    progress(f"{copied} objects copied; training {steps} steps again")
    from bucketrl.learner.main import LearnerOptions, run_learner

    with tempfile.TemporaryDirectory() as scratch:
        options = LearnerOptions(learner_id="replay", cache_dir=Path(scratch), device="cpu")
        run_learner(target, shorter, model_path=model_path, client=None, options=options)
    there, here = _adapters(source, run), _adapters(target, shorter)
    differences = [
        Difference(version, file, there[version][file], here.get(version, {}).get(file, "absent"))
        for version in sorted(there)
        for file in sorted(there[version])
        if there[version][file] != here.get(version, {}).get(file)
    ]
    return len(there), differences


def _adapters(store: Store, run: RunRecord) -> dict[int, dict[str, str]]:
    """version -> file name -> sha256, from the log."""
    return {
        record.policy.version: {file.key.rpartition("/")[2]: file.sha256 for file in record.policy.files}
        for record in LogReader(store, run).refresh()
        if isinstance(record, StepRecord)
    }
