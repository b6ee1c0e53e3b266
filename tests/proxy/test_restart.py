"""A proxy that is started anew, on any machine, knows from the bucket and the next heartbeats what it must."""

from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from tests.bucket.builders import NOW, group_text, partial_group
from tests.proxy.worlds import World, proxy_of, rollout

from bucketrl.bucket import keys, partials, snapshots
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import QuarantineRecord
from bucketrl.bucket.store import ObjectInfo, Store

GRACE_S = 10.0


async def test_status_and_steps_come_back() -> None:
    world = World()
    world.begin()
    world.train(0, 1)
    async with proxy_of(world) as proxy:
        before = ((await proxy.get("/v1/run")).json(), (await proxy.get("/v1/steps")).json())
    async with proxy_of(world) as proxy:
        after = ((await proxy.get("/v1/run")).json(), (await proxy.get("/v1/steps")).json())
    assert after == before
    assert after[0]["reward"] == 0.5


async def test_a_proxy_that_begins_at_a_snapshot_shows_the_steps_before_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as it reads at once; the state is that of the whole log."""
    world = World()
    world.begin()
    for step in range(6):
        world.train(step)
    async with proxy_of(world) as proxy:
        before = ((await proxy.get("/v1/run")).json(), (await proxy.get("/v1/steps")).json())
    state = world.learner.reader.state
    snapshots.write(world.store, world.run.run_id, state.step_seq, state.step_sha256)
    async with proxy_of(world) as proxy:
        assert (await proxy.get("/v1/run")).json() == before[0]
        assert (await proxy.get("/v1/steps")).json() == before[1]
    monkeypatch.setattr("bucketrl.proxy.core.HISTORY", 2)
    async with proxy_of(world) as proxy:
        assert [row["step"] for row in (await proxy.get("/v1/steps")).json()] == [4, 5, 6]
    world.store.put(keys.log(3), world.store.get(keys.log(3)) + b" ")
    monkeypatch.setattr("bucketrl.proxy.core.HISTORY", 256)
    async with proxy_of(world) as proxy:
        assert [row["step"] for row in (await proxy.get("/v1/steps")).json()] == [6]


async def test_the_age_of_the_newest_commit_survives() -> None:
    world = World()
    world.begin()
    async with proxy_of(world) as proxy:
        assert (await proxy.get("/v1/run")).json()["seconds_since_commit"] == 3600
        world.train(0, 1)
        status = await proxy.until(lambda status: status["version"] == 1)
        assert status["seconds_since_commit"] == 0


async def test_uploads_are_kept_claims_adopted_and_the_rest_issued_again_after_a_grace() -> None:
    world = World()
    world.begin()
    async with proxy_of(world) as proxy:
        leases = (await proxy.lease("w1", groups=4))["leases"]
    world.upload(0)
    world.upload(3)
    async with proxy_of(world) as successor:
        claim = {"lease_id": leases[1]["lease_id"], "group_id": leases[1]["group_id"]}
        await successor.beat(**rollout("w1", leases=[claim]))
        assert await successor.leased("w2", groups=4) == [], "2 may still be worked on"
        world.clock.now += GRACE_S
        assert await successor.leased("w2", groups=4) == [2]
        held = (await successor.get(f"/v1/groups/{group_text(1)}")).json()
        assert (held["state"], held["worker_id"]) == ("leased", "w1")


async def test_attempts_that_were_refused_before_do_not_count_as_uploads() -> None:
    """The refusing learner reported to the predecessor; its record in the bucket is all that is left."""
    world = World()
    world.begin()
    world.upload(0, "bad")
    world.upload(1, "good")
    key = keys.quarantine(GroupId.parse(group_text(0)), "bad")
    record = QuarantineRecord(key=key, reason="torn", learner_id="learner-a", written_at=NOW)
    world.store.put(key, record.encode())
    async with proxy_of(world) as proxy:
        assert await proxy.leased(groups=1) == [0]


async def test_foreign_objects_among_the_trajectories_are_no_obstacle() -> None:
    world = World()
    world.begin()
    for name in (
        "README",
        "0000-00000000/UPPER.parquet",
        "0000-00000009/a.parquet",
        "9999-00000000/a.parquet",
    ):
        world.store.put(keys.TRAJECTORY_PREFIX + name, b"x")
    async with proxy_of(world) as proxy:
        assert await proxy.leased(groups=9) == [0, 1, 2, 3]


async def test_partial_groups_are_found_and_issued_first_after_the_grace() -> None:
    """Above the consumed cursor; of two attempts the one with more in it."""
    world = World()
    world.begin()
    world.train(0, 1)
    for ordinal, attempt, tokens in ((1, "old", 2), (4, "small", 1), (4, "large", 2)):
        group = partial_group(ordinal, attempt)
        kept = group.completions if tokens == 2 else group.completions[:1]
        key = keys.partial(GroupId.parse(group.group_id), attempt)
        world.store.put(key, partials.encode(replace(group, completions=kept)))
    world.store.put(keys.PARTIAL_PREFIX + "0001-00000002/UPPER.parquet", b"x")
    async with proxy_of(world) as proxy:
        world.clock.now += GRACE_S
        leases = (await proxy.lease("w2", groups=3))["leases"]
    assert [(lease["ordinal"], lease["partial_attempt"]) for lease in leases] == [
        (4, "large"), (2, None), (3, None),
    ]  # fmt: skip


async def test_no_work_is_given_out_before_the_bucket_has_been_listed() -> None:
    """Else everything that a predecessor's workers have uploaded would be sampled again."""
    world = World()
    world.begin()
    world.upload(0)
    listing = HeldListing(world.store)
    world.store = listing
    async with proxy_of(world, ready=False) as proxy:
        await proxy.until(lambda status: status["version"] == 0)
        assert (await proxy.lease())["reason"] == "no_policy"
        assert (await proxy.get("/readyz")).status_code == 503
        listing.let_go.set()
        await proxy.until_ready()
        assert await proxy.leased() == [1]


class HeldListing:
    """A store whose listing of trajectories takes until `let_go`."""

    def __init__(self, inner: Store) -> None:
        self.let_go = Event()
        self._inner = inner

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        if prefix == keys.TRAJECTORY_PREFIX:
            assert self.let_go.wait(30)
        return self._inner.list(prefix, start_after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
