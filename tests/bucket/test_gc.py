"""Garbage collection: bounded, resumable, never ahead of a reader, whoever dies or freezes meanwhile."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.bucket.builders import NOW, Learner, group, run_record, skip, upload
from tests.bucket.counting import CountingStore

from bucketrl.bucket import artifacts, gc, keys, snapshots
from bucketrl.bucket.audit import audit
from bucketrl.bucket.errors import IntegrityError, NotFound
from bucketrl.bucket.gc import PROBE_AGE_S, GarbageCollector, Report, newest_boundary
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


# -- one pass ---------------------------------------------------------------------------------------


def test_a_pass_removes_what_old_commits_needed_and_says_so_first() -> None:
    world = World()
    steps(world, 8)
    world.die()
    world.step()
    before = {info.key: info.size for info in world.store.list("")}
    counting = CountingStore(world.store)
    report = collector_on(counting).collect(world.state)
    after = set(listed(world.store, ""))
    gone = before.keys() - after
    assert report.boundary == 6
    assert report.total == (len(gone), sum(before[key] for key in gone))
    assert after - before.keys() == {keys.boundary(6)}
    changes = [name for name, _ in counting.calls if name in ("put", "delete")]
    assert changes[0] == "put"
    assert set(changes[1:]) == {"delete"}
    assert listed(world.store, keys.BATCH_PREFIX) == [
        keys.batch(step, epoch) for step, epoch in ((7, 1), (8, 1), (9, 1), (9, 2))
    ]
    versions = {keys.folder_number(key) for key in listed(world.store, keys.POLICY_PREFIX)}
    assert versions == {0, 7, 8, 9}
    assert {keys.folder_number(key) for key in listed(world.store, keys.CHECKPOINT_PREFIX)} == {0, 8, 9}
    assert len({key.split("/")[1] for key in listed(world.store, keys.TRAJECTORY_PREFIX)}) == 5
    check_whole(world)
    assert collector_on(world.store).collect(world.state) == Report(boundary=6)


def test_a_dry_run_tells_the_same_and_changes_nothing() -> None:
    world = World()
    steps(world, 8)
    before = listed(world.store, "")
    told = collector_on(world.store).collect(world.state, dry_run=True)
    assert listed(world.store, "") == before
    assert told == collector_on(world.store).collect(world.state)


def test_a_run_without_a_commit_has_nothing_to_collect(memory: Store) -> None:
    assert collector_on(memory).collect(LogState.empty(RUN)) == Report()


def test_one_boundary_record_is_left_the_newest() -> None:
    world = World()
    collector = collector_on(world.store)
    for boundary in (2, 4):
        steps(world, boundary + KEEP - world.learner.next_step + 1)
        collector.collect(world.state)
        assert listed(world.store, keys.BOUNDARY_PREFIX) == [keys.boundary(boundary)]
        record = decode(BoundaryRecord, world.store.get(keys.boundary(boundary)))
        assert (record.run_id, record.step, record.collector_id) == (RUN.run_id, boundary, "c1")


def test_later_passes_read_only_what_is_new() -> None:
    world = World()
    steps(world, 8)
    counting = CountingStore(world.store)
    collector = collector_on(counting)
    collector.collect(world.state)
    counting.calls.clear()
    steps(world, 2)
    collector.collect(world.state)
    assert [key for name, key in counting.calls if name == "get"] == [keys.log(world.state.head_seq - 1)]


def test_probe_leftovers_go_when_two_passes_far_apart_have_seen_them() -> None:
    """A probe under way is never disturbed; nobody else's clock counts."""
    world, times = World(), [0.0]
    collector = collector_on(world.store, clock=lambda: times[0])
    world.store.put("probe/old/put", b"x")
    for now, left in ((0.0, 1), (PROBE_AGE_S - 1, 1), (PROBE_AGE_S, 0)):
        times[0] = now
        collector.collect(world.state)
        assert len(listed(world.store, keys.PROBE_PREFIX)) == left


def test_a_history_that_was_edited_stops_the_pass() -> None:
    world = World()
    steps(world, 8)
    world.store.put(keys.log(5), world.store.get(keys.log(5)) + b" ")
    before = listed(world.store, "")
    with pytest.raises(IntegrityError, match=r"log/00000005\.json: digest"):
        collector_on(world.store).collect(world.state)
    assert listed(world.store, "") == before


# -- the boundary -----------------------------------------------------------------------------------


def boundary_record(step: int, **changes: Any) -> bytes:
    record = BoundaryRecord(run_id=RUN.run_id, step=step, collector_id="c1", written_at=NOW)
    return record.model_copy(update=changes).encode()


def test_the_newest_boundary_counts(memory: Store) -> None:
    assert newest_boundary(memory, RUN) == 0
    for step in (3, 12):
        memory.put(keys.boundary(step), boundary_record(step))
    memory.put("gc/notes.txt", b"foreign")
    assert newest_boundary(memory, RUN) == 12


@pytest.mark.parametrize("data", [b"torn", boundary_record(3), boundary_record(5, run_id="other")])
def test_a_boundary_of_something_else_is_an_error(memory: Store, data: bytes) -> None:
    memory.put(keys.boundary(5), data)
    with pytest.raises(IntegrityError):
        newest_boundary(memory, RUN)


def test_a_boundary_that_is_replaced_while_it_is_read_is_looked_for_again(memory: Store) -> None:
    memory.put(keys.boundary(3), boundary_record(3))

    def replaced() -> None:
        memory.put(keys.boundary(6), boundary_record(6))
        memory.delete([keys.boundary(3)])

    assert newest_boundary(Interrupted(memory, 2, replaced), RUN) == 6


# -- crashes, stale views, other collectors ---------------------------------------------------------


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


def crash() -> None:
    raise Crash


EVENTS = ("step", "step", "step", "die", "restart", "early", "late", "mark", "view", "collect")
events = st.sampled_from(EVENTS)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    history=st.lists(
        st.tuples(events, st.integers(1, 60), st.lists(events, max_size=6)), min_size=4, max_size=14
    )
)
def test_whatever_happens_nothing_that_is_needed_is_gone(
    history: list[tuple[str, int, list[str]]],
) -> None:
    """A pass works by the view of the log that was taken at the last `view`; at some operation it crashes,
    or freezes while the run goes on and other passes are made."""
    world = World()
    steps(world, KEEP)
    view = world.state

    def happen(name: str) -> None:
        nonlocal view
        if name == "view":
            view = world.state
        elif name == "collect":
            collector_on(world.store).collect(world.state)
        else:
            getattr(world, name)()

    for name, at, meanwhile in history:
        if name == "collect":

            def interrupt(meanwhile: list[str] = meanwhile) -> None:
                for other in meanwhile:
                    happen(other)
                if not meanwhile:
                    raise Crash

            try:
                collector_on(Interrupted(world.store, at, interrupt)).collect(view)
            except Crash:
                pass
        else:
            happen(name)
    unconsumed = list(world.store.list(keys.TRAJECTORY_PREFIX))
    check_whole(world)
    # A fresh learner goes on, from the batch that a dead one has left if there is one.
    world.restart()
    world.step()
    collector_on(world.store).collect(world.state)
    check_whole(world)
    for info in unconsumed:
        parsed = keys.parse_trajectory(info.key)
        assert parsed is not None
        if parsed[0].ordinal(RUN.prompts_per_epoch) not in world.state.consumed:
            assert world.store.size(info.key) == info.size


@pytest.mark.parametrize("at", range(1, 60, 4))
def test_a_pass_that_was_killed_is_finished_by_the_next(at: int) -> None:
    world, undisturbed = World(), World()
    for one in (world, undisturbed):
        steps(one, 8)
    try:
        collector_on(Interrupted(world.store, at, crash)).collect(world.state)
    except Crash:
        check_whole(world)
    collector_on(world.store).collect(world.state)
    collector_on(undisturbed.store).collect(undisturbed.state)
    assert listed(world.store, "") == listed(undisturbed.store, "")


# -- the audit --------------------------------------------------------------------------------------


def collected_world() -> World:
    world = World()
    steps(world, 8)
    collector_on(world.store).collect(world.state)
    return world


def test_the_audit_counts_what_is_collected() -> None:
    world = collected_world()
    report = audit(world.store)
    assert report.violations == ()
    # Of steps 1 to 5: two files of the adapter, a batch, a trained and a skipped group each.
    assert (report.boundary, report.collected) == (5, 25)
    assert (report.steps, report.trained, report.skipped) == (9, 8, 8)


@pytest.mark.parametrize(
    ("key", "invariant"),
    [
        (keys.batch(6, 1), 1),
        (keys.policy(6, 1) + "adapter_config.json", 5),
        (keys.policy(0, 1) + "adapter_config.json", 5),
        (keys.checkpoint(8, 1) + "state.safetensors", 6),
    ],
)
def test_absence_above_the_boundary_and_of_step_0_is_a_violation(key: str, invariant: int) -> None:
    world = collected_world()
    world.store.delete([key])
    [found] = audit(world.store).violations
    assert (found.invariant, found.key) == (invariant, key)


def test_without_its_boundary_record_what_is_gone_is_missing() -> None:
    world = collected_world()
    world.store.delete([keys.boundary(5)])
    assert len(audit(world.store).violations) == 25


def test_what_is_there_below_the_boundary_is_verified() -> None:
    world = World()
    steps(world, 8)
    world.store.put(keys.boundary(5), boundary_record(5))
    torn = keys.policy(2, 1) + "adapter_config.json"
    world.store.put(torn, b"torn")
    world.store.delete([keys.batch(3, 1)])
    report = audit(world.store)
    assert [violation.key for violation in report.violations] == [torn]
    assert report.collected == 1


def test_a_batch_that_a_frozen_learner_writes_late_is_garbage() -> None:
    world = collected_world()
    world.store.put(keys.batch(2, 9), b"another choice")
    assert audit(world.store).violations == ()
    collector_on(world.store).collect(world.state)
    assert listed(world.store, keys.BATCH_PREFIX) == [keys.batch(step, 1) for step in (6, 7, 8)]


def test_a_boundary_that_lets_go_what_is_needed_is_a_violation() -> None:
    world = World()
    steps(world, 8)
    world.store.put(keys.boundary(6), boundary_record(6))  # 3 are kept at max_staleness 1
    [found] = audit(world.store).violations
    assert (found.invariant, found.key) == (8, keys.boundary(6))
    assert "newest step is 8 and 3 must be kept" in found.message


def test_a_boundary_that_cannot_be_read_is_a_violation() -> None:
    world = World()
    world.store.put(keys.boundary(6), b"torn")
    [found] = audit(world.store).violations
    assert (found.invariant, found.key) == (8, keys.BOUNDARY_PREFIX)


@pytest.mark.parametrize(
    ("seq", "digest", "reason"),
    [(2, "0" * 64, "sha256"), (0, "0" * 64, "is no commit"), (77, "0" * 64, "is no commit")],
)
def test_a_snapshot_that_is_not_of_this_log_is_a_violation(seq: int, digest: str, reason: str) -> None:
    world = World()
    steps(world, 3)
    world.mark()
    assert audit(world.store).violations == ()
    snapshots.write(world.store, RUN.run_id, seq, digest)
    [found] = audit(world.store).violations
    assert (found.invariant, found.key) == (1, keys.snapshot(seq))
    assert reason in found.message


@pytest.mark.parametrize("at", range(1, 100, 6))
def test_an_audit_beside_a_run_that_goes_on_and_is_collected_is_clean(at: int) -> None:
    world = World()
    steps(world, 6)
    world.mark()

    def go_on() -> None:
        steps(world, 6)
        world.mark()
        world.step()
        world.mark()
        collector_on(world.store).collect(world.state)

    assert audit(Interrupted(world.store, at, go_on)).violations == ()


def test_a_log_that_breaks_during_an_audit_is_a_violation() -> None:
    world = World()
    steps(world, 2)

    def break_off() -> None:
        world.store.put(keys.log(world.state.next_seq), b"torn")

    [found] = audit(Interrupted(world.store, 20, break_off)).violations
    assert (found.invariant, found.key) == (1, keys.log(4))


def test_a_collector_deletes_in_parts_and_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "DELETED_AT_ONCE", 10)
    world = World()
    steps(world, 8)
    seen: list[tuple[int, int]] = []
    report = collector_on(world.store).collect(
        world.state, progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == [*range(10, report.total.objects, 10), report.total.objects]
    assert {total for _, total in seen} == {report.total.objects}
