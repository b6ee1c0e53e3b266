"""What must hold at the end of any history, whatever happened: the invariants of `bucket_layout.md` 9."""

from bucketrl.bucket import keys
from bucketrl.bucket.audit import audit
from bucketrl.bucket.errors import Fenced, IntegrityError, StoreError
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import (
    BatchRecord,
    FileRef,
    RunRecord,
    StartRecord,
    StepRecord,
    decode_log,
    sha256_hex,
)
from bucketrl.bucket.records import decode as decode_record
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup, decode
from bucketrl.simulator import model
from bucketrl.simulator.disk import Disk


def is_honest_end(error: BaseException) -> bool:
    """What a role may end with under faults; a supervisor starts it again."""
    return isinstance(error, (Fenced, StoreError, IntegrityError))


def finished(disk: Disk, run: RunRecord) -> bool:
    return disk.newest is not None and disk.newest.step >= run.config.algorithm.steps


def violations(disk: Disk, run: RunRecord) -> list[str]:
    """Every invariant that this history has broken."""
    log = {key: contents for key, contents in disk.archive.items() if key.startswith(keys.LOG_PREFIX)}
    found = [f"log: {key} had {len(contents)} contents" for key, contents in log.items() if len(contents) > 1]
    found += [f"log: {key} is gone" for key in log if key not in disk.objects]
    found += _audit(disk)
    try:
        history = _verified(disk, run)
    except IntegrityError as error:
        return [*found, f"log: {error}"]
    found += _lineage(disk, run, history)
    found += [problem for commit in history if (problem := _write_ahead(disk, commit)) is not None]
    return found


def _audit(disk: Disk) -> list[str]:
    store = MemoryStore("judge")
    for key, data in disk.objects.items():
        store.put(key, data)
    return [f"audit: {violation}" for violation in audit(store).violations]


def _verified(disk: Disk, run: RunRecord) -> list[StepRecord]:
    state, found = LogState.empty(run), []
    while (data := disk.objects.get(keys.log(state.next_seq))) is not None:
        state = state.apply(data)
        record = decode_log(data)
        if isinstance(record, StepRecord):
            found.append(record)
    return found


def _lineage(disk: Disk, run: RunRecord, history: list[StepRecord]) -> list[str]:
    """Trains the whole run again, from the objects as they were, and looks at every token."""
    found: list[str] = []
    weights = model.UNTRAINED
    adapters: dict[int, str] = {}
    for commit in history:
        groups = []
        for ref in commit.groups:
            data = _as_committed(disk, ref.file)
            if data is None:
                found.append(f"step {commit.step}: {ref.file.key} never had the bytes that the commit names")
                return found
            group = decode(
                data, run_id=run.run_id, group_id=ref.group_id, attempt=ref.attempt, max_version=commit.step
            )
            groups.append(group)
            found += [f"step {commit.step}: {problem}" for problem in _tokens(group, adapters)]
        if commit.step > 0:
            weights = model.trained(weights, groups)
        adapters[commit.policy.version] = weights
        [adapter] = [file for file in commit.policy.files if file.key.endswith(".safetensors")]
        if _as_committed(disk, adapter) != weights.encode():
            found.append(f"step {commit.step}: the adapter is not what its batches make of the one before")
            return found
    return found


def _write_ahead(disk: Disk, commit: StepRecord) -> str | None:
    """Whether the step was trained on the batch that the newest learner before had stored for it, if any."""
    earlier = {
        parsed[1]: key
        for key in disk.archive
        if (parsed := keys.parse_batch(key)) is not None
        and parsed[0] == commit.step
        and parsed[1] < commit.epoch
    }
    if not earlier:
        return None
    key = earlier[max(earlier)]
    started_at = _started_at(disk, commit.epoch)
    if started_at is None or disk.written_at[key] >= started_at:
        return None  # its learner's start is lost, which others report; or the batch landed late
    batch = decode_record(BatchRecord, disk.archive[key][-1])
    if (batch.groups, batch.skipped) == (commit.groups, commit.skipped):
        return None
    return f"step {commit.step}: trained on another batch than {key}, which was there"


def _started_at(disk: Disk, epoch: int) -> float | None:
    for key, contents in disk.archive.items():
        if key.startswith(keys.LOG_PREFIX):
            record = decode_log(contents[0])
            if isinstance(record, StartRecord) and record.epoch == epoch:
                return disk.written_at[key]
    return None


def _as_committed(disk: Disk, file: FileRef) -> bytes | None:
    return next((data for data in disk.archive.get(file.key, ()) if sha256_hex(data) == file.sha256), None)


def _tokens(group: TrajectoryGroup, adapters: dict[int, str]) -> list[str]:
    problems = []
    for trajectory in group.trajectories:
        wrong = _wrong_token(trajectory, adapters)
        if wrong is not None:
            problems.append(f"{group.group_id} {group.attempt} sample {trajectory.sample}: {wrong}")
    return problems


def _wrong_token(trajectory: Trajectory, adapters: dict[int, str]) -> str | None:
    """The first token that was not drawn, with this log-probability, by the version that it carries."""
    context = list(trajectory.prompt_token_ids)
    rows = zip(
        trajectory.completion_token_ids,
        trajectory.behaviour_logprobs,
        trajectory.policy_versions,
        trajectory.loss_mask,
        strict=True,
    )
    for index, (token, logprob, version, sampled) in enumerate(rows):
        weights = adapters.get(version)
        if weights is None:
            return f"token {index} carries version {version}, which was not committed"
        if (model.logprob(weights, context, token) if sampled else 0.0) != logprob:
            return f"token {index} carries version {version} but was sampled by something else"
        context.append(token)
    return None
