"""One group: its completions drawn with the newest policy version, scored, packed as a trajectory object."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from bucketrl.bucket.errors import BucketrlError
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.rollout_worker.adapters import Adapters
from bucketrl.rollout_worker.counters import Counters
from bucketrl.rollout_worker.engine import DroppedCompletion, Engine, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.prompts import Prompts, TemplatedPrompt
from bucketrl.rollout_worker.rewards import RewardFailed, RewardPool
from bucketrl.rollout_worker.work import Work

MIN_COMPLETIONS = 2
"""A single completion has no advantage within its group."""


class VersionNotServed(BucketrlError):
    """The version that a lease asks for did not arrive in time."""


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """Generated; the rewards are still being computed."""

    work: Work
    attempt: str
    prompt: TemplatedPrompt
    scored: tuple["asyncio.Task[Trajectory | None]", ...]
    """One for each completion that the engine delivered; None where the reward failed."""


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
        self._rewards = rewards
        self._run = run
        self._worker_id = worker_id
        self._counters = counters
        self._now = now
        self._clock = clock

    async def sample(self, work: Work, attempt: str) -> SampledGroup:
        """Draws all completions of the group. Raises PromptTooLong, TaskError, VersionNotServed."""
        prompt = self._prompts.get("train", work.group_id.index)
        try:
            await asyncio.wait_for(self._adapters.wait_for(work.policy_version), work.seconds)
        except TimeoutError:
            raise VersionNotServed(
                f"policy version {work.policy_version} was not served within the lease time"
            ) from None
        drawn = await asyncio.gather(
            *(
                self._draw(work, attempt, prompt, sample)
                for sample in range(self._run.config.sampling.group_size)
            )
        )
        return SampledGroup(work, attempt, prompt, tuple(task for task in drawn if task is not None))

    async def finish(self, group: SampledGroup) -> TrajectoryGroup | None:
        """Waits for the rewards. None if too few completions survived."""
        scored = await asyncio.gather(*group.scored)
        trajectories = tuple(trajectory for trajectory in scored if trajectory is not None)
        if len(trajectories) < MIN_COMPLETIONS:
            return None
        return TrajectoryGroup(
            run_id=self._run.run_id,
            group_id=str(group.work.group_id),
            attempt=group.attempt,
            worker_id=self._worker_id,
            engine=self._engine.name,
            prompt_text=group.prompt.text,
            trajectories=trajectories,
        )

    async def _draw(
        self, work: Work, attempt: str, prompt: TemplatedPrompt, sample: int
    ) -> "asyncio.Task[Trajectory | None] | None":
        sampling = self._run.config.sampling
        seed = request_seed(self._run.config.seed, work.group_id, sample, attempt)
        started_at, start = self._now().isoformat(), self._clock()
        self._counters.running_requests += 1
        try:
            # The version is chosen here, where the request is sent, and stays with it to the end.
            with self._adapters.use() as version:
                completion = await self._engine.generate(
                    SamplingRequest(
                        request_id=f"{work.group_id}-{attempt}-{sample}",
                        prompt_token_ids=prompt.token_ids,
                        max_tokens=sampling.max_tokens,
                        temperature=sampling.temperature,
                        seed=seed,
                        policy_version=version,
                    )
                )
        except DroppedCompletion as error:
            self._counters.drop(str(error))
            return None
        finally:
            self._counters.running_requests -= 1
        self._counters.tokens_generated += len(completion.token_ids)
        self._counters.completions += 1
        seconds = self._clock() - start
        return asyncio.create_task(self._score(prompt, completion, sample, seed, started_at, seconds))

    async def _score(
        self,
        prompt: TemplatedPrompt,
        completion: SampledCompletion,
        sample: int,
        seed: int,
        started_at: str,
        seconds: float,
    ) -> Trajectory | None:
        if completion.finish_reason == "abort":
            self._counters.drop("finish reason abort")
            return None
        text = self._prompts.text_of(completion.token_ids)
        try:
            reward = await self._rewards.score(prompt.prompt, text, completion.finish_reason)
        except RewardFailed as error:
            self._counters.drop(str(error))
            return None
        return Trajectory(
            sample=sample,
            prompt_token_ids=prompt.token_ids,
            completion_token_ids=completion.token_ids,
            behaviour_logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            loss_mask=(True,) * len(completion.token_ids),
            reward=float(reward.total),
            reward_parts={name: float(value) for name, value in reward.parts.items()},
            finish_reason=completion.finish_reason,
            seed=seed,
            started_at=started_at,
            seconds=seconds,
            completion_text=text,
        )


def request_seed(run_seed: int, group_id: GroupId, sample: int, attempt: str) -> int:
    """Same arguments, same seed, on every machine; in [0, 2**63)."""
    text = f"{run_seed}/{group_id}/{sample}/{attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
