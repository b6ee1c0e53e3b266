"""The audit of a run that is collected: what is gone rightly, and what is missing."""

import pytest
from tests.bucket.collected_runs import RUN, Interrupted, World, boundary_record, collector_on, listed, steps

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.audit import audit


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
