"""Kills one role of a running fleet and takes the time until the work that it did goes on."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tests.e2e.roles import READ_TOKEN, Fleet, Role

from benchmarks.recovery.bucket_view import BucketView
from benchmarks.recovery.counted_worker import TOKENS_FILE
from bucketrl.bucket import keys

TICK_S = 0.02
LIMIT_S = 180.0
LONGEST_PAUSE_S = 2.0
"""A kill falls at a random moment within so many seconds after what it waited for."""

Times = dict[str, float]
"""Seconds from the signal, or tokens, by figure name."""


class CountedWorker(Role):
    """A rollout worker whose drawn tokens are counted; each start has a worker id, a log and a count of its own."""

    module = "benchmarks.recovery.counted_worker"


@dataclass
class Measured:
    """A fleet that is running, and the bucket that it shares."""

    run: Fleet
    view: BucketView
    folder: Path
    rng: random.Random
    incarnations: int = 0
    commands: dict[str, list[str]] = field(default_factory=dict)
    """Of each worker, without its id."""
    http: httpx.Client = field(
        default_factory=lambda: httpx.Client(headers={"Authorization": f"Bearer {READ_TOKEN}"}, timeout=10)
    )

    def start_worker(self, place: int) -> Role:
        """Also again: under a new id, as a worker without `--worker-id` does it."""
        old = self.run.workers[place]
        arguments = self.commands.setdefault(old.name, old.arguments)
        worker_id = f"worker-{self.incarnations}"
        self.incarnations += 1
        env = old.env | {TOKENS_FILE: str(self.tokens_file(worker_id))}
        worker = CountedWorker(
            old.name, [*arguments, "--worker-id", worker_id], self.folder / f"{worker_id}.log", env
        )
        self.run.workers[place] = worker
        worker.start()
        return worker

    def tokens_file(self, worker_id: str) -> Path:
        return self.folder / f"{worker_id}.tokens"

    def lost_by(self, worker: Role) -> int:
        worker_id = _id(worker)
        return self.view.lost_by(worker_id, self.tokens_file(worker_id), worker.tail(10**6))

    # -- one measurement each

    def kill_learner(self) -> Times:
        mean_tokens = self.view.mean_tokens()
        before = self.view.step
        self._until(lambda: self.view.step > before, "a commit")
        self._pause()
        queued, outstanding = self.view.waiting(), self._leases()["outstanding_groups"]
        epoch = self.view.log()[-1].epoch
        learner = self.run.learner
        clock = _Clock()
        learner.kill()
        said = _Log(learner.log)
        learner.start()
        times = self._times(
            clock,
            learner_imports_s=lambda: said.has(" loading "),
            learner_to_fence_s=lambda: any(record.epoch > epoch for record in self.view.log()),
            learner_to_commit_s=lambda: any(commit.epoch > epoch for commit in self.view.commits()),
        )
        times["queued_tokens_at_learner_kill"] = queued * mean_tokens
        times["outstanding_tokens_at_learner_kill"] = outstanding * mean_tokens
        return times

    def kill_proxy(self) -> Times:
        self._until(lambda: self._sampling() == len(self.run.workers), "all workers at work")
        self._pause()
        proxy = self.run.proxy
        clock = _Clock()
        proxy.kill()
        said = _Log(proxy.log)
        proxy.start()
        return self._times(
            clock,
            proxy_imports_s=lambda: said.has(" proxy of run "),
            proxy_to_lease_s=lambda: (
                (status := self.run.status()) is not None and dict(status["leases"])["issued_total"] > 0
            ),  # type: ignore[call-overload]
        )

    def kill_worker(self) -> Times:
        """SIGKILL, to it and its reward processes."""
        return self._stop_worker("worker", signal.SIGKILL)

    def preempt_worker(self) -> Times:
        """SIGTERM, as a spot instance gets it."""
        return self._stop_worker("preempted", signal.SIGTERM)

    def _stop_worker(self, name: str, number: signal.Signals) -> Times:
        """The first worker, which is started again when it has ended."""
        self._until(lambda: self._sampling() == len(self.run.workers), "all workers at work")
        self._pause()
        worker = self.run.workers[0]
        held = self._held_by(worker)
        clock = _Clock()
        worker.send(number)

        def exited() -> bool:
            if not worker.alive and self.run.workers[0] is worker:
                self.start_worker(0)
            return not worker.alive

        def says(text: str) -> bool:
            again = self.run.workers[0]
            return again is not worker and text in again.log.read_text(errors="replace")

        conditions = {
            f"{name}_to_exit_s": exited,
            f"{name}_imports_s": lambda: says(" loading the engine"),
            f"{name}_to_ready_s": lambda: says(" serving policy version "),
            f"{name}_to_upload_s": lambda: (
                self.run.workers[0] is not worker and bool(self.view.attempts_of(_id(self.run.workers[0])))
            ),
        }
        if held := [group for group in held if not self.view.attempts(group)]:
            conditions[f"{name}_to_reissue_s"] = lambda: any(self._moved(group, worker) for group in held)
            conditions[f"{name}_to_all_reissued_s"] = lambda: all(self._settled(g, worker) for g in held)
        times = self._times(clock, **conditions)
        times[f"tokens_lost_{name}"] = self.lost_by(worker)
        return times

    def _moved(self, group: str, worker: Role) -> bool:
        """Whether somebody else holds the group, or has sampled it."""
        holder = self._get(f"/v1/groups/{group}")["worker_id"]
        others = set(self.view.attempts(group)) - set(self.view.attempts_of(_id(worker)))
        return holder not in (None, _id(worker)) or bool(others)

    def _settled(self, group: str, worker: Role) -> bool:
        """Whether it has moved, or was uploaded in time."""
        return bool(self.view.attempts(group)) or self._moved(group, worker)

    # -- what the proxy says

    def _held_by(self, worker: Role) -> list[str]:
        """Groups that the proxy has leased to it."""
        size, newest = self.view.run.prompts_per_epoch, self.view.commits()[-1]
        ordinals = range(
            newest.consumed.cursor, newest.consumed.cursor + 2 * self._leases()["max_outstanding_groups"]
        )
        groups = [str(keys.GroupId.from_ordinal(ordinal, size)) for ordinal in ordinals]
        return [group for group in groups if self._get(f"/v1/groups/{group}")["worker_id"] == _id(worker)]

    def _sampling(self) -> int:
        """Workers with requests in their engines, as of their last heartbeat."""
        living = {_id(worker) for worker in self.run.workers}
        rows = self._get("/v1/workers")
        return sum(row["id"] in living and row["state"]["running_requests"] > 0 for row in rows)

    def _leases(self) -> dict[str, int]:
        return dict(self._get("/v1/run")["leases"])

    def _get(self, route: str):  # type: ignore[no-untyped-def]
        return self.http.get(self.run.proxy_url + route).raise_for_status().json()

    def _pause(self) -> None:
        time.sleep(self.rng.uniform(0.0, LONGEST_PAUSE_S))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        self._times(_Clock(), **{what: condition})

    def _times(self, clock: "_Clock", **conditions: Callable[[], bool]) -> Times:
        """By `clock`, when each condition has come true."""
        times: Times = {}
        deadline = clock.seconds() + LIMIT_S
        while waited_for := conditions.keys() - times.keys():
            if clock.seconds() > deadline:
                raise AssertionError(f"{waited_for}: not within {LIMIT_S} s\n{self.run.tails()}")
            times |= {name: clock.seconds() for name in waited_for if conditions[name]()}
            time.sleep(TICK_S)
        return times


class _Clock:
    def __init__(self) -> None:
        self._start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._start


class _Log:
    """What a role writes from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size if path.exists() else 0

    def has(self, text: str) -> bool:
        return text in self._path.read_bytes()[self._size :].decode(errors="replace")


def _id(worker: Role) -> str:
    return worker.arguments[-1]
