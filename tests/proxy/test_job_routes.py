"""What workers and the learner get from the proxy, request by request."""

import asyncio

import pytest
from tests.bucket.builders import group_text
from tests.proxy.worlds import World, learner, proxy_of, rollout

from bucketrl.bucket import keys
from bucketrl.bucket.records import sha256_hex


@pytest.fixture
def world() -> World:
    made = World()
    made.begin()
    return made


async def test_no_policy_and_no_lease_before_the_first_commit() -> None:
    async with proxy_of(World()) as proxy:
        assert (await proxy.get("/v1/policy")).status_code == 204
        reply = await proxy.lease()
        assert (reply["leases"], reply["reason"]) == ([], "no_policy")
        assert reply["wait_seconds"] > 0


async def test_the_head_names_the_log_record_by_its_digest(world: World) -> None:
    async with proxy_of(world) as proxy:
        head = (await proxy.get("/v1/policy")).json()
    assert head["version"] == 0
    assert head["log_sha256"] == sha256_hex(world.store.get(keys.log(head["log_seq"])))


async def test_a_reader_that_has_the_newest_version_is_told_nothing_new(world: World) -> None:
    async with proxy_of(world) as proxy:
        first = await proxy.get("/v1/policy")
        assert (await proxy.get("/v1/policy", params={"after": 0})).status_code == 204
        again = await proxy.get("/v1/policy", headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304
        world.train(0, 1)
        await proxy.until(lambda status: status["version"] == 1)
        changed = await proxy.get("/v1/policy", headers={"if-none-match": first.headers["etag"]})
        assert changed.json()["version"] == 1
        assert changed.headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize("by_etag", [False, True])
async def test_a_long_poll_is_answered_by_the_commit(world: World, by_etag: bool) -> None:
    async with proxy_of(world) as proxy:
        etag = (await proxy.get("/v1/policy")).headers["etag"]
        options = {"headers": {"if-none-match": etag}} if by_etag else {}
        after = -1 if by_etag else 0
        poll = asyncio.create_task(proxy.get("/v1/policy", params={"after": after, "wait": 30}, **options))
        await asyncio.sleep(0.1)
        assert not poll.done()
        world.train(0, 1)
        reply = await asyncio.wait_for(poll, 5)
        assert reply.json()["version"] == 1


async def test_a_long_poll_without_a_commit_ends_after_its_wait(world: World) -> None:
    async with proxy_of(world) as proxy:
        before = asyncio.get_running_loop().time()
        reply = await proxy.get("/v1/policy", params={"after": 0, "wait": 0.2})
        assert reply.status_code == 204
        assert 0.2 <= asyncio.get_running_loop().time() - before < 5


@pytest.mark.parametrize("wait", ["31", "-1", "nan", "soon"])
async def test_a_wait_out_of_bounds_is_refused_by_name(world: World, wait: str) -> None:
    async with proxy_of(world) as proxy:
        reply = await proxy.get("/v1/policy", params={"wait": wait})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith("query.wait: ")


async def test_leases_stop_at_the_bound_and_go_on_after_a_commit(world: World) -> None:
    async with proxy_of(world) as proxy:
        first = await proxy.lease(groups=9)
        assert [lease["group_id"] for lease in first["leases"]] == [group_text(n) for n in range(4)]
        assert first["reason"] == "staleness_bound"
        world.train(0, 1)
        await proxy.until(lambda status: status["version"] == 1)
        again = await proxy.lease(groups=9)
        assert [lease["ordinal"] for lease in again["leases"]] == [4, 5]
        assert {lease["policy_version"] for lease in again["leases"]} == {1}


async def test_nothing_is_leased_after_the_last_step(world: World) -> None:
    for ordinals in [(0, 1), (2, 3), (4, 5)]:
        world.train(*ordinals)
    async with proxy_of(world) as proxy:
        assert (await proxy.lease())["reason"] == "finished"
        assert (await proxy.beat(**rollout())).json() == {"version": 3, "finished": True, "directives": []}
        assert (await proxy.get("/v1/policy")).json()["finished"] is True


async def test_a_group_goes_from_leased_to_uploaded_to_consumed(world: World) -> None:
    async with proxy_of(world) as proxy:
        path = f"/v1/groups/{group_text(0)}"
        assert (await proxy.get(path)).json()["state"] == "not_issued"
        lease = (await proxy.lease("w1"))["leases"][0]
        assert (await proxy.get(path)).json() | {"attempts": []} == {
            "group_id": group_text(0), "state": "leased", "worker_id": "w1", "attempts": [],
        }  # fmt: skip
        ref = world.upload(0)
        done = {
            "worker_id": "w1", "group_id": ref.group_id, "attempt": ref.attempt, "size": ref.file.size,
            "sha256": ref.file.sha256, "tokens": 6, "mean_reward": 0.5,
        }  # fmt: skip
        assert (await proxy.post(f"/v1/leases/{lease['lease_id']}/complete", done)).status_code == 204
        uploaded = (await proxy.get(path)).json()
        assert (uploaded["state"], uploaded["attempts"]) == ("uploaded", ["w1-0001"])
        world.train(0, 1)
        await proxy.until(lambda status: status["version"] == 1)
        assert (await proxy.get(path)).json()["state"] == "consumed"
        counts = (await proxy.get("/v1/run")).json()["leases"]
        assert (counts["issued_total"], counts["completed_total"], counts["active"]) == (1, 1, 0)


async def test_a_released_group_goes_to_the_next_worker(world: World) -> None:
    async with proxy_of(world) as proxy:
        lease = (await proxy.lease("w1"))["leases"][0]
        path = f"/v1/leases/{lease['lease_id']}/release"
        assert (await proxy.post(path, {"worker_id": "w1"})).status_code == 204
        assert await proxy.leased("w2") == [0]


async def test_a_group_that_was_cut_goes_to_the_next_worker_first_and_names_its_attempt(world: World) -> None:
    async with proxy_of(world) as proxy:
        first, second = (await proxy.lease("w1", groups=2))["leases"]
        assert first["partial_attempt"] is None
        for lease, attempt in ((first, None), (second, "w1-0001")):
            path = f"/v1/leases/{lease['lease_id']}/release"
            body = {"worker_id": "w1", "partial_attempt": attempt}
            assert (await proxy.post(path, body)).status_code == 204
        again = (await proxy.lease("w2", groups=2))["leases"]
    assert [(lease["ordinal"], lease["partial_attempt"]) for lease in again] == [(1, "w1-0001"), (0, None)]


async def test_renewing_keeps_a_lease_and_tells_when_it_is_over(world: World) -> None:
    async with proxy_of(world) as proxy:
        lease = (await proxy.lease("w1"))["leases"][0]
        path = f"/v1/leases/{lease['lease_id']}/renew"
        world.clock.now += 100
        assert (await proxy.post(path, {"worker_id": "w1"})).json()["ordinal"] == 0
        world.clock.now += 100
        assert await proxy.leased("w2") == [1]
        world.clock.now += 100
        assert await proxy.leased("w2") == [0]
        over = await proxy.post(path, {"worker_id": "w1"})
        assert over.status_code == 404
        assert "over" in over.json()["error"]


async def test_heartbeats_keep_leases_and_silence_gives_them_to_others(world: World) -> None:
    async with proxy_of(world) as proxy:
        lease = (await proxy.lease("w1"))["leases"][0]
        held = [{"lease_id": lease["lease_id"], "group_id": lease["group_id"]}]
        for _ in range(30):
            world.clock.now += 5
            await proxy.beat(**rollout("w1", leases=held))
        assert await proxy.leased("w2") == [1]
        world.clock.now += 16
        await asyncio.sleep(1.2)  # the proxy looks for silent workers once a second
        assert await proxy.leased("w2") == [0]


async def test_what_the_learner_will_skip_makes_room_for_fresh_groups(world: World) -> None:
    async with proxy_of(world) as proxy:
        await proxy.lease(groups=4)
        await proxy.beat(**learner(pending_skips=[0, 1, 2]))
        assert await proxy.leased(groups=9) == [4, 5, 6]


async def test_a_fenced_learners_skips_do_not_count(world: World) -> None:
    world.learner.start()
    async with proxy_of(world) as proxy:
        await proxy.lease(groups=4)
        await proxy.beat(**learner(epoch=1, pending_skips=[0, 1, 2]))
        assert await proxy.leased(groups=9) == []
        await proxy.beat(**learner(epoch=2, pending_skips=[0]))
        assert await proxy.leased(groups=9) == [4]


async def test_an_attempt_that_the_learner_refuses_is_sampled_again(world: World) -> None:
    world.upload(0, "bad")
    async with proxy_of(world) as proxy:
        assert await proxy.leased() == [1]
        refused = [{"group_id": group_text(0), "attempt": "bad"}]
        await proxy.beat(**learner(quarantined=refused))
        assert await proxy.leased() == [0]


async def test_a_big_fleet_is_asked_to_wait_longer(world: World) -> None:
    """However many workers idle, their requests together stay bounded."""
    async with proxy_of(world) as proxy:
        await proxy.lease(groups=4)
        alone = (await proxy.lease())["wait_seconds"]
        for number in range(300):
            await proxy.beat(**rollout(f"w{number}"))
        assert (await proxy.lease())["wait_seconds"] == pytest.approx(1.5)
        assert alone == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/leases", {"worker_id": "../w", "max_groups": 1, "loaded_version": 0}, "worker_id"),
        ("/v1/leases", {"worker_id": "w", "max_groups": 0, "loaded_version": 0}, "max_groups"),
        ("/v1/leases", {"worker_id": "w", "max_groups": 1}, "loaded_version"),
        ("/v1/leases/a.b/renew", {"worker_id": "w"}, "path.lease_id"),
        ("/v1/leases/a/release", {"worker_id": "w", "partial_attempt": "../a"}, "partial_attempt"),
        ("/v1/heartbeats", {"state": {"role": "cook"}}, "state"),
        ("/v1/heartbeats", {"state": rollout(tokens_per_second="NaN")}, "state.rollout.tokens_per_second"),
        (
            "/v1/heartbeats",
            {"state": rollout(leases=[{"lease_id": "x", "group_id": "0000-00000099"}])},
            "group_id 0000-00000099",
        ),
    ],
)
async def test_wrong_input_is_one_line_that_names_the_field(
    world: World, path: str, body: dict[str, object], field: str
) -> None:
    async with proxy_of(world) as proxy:
        reply = await proxy.post(path, body)
    assert reply.status_code == 422
    error = reply.json()["error"]
    assert error.startswith(f"{field}: ")
    assert "\n" not in error


async def test_a_completion_far_ahead_is_refused(world: World) -> None:
    done = {
        "worker_id": "w", "group_id": "0099-00000000", "attempt": "a", "size": 1, "sha256": "", "tokens": 1,
        "mean_reward": 0.0,
    }  # fmt: skip
    async with proxy_of(world) as proxy:
        reply = await proxy.post("/v1/leases/x/complete", done)
        assert reply.status_code == 422
        assert "far beyond" in reply.json()["error"]


async def test_a_worker_that_starts_again_under_its_old_name_holds_nothing(world: World) -> None:
    """Its heartbeats would else keep the dead one from going silent, until the leases run out."""
    async with proxy_of(world) as proxy:
        assert await proxy.leased("w1", groups=2) == [0, 1]
        await proxy.beat(**rollout("w1"))
        assert await proxy.leased("w2") == [2]
        await proxy.beat(**rollout("w1", state="starting"))
        assert await proxy.leased("w2", groups=2) == [0, 1]
