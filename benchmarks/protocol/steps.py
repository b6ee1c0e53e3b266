"""One more step of a run that is 10, 100, 1,000 and 10,000 steps long: what it costs each role.

Each run lies in a local folder and was collected all along. The learner's log, the proxy, the worker's log and
the collector have lived through it, so whatever grows in memory or in the bucket has grown.
"""

import itertools
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.bucket.builders import NOW, create_in, group, ids, upload

from benchmarks.protocol.costs import Cost, Progress, measured
from benchmarks.protocol.records import (
    ADAPTER,
    ATTEMPT,
    CHECKPOINT,
    commit,
    large_run,
    put_files,
    unread_commit,
)
from bucketrl.api.messages import Completion, Heartbeat, LearnerState, LeaseRequest
from bucketrl.bucket import artifacts, keys
from bucketrl.bucket.gc import GarbageCollector
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.stores.local import LocalStore
from bucketrl.learner.batches import Batches
from bucketrl.learner.housekeeping import Housekeeping
from bucketrl.learner.intake import Intake
from bucketrl.learner.select import select
from bucketrl.proxy.core import ProxyCore
from bucketrl.proxy.status import run_status, steps_after

GROUPS = 8
"""Groups a step."""
MAX_STALENESS = 1
PER_STEP = ("learner", "proxy", "worker", "collector")
"""Roles that do something in every step; the others when they start, or are looked at."""
ROLES = (*PER_STEP, "late joiner", "new proxy", "people")


class LongRun:
    """A run in `folder`, of which the newest `keep` steps stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.run = large_run(GROUPS, MAX_STALENESS)
        self.stores = {role: LocalStore(folder / "bucket") for role in ROLES}
        self._sampler = LocalStore(folder / "bucket")
        self._local = folder / "local"
        self._pass_every = max(1, keep // 2)
        self._now = 0.0
        self.writer = LogWriter(
            LogReader(self.stores["learner"], self.run), create_in(self.stores["learner"]), now=lambda: NOW,
            new_id=ids("w"),
        )  # fmt: skip
        self.intake = Intake(
            self.stores["learner"], self.run, vocab_size=1000, learner_id="l", now=lambda: NOW,
            on_refused=lambda *_: None,
        )  # fmt: skip
        self._batches = Batches(self.stores["learner"], self.intake, new_id=ids("b"))
        self._snapshots = Housekeeping(
            self._sampler, self.run, lambda: self.writer.state, keep=0, learner_id="l", now=lambda: NOW
        )
        self.proxy = self._new_proxy("proxy")
        self._worker = LogReader(self.stores["worker"], self.run, from_snapshot=True)
        self._collector = GarbageCollector(
            self.stores["collector"], self.run, keep=keep, collector_id="c", now=lambda: NOW,
            clock=lambda: self._now,
        )  # fmt: skip
        self._sampler.create(keys.RUN, self.run.encode())
        self.writer.start("l")
        self._commit_unread()

    @property
    def steps(self) -> int:
        step = self.writer.state.step
        return step.step if step else 0

    def grow(self, steps: int, progress: Progress) -> None:
        """To a run of so many steps, whose objects hold no trajectories: nobody reads them any more."""
        while self.steps < steps:
            self._commit_unread()
            if self.steps % 100 == 0:
                progress(f"a run of {steps} steps: {self.steps}")

    def one_more_step(self) -> dict[str, Cost]:
        """What it costs, by role."""
        self._now += 61.0
        costs: dict[str, Cost] = {}
        self._sample()
        with measured(self.stores["learner"]) as costs["learner"]:
            self._learn()
        with measured(self.stores["proxy"]) as costs["proxy"]:
            self._follow()
        with measured(self.stores["worker"]) as costs["worker"]:
            self._switch()
        with measured(self.stores["collector"]) as costs["collector"]:
            self._collector.collect(self.writer.state)
        with measured(self.stores["late joiner"]) as costs["late joiner"]:
            LogReader(self.stores["late joiner"], self.run, from_snapshot=True).refresh()
        with measured(self.stores["new proxy"]) as costs["new proxy"]:
            self._catch_up(self._new_proxy("new proxy"))
        with measured() as costs["people"]:
            run_status(self.proxy)
            assert len(steps_after(self.proxy, self.steps - 1, 1000)) == 1
        self._snapshots.look()
        return costs

    def _sample(self) -> None:
        """Workers draw the groups of a step; small ones, so that their tokens do not hide the rest."""
        reply = self.proxy.lease(LeaseRequest(worker_id="w1", max_groups=GROUPS, loaded_version=0))
        for lease in reply.leases:
            version = self.proxy.version
            ref = upload(self._sampler, group(group_id=lease.group_id, attempt=ATTEMPT, version=version))
            done = Completion(
                worker_id="w1", group_id=lease.group_id, attempt=ATTEMPT, size=ref.file.size,
                sha256=ref.file.sha256, tokens=6, mean_reward=0.5,
            )  # fmt: skip
            self.proxy.complete(lease.lease_id, done)

    def _learn(self) -> None:
        state = self.writer.state
        assert state.step is not None
        step = state.step.step + 1
        self.intake.poll(state.consumed, max_version=step - 1)
        batch = self._batches.next(
            state, lambda: select(self.intake.candidates.values(), step, self.run.config)
        )
        assert len(batch.groups) == GROUPS
        epoch, store = self.writer.epoch, self.stores["learner"]
        policy = put_files(store, keys.policy(step, epoch), ADAPTER)
        checkpoint = put_files(store, keys.checkpoint(step, epoch), CHECKPOINT)
        self.writer.append_step(
            lambda header: commit(
                header, step, policy, checkpoint, batch.ref, batch.record.groups, batch.consumed
            )
        )

    def _follow(self) -> None:
        seq = self.writer.state.head_seq
        state = LearnerState(learner_id="l", epoch=1, step=self.steps, phase="waiting", log_seq=seq)
        self.proxy.heartbeat(Heartbeat(state=state))
        self._catch_up(self.proxy)
        self.proxy.tick()
        assert self.proxy.policy_head() is not None

    def _catch_up(self, proxy: ProxyCore) -> None:
        proxy.apply_records(proxy.read())
        proxy.apply_attempts(proxy.list_attempts())

    def _switch(self) -> None:
        """A worker without a proxy finds the new version in the log, and gets it."""
        self._worker.refresh()
        step = self._worker.state.step
        assert step is not None
        target = artifacts.fetch(self.stores["worker"], step.policy.files, self._local / str(step.step))
        shutil.rmtree(target)

    def _new_proxy(self, role: str) -> ProxyCore:
        return ProxyCore(
            self.stores[role], self.run, clock=lambda: self._now, wall=lambda: datetime.now(UTC),
            new_id=ids("lease"),
        )  # fmt: skip

    def _commit_unread(self) -> None:
        """A step whose objects are there by name and size."""
        self._now += 61.0
        state = self.writer.state
        step = state.step.step + 1 if state.step else 0
        record = self.writer.append_step(
            lambda header: unread_commit(header, state.consumed, step, GROUPS, self.run)
        )
        named = [*record.policy.files, *record.checkpoint.files, *(ref.file for ref in record.groups)]
        for file in [*named, record.batch] if record.batch else named:
            self._sampler.put(file.key, file.key.encode())
        self._catch_up(self.proxy)
        self._worker.refresh()
        self._snapshots.look()
        if step % self._pass_every == 0:
            self._collector.collect(self.writer.state)


def measure(
    folder: Path, lengths: Sequence[int], *, keep: int, rounds: int, progress: Progress
) -> dict[int, list[dict[str, Cost]]]:
    """By length of the run: the cost of each of `rounds` further steps. The runs take turns."""
    runs: dict[int, LongRun] = {}
    for length in lengths:
        runs[length] = LongRun(folder / str(length), keep)
        runs[length].grow(length, progress)
    for one in runs.values():
        one.one_more_step()  # what is slow the first time
    costs: dict[int, list[dict[str, Cost]]] = {length: [] for length in lengths}
    for number, (length, one) in itertools.product(range(rounds), runs.items()):
        progress(f"one more step of {length}: round {number + 1} of {rounds}")
        costs[length].append(one.one_more_step())
    return costs


def medians(costs: Sequence[dict[str, Cost]], value: Callable[[Cost], float]) -> dict[str, float]:
    """By role."""
    return {role: sorted(value(cost[role]) for cost in costs)[len(costs) // 2] for role in ROLES}
