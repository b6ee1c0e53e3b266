"""What all roles together ask of the bucket, from what each says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.proxy.worlds import World, learner, proxy_of, rollout

from bucketrl.proxy.store_traffic import MAX_MEMBERS, WINDOW_S, StoreTraffic


def test_the_rate_is_that_of_the_last_five_minutes() -> None:
    traffic = StoreTraffic()
    for second in range(0, 601, 5):
        # 120 a minute in the first five minutes, 12 in the next.
        sent = 2 * second if second <= 300 else 600 + (second - 300) // 5
        traffic.reported("w1", "rollout", sent, float(second))
        if second == 300:
            assert traffic.per_minute(300.0) == pytest.approx(120.0)
    assert traffic.per_minute(600.0) == pytest.approx(12.0)


def test_a_burst_at_the_start_is_not_extrapolated() -> None:
    traffic = StoreTraffic()
    traffic.reported("w1", "rollout", 0, 0.0)
    traffic.reported("w1", "rollout", 30, 1.0)
    assert traffic.per_minute(1.0) == 30.0


def test_a_member_that_starts_again_counts_on() -> None:
    traffic = StoreTraffic()
    for now, sent in enumerate((100, 110, 3, 5)):
        traffic.reported("learner", "learner", sent, float(now))
    assert traffic.totals == {"learner": 15}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.floats(0, 400)), max_size=60))
def test_totals_are_what_was_sent_since_the_first_report_and_the_memory_is_bounded(
    history: list[tuple[str, int, float]],
) -> None:
    traffic, sent, first, now = StoreTraffic(), {"a": 7, "b": 0, "c": 90}, dict[str, int](), 0.0
    for member, more, seconds in history:
        now += seconds
        first.setdefault(member, sent[member] + more)
        sent[member] += more
        traffic.reported(member, "rollout", sent[member], now)
    assert traffic.totals.total() == sum(sent[member] - start for member, start in first.items())
    assert len(traffic._samples) <= WINDOW_S / 5 + 2
    assert traffic.per_minute(now) >= 0


def test_workers_that_are_long_gone_are_not_kept() -> None:
    traffic = StoreTraffic()
    for number in range(MAX_MEMBERS + 10):
        traffic.reported("stays", "rollout", number, float(number))
        traffic.reported(f"w{number}", "rollout", 5, float(number))
    assert len(traffic._reported) == MAX_MEMBERS
    assert traffic.totals["rollout"] == MAX_MEMBERS + 9


async def test_status_and_metrics_show_what_each_role_sends() -> None:
    world = World()
    world.begin()
    async with proxy_of(world) as proxy:
        for sent in (10, 40):
            await proxy.beat(**rollout("w1", store_requests=sent))
            await proxy.beat(**rollout("w2", store_requests=2 * sent))
            await proxy.beat(**learner(store_requests=sent))
            world.clock.now += 10
        status = (await proxy.get("/v1/run")).json()
        metrics = (await proxy.get("/metrics")).text
    assert {role: status["store_requests"][role] for role in ("rollout", "learner")} == {
        "rollout": 90,
        "learner": 30,
    }
    assert status["store_requests"]["proxy"] >= 0
    assert status["store_requests_per_minute"] >= 120
    assert 'bucketrl_store_requests_total{role="rollout"} 90.0' in metrics
