"""Entry point of a rollout worker: loads what it needs, listens for signals, runs it to the end."""

import asyncio
import logging
import signal
from pathlib import Path

from bucketrl.api.client import ProxyClient
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.scratch import scratch_folder
from bucketrl.bucket.store import Store
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.loading import load_engine
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.rewards import RewardPool
from bucketrl.rollout_worker.worker import RolloutWorker
from bucketrl.tasks.base import Task

__all__ = ["WorkerOptions", "run_worker"]

logger = logging.getLogger(__name__)


def run_worker(
    store: Store,
    run: RunRecord,
    *,
    model_path: Path,
    task: Task,
    client: ProxyClient,
    options: WorkerOptions,
) -> None:
    """Works until the run is finished, or until SIGTERM or SIGINT. Call it in the main thread.

    Raises UserError for a model, task or token that cannot work, and what an engine raises when it dies.
    """
    size = task.size("train")
    if size != run.prompts_per_epoch:
        raise UserError(
            f"task: it has {size} training prompts here, but {run.prompts_per_epoch} where the run was created; "
            "give this machine the same data files and package versions"
        )
    asyncio.run(_run(store, run, model_path, task, client, options))


async def _run(
    store: Store, run: RunRecord, model_path: Path, task: Task, client: ProxyClient, options: WorkerOptions
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tokenizer, engine = await in_thread(load_engine, run, model_path, options)
    with scratch_folder(options.cache_dir / "adapters", "worker-") as folder:
        rewards = RewardPool(task, processes=options.reward_processes, timeout_s=options.reward_timeout_s)
        worker = RolloutWorker(store, run, task, tokenizer, engine, rewards, client, options, folder)
        logger.info("loading the engine: about 30 s and 2 GB on CPU (%s)", engine.name)
        stopping = asyncio.create_task(_stop_when(stopped, worker))
        try:
            reason = await worker.run()
        finally:
            stopping.cancel()
    logger.info("%s: %s", reason, worker.counters.summary())


async def _stop_when(stopped: asyncio.Event, worker: RolloutWorker) -> None:
    await stopped.wait()
    logger.info("stopping: finished and partial groups are uploaded, then leases given back")
    worker.stop("drained")
