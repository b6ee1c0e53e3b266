"""What `audit` verifies about each object that a commit names."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.errors import IntegrityError, Missing, NotFound
from bucketrl.bucket.records import (
    BatchRecord,
    FileRef,
    GroupRef,
    RunRecord,
    SkippedGroup,
    StartRecord,
    StepRecord,
    decode,
    sha256_hex,
)
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.bucket.trajectories import decode as decode_group


class Check(NamedTuple):
    """One thing to verify; `run` raises IntegrityError if it does not hold, Missing if there is no object."""

    invariant: int
    key: str
    run: Callable[[], object]
    step: int
    """Of the commit that names it; 0 for what is never collected."""


def checks_of(store: Store, run: RunRecord, commits: Sequence[StepRecord]) -> Iterator[Check]:
    """Everything that the commits name, in log order."""
    step_of = {commit.policy.version: commit.step for commit in commits}
    newest = -1
    for commit in commits:
        folder = keys.policy(commit.policy.version, commit.epoch)
        for file in commit.policy.files:
            yield Check(5, file.key, partial(_check_artifact, store, file, folder), commit.step)
        yield Check(5, keys.log(commit.seq), partial(_check_canary, commit), 0)
        if commit is commits[-1]:
            folder = keys.checkpoint(commit.step, commit.epoch)
            for file in commit.checkpoint.files:
                yield Check(6, file.key, partial(_check_artifact, store, file, folder), commit.step)
        if commit.batch is not None:
            check_batch = partial(_check_batch, store, commit, commit.batch)
            yield Check(1, commit.batch.key, check_batch, commit.step)
        groups: list[GroupRef | SkippedGroup] = [*commit.groups, *commit.skipped]
        for group in groups:
            check_group = partial(_check_group, store, run, commit, step_of, newest, group)
            yield Check(4, group.file.key, check_group, commit.step)
        newest = commit.policy.version


def snapshot_checks(
    store: Store,
    run: RunRecord,
    seqs: Sequence[int],
    records: Sequence[StartRecord | StepRecord],
    head_sha256: str,
) -> Iterator[Check]:
    """The snapshots at `seqs`, against the whole log."""
    digests = [record.parent_sha256 for record in records[1:]] + [head_sha256]
    commits = {
        record.seq: digest
        for record, digest in zip(records, digests, strict=False)
        if isinstance(record, StepRecord)
    }
    for seq in seqs:
        yield Check(1, keys.snapshot(seq), partial(_check_snapshot, store, run, seq, commits.get(seq)), 0)


def _check_snapshot(store: Store, run: RunRecord, seq: int, digest: str | None) -> None:
    """`digest`: of the commit with this sequence number, None if there is none."""
    try:
        snapshot = snapshots.check(store.get(keys.snapshot(seq)), run.run_id, seq)
    except NotFound:
        return  # collected since it was listed
    if digest is None:
        raise IntegrityError(f"{keys.log(seq)} is no commit")
    if snapshot.record_sha256 != digest:
        raise IntegrityError(
            f"says that {keys.log(seq)} has sha256 {snapshot.record_sha256}, it has {digest}"
        )


def _read(store: Store, ref: FileRef) -> bytes:
    try:
        data = store.get(ref.key)
    except NotFound:
        raise Missing("missing, but a commit names it") from None
    if (len(data), sha256_hex(data)) != (ref.size, ref.sha256):
        raise IntegrityError(
            f"{len(data)} bytes with sha256 {sha256_hex(data)}, the commit says {ref.size} and {ref.sha256}"
        )
    return data


def _check_artifact(store: Store, ref: FileRef, folder: str) -> None:
    parsed = keys.parse_artifact(ref.key)
    if parsed is None or parsed[0] != folder:
        raise IntegrityError(f"not in {folder}, where this commit's files belong")
    _read(store, ref)


def _check_canary(commit: StepRecord) -> None:
    canary = commit.canary
    want = len(canary.token_ids) - 1
    if want < 1 or len(canary.logprobs) != want or len(canary.base_logprobs) != want:
        raise IntegrityError(
            f"canary of {len(canary.token_ids)} tokens with {len(canary.logprobs)} logprobs and "
            f"{len(canary.base_logprobs)} base logprobs"
        )


def _check_batch(store: Store, commit: StepRecord, ref: FileRef) -> None:
    key = keys.batch(commit.step, commit.epoch)
    if ref.key != key:
        raise IntegrityError(f"not {key}, where this commit's batch belongs")
    batch = decode(BatchRecord, _read(store, ref))
    for name in ("run_id", "step", "epoch", "groups", "skipped"):
        if getattr(batch, name) != getattr(commit, name):
            raise IntegrityError(f"its {name} differ from those of {keys.log(commit.seq)}")


def _check_group(
    store: Store,
    run: RunRecord,
    commit: StepRecord,
    step_of: dict[int, int],
    newest: int,
    group: GroupRef | SkippedGroup,
) -> None:
    """`step_of` maps policy versions to steps; `newest` is the last version before this commit."""
    group_id = keys.GroupId.parse(group.group_id)
    key = keys.trajectory(group_id, group.attempt)
    if group.file.key != key:
        raise IntegrityError(f"{keys.log(commit.seq)} names it for {key}")
    decoded = decode_group(
        _read(store, group.file),
        run_id=run.run_id,
        group_id=group.group_id,
        attempt=group.attempt,
        max_version=newest,
    )
    staleness = _staleness(decoded, commit.step, step_of)
    bound = run.config.algorithm.max_staleness
    if isinstance(group, GroupRef):
        if staleness > bound:
            raise IntegrityError(f"trained at staleness {staleness}, beyond max_staleness {bound}")
    elif group.reason == "stale" and staleness <= bound:
        raise IntegrityError(f"skipped as stale at staleness {staleness}, within max_staleness {bound}")
    elif group.reason == "zero_variance" and len({t.reward for t in decoded.trajectories}) > 1:
        raise IntegrityError("skipped as zero_variance, but its rewards differ")


def _staleness(group: TrajectoryGroup, step: int, step_of: dict[int, int]) -> int:
    """Optimizer steps between the oldest policy that sampled a token and the one that `step` updates."""
    versions = {version for t in group.trajectories for version in t.policy_versions}
    unknown = versions - step_of.keys()
    if unknown:
        raise IntegrityError(f"sampled with policy version {min(unknown)}, which no earlier commit has")
    return step - 1 - min(step_of[version] for version in versions)
