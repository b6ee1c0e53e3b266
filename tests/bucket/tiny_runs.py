"""Whole runs of a few bytes an object: no local files, no Parquet, so that thousands of steps take seconds."""

from dataclasses import dataclass, field
from itertools import count

from tests.bucket.builders import CANARY, NOW, create_in, file_ref, ids, run_record

from bucketrl.bucket import keys
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import (
    CheckpointRef,
    FileRef,
    GroupRef,
    LogRecord,
    PolicyRef,
    RunRecord,
    StepRecord,
)
from bucketrl.bucket.store import Store

ATTEMPT = "w1"


@dataclass
class TinyLearner:
    """Two groups a step, the oldest ones; writes what a learner writes, of a few bytes each."""

    store: Store
    name: str = "a"
    run: RunRecord = field(default_factory=run_record)
    writer: LogWriter = field(init=False)

    def __post_init__(self) -> None:
        self.writer = LogWriter(
            LogReader(self.store, self.run, from_snapshot=True),
            create_in(self.store),
            now=lambda: NOW,
            new_id=ids(f"write-{self.name}"),
        )
        self.writer.start(self.name)
        if self.state.step is None:
            self.commit()

    @property
    def state(self) -> LogState:
        return self.writer.state

    def step(self) -> None:
        """One step with all that it needs."""
        self.sample(2)
        self.commit()

    def next_groups(self, number: int) -> list[GroupId]:
        wanted = (n for n in count(self.state.consumed.cursor) if n not in self.state.consumed)
        return [GroupId.from_ordinal(next(wanted), self.run.prompts_per_epoch) for _ in range(number)]

    def sample(self, number: int) -> None:
        """Uploads the next groups, each with a part that was left over and an attempt that lost."""
        for group in self.next_groups(number):
            self.store.put(keys.trajectory(group, ATTEMPT), b"group %d" % group.index)
            self.store.put(keys.trajectory(group, "w2"), b"late")
            self.store.put(keys.partial(group, ATTEMPT), b"part")

    def publish(self) -> tuple[FileRef, FileRef]:
        """An adapter and a checkpoint; an orphan if no commit follows."""
        number, epoch = self.next_step, self.writer.epoch
        adapter = file_ref(keys.policy(number, epoch) + "adapter_model.safetensors", b"adapter %d" % number)
        state = file_ref(keys.checkpoint(number, epoch) + "state.safetensors", b"state %d" % number)
        self.store.put(adapter.key, b"adapter %d" % number)
        self.store.put(state.key, b"state %d" % number)
        return adapter, state

    def commit(self) -> None:
        adapter, state = self.publish()
        number = self.next_step
        groups = [self._ref(group) for group in self.next_groups(2 if number else 0)]
        batch = file_ref(keys.batch(number, self.writer.epoch), b"batch") if number else None
        if batch:
            self.store.put(batch.key, b"batch")
        size = self.run.prompts_per_epoch
        ordinals = {GroupId.parse(ref.group_id).ordinal(size) for ref in groups}
        consumed = self.state.consumed.add(ordinals)

        def build(header: LogRecord) -> StepRecord:
            return StepRecord(
                **header.model_dump(),
                step=number,
                policy=PolicyRef(version=number, files=(adapter,)),
                checkpoint=CheckpointRef(step=number, files=(state,)),
                batch=batch,
                groups=tuple(groups),
                consumed=consumed,
                canary=CANARY,
            )

        self.writer.append_step(build)

    @property
    def next_step(self) -> int:
        return self.state.step.step + 1 if self.state.step else 0

    def _ref(self, group: GroupId) -> GroupRef:
        key = keys.trajectory(group, ATTEMPT)
        return GroupRef(group_id=str(group), attempt=ATTEMPT, file=file_ref(key, b"group %d" % group.index))
