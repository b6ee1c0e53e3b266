"""What `curl … | jq`, the dashboard and Prometheus get."""

import re

import pytest
from tests.proxy.worlds import WALL, World, learner, proxy_of, rollout

from bucketrl.api.messages import StepSummary
from bucketrl.proxy.status import steps_per_minute


@pytest.fixture
def world() -> World:
    made = World()
    made.begin()
    return made


async def test_status_of_a_run_that_has_not_trained(world: World) -> None:
    async with proxy_of(world) as proxy:
        status = (await proxy.get("/v1/run")).json()
    assert (status["step"], status["version"], status["steps"]) == (0, 0, 3)
    assert status["reward"] is None
    assert status["proxy_started_at"] == WALL.isoformat()
    assert (status["workers_alive"], status["learner_alive"]) == (0, False)


async def test_status_adds_up_what_the_living_report(world: World) -> None:
    world.train(0, 1)
    async with proxy_of(world) as proxy:
        await proxy.beat(**rollout("dead", tokens_per_second=1000.0))
        world.clock.now += 20
        for name in ("w1", "w2"):
            await proxy.beat(**rollout(name, tokens_per_second=50.0))
        await proxy.beat(**learner(step=1))
        status = (await proxy.get("/v1/run")).json()
        assert status["rollout_tokens_per_second"] == 100.0
        assert (status["workers_alive"], status["learner_alive"]) == (2, True)
        assert (status["reward"], status["staleness_max"]) == (0.5, 0.0)
        rows = {row["id"]: row for row in (await proxy.get("/v1/workers")).json()}
        assert {name: row["alive"] for name, row in rows.items()} == {
            "learner-a": True, "w1": True, "w2": True, "dead": False,
        }  # fmt: skip
        assert rows["dead"]["seconds_since_seen"] == 20


async def test_workers_show_how_many_leases_they_hold(world: World) -> None:
    async with proxy_of(world) as proxy:
        await proxy.beat(**rollout("w1"))
        await proxy.lease("w1", groups=3)
        assert [row["leases"] for row in (await proxy.get("/v1/workers")).json()] == [3]


async def test_a_member_silent_for_an_hour_is_forgotten(world: World) -> None:
    async with proxy_of(world) as proxy:
        await proxy.beat(**rollout("w1"))
        world.clock.now += 3601
        proxy.app.state.follower._core.tick()
        assert (await proxy.get("/v1/workers")).json() == []


async def test_steps_after_a_step_and_the_newest_few(world: World) -> None:
    world.train(0, 1)
    world.train(2, 3)
    async with proxy_of(world) as proxy:
        every = (await proxy.get("/v1/steps")).json()
        assert [row["step"] for row in every] == [0, 1, 2]
        assert every[1]["metrics"] == {"reward_mean": 0.5, "staleness_max": 0.0}
        assert [row["step"] for row in (await proxy.get("/v1/steps?after=1")).json()] == [2]
        assert [row["step"] for row in (await proxy.get("/v1/steps?limit=2")).json()] == [1, 2]


@pytest.mark.parametrize("group_id", ["0000-00000004", "1-2", "..%2F..%2Frun.json"])
async def test_a_group_that_the_run_cannot_have(world: World, group_id: str) -> None:
    async with proxy_of(world) as proxy:
        reply = await proxy.get(f"/v1/groups/{group_id}")
    assert reply.status_code in (404, 422)
    assert "\n" not in reply.json()["error"]


def test_the_rate_of_steps_is_that_of_the_median_gap() -> None:
    """A pause for the night does not make a run look slow."""
    times = ["12:00:00", "12:00:10", "12:00:20", "23:00:00", "23:00:10"]
    rows = [
        StepSummary(
            step=n, version=n, log_seq=n, written_at=f"2026-03-01T{time}Z", groups=1, skipped=0, metrics={}
        )
        for n, time in enumerate(times)
    ]
    assert steps_per_minute(rows) == 6.0
    assert steps_per_minute(rows[:1]) == 0.0
    assert steps_per_minute([rows[0].model_copy(update={"written_at": "soon"}), rows[1]]) == 0.0


async def test_metrics_are_prometheus_text_with_the_newest_steps_numbers(world: World) -> None:
    world.train(0, 1)
    async with proxy_of(world) as proxy:
        await proxy.lease("w1", groups=2)
        await proxy.beat(**rollout("w1", tokens_per_second=12.5))
        text = (await proxy.get("/metrics")).text
    values = dict(re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE))
    expected = {
        "bucketrl_step": 1.0,
        "bucketrl_policy_version": 1.0,
        'bucketrl_step_metric{name="reward_mean"}': 0.5,
        "bucketrl_leases_issued_total": 2.0,
        "bucketrl_leases_active": 2.0,
        "bucketrl_groups_outstanding_limit": 4.0,
        "bucketrl_rollout_tokens_per_second": 12.5,
        "bucketrl_workers_alive": 1.0,
    }
    assert {name: float(values[name]) for name in expected} == expected


async def test_metrics_before_the_first_commit() -> None:
    async with proxy_of(World()) as proxy:
        assert "bucketrl_policy_version -1.0" in (await proxy.get("/metrics")).text


async def test_the_page_needs_nothing_from_elsewhere(world: World) -> None:
    async with proxy_of(world) as proxy:
        reply = await proxy.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    links = re.findall(r"https?://[^\s\"'<]+", reply.text)
    assert set(links) <= {"http://www.w3.org/2000/svg"}


async def test_health_says_which_run_and_readiness_waits_for_the_bucket(world: World) -> None:
    async with proxy_of(world) as proxy:
        assert (await proxy.get("/healthz")).json()["run_id"] == world.run.run_id
        assert (await proxy.get("/readyz")).json() == {"status": "ready"}
