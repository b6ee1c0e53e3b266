"""One pass of garbage collection, and the boundary that it writes."""

import pytest
from tests.bucket.collected_runs import (
    KEEP,
    RUN,
    Interrupted,
    World,
    boundary_record,
    check_whole,
    collector_on,
    listed,
    steps,
)
from tests.bucket.counting import CountingStore

from bucketrl.bucket import gc, keys
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.gc import PROBE_AGE_S, Report, newest_boundary
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import BoundaryRecord, decode
from bucketrl.bucket.store import Store

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


# -- the boundary -----------------------------------------------------------------------------------


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
