"""The rollout worker: lease, generate, score, upload; many groups at once, each stage in the background.

                 ┌─ feed ──────► ready ──► begin ──► groups in flight ──► scoring ──► uploads ──► bucket
    proxy ◄──────┤   leases                  │ newest version at send                     │
                 ├─ heartbeats, long poll     ▼                                            └──► complete
                 └─ adapters ───────────► engine

A group begins as soon as enough requests have ended, whichever group they belong to; `flow` says how many may
run. `feed` leases ahead, so that the engine never waits for the proxy, and stops leasing while too many
groups wait to be uploaded. Whatever ends the worker (the run is finished, a signal, an error), its last
act is `_shut_down`, and `preemption.py` tells what becomes of the groups that it still holds then.
"""

import asyncio
import itertools
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from bucketrl.api.client import ProxyClient
from bucketrl.api.messages import RolloutState
from bucketrl.bucket.counting import requests_of
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import encode
from bucketrl.rollout_worker.adapters import Adapters
from bucketrl.rollout_worker.background import Background, in_time
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.counters import Counters
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines.pool import EnginePool
from bucketrl.rollout_worker.flow import Flow, GroupInFlight
from bucketrl.rollout_worker.group import GroupSampler, SampledGroup, VersionNotServed
from bucketrl.rollout_worker.heartbeat import Heartbeats
from bucketrl.rollout_worker.link import ProxyLink
from bucketrl.rollout_worker.metered import MeteredEngine, group_in_flight
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.partials import Partials
from bucketrl.rollout_worker.policy import PolicyWatcher
from bucketrl.rollout_worker.preemption import RELEASE_SHARE, Preemption
from bucketrl.rollout_worker.prompts import Prompts, PromptTooLong, Tokenizer
from bucketrl.rollout_worker.rewards import RewardPool
from bucketrl.rollout_worker.uploads import PARALLEL, Upload, Uploads
from bucketrl.rollout_worker.work import Work, WorkSource
from bucketrl.tasks.base import Task, TaskError

logger = logging.getLogger(__name__)

MAX_BACKLOG = 64
"""Groups generated and not uploaded; no more are leased beyond that, which bounds memory."""
MAX_WAITING = 4
"""Completions that wait for a reward or an environment, in multiples of the requests that may run. More groups
than that would only grow old: what waits between two turns is not in the engine, which therefore looks empty."""
RECHECK_S = 0.2
"""Room comes not only when requests end: that those which run grow old, or have short prompts, makes some too."""

EndReason = Literal["finished", "drained"]


class RolloutWorker:
    """Runs until the run is finished or `stop` is called. Made inside the event loop that runs it."""

    def __init__(
        self,
        store: Store,
        run: RunRecord,
        task: Task,
        tokenizer: Tokenizer,
        engine: Engine,
        rewards: RewardPool,
        client: ProxyClient,
        options: WorkerOptions,
        folder: Path,
        *,
        rng: random.Random | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`engine` and `rewards` have not been started; `folder` is private to this worker. `rng` is seeded
        by chance if it is not given: workers that start at one moment must not stay in step."""
        worker_id = options.worker_id
        self._options = options
        self._store = store
        # A worker that starts again under its old id must not write under an old key.
        rng = rng or random.Random(secrets.randbits(128))
        self._incarnation = f"{rng.getrandbits(24):06x}"
        self._attempts = itertools.count()
        self._ready: deque[Work] = deque()
        """Leased and not begun."""
        self._changed = asyncio.Event()
        self._complete: dict[Work, SampledGroup] = {}
        """Groups whose completions are all drawn and which are not in the bucket yet."""
        self._cut: list[SampledGroup] = []
        """Groups that were being sampled when the worker was told to stop."""
        self._state: Literal["starting", "running", "draining"] = "starting"
        self._starting = "starting the engine"
        self._ended: asyncio.Future[EndReason] = asyncio.get_running_loop().create_future()

        def failed(error: BaseException) -> None:
            if not self._ended.done():
                self._ended.set_exception(error)

        self._producers, self._sampling, self._others = (Background(failed) for _ in range(3))
        """Stopped one after the other: nothing new, nothing drawn any more, nothing uploaded."""

        def finished() -> None:
            self.stop("finished")

        loop = asyncio.get_running_loop()
        self._clock = loop.time
        link = ProxyLink(client, clock=loop.time)
        self.counters = Counters()
        self._engine = engine
        self._rewards = rewards
        self._policy = PolicyWatcher(
            link, LogReader(store, run, from_snapshot=True), run, rng=rng, on_finished=finished
        )
        self._adapters = Adapters(engine, store, run, folder, rng=rng)
        self._source = WorkSource(
            link, store, run, self._policy, worker_id, rng=rng, on_finished=finished, clock=loop.time
        )
        prompts = Prompts(task, tokenizer, run.config)
        sampling = run.config.sampling
        self._flow = Flow(
            lambda: engine.capacity,
            group_size=sampling.group_size,
            max_tokens=sampling.max_tokens,
            max_prompt=run.config.rollout.max_model_len - sampling.max_tokens,
            max_ahead=run.config.algorithm.groups_per_step,
            max_groups=options.max_groups_in_flight,
        )
        metered = MeteredEngine(engine, self._flow, on_ended=self._changed.set, clock=loop.time)
        self._sampler = GroupSampler(
            metered, self._adapters, prompts, rewards, run, worker_id, self.counters, now=now, clock=loop.time
        )
        self._partials = Partials(store, run, rng=rng)
        self._uploads = Uploads(store, link, worker_id, rng=rng, on_uploaded=self._uploaded)
        self._heartbeats = Heartbeats(
            link, self._snapshot, on_finished=finished, on_drain=lambda: self.stop("drained"), clock=loop.time
        )

    def stop(self, reason: EndReason) -> None:
        """Ends `run`; the first reason counts."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self) -> EndReason:
        """Raises the first error of any part: UserError, or what an engine that died raises."""
        reason: EndReason | None = None
        try:
            self._others.spawn(self._heartbeats.run())
            for _ in range(PARALLEL):
                self._others.spawn(self._uploads.serve())
            for follow in (self._policy.follow_proxy(), self._policy.follow_log(), self._produce()):
                self._producers.spawn(follow)
            reason = await self._ended
        finally:
            await self._shut_down(finished=reason == "finished")
        return reason

    async def _produce(self) -> None:
        await asyncio.gather(self._engine.start(), self._rewards.start())
        self._starting = "waiting for the first policy version"
        self._producers.spawn(self._adapters.keep_current(self._policy))
        await self._adapters.wait_for(0)
        self._state = "running"
        self._producers.spawn(self._feed())
        self._producers.spawn(self._begin())
        while True:
            await asyncio.sleep(RECHECK_S)
            self._changed.set()

    # ---- the pipeline

    async def _feed(self) -> None:
        while True:
            await self._until(lambda: self._room() > 0)
            start = self._clock()
            if granted := await self._source.take(self._room(), self._adapters.newest):
                self._flow.leased(self._clock() - start)
                self._ready.extend(granted)
                self._changed.set()

    def _room(self) -> int:
        """Groups to lease now."""
        if len(self._complete) >= MAX_BACKLOG or not self._answers_keep_up():
            return 0
        return self._flow.groups_to_lease(len(self._ready), self._clock())

    def _answers_keep_up(self) -> bool:
        return self._rewards.waiting < MAX_WAITING * self._flow.target(self._clock())

    async def _begin(self) -> None:
        while True:
            await self._until(
                lambda: self._ready and self._answers_keep_up() and self._flow.groups_to_begin(self._clock())
            )
            # Outlives this task: what it draws is collected when the producers have been stopped.
            self._sampling.spawn(self._sample(self._ready.popleft(), self._flow.begin_group(self._clock())))

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _sample(self, work: Work, in_flight: GroupInFlight) -> None:
        attempt = f"{self._options.worker_id}-{self._incarnation}-{next(self._attempts)}"
        group_in_flight.set(in_flight)
        self._changed.set()
        head = self._policy.head
        partial = await self._partials.fetch(work, max(work.policy_version, head.version if head else -1))
        if partial is not None:
            in_flight.unsent -= sum(bool(completion.finish_reason) for completion in partial.completions)
        try:
            group = await self._sampler.sample(work, attempt, partial)
        except (PromptTooLong, TaskError) as error:
            self._fail(work, str(error), hopeless=True)
        except VersionNotServed as error:
            self._fail(work, str(error), hopeless=False)
        else:
            self._sampled(group)
        finally:
            self._flow.end_group(in_flight, self._clock())
            self._changed.set()

    def _sampled(self, group: SampledGroup) -> None:
        if not group.cut:
            self._complete[group.work] = group
            self._others.spawn(self._finish(group))
        else:
            self._cut.append(group)

    async def _finish(self, sampled: SampledGroup) -> None:
        work = sampled.work
        try:
            group = await self._sampler.finish(sampled)
            if group is None:
                reason = f"fewer than 2 completions survived; last reason: {self.counters.last_drop}"
                self._fail(work, reason, hopeless=False)
                return
            data = await in_thread(encode, group)
        except IntegrityError as error:
            self._fail(work, str(error), hopeless=False)
            return
        rewards = [trajectory.reward for trajectory in group.trajectories]
        tokens = sum(len(trajectory.completion_token_ids) for trajectory in group.trajectories)
        self._uploads.submit(Upload(work, sampled.attempt, data, tokens, sum(rewards) / len(rewards)))

    def _uploaded(self, work: Work) -> None:
        """The group is in the bucket."""
        self._complete.pop(work, None)
        self._source.done(work)
        self.counters.groups_uploaded += 1
        self._changed.set()

    def _fail(self, work: Work, reason: str, *, hopeless: bool) -> None:
        self._complete.pop(work, None)
        self._changed.set()
        self.counters.groups_failed += 1
        self.counters.last_problem = reason
        logger.error("group %s given back: %s", work.group_id, reason)
        self._producers.spawn(self._source.fail(work, hopeless=hopeless))

    # ---- what others see

    def _snapshot(self) -> RolloutState:
        counters = self.counters
        return RolloutState(
            worker_id=self._options.worker_id,
            engine=self._engine.name,
            loaded_version=self._adapters.newest,
            leases=self._source.held_leases(),
            running_requests=counters.running_requests,
            target_requests=0 if self._state == "starting" else self._flow.target(self._clock()),
            tokens_generated=counters.tokens_generated,
            groups_uploaded=counters.groups_uploaded,
            store_requests=requests_of(self._store).total,
            completions_dropped=counters.dropped.total(),
            mean_completion_tokens=counters.mean_completion_tokens(),
            state=self._state,
            note=self._note(),
        )

    def _note(self) -> str:
        counters = self.counters
        if self._state == "starting":
            return self._starting
        if self._adapters.problem:
            return self._adapters.problem[:300]
        if isinstance(self._engine, EnginePool) and self._engine.note:
            return self._engine.note[:300]
        if self._uploads.waiting > PARALLEL:
            return f"{self._uploads.waiting} groups wait for upload"
        if counters.groups_failed:
            return f"{counters.groups_failed} groups failed: {counters.last_problem}"[:300]
        return ""

    # ---- the end

    async def _shut_down(self, *, finished: bool) -> None:
        """Takes no more work and leaves nothing behind that is not in the bucket, within the grace period.
        After the last step nothing is worth uploading."""
        self._state = "draining"
        leaving = Preemption(
            self._source, self._sampler, self._partials, self._options.grace_s, clock=self._clock
        )
        await self._producers.cancel()
        if finished:
            await self._sampling.cancel()
        else:
            await leaving.collect(self._sampling)
        closing = asyncio.create_task(self._engine.close())
        if not finished:
            await leaving.hand_over(self._complete, self._cut, self._drain)
        await self._rewards.close()
        await in_time(closing, max(leaving.left(), self._options.grace_s * RELEASE_SHARE))
        await self._others.cancel()

    async def _drain(self) -> None:
        """Until every complete group is in the bucket or has failed."""
        await self._until(lambda: not self._complete)
