"""`bucketrl evaluate | doctor`: measuring a policy or a task with an engine, outside a run."""

import argparse
from pathlib import Path

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.inspect_commands import bar
from bucketrl.jobs.models import default_cache
from bucketrl.jobs.role_commands import logger, new_member_id
from bucketrl.jobs.runs import load_parts, open_run


def run_evaluate(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    run = open_run(store)
    task, model_path = load_parts(run, progress=logger.info)
    from bucketrl.rollout_worker.evaluate import evaluate_versions
    from bucketrl.rollout_worker.options import WorkerOptions

    options = WorkerOptions(
        worker_id=new_member_id(), cache_dir=arguments.cache_dir or default_cache(), engine=arguments.engine
    )
    versions = [_version(text) for text in arguments.version or ["latest"]]
    with bar("evaluating") as progress:
        shown = progress.add_task("problems", total=None)
        results = evaluate_versions(
            store,
            run,
            model_path=model_path,
            task=task,
            versions=versions,
            problems=arguments.problems,
            temperature=arguments.temperature or run.config.sampling.temperature,
            options=options,
            progress=lambda done, total: progress.update(shown, completed=done, total=total),
        )
    for result in results:
        print(
            f"version {result.version}: held-out reward {result.mean_reward:.3f} over {len(result.rewards)} "
            f"problems at temperature {result.temperature:g}, {result.mean_tokens:.1f} tokens a completion, "
            f"{result.truncated} cut off, {result.failed} without a completion, {result.seconds:.0f} s"
        )
    return 0


def add_arguments(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("evaluate", help="held-out reward of committed policy versions")
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.add_argument("--version", action="append", metavar="N|latest", help="may be given several times")
    verb.add_argument("--problems", type=int, default=200, metavar="N")
    verb.add_argument(
        "--temperature", type=float, default=0.0, help="default: the run's sampling temperature"
    )
    verb.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    verb.add_argument("--cache-dir", type=Path, metavar="FOLDER")
    verb.set_defaults(command=run_evaluate)


def _version(text: str) -> int | None:
    if text == "latest":
        return None
    if text.isdecimal():
        return int(text)
    raise UserError(f"--version {text}: want a number or latest")
