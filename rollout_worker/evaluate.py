"""Held-out accuracy of committed policy versions, by the same engines, prompts and rewards as rollouts."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bucketrl.api.messages import PolicyHead
from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.gc import newest_boundary
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import EvaluationRecord, RunRecord, StepRecord, sha256_hex
from bucketrl.bucket.scratch import scratch_folder
from bucketrl.bucket.store import Store
from bucketrl.rollout_worker.adapters import Adapters
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.drawing import CompletionSampler
from bucketrl.rollout_worker.engine import DroppedCompletion, Engine
from bucketrl.rollout_worker.group import request_seed
from bucketrl.rollout_worker.loading import load_engine
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.prompts import Prompts, PromptTooLong, Tokenizer
from bucketrl.rollout_worker.rewards import RewardFailed, RewardPool
from bucketrl.tasks.base import Task

logger = logging.getLogger(__name__)

CONCURRENT = 64
"""Problems in the engine at the same time."""

Progress = Callable[[int, int], None]
"""Called with (problems done, problems in all)."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One completion for each of the first n problems of the held-out split."""

    version: int
    temperature: float
    rewards: tuple[float, ...]
    """[n] in problem order; 0 for a problem without a usable completion."""
    mean_tokens: float
    """Over the usable completions."""
    truncated: int
    """Completions that ended for length."""
    failed: int
    """Problems without a usable completion."""
    seconds: float

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)


async def evaluate(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    run: RunRecord,
    *,
    rewards: RewardPool,
    version: int,
    problems: int,
    temperature: float,
    progress: Progress,
) -> EvaluationResult:
    """Evaluates a version that `engine` serves; `rewards` has been started. Raises UserError."""
    _check_problems(task, problems)
    prompts = Prompts(task, tokenizer, run.config)
    slots = asyncio.Semaphore(CONCURRENT)
    start = time.monotonic()
    done = 0

    sampler = CompletionSampler.of_version(
        engine,
        version,
        prompts,
        rewards,
        max_tokens=run.config.sampling.max_tokens,
        temperature=temperature,
    )

    async def attempt(index: int) -> tuple[float, int, bool] | None:
        """Reward, tokens, whether it was cut off; None if there is no usable completion."""
        nonlocal done
        name = f"evaluation-{version}"

        def seed(drawn: int) -> int:
            return request_seed(run.config.seed, keys.GroupId(0, index), 0, name, drawn)

        async with slots:
            try:
                prompt = prompts.get("heldout", index)
                completion, reward = await sampler.measured(f"{name}-{index}", prompt, seed)
            except (PromptTooLong, DroppedCompletion, RewardFailed) as error:
                logger.warning("held-out problem %d counts as 0: %s", index, error)
                return None
            finally:
                done += 1
                progress(done, problems)
        return reward.total, sum(completion.loss_mask), completion.finish_reason == "length"

    outcomes = await asyncio.gather(*map(attempt, range(problems)))
    usable = [outcome for outcome in outcomes if outcome is not None]
    return EvaluationResult(
        version=version,
        temperature=temperature,
        rewards=tuple(outcome[0] if outcome else 0.0 for outcome in outcomes),
        mean_tokens=sum(tokens for _, tokens, _ in usable) / max(len(usable), 1),
        truncated=sum(truncated for _, _, truncated in usable),
        failed=problems - len(usable),
        seconds=time.monotonic() - start,
    )


def evaluate_versions(
    store: Store,
    run: RunRecord,
    *,
    model_path: Path,
    task: Task,
    versions: Sequence[int | None],
    problems: int,
    temperature: float,
    options: WorkerOptions,
    progress: Progress,
) -> list[EvaluationResult]:
    """Evaluates committed versions (None is the newest) with one engine start, and puts one
    EvaluationRecord for each into the bucket.

    Raises UserError for a version that the log does not have, or a model or task that cannot work.
    """
    heads = _find_heads(store, run, versions)
    _check_problems(task, problems)
    tokenizer, engine = load_engine(run, model_path, options)
    rewards = RewardPool(task, processes=options.reward_processes, timeout_s=options.reward_timeout_s)

    async def work(folder: Path) -> list[EvaluationResult]:
        adapters = Adapters(engine, store, run, folder, rng=random.Random(0))
        results = []
        try:
            logger.info("loading the engine: about 30 s and 2 GB on CPU (%s)", engine.name)
            await asyncio.gather(engine.start(), rewards.start())
            for head in heads:
                await adapters.load(head)
                result = await evaluate(
                    engine,
                    tokenizer,
                    task,
                    run,
                    rewards=rewards,
                    version=head.version,
                    problems=problems,
                    temperature=temperature,
                    progress=progress,
                )
                await in_thread(_put_record, store, run, result, engine.name)
                results.append(result)
        finally:
            await rewards.close()
            await engine.close()
        return results

    with scratch_folder(options.cache_dir / "adapters", "worker-") as folder:
        return asyncio.run(work(folder))


def _check_problems(task: Task, problems: int) -> None:
    size = task.size("heldout")
    if not 0 < problems <= size:
        raise UserError(f"problems: {problems} asked for, the held-out split has {size}; choose 1 to {size}")


def _find_heads(store: Store, run: RunRecord, versions: Sequence[int | None]) -> list[PolicyHead]:
    commits = [record for record in LogReader(store, run).refresh() if isinstance(record, StepRecord)]
    if not commits:
        raise UserError(
            f"bucket {store.url}: the log has no committed policy version yet; run the learner first"
        )
    by_version = {commit.policy.version: commit for commit in commits}
    boundary = newest_boundary(store, run)
    heads = []
    for version in versions:
        commit = commits[-1] if version is None else by_version.get(version)
        if commit is None:
            raise UserError(f"version: {version} is not in the log; it has 0 to {commits[-1].policy.version}")
        if 0 < commit.step <= boundary:
            raise UserError(
                f"version: {version} has been collected; the bucket holds that of step 0 and those of steps above "
                f"{boundary}"
            )
        heads.append(
            PolicyHead(
                run_id=run.run_id,
                version=commit.policy.version,
                step=commit.step,
                log_seq=commit.seq,
                log_sha256=sha256_hex(store.get(keys.log(commit.seq))),
                consumed_cursor=commit.consumed.cursor,
                finished=commit.step >= run.config.algorithm.steps,
            )
        )
    return heads


def _put_record(store: Store, run: RunRecord, result: EvaluationResult, engine: str) -> None:
    problems = len(result.rewards)
    record = EvaluationRecord(
        run_id=run.run_id,
        version=result.version,
        problems=problems,
        temperature=result.temperature,
        mean_reward=result.mean_reward,
        engine=engine,
        seconds=result.seconds,
        written_at=datetime.now(UTC).isoformat(),
    )
    name = f"heldout-{problems}-t{result.temperature:g}"
    store.put(keys.evaluation(result.version, name), record.encode())
