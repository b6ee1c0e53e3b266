"""`doctor --probe-task` with a real engine: the policy is version 0, exactly as a learner would publish it."""

import logging
from pathlib import Path

import torch

from bucketrl.bucket.records import RunRecord
from bucketrl.jobs.doctor import TaskProbe, probe_task
from bucketrl.jobs.role_commands import new_member_id
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.publish import save_adapter
from bucketrl.rollout_worker.engines import EngineKind
from bucketrl.rollout_worker.loading import load_engine
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.rewards import RewardPool
from bucketrl.tasks.load import load_task

logger = logging.getLogger(__name__)


async def probe_with_engine(
    run: RunRecord, model_path: Path, scratch: Path, *, engine_kind: EngineKind, prompts: int, seed: int
) -> TaskProbe:
    """Samples groups of the run's size from `prompts` training prompts. Raises UserError, TaskError."""
    adapter = scratch / "adapter"
    save_adapter(adapter, PolicyModel.load(model_path, run.config, torch.device("cpu")))
    options = WorkerOptions(worker_id=new_member_id(), cache_dir=scratch, engine=engine_kind)
    tokenizer, engine = load_engine(run, model_path, options)
    task = load_task(run.config.task)
    rewards = RewardPool(task, processes=options.reward_processes, timeout_s=options.reward_timeout_s)
    logger.info("starting %s: about 30 s and 2 GB on CPU", engine.name)
    try:
        await engine.start()
        await rewards.start()
        await engine.add_adapter(0, adapter)
        return await probe_task(
            engine,
            rewards,
            tokenizer,
            task,
            run.config,
            prompts=prompts,
            group_size=run.config.sampling.group_size,
            seed=seed,
        )
    finally:
        await rewards.close()
        await engine.close()
