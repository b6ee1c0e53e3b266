"""Proves or refutes, from the bucket alone, the invariants of `bucket_layout.md` section 9.

It reads what every reader reads, by the same code (`LogReader`, `trajectories.decode`), and re-verifies
every object that a commit names. It writes nothing and may run beside a live run.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from bucketrl.bucket import keys
from bucketrl.bucket.audit_checks import Check, checks_of, snapshot_checks
from bucketrl.bucket.audit_partials import check_partials
from bucketrl.bucket.errors import IntegrityError, Missing, NotFound, UserError
from bucketrl.bucket.gc import newest_boundary
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.log_state import LogViolation
from bucketrl.bucket.records import Consumed, RunRecord, StartRecord, StepRecord, decode
from bucketrl.bucket.retention import CHECKPOINTS_KEPT, least_keep
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
    partials: int = 0
    """Groups that a worker had to leave and others can go on with, or have."""
    orphans: int = 0
    """Files of adapters and checkpoints that no commit names."""
    boundary: int = 0
    """Step up to which garbage collection may have removed what commits name; 0: nowhere."""
    collected: int = 0
    """Objects that it has removed; whatever is there is verified."""


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
    pointers = _snapshots(store)  # listed first: each must point into the log that is read now
    reader = LogReader(store, run)
    records, broken = _read_log(reader)
    violations = broken + _gaps(store, reader.state.next_seq)
    if broken:
        pointers = [seq for seq in pointers if seq < len(records)]
    commits = [record for record in records if isinstance(record, StepRecord)]
    checks = [*snapshot_checks(store, run, pointers, records, reader.state.head_sha256)]
    checks += checks_of(store, run, commits)
    present, absent = _without_absent(store, checks, _boundary(store, run)[0])
    failures = _verify(present, progress)
    # Read again at the end: a run that goes on has its garbage collected meanwhile.
    boundary, doubtful = _boundary(store, run)
    if not broken:
        violations += _read_log(reader)[1]
        doubtful += _too_high(boundary, reader, run)
    refuted = [failure for failure in failures if not _is_collected(*failure, boundary, reader)]
    violations += doubtful
    violations += [Violation(check.invariant, check.key, str(error)) for check, error in refuted]
    uploads = _Uploads.of(store, run, commits)
    orphans, notes = _leftovers(store, commits)
    newest = reader.state.step.policy.version if reader.state.step else -1
    partials, doubts = check_partials(store, run, newest, THREADS)
    return AuditReport(
        run_id=run.run_id,
        violations=tuple(sorted(violations)),
        notes=(*notes, *uploads.notes, *doubts),
        records=len(records),
        steps=len(commits),
        trained=sum(len(commit.groups) for commit in commits),
        skipped=sum(len(commit.skipped) for commit in commits),
        unconsumed=uploads.unconsumed,
        duplicates=uploads.duplicates,
        quarantined=uploads.quarantined,
        partials=partials,
        orphans=orphans,
        boundary=boundary,
        collected=absent + len(failures) - len(refuted),
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


def _snapshots(store: Store) -> list[int]:
    listed = [keys.parse_snapshot(info.key) for info in store.list(keys.SNAPSHOT_PREFIX)]
    return [seq for seq in listed if seq is not None]


def _boundary(store: Store, run: RunRecord) -> tuple[int, list[Violation]]:
    try:
        return newest_boundary(store, run), []
    except IntegrityError as error:
        return 0, [Violation(8, keys.BOUNDARY_PREFIX, f"{error}; nothing counts as collected")]


def _too_high(boundary: int, reader: LogReader, run: RunRecord) -> list[Violation]:
    newest = reader.state.step.step if reader.state.step else 0
    least = least_keep(run.config)
    if boundary == 0 or boundary + least <= newest:
        return []
    message = f"the newest step is {newest} and {least} must be kept: what it names is still needed"
    return [Violation(8, keys.boundary(boundary), message)]


def _without_absent(store: Store, checks: Sequence[Check], boundary: int) -> tuple[list[Check], int]:
    """Without those that need not be asked for one by one: collected, by a listing. And how many."""
    if boundary == 0:
        return list(checks), 0
    prefixes = (keys.POLICY_PREFIX, keys.BATCH_PREFIX, keys.TRAJECTORY_PREFIX)
    listed = {info.key for prefix in prefixes for info in store.list(prefix)}
    kept = [check for check in checks if not 0 < check.step <= boundary or check.key in listed]
    return kept, len(checks) - len(kept)


def _is_collected(check: Check, error: IntegrityError, boundary: int, reader: LogReader) -> bool:
    """Whether `check` fails because garbage collection was allowed to remove the object, by the log now."""
    if check.invariant == 6:  # a checkpoint
        newest = reader.state.step
        allowed = newest is not None and newest.step >= check.step + CHECKPOINTS_KEPT
    else:
        allowed = 0 < check.step <= boundary
    return allowed and isinstance(error, Missing)


def _verify(
    checks: Sequence[Check], progress: Callable[[int, int], None] | None
) -> list[tuple[Check, IntegrityError]]:
    """Those that do not hold, and why."""
    failures: list[tuple[Check, IntegrityError]] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(checks), WINDOW):
            window = checks[start : start + WINDOW]
            outcomes = zip(window, pool.map(_refute, window), strict=True)
            failures += [(check, error) for check, error in outcomes if error]
            if progress:
                progress(start + len(window), len(checks))
    return failures


def _refute(check: Check) -> IntegrityError | None:
    try:
        check.run()
    except IntegrityError as error:
        return error
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
        parsed = keys.parse_batch(info.key)
        if parsed is None:
            notes.append(f"{info.key}: foreign key")
        elif parsed[0] > newest:
            notes.append(f"{info.key}: written ahead, not committed yet")
    for prefix, parse in (
        (keys.LOG_PREFIX, keys.parse_log),
        (keys.SNAPSHOT_PREFIX, keys.parse_snapshot),
        (keys.BOUNDARY_PREFIX, keys.parse_boundary),
    ):
        notes += [f"{info.key}: foreign key" for info in store.list(prefix) if parse(info.key) is None]
    return len(present - named), notes
