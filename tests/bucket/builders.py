"""Small valid records, groups and whole runs, made by the code under test's own encoders."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bucketrl.bucket import artifacts, conditional, keys, partials
from bucketrl.bucket.completions import Completion
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.partials import PartialGroup
from bucketrl.bucket.records import (
    BatchRecord,
    Canary,
    CheckpointRef,
    FileRef,
    GroupRef,
    LogRecord,
    ModelIdentity,
    PolicyRef,
    Record,
    RunRecord,
    SkippedGroup,
    StepRecord,
    sha256_hex,
)
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup, encode

RUN_ID = "demo-4f1c2a"
PROMPTS_PER_EPOCH = 4
NOW = "2026-03-01T12:00:00Z"
CANARY = Canary(token_ids=(5, 7, 9), logprobs=(-1.25, -0.5), base_logprobs=(-1.5, -0.75))


def run_record(**algorithm: Any) -> RunRecord:
    config = RunConfig.model_validate(
        {
            "name": "demo",
            "model": {"id": "tiny-arithmetic"},
            "task": {"kind": "arithmetic"},
            "sampling": {"group_size": 2, "max_tokens": 8},
            "algorithm": {"steps": 3, "groups_per_step": 2, "max_staleness": 1} | algorithm,
        }
    )
    return RunRecord(
        run_id=RUN_ID,
        created_at=NOW,
        bucketrl_version="0.1.0",
        config=config,
        model=ModelIdentity(weights_sha256=sha256_hex(b"weights"), tokenizer_sha256=sha256_hex(b"tokenizer")),
        prompts_per_epoch=PROMPTS_PER_EPOCH,
        write_id="w-run",
    )


def group_text(ordinal: int) -> str:
    return str(GroupId.from_ordinal(ordinal, PROMPTS_PER_EPOCH))


def trajectory(sample: int, *, version: int = 0, reward: float = 0.0, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "sample": sample,
        "prompt_token_ids": (11, 12, 13),
        "completion_token_ids": (21, 22 + sample, 2),
        "behaviour_logprobs": (-0.5, -1.25, -0.125),
        "policy_versions": (version,) * 3,
        "loss_mask": (True, True, True),
        "reward": reward,
        "reward_parts": {"correct": reward},
        "finish_reason": "stop",
        "seed": 1000 + sample,
        "started_at": NOW,
        "seconds": 0.5,
        "completion_text": f"4{sample}",
    }
    return Trajectory(**(values | changes))


def group(ordinal: int = 0, attempt: str = "w1-0001", **changes: Any) -> TrajectoryGroup:
    version = changes.pop("version", 0)
    rewards: Sequence[float] = changes.pop("rewards", (0.0, 1.0))
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "group_id": group_text(ordinal),
        "attempt": attempt,
        "worker_id": "w1",
        "engine": "transformers 5.19.0",
        "prompt_text": "21 * 2 = ",
        "trajectories": tuple(
            trajectory(i, version=version, reward=reward) for i, reward in enumerate(rewards)
        ),
    }
    return TrajectoryGroup(**(values | changes))


def partial_group(ordinal: int = 0, attempt: str = "w1-0001", **changes: Any) -> PartialGroup:
    """Sample 0 has ended, sample 1 was cut after two tokens."""
    version = changes.pop("version", 0)
    shared: dict[str, Any] = {"prompt_token_ids": (11, 12, 13), "started_at": NOW, "seconds": 0.5}
    ended = Completion(
        sample=0,
        completion_token_ids=(21, 22, 2),
        behaviour_logprobs=(-0.5, -1.25, -0.125),
        policy_versions=(version,) * 3,
        loss_mask=(True,) * 3,
        finish_reason="stop",
        seed=1000,
        **shared,
    )
    cut = Completion(
        sample=1,
        completion_token_ids=(21, 23),
        behaviour_logprobs=(-0.5, -1.25),
        policy_versions=(version,) * 2,
        loss_mask=(True,) * 2,
        finish_reason="",
        seed=1001,
        **shared,
    )
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "group_id": group_text(ordinal),
        "attempt": attempt,
        "worker_id": "w1",
        "engine": "transformers 5.19.0",
        "prompt_text": "21 * 2 = ",
        "completions": (ended, cut),
    }
    return PartialGroup(**(values | changes))


def file_ref(key: str, data: bytes) -> FileRef:
    return FileRef(key=key, size=len(data), sha256=sha256_hex(data))


def create_in(store: Store) -> Callable[[str, bytes], bytes | None]:
    """What `LogWriter` wants."""
    return partial(conditional.create, store)


def ids(prefix: str) -> Callable[[], str]:
    numbers: Iterator[int] = count(1)
    return lambda: f"{prefix}-{next(numbers):04d}"


def step_record(
    header: LogRecord, state: LogState, ordinals: Sequence[int] = (), **changes: Any
) -> StepRecord:
    """A valid next step without objects behind it; consumes `ordinals`, or the next two."""
    step = state.step.step + 1 if state.step else 0
    unconsumed = (n for n in count() if n not in state.consumed)
    chosen = tuple(ordinals) if ordinals or step == 0 else (next(unconsumed), next(unconsumed))
    groups = tuple(
        GroupRef(
            group_id=group_text(n),
            attempt="w1-0001",
            file=file_ref(keys.trajectory(GroupId.parse(group_text(n)), "w1-0001"), b"group %d" % n),
        )
        for n in chosen
    )
    policy, checkpoint = keys.policy(step, header.epoch), keys.checkpoint(step, header.epoch)
    values: dict[str, Any] = header.model_dump() | {
        "step": step,
        "policy": PolicyRef(
            version=step, files=(file_ref(policy + "adapter_model.safetensors", b"adapter"),)
        ),
        "checkpoint": CheckpointRef(step=step, files=(file_ref(checkpoint + "state.json", b"{}"),)),
        "batch": file_ref(keys.batch(step, header.epoch), b"batch") if step else None,
        "groups": groups,
        "consumed": state.consumed.add(set(chosen)),
        "canary": CANARY,
        "metrics": {"reward_mean": 0.5},
    }
    return StepRecord(**(values | changes))


def writer_on(
    store: Store,
    name: str = "a",
    create: Callable[[str, bytes], bytes | None] | None = None,
    reader: LogReader | None = None,
) -> LogWriter:
    return LogWriter(
        reader or LogReader(store, run_record()),
        create or create_in(store),
        now=lambda: NOW,
        new_id=ids(f"write-{name}"),
    )


def append(writer: LogWriter, **changes: Any) -> StepRecord:
    return writer.append_step(lambda header: step_record(header, writer.state, **changes))


@dataclass
class Learner:
    """Commits steps with real objects behind them; trains nothing."""

    store: Store
    run: RunRecord
    name: str
    reader: LogReader = field(init=False)
    writer: LogWriter = field(init=False)

    def __post_init__(self) -> None:
        self.reader = LogReader(self.store, self.run)
        self.writer = LogWriter(
            self.reader, create_in(self.store), now=lambda: NOW, new_id=ids(f"write-{self.name}")
        )

    def start(self) -> int:
        return self.writer.start(self.name)

    @property
    def next_step(self) -> int:
        return self.reader.state.step.step + 1 if self.reader.state.step else 0

    def write_batch(self, groups: Sequence[GroupRef], skipped: Sequence[SkippedGroup] = ()) -> BatchRecord:
        batch = BatchRecord(
            run_id=self.run.run_id,
            step=self.next_step,
            epoch=self.writer.epoch,
            groups=tuple(groups),
            skipped=tuple(skipped),
            write_id=f"batch-{self.name}-{self.next_step}",
        )
        self.store.put(keys.batch(batch.step, batch.epoch), batch.encode())
        return batch

    def publish(self, prefix: str, files: dict[str, bytes]) -> tuple[FileRef, ...]:
        with TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            return artifacts.publish(self.store, prefix, Path(folder))

    def commit(self, batch: BatchRecord | None = None, /, **changes: Any) -> StepRecord:
        """Publishes adapter and checkpoint, then commits `batch` (None for step 0), taken over if it is another
        learner's."""
        step, epoch = self.next_step, self.writer.epoch
        if batch is not None and batch.epoch != epoch:
            batch = batch.model_copy(update={"epoch": epoch})
            self.store.put(keys.batch(batch.step, epoch), batch.encode())
        policy = self.publish(
            keys.policy(step, epoch),
            {"adapter_model.safetensors": b"adapter %d" % step, "adapter_config.json": b'{"r": 16}'},
        )
        checkpoint = self.publish(keys.checkpoint(step, epoch), {"state.safetensors": b"moments %d" % step})
        named = [*batch.groups, *batch.skipped] if batch else []
        ordinals = {GroupId.parse(ref.group_id).ordinal(PROMPTS_PER_EPOCH) for ref in named}
        values: dict[str, Any] = {
            "step": step,
            "policy": PolicyRef(version=step, files=policy),
            "checkpoint": CheckpointRef(step=step, files=checkpoint),
            "batch": file_ref(keys.batch(step, epoch), batch.encode()) if batch else None,
            "groups": batch.groups if batch else (),
            "skipped": batch.skipped if batch else (),
            "consumed": self.reader.state.consumed.add(ordinals),
            "canary": CANARY,
            "metrics": {"reward_mean": 0.5, "staleness_max": 0.0} if batch else {},
        }
        return self.writer.append_step(lambda header: StepRecord(**(header.model_dump() | values | changes)))


def upload(store: Store, uploaded: TrajectoryGroup) -> GroupRef:
    """What a rollout worker does; returns the reference that a commit would hold."""
    data = encode(uploaded)
    key = keys.trajectory(GroupId.parse(uploaded.group_id), uploaded.attempt)
    store.put(key, data)
    return GroupRef(group_id=uploaded.group_id, attempt=uploaded.attempt, file=file_ref(key, data))


def skip(ref: GroupRef, reason: str) -> SkippedGroup:
    return SkippedGroup.model_validate(ref.model_dump() | {"reason": reason})


def worked_example(store: Store) -> dict[str, Record]:
    """The run of `bucket_layout.md` section 16: one worker dies, one is preempted; one learner restart.

    Returns the records that the document shows, by key.
    """
    run = run_record()
    store.create(keys.RUN, run.encode())
    first = Learner(store, run, "learner-a")
    first.start()
    first.commit()
    # Worker w1 samples group 0, w2 group 1; then w2 is killed while it uploads group 2.
    zero = upload(store, group(0, "w1-0001"))
    one = upload(store, group(1, "w2-0001", worker_id="w2"))
    first.commit(first.write_batch([zero, one]))
    # w1 gets group 2 again, then group 3, whose completions are all right: no gradient.
    two = upload(store, group(2, "w1-0002", version=1))
    three = skip(upload(store, group(3, "w1-0003", version=1, rewards=(1.0, 1.0))), "zero_variance")
    four = upload(store, group(4, "w1-0004", version=1))
    # The store completes w2's upload after all: a second attempt, which loses.
    upload(store, group(2, "w2-0002", worker_id="w2"))
    # The learner is killed after it wrote the batch; the next one trains the same batch.
    batch = first.write_batch([two, four], [three])
    second = Learner(store, run, "learner-b")
    second.start()
    second.commit(batch)
    # w3, which began group 5 before that commit, is preempted; w1 goes on with it.
    left = partial_group(5, "w3-0001", version=1, worker_id="w3")
    store.put(keys.partial(GroupId.parse(left.group_id), left.attempt), partials.encode(left))
    ended, cut = trajectory(0, version=1), trajectory(1, reward=1.0, policy_versions=(1, 1, 2))
    upload(store, group(5, "w1-0005", trajectories=(ended, cut)))
    records: dict[str, Record] = {keys.RUN: run, keys.batch(2, 2): batch.model_copy(update={"epoch": 2})}
    reader = LogReader(store, run)
    for record in reader.refresh():
        records[keys.log(record.seq)] = record
    return records
