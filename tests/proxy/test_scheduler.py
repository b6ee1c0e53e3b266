"""What the scheduler leases, to whom, and in which order."""

import pytest
from tests.proxy.schedulers import LIMITS, ordinals, scheduler

from bucketrl.bucket.records import Consumed
from bucketrl.proxy.scheduler import ADOPTION_GRACE_S, REACH, Limits
from bucketrl.proxy.tail import TAIL_MIN_S, TAIL_MIN_SAMPLES


def test_nothing_is_leased_before_the_first_policy_or_after_the_last_step() -> None:
    fresh = scheduler(version=-1)
    assert fresh.lease("w", 4, 0.0).reason == "no_policy"
    fresh.committed(Consumed(), 9, 0.0, finished=True)
    assert fresh.lease("w", 4, 0.0).reason == "finished"


def test_admission_stops_at_the_staleness_bound_and_reopens_with_a_commit() -> None:
    one = scheduler()
    assert ordinals(one.lease("w", 9, 0.0)) == [0, 1, 2, 3, 4, 5]
    assert one.lease("w", 1, 0.0).reason == "staleness_bound"
    one.committed(Consumed(cursor=2), 1, 0.0, finished=False)
    assert ordinals(one.lease("w", 9, 0.0)) == [6, 7]


def test_a_large_worker_leaves_the_others_their_share() -> None:
    one = scheduler()
    assert len(one.lease("large", 9, 0.0).leases) == 6
    assert len(one.lease("small", 1, 0.1).leases) == 0
    for step in range(1, 4):
        one.committed(Consumed(cursor=step), step, 1.0, finished=False)
        assert len(one.lease("large", 9, 1.0).leases) == 0, "it holds more than half while another waits"
        assert len(one.lease("small", 1, 1.0).leases) == 1
        assert len(one.lease("small", 1, 1.0).leases) == 0
    one.committed(Consumed(cursor=4), 4, 1.5, finished=False)
    assert len(one.lease("large", 9, 1.5).leases) == 1, "its half is three, of which it holds two"


def test_a_large_worker_takes_what_nobody_else_wants() -> None:
    one = scheduler()
    one.lease("large", 9, 0.0)
    one.lease("small", 1, 0.1)
    one.committed(Consumed(cursor=2), 1, 9.0, finished=False)
    assert len(one.lease("large", 9, 9.0).leases) == 2, "the small one asked long ago"


def test_pending_skips_do_not_count_as_outstanding() -> None:
    """Otherwise a batch of zero-variance groups could starve the learner for ever."""
    one = scheduler()
    one.lease("w", 9, 0.0)
    for ordinal in range(6):
        one.complete(f"lease-{ordinal}", ordinal, "a", 1.0)
    one.pending_skips([0, 1, 2, 3, 4, 5])
    assert ordinals(one.lease("w", 2, 1.0)) == [6, 7]


def test_skips_that_a_commit_has_consumed_are_not_subtracted_twice() -> None:
    one = scheduler()
    one.lease("w", 6, 0.0)
    one.pending_skips([0, 1])
    one.committed(Consumed(cursor=3), 1, 1.0, finished=False)
    assert one.outstanding == 3
    assert ordinals(one.lease("w", 9, 1.0)) == [6, 7, 8]


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
        one.committed(Consumed(above=tuple(range(1, turn + 2))), turn, 0.5, finished=False)
    while not one.lease("quick", 1, 1.0).reason.startswith("staleness"):
        pass
    assert not one.lease("quick", 1, TAIL_MIN_S - 1).leases
    assert ordinals(one.lease("quick", 1, TAIL_MIN_S + 1)) == [first.ordinal]
    assert first.ordinal not in ordinals(one.lease("third", 9, TAIL_MIN_S + 2)), "twice is enough"


def test_a_refused_attempt_stays_refused_when_a_listing_shows_it_again() -> None:
    """Its object stays in the bucket: were it taken for an upload, the group would never be sampled again."""
    one = scheduler()
    one.lease("w", 1, 0.0)
    one.complete("lease-0", 0, "bad", 1.0)
    one.quarantined(0, "bad")
    one.listed([(0, "bad")], 2.0)
    assert ordinals(one.lease("w", 1, 3.0)) == [0]
    one.listed([(0, "bad")], 4.0)
    assert one.holder(0) == "w"


def test_an_attempt_refused_before_it_is_announced_frees_its_lease() -> None:
    one = scheduler()
    one.lease("w", 1, 0.0)
    one.quarantined(0, "bad")
    one.complete("lease-0", 0, "bad", 1.0)
    assert ordinals(one.lease("x", 1, 1.0)) == [0]


def test_a_repeated_announcement_counts_once() -> None:
    one = scheduler()
    one.lease("w", 1, 0.0)
    one.complete("lease-0", 0, "a", 1.0)
    one.complete("lease-0", 0, "a", 1.5)
    assert one.totals.completed == 1


def test_a_successor_gives_out_the_gaps_below_what_the_log_has_consumed() -> None:
    """Ordinals 0 and 1 were leased by a predecessor; the log consumed 2 first."""
    successor = scheduler(version=-1)
    successor.committed(Consumed(above=(2,)), 1, 0.0, finished=False)
    assert ordinals(successor.lease("w", 1, 1.0)) == [3]
    assert ordinals(successor.lease("w", 2, ADOPTION_GRACE_S)) == [0, 1]


def test_a_successor_of_a_long_run_starts_at_the_cursor() -> None:
    """In time that does not depend on how many groups the run has consumed."""
    successor = scheduler(Limits(10**8, 6, 60.0), version=-1)
    successor.committed(Consumed(cursor=10**11), 9, 0.0, finished=False)
    assert ordinals(successor.lease("w", 1, 0.0)) == [10**11]


@pytest.mark.parametrize("claim", ["listed", "held", "complete", "quarantined"])
def test_a_group_far_beyond_the_bound_is_ignored(claim: str) -> None:
    """A foreign object or a confused worker must not make the scheduler account for groups without end."""
    one = scheduler()
    far = REACH * LIMITS.max_outstanding
    match claim:
        case "listed":
            one.listed([(far, "a")], 0.0)
        case "held":
            one.held("w", [("x", far)], 0.0)
        case "complete":
            one.complete("x", far, "a", 0.0)
        case _:
            one.quarantined(far, "a")
    assert one.next_ordinal == 0
    one.listed([(far - 1, "a")], 0.0)
    assert one.next_ordinal == far


def test_a_lease_released_twice_or_by_a_stranger_changes_nothing_more() -> None:
    one = scheduler()
    one.lease("w", 1, 0.0)
    one.release("lease-0", "stranger")
    assert one.holder(0) == "w"
    one.release("lease-0", "w")
    one.release("lease-0", "w")
    assert ordinals(one.lease("x", 6, 0.0)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("late", ["lease-0", "unknown"])
def test_messages_about_consumed_groups_change_nothing(late: str) -> None:
    one = scheduler()
    one.lease("w", 1, 0.0)
    one.committed(Consumed(cursor=1), 1, 0.0, finished=False)
    one.complete(late, 0, "a", 1.0)
    one.held("w", [(late, 0)], 1.0)
    one.quarantined(0, "a")
    assert one.counts().active == 0
    assert ordinals(one.lease("w", 1, 1.0)) == [1]


def partials_of(reply: object) -> dict[int, str | None]:
    return {lease.ordinal: lease.partial_attempt for lease in reply.leases}  # type: ignore[attr-defined]


def test_a_group_that_somebody_has_begun_is_issued_first_and_names_its_attempt() -> None:
    one = scheduler()
    one.lease("w", 4, 0.0)
    one.release("lease-0", "w")
    one.release("lease-3", "w", "cut")
    assert list(partials_of(one.lease("x", 3, 0.0)).items()) == [(3, "cut"), (0, None), (4, None)]


def test_the_newest_partial_attempt_counts_and_giving_back_without_one_keeps_it() -> None:
    one = scheduler()
    one.lease("w", 1, 0.0)
    for lease_id, attempt in [("lease-0", "first"), ("lease-1", None), ("lease-2", "second")]:
        one.release(lease_id, "w", attempt)
        one.listed_partial([(0, "first")], 1.0)
        wanted = "second" if attempt == "second" else "first"
        assert partials_of(one.lease("w", 1, 1.0)) == {0: wanted}


def test_only_the_holder_of_a_lease_can_name_a_partial_attempt() -> None:
    one = scheduler()
    one.lease("w", 1, 0.0)
    one.release("lease-0", "stranger", "forged")
    one.release("unknown", "w", "forged")
    one.expire(100.0)
    assert partials_of(one.lease("x", 1, 100.0)) == {0: None}


def test_a_successor_finds_what_was_begun_by_listing_and_waits_for_whoever_goes_on_with_it() -> None:
    """Group 1 is being continued by w, group 3 by nobody."""
    successor = scheduler(prefix="new")
    successor.listed_partial([(1, "a"), (3, "b")], 0.0)
    successor.held("w", [("old-1", 1)], 1.0)
    assert ordinals(successor.lease("x", 1, 1.0)) == [4]
    assert list(partials_of(successor.lease("x", 9, ADOPTION_GRACE_S)).items()) == [
        (3, "b"), (0, None), (2, None), (5, None),
    ]  # fmt: skip
    successor.release("old-1", "w")
    assert partials_of(successor.lease("x", 1, ADOPTION_GRACE_S)) == {1: "a"}


def test_an_uploaded_or_consumed_group_is_not_continued() -> None:
    """Though its partial object stays in the bucket, and listings show it."""
    one = scheduler()
    one.lease("w", 2, 0.0)
    for ordinal in range(2):
        one.release(f"lease-{ordinal}", "w", "cut")
    one.lease("w", 2, 0.0)
    one.complete("lease-2", 0, "whole", 1.0)
    one.committed(Consumed(above=(1,)), 1, 1.0, finished=False)
    one.listed_partial([(0, "cut"), (1, "cut")], 2.0)
    one.quarantined(0, "whole")
    assert partials_of(one.lease("w", 1, 3.0)) == {0: None}
