"""Runs that go on and are collected, with what may happen beside them or to a pass."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.bucket.builders import NOW, Learner, group, run_record, skip, upload

from bucketrl.bucket import artifacts, keys, snapshots
from bucketrl.bucket.audit import audit
from bucketrl.bucket.errors import NotFound
from bucketrl.bucket.gc import GarbageCollector
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import BatchRecord, BoundaryRecord, StepRecord, decode
from bucketrl.bucket.store import ObjectInfo, Store
from bucketrl.bucket.stores.memory import MemoryStore

KEEP = 3
RUN = run_record()


def collector_on(
    store: Store, clock: Callable[[], float] = lambda: 0.0, keep: int = KEEP
) -> GarbageCollector:
    return GarbageCollector(store, RUN, keep=keep, collector_id="c1", now=lambda: NOW, clock=clock)


@dataclass
class World:
    """A run that goes on, with what may happen beside it."""

    store: Store = field(default_factory=MemoryStore)
    incarnations: int = 0
    uploads: int = 0
    learner: Learner = field(init=False)

    def __post_init__(self) -> None:
        self.store.put(keys.RUN, RUN.encode())
        self.restart()

    @property
    def state(self) -> LogState:
        return self.learner.reader.state

    def restart(self) -> None:
        self.incarnations += 1
        self.learner = Learner(self.store, RUN, f"l{self.incarnations}")
        self.learner.start()
        if self.state.step is None:
            self.learner.commit()

    def upload(self, ordinal: int) -> Any:
        assert self.state.step is not None
        self.uploads += 1
        attempt = f"w1-{self.uploads:04d}"
        self.store.put(keys.partial(GroupId.from_ordinal(ordinal, RUN.prompts_per_epoch), attempt), b"part")
        return upload(self.store, group(ordinal, attempt, version=self.state.step.policy.version))

    def step(self) -> None:
        """Trains the batch of a learner that died if there is one, else the next group; skips another."""
        cursor = self.state.consumed.cursor
        try:
            before = self.learner.writer.epoch - 1
            batch = decode(BatchRecord, self.store.get(keys.batch(self.learner.next_step, before)))
        except NotFound:
            same = upload(
                self.store,
                group(cursor + 1, f"s-{cursor}", version=self.learner.next_step - 1, rewards=(1.0, 1.0)),
            )
            batch = self.learner.write_batch([self.upload(cursor)], [skip(same, "zero_variance")])
        self.learner.commit(batch)

    def die(self) -> None:
        """Before its commit: the batch and the files of the adapter and the checkpoint are there."""
        cursor, number, epoch = self.state.consumed.cursor, self.learner.next_step, self.learner.writer.epoch
        if number > 0 and not list(self.store.list(keys.BATCH_PREFIX, keys.batch(number - 1, 10**6))):
            self.learner.write_batch([self.upload(cursor)])
        self.store.put(keys.policy(number, epoch) + "adapter_model.safetensors", b"orphan")
        self.store.put(keys.checkpoint(number, epoch) + "state.safetensors", b"orphan")
        self.restart()

    def early(self) -> None:
        """Groups that no step has consumed yet."""
        self.upload(self.state.consumed.cursor + 2)

    def late(self) -> None:
        """Another attempt at a group that is consumed, and at the oldest one."""
        for ordinal in {0, max(0, self.state.consumed.cursor - 1)}:
            self.upload(ordinal)

    def mark(self) -> None:
        snapshots.write(self.store, RUN.run_id, self.state.step_seq, self.state.step_sha256)


def steps(world: World, number: int) -> None:
    for _ in range(number):
        world.step()


def listed(store: Store, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


def check_whole(world: World) -> None:
    """Nothing that anybody may still need is gone."""
    store, state = world.store, world.state
    report = audit(store)
    assert report.violations == ()
    for from_snapshot in (False, True):
        reader = LogReader(store, RUN, from_snapshot=from_snapshot)
        reader.refresh()
        assert reader.state == state
    commits = [r for r in LogReader(store, RUN).refresh() if isinstance(r, StepRecord)]
    needed = [*commits[0].policy.files, *commits[0].checkpoint.files, *commits[-1].checkpoint.files]
    for commit in commits[-KEEP:]:
        needed += [*commit.policy.files, *([commit.batch] if commit.batch else [])]
        needed += [ref.file for ref in (*commit.groups, *commit.skipped)]
    for ref in needed:
        artifacts.read_verified(store, ref)


def boundary_record(step: int, **changes: Any) -> bytes:
    record = BoundaryRecord(run_id=RUN.run_id, step=step, collector_id="c1", written_at=NOW)
    return record.model_copy(update=changes).encode()


class Crash(Exception):
    pass


class Interrupted:
    """Delegates, each deletion of a key being an operation; before operation `at` it calls `meanwhile`."""

    def __init__(self, store: Store, at: int, meanwhile: Callable[[], None]) -> None:
        self._store = store
        self._left = at
        self._meanwhile = meanwhile
        self.url = store.url
        self.tier = store.tier

    def _operation(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._meanwhile()

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self._operation()
        return self._store.list(prefix, start_after)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._operation()
            self._store.delete([name])

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._operation()
            return getattr(self._store, name)(*arguments)

        return call
