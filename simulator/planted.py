"""Faults planted into the real code, one at a time: a simulator that cannot find them proves nothing.

Each is a mistake that somebody has made, or could make, in a system of this kind. While it is planted the
simulated roles run with it; the judge does not.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bucketrl.bucket import artifacts, conditional, keys, retention
from bucketrl.bucket.errors import AlreadyExists, Fenced
from bucketrl.bucket.log import LogWriter
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import Consumed
from bucketrl.bucket.store import Store
from bucketrl.learner import select
from bucketrl.learner.batches import Batches
from bucketrl.learner.intake import Intake
from bucketrl.proxy.scheduler import Scheduler
from bucketrl.rollout_worker import adapters, continuation, drawing
from bucketrl.simulator import disk, model, sampling

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def commit_before_upload() -> Iterator[None]:
    """The commit is appended first; adapter and checkpoint are uploaded after it."""
    waiting: list[tuple[Store, str, bytes]] = []
    publish, append_step = artifacts.publish, LogWriter.append_step

    def later(store: Store, prefix: str, folder: Path) -> Any:
        class Recorder:
            def put_file(self, key: str, path: Path) -> None:
                waiting.append((store, key, path.read_bytes()))

        return publish(Recorder(), prefix, folder)  # type: ignore[arg-type]

    def append(self: LogWriter, build: Any) -> Any:
        record = append_step(self, build)
        while waiting:
            store, key, data = waiting.pop(0)
            store.put(key, data)
        return record

    with patch.object(artifacts, "publish", later), patch.object(LogWriter, "append_step", append):
        yield


def missing_fsync() -> contextlib.AbstractContextManager[Any]:
    """A store says "written" before it is: what a process wrote last is lost when its machine dies."""
    return patch.object(disk, "DURABLE", False)


@contextlib.contextmanager
def no_epoch_check() -> Iterator[None]:
    """A learner that lost the race for a record takes the winner's as its own and goes on."""
    send = LogWriter._send

    def append_step(self: LogWriter, build: Any) -> Any:
        record = build(self._header(self.state.epoch))
        won = send(self, record)
        while not won and self.state.step is not None and self.state.step.step < record.step:
            self._reader.refresh()
            record = build(self._header(self.state.epoch))
            won = send(self, record)
        return record

    with patch.object(LogWriter, "append_step", append_step):
        yield


@contextlib.contextmanager
def dedup_by_worker() -> Iterator[None]:
    """A group counts as trained for the worker that sampled it, not for everybody."""
    consider, poll = Intake._consider, Intake.poll

    def seen(intake: Intake) -> set[tuple[int, str]]:
        found: set[tuple[int, str]] = intake.__dict__.setdefault("seen", set())
        return found

    def by_worker(self: Intake, info: Any, data: bytes | None, max_version: int) -> None:
        parsed = keys.parse_trajectory(info.key)
        if parsed is None:
            return
        who = (parsed[0].ordinal(self._run.prompts_per_epoch), parsed[1].rsplit("-", 2)[0])
        if who in seen(self):
            return
        consider(self, info, data, max_version)
        if who[0] in self.candidates:
            seen(self).add(who)

    def from_the_start(self: Intake, consumed: Consumed, max_version: int) -> int:
        self._forget(consumed)
        return poll(self, Consumed(), max_version)

    def union(self: Consumed, ordinals: set[int]) -> Consumed:
        fresh = {ordinal for ordinal in ordinals if ordinal not in self}
        return original_add(self, fresh)

    original_add = Consumed.add
    with (
        patch.object(Intake, "_consider", by_worker),
        patch.object(Intake, "poll", from_the_start),
        patch.object(Consumed, "add", union),
        patch.object(LogState, "_check_consumed", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def gc_ahead_of_a_lease() -> Iterator[None]:
    """Garbage collection takes every group that was issued for consumed."""
    of = retention.Retained.of

    def ahead(run: Any, first: Any, newest: Any, keep: int) -> Any:
        retained = of(run, first, newest, keep)
        cursor = newest[-1].consumed.cursor + run.config.max_outstanding_groups
        return dataclasses.replace(retained, consumed=Consumed(cursor=cursor))

    with patch.object(retention.Retained, "of", ahead):
        yield


@contextlib.contextmanager
def adapter_before_digest_check() -> Iterator[None]:
    """An adapter is served as soon as it is downloaded."""
    with (
        patch.object(artifacts, "_check", lambda *_: None),
        patch.object(adapters, "canary_failure", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def base_served() -> Iterator[None]:
    """An engine serves every third version with the base model, and no canary looks."""
    add_adapter = sampling.Engine.add_adapter

    async def add(self: sampling.Engine, version: int, folder: Path) -> None:
        await add_adapter(self, version, folder)
        if version % 3 == 2:
            self._weights[version] = model.BASE

    with (
        patch.object(sampling.Engine, "add_adapter", add),
        patch.object(adapters, "canary_failure", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def own_write_taken_for_anothers() -> Iterator[None]:
    """After a lost reply a learner finds its own record and thinks that it was fenced."""

    def create(store: Store, key: str, data: bytes, **_: Any) -> bytes | None:
        try:
            store.create(key, data)
        except AlreadyExists:
            if key.startswith(keys.LOG_PREFIX):
                raise Fenced(f"{key} exists: another learner has taken over") from None
            return store.get(key)
        return None

    with patch.object(conditional, "create", create):
        yield


@contextlib.contextmanager
def prompts_skipped_on_resume() -> Iterator[None]:
    """A learner goes on behind the newest group that it knows; the open ones before it are forgotten."""

    def add(self: Consumed, ordinals: set[int]) -> Consumed:
        return Consumed(cursor=max([self.cursor - 1, *self.above, *ordinals]) + 1)

    with patch.object(Consumed, "add", add):
        yield


@contextlib.contextmanager
def leases_forgotten_on_restart() -> Iterator[None]:
    """A proxy that starts again issues only what comes after the newest group in the bucket."""

    def advance(self: Scheduler, ordinal: int, now: float) -> None:
        self.next_ordinal = max(self.next_ordinal, ordinal)

    with patch.object(Scheduler, "_advance_to", advance):
        yield


@contextlib.contextmanager
def partial_with_wrong_stamp() -> Iterator[None]:
    """A continued completion carries the newest version on all of its tokens."""
    joined = continuation.joined

    def restamped(so_far: Any, drawn: Any, seconds: float) -> Any:
        whole = joined(so_far, drawn, seconds)
        return dataclasses.replace(
            whole, policy_versions=(max(whole.policy_versions),) * len(whole.policy_versions)
        )

    with patch.object(drawing, "joined", restamped):
        yield


@contextlib.contextmanager
def write_ahead_ignored() -> Iterator[None]:
    """A learner chooses the batch of a step anew after a crash."""
    with patch.object(Batches, "_left_behind", lambda *_: None):
        yield


@contextlib.contextmanager
def half_a_step_on_signal() -> Iterator[None]:
    """On SIGTERM a learner ends its optimizer step early and commits what it has."""
    train = model.Trainer.train

    def hurried(self: model.Trainer, groups: Any, step: int, stopping: Callable[[], bool]) -> Any:
        self._sleep(0.4 * len(groups))
        some = groups[: max(1, len(groups) // 2)] if stopping() else groups
        return train(self, some, step, lambda: False)

    with patch.object(model.Trainer, "train", hurried):
        yield


@contextlib.contextmanager
def stale_groups_trained() -> Iterator[None]:
    """Nobody looks how old a group is when it arrives."""
    reason = select._skip_reason

    def lenient(candidate: Any, step: int, config: Any) -> Any:
        found = reason(candidate, step, config)
        return None if found == "stale" else found

    with patch.object(select, "_skip_reason", lenient):
        yield


@contextlib.contextmanager
def version_stamped_at_the_end() -> Iterator[None]:
    """Tokens carry the version that is the newest when a completion ends."""
    generate = sampling.Engine.generate

    async def stamped(self: sampling.Engine, request: Any) -> Any:
        drawn = await generate(self, request)
        newest = max(self._weights)
        return dataclasses.replace(drawn, policy_versions=(newest,) * len(drawn.token_ids))

    with patch.object(sampling.Engine, "generate", stamped):
        yield


PLANTED: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        commit_before_upload, missing_fsync, no_epoch_check, dedup_by_worker, gc_ahead_of_a_lease,
        adapter_before_digest_check, base_served, own_write_taken_for_anothers, prompts_skipped_on_resume,
        leases_forgotten_on_restart, partial_with_wrong_stamp, write_ahead_ignored, half_a_step_on_signal,
        stale_groups_trained, version_stamped_at_the_end,
    )
}  # fmt: skip
"""Name -> a context manager; its docstring says what is wrong."""
