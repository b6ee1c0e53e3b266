"""Whole runs of the learner on a memory store, undisturbed and disturbed in every way that we can think of."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.learner.worlds import (
    Crash,
    EventStore,
    Trigger,
    die,
    make_config,
    make_group,
    make_run,
    put_group,
    sample_group,
    stock_model,
)

from bucketrl.api.client import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import Heartbeat, HeartbeatReply, LearnerState, UploadedGroups
from bucketrl.bucket import keys
from bucketrl.bucket.audit import audit
from bucketrl.bucket.errors import Fenced, Unsupported, UserError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import BatchRecord, RunRecord, StartRecord, StepRecord, decode
from bucketrl.bucket.store import Store, Tier
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.learner.heartbeat import Heartbeats
from bucketrl.learner.main import LearnerOptions, run_learner
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.publish import save_adapter

STEPS = 4
CONFIG = make_config(algorithm={"steps": STEPS})


@pytest.fixture(scope="module")
def sampled(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    """The trajectories of a whole run, all sampled with version 0: real ones, a group without signal, a
    corrupt attempt beside a good one, an attempt of another run."""
    folder = tmp_path_factory.mktemp("version-0")
    save_adapter(folder, PolicyModel.load(model_folder, CONFIG, torch.device("cpu")))
    stock = stock_model(model_folder, folder)
    store = MemoryStore()
    for ordinal in range(2 * STEPS + 2):
        put_group(store, sample_group(stock, ordinal, config=CONFIG, version=0))
    put_group(store, make_group(1, rewards=[1.0, 1.0]))
    torn = put_group(store, make_group(4, rewards=[1.0, 0.0], attempt="worker-0-0"))
    store.put(torn, store.get(torn)[:-50])
    return store


class World:
    """One bucket with prepared trajectories, and learners on it."""

    def __init__(
        self, model_folder: Path, cache: Path, sampled: Store | None, run: RunRecord | None = None
    ) -> None:
        self.store = MemoryStore()
        self.run = run or make_run(CONFIG)
        self.store.put(keys.RUN, self.run.encode())
        for info in sampled.list(keys.TRAJECTORY_PREFIX) if sampled else ():
            self.store.put(info.key, sampled.get(info.key))
        self._model_folder = model_folder
        self._cache = cache

    def learn(
        self,
        store: Store | None = None,
        client: object = None,
        learner_id: str = "learner-0",
        keep: int | None = None,
    ) -> None:
        run_learner(
            store or self.store,
            self.run,
            model_path=self._model_folder,
            client=client,  # type: ignore[arg-type]
            options=LearnerOptions(
                learner_id=learner_id,
                cache_dir=self._cache,
                device="cpu",
                poll_s=0.001,
                threads=1,
                keep=keep,
            ),
        )

    @property
    def log(self) -> list[StartRecord | StepRecord]:
        return LogReader(self.store, self.run).refresh()

    @property
    def commits(self) -> list[StepRecord]:
        return [record for record in self.log if isinstance(record, StepRecord)]

    def fingerprint(self) -> list[tuple[object, ...]]:
        """Per step: what it consumed and the digests of what it made. Equal for equal trainings."""
        return [
            (
                commit.step,
                commit.groups,
                commit.skipped,
                [file.sha256 for file in commit.policy.files],
                [file.sha256 for file in commit.checkpoint.files],
                commit.canary,
                {name: value for name, value in commit.metrics.items() if name != "tokens_per_second"},
            )
            for commit in self.commits
        ]

    def assert_sound(self) -> None:
        assert audit(self.store).violations == ()


@pytest.fixture
def world(model_folder: Path, tmp_path: Path, sampled: MemoryStore) -> World:
    return World(model_folder, tmp_path, sampled)


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, sampled: MemoryStore) -> World:
    made = World(model_folder, tmp_path_factory.mktemp("undisturbed"), sampled)
    made.learn()
    return made


def test_a_learner_keeps_house_while_it_trains(
    world: World, undisturbed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run too short for a boundary: old checkpoints go, a snapshot comes, and the training is the same."""
    monkeypatch.setattr("bucketrl.learner.housekeeping.LOOK_S", 0.005)
    monkeypatch.setattr("bucketrl.learner.housekeeping.MIN_GAP_S", 0.0)
    monkeypatch.setattr("bucketrl.bucket.snapshots.EVERY", 1)
    world.learn(keep=2 + CONFIG.algorithm.max_staleness)
    assert world.fingerprint() == undisturbed.fingerprint()
    assert len(list(world.store.list(keys.SNAPSHOT_PREFIX))) > 0
    kept = {keys.folder_number(info.key) for info in world.store.list(keys.CHECKPOINT_PREFIX)}
    assert {0, STEPS} <= kept < set(range(STEPS + 1))
    world.assert_sound()


def test_a_learner_refuses_to_keep_too_little(world: World) -> None:
    with pytest.raises(UserError, match="--keep 1: a run with max_staleness"):
        world.learn(keep=1)
    assert world.log == []


def is_commit_of(step: int) -> Trigger:
    return lambda _, key, data: (
        key.startswith(keys.LOG_PREFIX) and b'"kind": "step"' in data and f'"step": {step},'.encode() in data
    )


def is_write_to(prefix: str) -> Trigger:
    return lambda _, key, __: key.startswith(prefix)


def test_an_undisturbed_run_commits_every_step(undisturbed: World) -> None:
    assert [commit.step for commit in undisturbed.commits] == list(range(STEPS + 1))
    assert [commit.policy.version for commit in undisturbed.commits] == list(range(STEPS + 1))
    assert len(undisturbed.log) == STEPS + 2
    digests = {commit.policy.files[1].sha256 for commit in undisturbed.commits}
    assert len(digests) == STEPS + 1
    undisturbed.assert_sound()


def test_the_group_without_signal_is_named_and_the_corrupt_attempt_never_trained(undisturbed: World) -> None:
    first = undisturbed.commits[1]
    assert [(skip.group_id, skip.reason) for skip in first.skipped] == [("0000-00000001", "zero_variance")]
    assert [ref.group_id for ref in first.groups] == ["0000-00000000", "0000-00000002"]
    attempts = {ref.group_id: ref.attempt for commit in undisturbed.commits for ref in commit.groups}
    assert attempts["0000-00000004"] == "worker-0-1"
    assert first.metrics["groups_skipped"] == 1.0
    assert first.metrics["logprob_mismatch_max"] < 1e-4
    assert undisturbed.commits[-1].metrics["staleness_max"] == STEPS - 1


def test_no_group_is_consumed_twice(undisturbed: World) -> None:
    consumed = [ref.group_id for commit in undisturbed.commits for ref in (*commit.groups, *commit.skipped)]
    assert len(consumed) == len(set(consumed)) == 2 * STEPS + 1


def test_the_canary_tells_trained_versions_from_the_base(undisturbed: World) -> None:
    first, *_, last = undisturbed.commits
    assert first.canary.logprobs == first.canary.base_logprobs
    assert last.canary.base_logprobs == first.canary.base_logprobs
    assert len(last.canary.token_ids) == 24
    difference = [abs(a - b) for a, b in zip(last.canary.logprobs, last.canary.base_logprobs, strict=True)]
    assert max(difference) > 1e-2


def test_the_published_adapter_is_a_plain_peft_folder(undisturbed: World, tmp_path: Path) -> None:
    """Loaded by PEFT alone, it gives the canary's log-probabilities."""
    commit = undisturbed.commits[-1]
    names = [Path(file.key).name for file in commit.policy.files]
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    for file in commit.policy.files:
        (tmp_path / Path(file.key).name).write_bytes(undisturbed.store.get(file.key))
    stock = stock_model(undisturbed._model_folder, tmp_path)
    tokens = torch.tensor(commit.canary.token_ids)
    logits = stock(input_ids=tokens[None]).logits[0, :-1]
    want = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
    assert list(commit.canary.logprobs) == pytest.approx(want.tolist(), abs=1e-5)


CRASHES: dict[str, tuple[Trigger, bool]] = {
    "before anything is published": (is_write_to(keys.policy(0, 1)), False),
    "after step 0 is published, before its commit": (is_commit_of(0), False),
    "before the batch is written": (is_write_to(keys.batch(2, 1)), False),
    "after the batch is written": (is_write_to(keys.batch(2, 1)), True),
    "after the optimizer step, before anything is published": (is_write_to(keys.policy(2, 1)), False),
    "with half an adapter published": (is_write_to(keys.policy(2, 1)), True),
    "with half a checkpoint published": (is_write_to(keys.checkpoint(2, 1)), True),
    "after everything is published, before the commit": (is_commit_of(2), False),
    "after the commit": (is_commit_of(2), True),
    "after the last commit": (is_commit_of(STEPS), True),
}


@pytest.mark.parametrize("where", CRASHES)
def test_a_crash_anywhere_changes_not_a_byte_of_what_is_learned(
    world: World, undisturbed: World, where: str
) -> None:
    trigger, after = CRASHES[where]
    crashing = EventStore(world.store, trigger, die, after=after)
    with pytest.raises(Crash):
        world.learn(crashing)
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()
    assert [type(record) for record in world.log].count(StartRecord) == 2
    world.assert_sound()


def test_the_batch_that_was_written_is_trained_whatever_has_arrived_since(world: World) -> None:
    """A late, older group would be chosen first if the step were selected anew."""
    late = keys.trajectory(keys.GroupId(0, 3), "worker-0-1")
    data = world.store.get(late)
    world.store.delete([late])
    with pytest.raises(Crash):
        world.learn(EventStore(world.store, is_write_to(keys.batch(2, 1)), die, after=True))
    written = decode(BatchRecord, world.store.get(keys.batch(2, 1)))
    world.store.put(late, data)
    world.learn()
    assert world.commits[2].groups == written.groups
    assert world.commits[2].batch.key == keys.batch(2, 2)
    assert "0000-00000003" not in {ref.group_id for ref in written.groups}
    assert "0000-00000003" in {ref.group_id for ref in world.commits[3].groups}
    world.assert_sound()


def test_a_crash_at_every_step_in_turn_changes_nothing_either(world: World, undisturbed: World) -> None:
    for step in range(1, STEPS + 1):
        with pytest.raises(Crash):
            world.learn(EventStore(world.store, is_commit_of(step), die))
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()
    assert world.commits[-1].epoch == STEPS + 1
    world.assert_sound()


@pytest.mark.parametrize(
    "frozen_at",
    [is_write_to(keys.batch(2, 1)), is_write_to(keys.policy(2, 1)), is_commit_of(2), is_commit_of(STEPS)],
    ids=["batch", "publish", "commit", "last commit"],
)
def test_a_learner_that_wakes_after_another_has_taken_over_is_fenced(
    world: World, undisturbed: World, frozen_at: Trigger
) -> None:
    """The second learner does the rest of the run while the first one is frozen."""
    frozen = EventStore(world.store, frozen_at, lambda: world.learn(learner_id="learner-1"), after=False)
    with pytest.raises(Fenced):
        world.learn(frozen)
    assert world.fingerprint() == undisturbed.fingerprint()
    world.assert_sound()


def test_a_finished_run_is_left_as_it_is(world: World, undisturbed: World) -> None:
    world.learn()
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_training_abandons_the_step(world: World, undisturbed: World, number: int) -> None:
    world.learn(EventStore(world.store, is_write_to(keys.batch(2, 1)), lambda: os.kill(os.getpid(), number)))
    assert [commit.step for commit in world.commits] == [0, 1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()


def test_a_signal_while_publishing_lets_the_step_be_committed(world: World, undisturbed: World) -> None:
    at_publishing = is_write_to(keys.policy(2, 1))
    world.learn(EventStore(world.store, at_publishing, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert [commit.step for commit in world.commits] == [0, 1, 2]
    world.learn()
    assert world.fingerprint() == undisturbed.fingerprint()


def test_a_signal_while_waiting_ends_the_wait(model_folder: Path, tmp_path: Path) -> None:
    empty = World(model_folder, tmp_path, None)
    later = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    empty.learn(EventStore(empty.store, is_commit_of(0), later.start, after=True))
    assert [commit.step for commit in empty.commits] == [0]


def damage_batch(store: MemoryStore) -> None:
    store.put(keys.batch(2, 1), store.get(keys.batch(2, 1))[:-30])


def damage_trajectory(store: MemoryStore) -> None:
    ref = decode(BatchRecord, store.get(keys.batch(2, 1))).groups[0].file
    store.put(ref.key, store.get(ref.key)[:-30])


def forget_trajectory(store: MemoryStore) -> None:
    store.delete([decode(BatchRecord, store.get(keys.batch(2, 1))).groups[1].file.key])


def name_a_consumed_group(store: MemoryStore) -> None:
    store.put(keys.batch(2, 1), store.get(keys.batch(1, 1)).replace(b'"step": 1', b'"step": 2'))


@pytest.mark.parametrize(
    "damage", [damage_batch, damage_trajectory, forget_trajectory, name_a_consumed_group]
)
def test_a_batch_that_can_no_longer_be_trained_on_is_replaced(
    world: World, damage: Callable[[MemoryStore], None]
) -> None:
    with pytest.raises(Crash):
        world.learn(EventStore(world.store, is_write_to(keys.policy(2, 1)), die))
    damage(world.store)
    for ordinal in range(20, 24):
        put_group(world.store, make_group(ordinal, rewards=[1.0, 0.0]))
    world.learn()
    assert [commit.step for commit in world.commits] == list(range(STEPS + 1))
    world.assert_sound()


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


def test_scratch_space_is_removed_whatever_happens(world: World, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        world.learn(EventStore(world.store, is_commit_of(1), die))
    assert list(tmp_path.iterdir()) == []
    world.learn()
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_groups_are_all_alike_ends_with_advice(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(algorithm={"groups_per_step": 1, "max_staleness": 0})
    flat = World(model_folder, tmp_path, None, make_run(config))
    for ordinal in range(10):
        put_group(flat.store, make_group(ordinal, rewards=[1.0, 1.0]))
    with pytest.raises(UserError, match="no learning signal"):
        flat.learn()
    assert [commit.step for commit in flat.commits] == [0]


def test_a_target_that_the_model_lacks_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path
) -> None:
    run = make_run(make_config(lora={"target_modules": ("c_attn",)}))
    wrong = World(model_folder, tmp_path, None, run)
    with pytest.raises(UserError, match="c_attn"):
        wrong.learn()
    assert [info.key for info in wrong.store.list("")] == [keys.RUN]


def test_a_zombie_that_wakes_while_it_waits_changes_nothing(
    world: World, model_folder: Path, tmp_path: Path
) -> None:
    """Frozen before it listed the bucket: what it finds then was sampled with versions that it does not know."""
    objects: list[set[str]] = []

    def others_go_on() -> None:
        world.learn(learner_id="learner-1")
        newer = make_group(30, rewards=[1.0, 0.0], version=STEPS)
        put_group(world.store, newer)
        objects.append({info.key for info in world.store.list("")})

    frozen = EventStore(world.store, is_commit_of(0), others_go_on, after=True)
    with pytest.raises(Fenced):
        world.learn(frozen)
    assert {info.key for info in world.store.list("")} == objects[0]
