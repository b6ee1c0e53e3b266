"""One group: its completions drawn with the newest policy version, scored, packed as a trajectory object.

sample ─┬─ all have ended ─► finish: rewards ─► TrajectoryGroup
        └─ some were cut ──► as_partial ─► PartialGroup ─► another worker's `sample` goes on with it
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from bucketrl.bucket.completions import Completion
from bucketrl.bucket.errors import BucketrlError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.partials import PartialGroup
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.rollout_worker.adapters import Adapters
from bucketrl.rollout_worker.continuation import fresh, usable
from bucketrl.rollout_worker.counters import Counters
from bucketrl.rollout_worker.drawing import CompletionSampler
from bucketrl.rollout_worker.engine import DroppedCompletion, Engine
from bucketrl.rollout_worker.episode import Episode
from bucketrl.rollout_worker.prompts import Prompts, TemplatedPrompt
from bucketrl.rollout_worker.rewards import RewardFailed, RewardPool
from bucketrl.rollout_worker.work import Work

logger = logging.getLogger(__name__)

MIN_COMPLETIONS = 2
"""A single completion has no advantage within its group."""


class VersionNotServed(BucketrlError):
    """The version that a lease asks for did not arrive in time."""


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """As far as it was generated; the rewards are still being computed."""

    work: Work
    attempt: str
    prompt: TemplatedPrompt
    completions: tuple[Completion, ...]
    """Those that the engine delivered. One that was cut may have no tokens."""
    scored: tuple["asyncio.Task[Trajectory | None]", ...]
    """One for each completion that has ended; None where the reward failed."""

    @property
    def cut(self) -> bool:
        return any(not completion.finish_reason for completion in self.completions)


class GroupSampler:
    """Samples the groups of one worker."""

    def __init__(
        self,
        engine: Engine,
        adapters: Adapters,
        prompts: Prompts,
        rewards: RewardPool,
        run: RunRecord,
        worker_id: str,
        counters: Counters,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._prompts = prompts
        self._run = run
        self._worker_id = worker_id
        self._counters = counters
        self._now = now
        self._completions = CompletionSampler(
            engine,
            adapters.use,
            prompts,
            rewards,
            counters,
            max_tokens=run.config.sampling.max_tokens,
            chunk_tokens=run.config.rollout.chunk_tokens,
            temperature=run.config.sampling.temperature,
            clock=clock,
        )

    async def sample(self, work: Work, attempt: str, partial: PartialGroup | None = None) -> SampledGroup:
        """Draws all completions of the group, going on with those of `partial`.

        Raises PromptTooLong, TaskError, VersionNotServed.
        """
        prompt = self._prompts.get("train", work.group_id.index)
        versions = [v for c in partial.completions for v in c.policy_versions] if partial else []
        # A completion's versions never decrease.
        await self._served(max([work.policy_version, *versions]), work.seconds)
        begun = self._begun(prompt, partial)
        drawn = await asyncio.gather(
            *(
                self._draw(work, attempt, prompt, sample, begun.get(sample))
                for sample in range(self._run.config.sampling.group_size)
            )
        )
        delivered = [pair for pair in drawn if pair is not None]
        return SampledGroup(
            work,
            attempt,
            prompt,
            completions=tuple(completion for completion, _ in delivered),
            scored=tuple(score for _, score in delivered if score is not None),
        )

    async def cut(self) -> None:
        """Ends all requests where they are: every running `sample` returns soon, and none begins to draw."""
        await self._completions.cut()

    async def finish(self, group: SampledGroup) -> TrajectoryGroup | None:
        """Waits for the rewards. None if too few completions survived."""
        scored = await asyncio.gather(*group.scored)
        trajectories = tuple(trajectory for trajectory in scored if trajectory is not None)
        if len(trajectories) < MIN_COMPLETIONS:
            return None
        return TrajectoryGroup(**self._header(group), trajectories=trajectories)

    def as_partial(self, group: SampledGroup) -> PartialGroup | None:
        """What another worker can go on with. None if there is not a single token."""
        completions = tuple(one for one in group.completions if one.completion_token_ids)
        return PartialGroup(**self._header(group), completions=completions) if completions else None

    def _header(self, group: SampledGroup) -> dict[str, str]:
        return {
            "run_id": self._run.run_id,
            "group_id": str(group.work.group_id),
            "attempt": group.attempt,
            "worker_id": self._worker_id,
            "engine": self._engine.name,
            "prompt_text": group.prompt.text,
        }

    async def _served(self, version: int, seconds: float) -> None:
        """Until `version` or a newer one is served, or everything is cut. Raises VersionNotServed."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._adapters.wait_for(version)),
            asyncio.ensure_future(self._completions.cut_begins()),
        ]
        try:
            done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            raise VersionNotServed(f"policy version {version} was not served within the lease time")

    def _begun(self, prompt: TemplatedPrompt, partial: PartialGroup | None) -> dict[int, Completion]:
        if partial is None:
            return {}
        config = self._run.config
        begun = usable(
            partial.completions,
            prompt_token_ids=prompt.token_ids,
            newest_version=self._adapters.newest,
            max_staleness=config.algorithm.max_staleness,
            max_tokens=config.sampling.max_tokens,
            group_size=config.sampling.group_size,
        )
        kept = sum(len(completion.completion_token_ids) for completion in begun.values())
        logger.info(
            "group %s goes on from attempt %s: %d tokens of %d completions, %d completions too old or foreign",
            partial.group_id, partial.attempt, kept, len(begun), len(partial.completions) - len(begun),
        )  # fmt: skip
        return begun

    async def _draw(
        self, work: Work, attempt: str, prompt: TemplatedPrompt, sample: int, begun: Completion | None
    ) -> tuple[Completion, "asyncio.Task[Trajectory | None] | None"] | None:
        """The completion to its end, or to where it is cut, and its score if it has ended. None if it cannot
        be used."""

        def seed(drawn: int) -> int:
            return request_seed(self._run.config.seed, work.group_id, sample, attempt, drawn)

        name = f"{work.group_id}-{attempt}-{sample}"
        so_far = begun or fresh(prompt.token_ids, sample, seed(0), self._now().isoformat())
        try:
            completion, episode = await self._completions.draw(name, prompt, so_far, seed)
        except (DroppedCompletion, RewardFailed) as error:
            self._counters.drop(str(error))
            return None
        if not completion.finish_reason:
            return completion, None
        return completion, asyncio.create_task(self._score(episode, completion))

    async def _score(self, episode: Episode, completion: Completion) -> Trajectory | None:
        try:
            reward = await episode.reward(completion)
        except RewardFailed as error:
            self._counters.drop(str(error))
            return None
        return Trajectory(
            **{field.name: getattr(completion, field.name) for field in fields(Completion)},
            reward=float(reward.total),
            reward_parts={name: float(value) for name, value in reward.parts.items()},
            completion_text=self._prompts.text_of(completion.completion_token_ids),
        )


def request_seed(run_seed: int, group_id: GroupId, sample: int, attempt: str, drawn: int = 0) -> int:
    """Of the request that begins after `drawn` tokens. Same arguments, same seed, on every machine; in
    [0, 2**63). Another one for each request, which else would repeat the random numbers of the one before."""
    text = f"{run_seed}/{group_id}/{sample}/{attempt}" + (f"/{drawn}" if drawn else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
