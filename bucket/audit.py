"""Proves or refutes, from the bucket alone, the invariants of `bucket_layout.md` section 9.

It reads what every reader reads, by the same code (`LogReader`, `trajectories.decode`), and re-verifies
every object that a commit names. It writes nothing and may run beside a live run.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from bucketrl.bucket import keys
from bucketrl.bucket.audit_checks import Check, checks_of
from bucketrl.bucket.errors import IntegrityError, NotFound, UserError
from bucketrl.bucket.log import LogReader, LogViolation
from bucketrl.bucket.records import Consumed, RunRecord, StartRecord, StepRecord, decode
from bucketrl.bucket.store import Store

THREADS = 16
WINDOW = 128
"""Checks in flight; bounds the memory of an audit."""


class Violation(NamedTuple):
    invariant: int
    """Number in `bucket_layout.md` section 9."""
    key: str
    message: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result: clean if there is no violation."""

    run_id: str
    violations: tuple[Violation, ...]
    notes: tuple[str, ...] = ()
    """Nothing wrong, but worth knowing: foreign keys, collected checkpoints, left-over objects."""
    records: int = 0
    """Log records that follow from the first one."""
    steps: int = 0
    """Commits among them, step 0 included."""
    trained: int = 0
    """Groups."""
    skipped: int = 0
    """Groups."""
    unconsumed: int = 0
    """Trajectory objects of groups that no step has consumed yet."""
    duplicates: int = 0
    """Trajectory objects of consumed groups that lost to another attempt."""
    quarantined: int = 0
    orphans: int = 0
    """Files of adapters and checkpoints that no commit names."""


def audit(store: Store, progress: Callable[[int, int], None] | None = None) -> AuditReport:
    """Audits the run in `store`; `progress(done, total)` counts objects.

    Raises UserError if there is no run, StoreError if the store fails.
    """
    try:
        run = decode(RunRecord, store.get(keys.RUN))
    except NotFound:
        raise UserError(f"{store.url} holds no run: {keys.RUN} is missing; give the URL of a run") from None
    except IntegrityError as error:
        return AuditReport("", (Violation(1, keys.RUN, str(error)),))
    reader = LogReader(store, run)
    records, violations = _read_log(reader)
    violations += _gaps(store, reader.state.next_seq)
    commits = [record for record in records if isinstance(record, StepRecord)]
    violations += _verify(list(checks_of(store, run, commits)), progress)
    uploads = _Uploads.of(store, run, commits)
    orphans, notes = _leftovers(store, commits)
    return AuditReport(
        run_id=run.run_id,
        violations=tuple(sorted(violations)),
        notes=(*notes, *uploads.notes),
        records=len(records),
        steps=len(commits),
        trained=sum(len(commit.groups) for commit in commits),
        skipped=sum(len(commit.skipped) for commit in commits),
        unconsumed=uploads.unconsumed,
        duplicates=uploads.duplicates,
        quarantined=uploads.quarantined,
        orphans=orphans,
    )


def _read_log(reader: LogReader) -> tuple[list[StartRecord | StepRecord], list[Violation]]:
    """The records up to the first that is absent or may not follow."""
    records: list[StartRecord | StepRecord] = []
    try:
        while fresh := reader.refresh():
            records += fresh
    except LogViolation as error:
        key = keys.log(reader.state.next_seq)
        return records, [Violation(error.invariant, key, f"{error}; nothing after it was audited")]
    return records, []


def _gaps(store: Store, next_seq: int) -> list[Violation]:
    seqs = {seq for i in store.list(keys.LOG_PREFIX) if (seq := keys.parse_log(i.key)) is not None}
    beyond = min((seq for seq in seqs if seq > next_seq), default=None)
    if beyond is not None and next_seq not in seqs:
        key = keys.log(next_seq)
        return [Violation(1, key, f"missing, but {keys.log(beyond)} exists: the log has a gap")]
    return []


def _verify(checks: Sequence[Check], progress: Callable[[int, int], None] | None) -> list[Violation]:
    found: list[Violation] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(checks), WINDOW):
            window = checks[start : start + WINDOW]
            found += [violation for violation in pool.map(_refute, window) if violation]
            if progress:
                progress(start + len(window), len(checks))
    return found


def _refute(check: Check) -> Violation | None:
    try:
        check.run()
    except IntegrityError as error:
        return Violation(check.invariant, check.key, str(error))
    return None


@dataclass(frozen=True, slots=True)
class _Uploads:
    """What lies under `trajectories/` and `quarantine/`, seen against the log."""

    unconsumed: int
    duplicates: int
    quarantined: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, store: Store, run: RunRecord, commits: Sequence[StepRecord]) -> "_Uploads":
        consumed = commits[-1].consumed if commits else Consumed()
        named = {ref.file.key for commit in commits for ref in commit.groups}
        named |= {ref.file.key for commit in commits for ref in commit.skipped}
        trained = {(ref.group_id, ref.attempt) for commit in commits for ref in commit.groups}
        unconsumed = duplicates = quarantined = 0
        notes = []
        for info in store.list(keys.TRAJECTORY_PREFIX):
            parsed = keys.parse_trajectory(info.key)
            if parsed is None or parsed[0].index >= run.prompts_per_epoch:
                notes.append(f"{info.key}: foreign key")
            elif parsed[0].ordinal(run.prompts_per_epoch) not in consumed:
                unconsumed += 1
            elif info.key not in named:
                duplicates += 1
        for info in store.list(keys.QUARANTINE_PREFIX):
            parsed = keys.parse_quarantine(info.key)
            if parsed is None:
                notes.append(f"{info.key}: foreign key")
                continue
            quarantined += 1
            if (str(parsed[0]), parsed[1]) in trained:
                notes.append(f"{info.key}: quarantined, yet trained: another reading found the object whole")
        return cls(unconsumed, duplicates, quarantined, tuple(notes))


def _leftovers(store: Store, commits: Sequence[StepRecord]) -> tuple[int, list[str]]:
    """Number of artefact files that no commit names, and notes about other keys that none names."""
    named = {file.key for commit in commits for file in (*commit.policy.files, *commit.checkpoint.files)}
    present: set[str] = set()
    notes = []
    for prefix in (keys.POLICY_PREFIX, keys.CHECKPOINT_PREFIX):
        for info in store.list(prefix):
            if keys.parse_artifact(info.key) is None:
                notes.append(f"{info.key}: foreign key")
            else:
                present.add(info.key)
    collected = sum(any(f.key not in present for f in commit.checkpoint.files) for commit in commits[:-1])
    if collected:
        notes.append(f"checkpoints of {collected} older steps are gone; only the newest is needed")
    newest = commits[-1].step if commits else -1
    for info in store.list(keys.BATCH_PREFIX):
        step = keys.parse_batch(info.key)
        if step is None:
            notes.append(f"{info.key}: foreign key")
        elif step > newest:
            notes.append(f"{info.key}: written ahead, not committed yet")
    notes += [f"{i.key}: foreign key" for i in store.list(keys.LOG_PREFIX) if keys.parse_log(i.key) is None]
    return len(present - named), notes
