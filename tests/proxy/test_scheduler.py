"""The scheduler's promises, held under random histories."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bucketrl.bucket.records import Consumed
from bucketrl.proxy.scheduler import ADOPTION_GRACE_S, TAIL_MIN_S, TAIL_MIN_SAMPLES, Limits, Scheduler

LIMITS = Limits(prompts_per_epoch=5, max_outstanding=6, lease_seconds=60.0)


def scheduler(limits: Limits = LIMITS, *, version: int = 0, prefix: str = "lease") -> Scheduler:
    numbers = count()
    made = Scheduler(limits, lambda: f"{prefix}-{next(numbers)}")
    if version >= 0:
        made.committed(Consumed(), version, finished=False)
    return made


def ordinals(reply: object) -> list[int]:
    return [lease.ordinal for lease in reply.leases]  # type: ignore[attr-defined]


def test_nothing_is_leased_before_the_first_policy_or_after_the_last_step() -> None:
    fresh = scheduler(version=-1)
    assert fresh.lease("w", 4, 0.0).reason == "no_policy"
    fresh.committed(Consumed(), 9, finished=True)
    assert fresh.lease("w", 4, 0.0).reason == "finished"


def test_admission_stops_at_the_staleness_bound_and_reopens_with_a_commit() -> None:
    one = scheduler()
    assert ordinals(one.lease("w", 9, 0.0)) == [0, 1, 2, 3, 4, 5]
    assert one.lease("w", 1, 0.0).reason == "staleness_bound"
    one.committed(Consumed(cursor=2), 1, finished=False)
    assert ordinals(one.lease("w", 9, 0.0)) == [6, 7]


def test_pending_skips_do_not_count_as_outstanding() -> None:
    """Otherwise a batch of zero-variance groups could starve the learner for ever."""
    one = scheduler()
    one.lease("w", 9, 0.0)
    for ordinal in range(6):
        one.complete(f"lease-{ordinal}", ordinal, "a", 1.0)
    one.pending_skips([0, 1, 2, 3, 4, 5])
    assert ordinals(one.lease("w", 2, 1.0)) == [6, 7]


def test_an_expired_lease_is_issued_again_first() -> None:
    one = scheduler()
    one.lease("slow", 1, 0.0)
    assert ordinals(one.lease("other", 2, 61.0)) == [0, 1]
    assert one.totals.reissued == 1


def test_a_renewed_lease_is_kept_and_a_strangers_renewal_is_refused() -> None:
    one = scheduler()
    lease = one.lease("w", 1, 0.0).leases[0]
    assert one.renew(lease.lease_id, "stranger", 30.0) is None
    assert one.renew(lease.lease_id, "w", 30.0) is not None
    one.expire(80.0)
    assert one.holder(0) == "w"


def test_completion_counts_even_after_the_lease_expired() -> None:
    one = scheduler()
    lease = one.lease("slow", 1, 0.0).leases[0]
    one.expire(100.0)
    one.complete(lease.lease_id, 0, "late", 101.0)
    assert one.attempts(0) == ("late",)
    assert 0 not in ordinals(one.lease("w", 6, 101.0))


def test_a_refused_attempt_is_sampled_again_unless_another_one_is_there() -> None:
    one = scheduler()
    one.lease("w", 2, 0.0)
    one.complete("lease-0", 0, "bad", 1.0)
    one.complete("lease-0", 0, "good", 1.0)
    one.complete("lease-1", 1, "bad", 1.0)
    one.quarantined(0, "bad")
    one.quarantined(1, "bad")
    assert ordinals(one.lease("w", 1, 2.0)) == [1]
    assert one.attempts(0) == ("good",)


def test_a_silent_workers_groups_go_to_others() -> None:
    one = scheduler()
    one.lease("dead", 2, 0.0)
    one.lost("dead")
    assert ordinals(one.lease("w", 2, 1.0)) == [0, 1]


def test_a_successor_adopts_what_heartbeats_claim_and_issues_the_rest_after_a_grace() -> None:
    """A proxy that starts anew finds ordinals 0 and 4 in the bucket; 2 is claimed; 1 and 3 are nobody's."""
    successor = scheduler(prefix="new")
    successor.listed([(0, "a"), (4, "a")], 0.0)
    successor.held("w", [("old-2", 2)], 1.0)
    assert ordinals(successor.lease("x", 1, 1.0)) == [5]
    assert successor.holder(2) == "w"
    assert ordinals(successor.lease("x", 2, ADOPTION_GRACE_S)) == [1, 3]


def test_an_idle_worker_gets_a_late_group_as_well() -> None:
    one = scheduler()
    first = one.lease("slow", 1, 0.0).leases[0]
    for turn in range(TAIL_MIN_SAMPLES):
        lease = one.lease("quick", 1, 0.0).leases[0]
        one.complete(lease.lease_id, lease.ordinal, "a", 0.5)
        one.committed(Consumed(above=tuple(range(1, turn + 2))), turn, finished=False)
    while not one.lease("quick", 1, 1.0).reason.startswith("staleness"):
        pass
    assert not one.lease("quick", 1, TAIL_MIN_S - 1).leases
    assert ordinals(one.lease("quick", 1, TAIL_MIN_S + 1)) == [first.ordinal]
    assert first.ordinal not in ordinals(one.lease("third", 9, TAIL_MIN_S + 2)), "twice is enough"


@pytest.mark.parametrize("late", ["lease-0", "unknown"])
def test_messages_about_consumed_groups_change_nothing(late: str) -> None:
    one = scheduler()
    one.lease("w", 1, 0.0)
    one.committed(Consumed(cursor=1), 1, finished=False)
    one.complete(late, 0, "a", 1.0)
    one.held("w", [(late, 0)], 1.0)
    one.quarantined(0, "a")
    assert one.counts().active == 0
    assert ordinals(one.lease("w", 1, 1.0)) == [1]


class Histories(RuleBasedStateMachine):
    """Two workers, a learner, silence, refusals, and a proxy that is replaced now and then."""

    workers = st.sampled_from(["a", "b"])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.consumed = Consumed()
        self.version = 0
        self.bucket: set[tuple[int, str]] = set()
        self.held: dict[str, tuple[str, int]] = {}
        self.generation = 0
        self.ever_issued: set[int] = set()
        self.one = scheduler()

    @rule(worker=workers, n=st.integers(1, 4))
    def lease(self, worker: str, n: int) -> None:
        before = self.one.next_ordinal
        reply = self.one.lease(worker, n, self.now)
        if self.one.next_ordinal > before:
            assert self.one.outstanding <= LIMITS.max_outstanding
        for lease in reply.leases:
            assert lease.ordinal not in self.consumed
            self.held[lease.lease_id] = (worker, lease.ordinal)
            self.ever_issued.add(lease.ordinal)

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if not self.held:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        worker, ordinal = self.held.pop(lease_id)
        self.bucket.add((ordinal, worker))
        if data.draw(st.booleans()):  # else the announcement is lost
            self.one.complete(lease_id, ordinal, worker, self.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            lease_id = data.draw(st.sampled_from(sorted(self.held)))
            worker, _ = self.held.pop(lease_id)
            self.one.release(lease_id, worker)

    @rule(worker=workers)
    def die(self, worker: str) -> None:
        self.held = {lease: pair for lease, pair in self.held.items() if pair[0] != worker}
        self.one.lost(worker)

    @rule(worker=workers)
    def heartbeat(self, worker: str) -> None:
        mine = [(lease, ordinal) for lease, (who, ordinal) in self.held.items() if who == worker]
        self.one.held(worker, mine, self.now)

    @rule()
    def commit(self) -> None:
        ready = sorted({ordinal for ordinal, _ in self.bucket if ordinal not in self.consumed})[:2]
        if ready:
            self.consumed = self.consumed.add(set(ready))
            self.version += 1
            self.one.committed(self.consumed, self.version, finished=False)

    @rule()
    def list_bucket(self) -> None:
        self.one.listed([pair for pair in self.bucket if pair[0] not in self.consumed], self.now)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        waiting = sorted(pair for pair in self.bucket if pair[0] not in self.consumed)
        if waiting:
            ordinal, attempt = data.draw(st.sampled_from(waiting))
            self.bucket.discard((ordinal, attempt))
            self.one.quarantined(ordinal, attempt)

    @rule(seconds=st.sampled_from([1.0, 20.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.one.expire(self.now)

    @rule()
    def replace_proxy(self) -> None:
        self.generation += 1
        self.one = scheduler(prefix=f"g{self.generation}")
        self.one.committed(self.consumed, self.version, finished=False)
        self.list_bucket()

    @invariant()
    def every_ordinal_below_next_is_accounted_for(self) -> None:
        one = self.one
        for ordinal in range(one.next_ordinal):
            places = [
                one.is_consumed(ordinal),
                bool(one.attempts(ordinal)),
                one.holder(ordinal) is not None,
                ordinal in one._queue,
                ordinal in one._unaccounted,
            ]
            assert sum(places) == 1, f"{ordinal}: {places}"

    def teardown(self) -> None:
        """However it went: if workers and learner go on working, everything issued is consumed."""
        for _ in range(200):
            self.now += 15.0
            self.list_bucket()
            for worker in ("a", "b"):
                for lease in self.one.lease(worker, 4, self.now).leases:
                    self.bucket.add((lease.ordinal, worker))
                    self.one.complete(lease.lease_id, lease.ordinal, worker, self.now)
            self.commit()
        assert all(ordinal in self.consumed for ordinal in self.ever_issued)


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
