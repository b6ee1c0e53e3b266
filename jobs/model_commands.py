"""`bucketrl doctor | evaluate`: measuring a task or a policy with an engine, outside a run."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.config_file import load_config
from bucketrl.jobs.memory_check import check_engine, check_learner
from bucketrl.jobs.models import default_cache, resolve_model
from bucketrl.jobs.progress import bar
from bucketrl.jobs.role_commands import new_member_id
from bucketrl.jobs.runs import draft_run, load_model, open_run
from bucketrl.tasks.load import load_task


def doctor(arguments: argparse.Namespace) -> int:
    """1 if the task gives no signal."""
    run = draft_run(load_config(arguments.config), progress=_say)
    model_path = resolve_model(run.config.model, progress=_say)
    print(f"{arguments.config}: the configuration, the model and the task load")
    for line in (check_engine(run.config, model_path), check_learner(run.config, model_path)):
        print(line)
    if not arguments.probe_task:
        print("add --probe-task to measure whether the task can teach this model")
        return 0
    from bucketrl.jobs.doctor import render
    from bucketrl.jobs.task_probe import probe_with_engine

    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(
            probe_with_engine(
                run,
                model_path,
                Path(scratch),
                engine_kind=arguments.engine,
                prompts=arguments.prompts,
                seed=arguments.seed,
            )
        )
    print(render(found))
    return 1 if found.verdict == "none" else 0


def evaluate(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    run: RunRecord = open_run(store)
    task, model_path = load_task(run.config.task), load_model(run, progress=_say)
    from bucketrl.rollout_worker.evaluate import evaluate_versions
    from bucketrl.rollout_worker.options import WorkerOptions

    options = WorkerOptions(
        worker_id=new_member_id(),
        cache_dir=arguments.cache_dir or default_cache(),
        engine=arguments.engine,
        engine_url=arguments.engine_url,
    )
    with bar("evaluating", "problems") as progress:
        results = evaluate_versions(
            store,
            run,
            model_path=model_path,
            task=task,
            versions=arguments.version or [None],
            problems=arguments.problems,
            temperature=arguments.temperature or run.config.sampling.temperature,
            options=options,
            progress=progress,
        )
    for result in results:
        print(
            f"version {result.version}: held-out reward {result.mean_reward:.3f} over {len(result.rewards)} "
            f"problems at temperature {result.temperature:g}, {result.mean_tokens:.1f} tokens a completion, "
            f"{result.truncated} cut off, {result.failed} without a completion, {result.seconds:.0f} s"
        )
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
