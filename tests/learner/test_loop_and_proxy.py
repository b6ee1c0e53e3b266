"""Whole runs of the learner beside a proxy: one that appends to the log, refuses, or is away."""

import pytest
from tests.learner.runs import STEPS, World

from bucketrl.api.client import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import Heartbeat, HeartbeatReply, LearnerState, UploadedGroups
from bucketrl.bucket import keys
from bucketrl.bucket.errors import Unsupported, UserError
from bucketrl.bucket.store import Tier
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.learner.heartbeat import Heartbeats


class FakeProxy:
    """Records heartbeats; serialises the log of a store that cannot."""

    def __init__(self, store: MemoryStore | None = None, *, silent: bool = False, refuse: int = 0) -> None:
        self._store = store
        self._silent = silent
        self._refuse = refuse
        self.states: list[LearnerState] = []
        self.appended = 0

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        if self._refuse:
            raise ProxyRefused(self._refuse, "wrong token")
        if self._silent:
            raise ProxyUnavailable("connection refused")
        assert isinstance(beat.state, LearnerState)
        self.states.append(beat.state)
        return HeartbeatReply(version=0, finished=False)

    def uploads(self, groups: int, log_seq: int, wait_s: float) -> UploadedGroups:
        raise ProxyUnavailable("this one does not tell")

    def append_log(self, seq: int, data: bytes) -> bytes | None:
        assert self._store is not None
        self.appended += 1
        key = keys.log(seq)
        if [info for info in self._store.list(keys.LOG_PREFIX) if info.key == key]:
            return self._store.get(key)
        self._store.put(key, data)
        return None


class PutOnlyStore(MemoryStore):
    """Tier 0."""

    tier = Tier.PUT

    def create(self, key: str, data: bytes) -> None:
        raise Unsupported("create")


def put_only(world: World) -> PutOnlyStore:
    store = PutOnlyStore()
    for info in world.store.list(""):
        store.put(info.key, world.store.get(info.key))
    return store


def test_without_exclusive_creates_the_proxy_appends_to_the_log(world: World, undisturbed: World) -> None:
    store = put_only(world)
    proxy = FakeProxy(store)
    world.learn(store, proxy)
    world.store = store
    assert proxy.appended == STEPS + 2
    assert world.fingerprint() == undisturbed.fingerprint()
    world.assert_sound()


def test_without_exclusive_creates_and_without_a_proxy_nothing_is_begun(world: World) -> None:
    store = put_only(world)
    before = [info.key for info in store.list("")]
    with pytest.raises(UserError, match="pass --proxy URL"):
        world.learn(store)
    assert [info.key for info in store.list("")] == before


def test_a_learner_with_the_wrong_token_writes_nothing(world: World) -> None:
    before = [info.key for info in world.store.list("")]
    with pytest.raises(UserError, match="BUCKETRL_WORKER_TOKEN"):
        world.learn(client=FakeProxy(refuse=401))
    assert [info.key for info in world.store.list("")] == before


def test_an_absent_proxy_does_not_keep_the_learner_from_finishing(world: World, undisturbed: World) -> None:
    world.learn(client=FakeProxy(silent=True))
    assert world.fingerprint() == undisturbed.fingerprint()


def test_skips_are_reported_until_their_commit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they are, they do not count as outstanding and new groups can be issued."""
    reported: list[tuple[str, tuple[int, ...]]] = []
    plain = Heartbeats.update

    def record(self: Heartbeats, **changes: object) -> None:
        plain(self, **changes)
        reported.append((self.state.phase, self.state.pending_skips))

    monkeypatch.setattr(Heartbeats, "update", record)
    world.learn()
    assert ("training", (1,)) in reported
    assert ("publishing", (1,)) in reported
    assert reported[-1] == ("finished", ())
