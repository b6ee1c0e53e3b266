"""The scheduler's promises, held under random histories."""

from dataclasses import dataclass
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.proxy.schedulers import LIMITS, scheduler

from bucketrl.bucket.records import Consumed


@dataclass
class Held:
    """A lease as its worker knows it."""

    worker: str
    ordinal: int
    deadline: float


class Histories(RuleBasedStateMachine):
    """Two workers, a learner, silence, refusals, work without the proxy, and a proxy that is replaced."""

    workers = st.sampled_from(["a", "b"])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.consumed = Consumed()
        self.version = 0
        self.bucket: set[tuple[int, str]] = set()
        self.refused: set[tuple[int, str]] = set()
        self.partial: dict[int, str] = {}
        """In the bucket: the fullest of each group, which is the newest."""
        self.attempts = count()
        self.held: dict[str, Held] = {}
        """What workers still work on."""
        self.granted: dict[str, Held] = {}
        """The same, and what they have finished without the proxy hearing of it: its leases still stand."""
        self.generation = 0
        self.ever_issued: set[int] = set()
        self.issued_here: set[int] = set()
        """By this very proxy, and nothing has happened since that would let it issue them again."""
        self.skips: set[int] = set()
        """What the learner has told this very proxy."""
        self.one = scheduler()

    def valid(self) -> list[tuple[int, str]]:
        return sorted(pair for pair in self.bucket - self.refused if pair[0] not in self.consumed)

    def upload(self, ordinal: int) -> str:
        attempt = f"a{next(self.attempts):04d}"
        self.bucket.add((ordinal, attempt))
        return attempt

    @rule(worker=workers, n=st.integers(1, 4))
    def lease(self, worker: str, n: int) -> None:
        before, doubled = self.one.next_ordinal, self.one.totals.tail
        begun = {o for o in self.one._queue if o in self.one._partial}
        reply = self.one.lease(worker, n, self.now)
        first = {lease.ordinal for lease in reply.leases[: len(begun)]}
        assert first <= begun or begun <= first, "begun groups come first"
        if self.one.next_ordinal > before:
            assert self.one.outstanding <= LIMITS.max_outstanding
        again = [lease for lease in reply.leases if lease.ordinal in self.issued_here]
        assert len(again) == self.one.totals.tail - doubled, "issued again without a reason"
        for lease in reply.leases:
            assert lease.ordinal not in self.consumed
            assert lease.partial_attempt == self.one._partial.get(lease.ordinal)
            given = Held(worker, lease.ordinal, self.now + LIMITS.lease_seconds)
            self.held[lease.lease_id] = self.granted[lease.lease_id] = given
            self.ever_issued.add(lease.ordinal)
            self.issued_here.add(lease.ordinal)

    @rule(data=st.data(), announced=st.booleans(), twice=st.booleans())
    def complete(self, data: st.DataObject, announced: bool, twice: bool) -> None:
        if not self.held:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        done = self.held.pop(lease_id)
        attempt = self.upload(done.ordinal)
        if announced:
            del self.granted[lease_id]
        for _ in range(announced * (1 + twice)):
            self.one.complete(lease_id, done.ordinal, attempt, self.now)

    @rule(ahead=st.integers(0, 2 * LIMITS.max_outstanding - 1))
    def work_alone(self, ahead: int) -> None:
        """A worker that could not reach the proxy."""
        ordinal = self.consumed.cursor + ahead
        if ordinal not in self.consumed:
            self.upload(ordinal)
            self.ever_issued.add(ordinal)

    @rule(data=st.data(), cut=st.booleans(), told=st.booleans())
    def release(self, data: st.DataObject, cut: bool, told: bool) -> None:
        """`cut` with tokens, which are saved; a worker whose release is lost leaves them all the same."""
        if not self.held:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        given = self.held.pop(lease_id)
        attempt = f"p{next(self.attempts):04d}" if cut else None
        if attempt is not None:
            self.partial[given.ordinal] = attempt
        if told:
            stands = self.one._leases.get(lease_id) is not None
            del self.granted[lease_id]
            self.one.release(lease_id, given.worker, attempt)
            self.issued_here.discard(given.ordinal)
            if stands and attempt is not None:
                assert self.one._partial[given.ordinal] == attempt

    @rule(worker=workers)
    def die(self, worker: str) -> None:
        for lease_id in [lease_id for lease_id, one in self.granted.items() if one.worker == worker]:
            self.held.pop(lease_id, None)
            self.issued_here.discard(self.granted.pop(lease_id).ordinal)
        self.one.lost(worker)

    @rule(worker=workers)
    def heartbeat(self, worker: str) -> None:
        mine = {lease_id: one for lease_id, one in self.held.items() if one.worker == worker}
        self.one.held(worker, [(lease_id, one.ordinal) for lease_id, one in mine.items()], self.now)
        for one in mine.values():
            one.deadline = self.now + LIMITS.lease_seconds

    @rule()
    def commit(self) -> None:
        ready = sorted({ordinal for ordinal, _ in self.valid()})[:2]
        if ready:
            self.consumed = self.consumed.add(set(ready))
            self.version += 1
            self.one.committed(self.consumed, self.version, self.now, finished=False)

    @rule(data=st.data())
    def announce_skips(self, data: st.DataObject) -> None:
        """The learner may change its mind, or be replaced by one that has not looked yet."""
        ready = sorted({ordinal for ordinal, _ in self.valid()})
        skips = data.draw(st.lists(st.sampled_from(ready), unique=True)) if ready else []
        self.one.pending_skips(skips)
        self.skips = {ordinal for ordinal in skips if ordinal < self.one.next_ordinal}

    @rule()
    def list_bucket(self) -> None:
        self.one.listed(sorted(pair for pair in self.bucket if pair[0] not in self.consumed), self.now)
        for ordinal, attempt in self.refused:
            self.one.quarantined(ordinal, attempt)
            self.issued_here.discard(ordinal)
        self.one.listed_partial(
            sorted(pair for pair in self.partial.items() if pair[0] not in self.consumed), self.now
        )

    @rule(data=st.data(), told=st.booleans())
    def refuse(self, data: st.DataObject, told: bool) -> None:
        if self.valid():
            refused = data.draw(st.sampled_from(self.valid()))
            self.refused.add(refused)
            if told:
                self.one.quarantined(*refused)
                self.issued_here.discard(refused[0])

    @rule(seconds=st.sampled_from([1.0, 20.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.one.expire(self.now)
        self.issued_here -= {one.ordinal for one in self.granted.values() if one.deadline <= self.now}

    @rule()
    def replace_proxy(self) -> None:
        self.generation += 1
        self.one = scheduler(version=-1, prefix=f"g{self.generation}")
        self.one.committed(self.consumed, self.version, self.now, finished=False)
        self.issued_here.clear()
        self.skips.clear()
        self.list_bucket()

    @invariant()
    def every_ordinal_below_next_is_in_exactly_one_place(self) -> None:
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

    @invariant()
    def what_is_outstanding_is_counted_right(self) -> None:
        issued = range(self.one.next_ordinal)
        assert self.one.outstanding == sum(n not in self.consumed and n not in self.skips for n in issued)

    @invariant()
    def a_group_has_two_leases_only_by_the_tail_rule(self) -> None:
        shared = [n for n in range(self.one.next_ordinal) if len(self.one._leases.of_group(n)) > 1]
        assert len(shared) <= self.one.totals.tail
        assert all(len(self.one._leases.of_group(n)) == 2 for n in shared)

    @invariant()
    def what_can_be_continued_is_neither_uploaded_nor_consumed(self) -> None:
        for ordinal in self.one._partial:
            assert ordinal not in self.consumed
            assert not self.one.attempts(ordinal)
            assert ordinal < self.one.next_ordinal

    @invariant()
    def the_view_of_the_log_is_right(self) -> None:
        assert self.one.next_ordinal >= self.consumed.cursor
        assert [n for n in range(self.one.next_ordinal) if self.one.is_consumed(n)] == [
            n for n in range(self.one.next_ordinal) if n in self.consumed
        ]

    def teardown(self) -> None:
        """However it went: if workers and learner go on working, everything issued is consumed, and more."""
        before = self.consumed.cursor
        for _ in range(100):
            self.now += 15.0
            self.list_bucket()
            for worker in ("a", "b"):
                for lease in self.one.lease(worker, 4, self.now).leases:
                    attempt = self.upload(lease.ordinal)
                    self.one.complete(lease.lease_id, lease.ordinal, attempt, self.now)
            self.commit()
        assert all(ordinal in self.consumed for ordinal in self.ever_issued)
        assert self.consumed.cursor >= before + 100, "the learner starved"


Histories.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestHistories = Histories.TestCase
