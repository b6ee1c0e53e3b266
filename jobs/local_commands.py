"""`bucketrl run`: the whole thing on one machine, from a TOML file to a summary and a plot."""

import argparse
import shlex
import sys
from pathlib import Path

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.config_file import load_config
from bucketrl.jobs.runs import create_or_join

RUNS = Path("runs")


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config)
    bucket = arguments.bucket or str(RUNS / config.name / "bucket")
    store = open_store(bucket)
    from bucketrl.jobs.local import LocalOptions, Stopped, evaluate, supervise

    record = create_or_join(store, config, progress=print)
    options = LocalOptions(
        bucket=bucket,
        workers=arguments.workers,
        engine=arguments.engine,
        port=arguments.port,
        logs=RUNS / config.name / "logs",
        groups_in_flight=arguments.groups_in_flight,
        kv_cache_mb=arguments.kv_cache_mb,
    )
    if _is_finished(store, record):
        print(
            f"run {record.run_id} in {bucket} is finished already; for another one, give --bucket or empty it"
        )
    else:
        try:
            supervise(options, f"run {record.run_id} in {bucket}")
        except Stopped:
            print(f"stopped; the same command goes on from the last commit in {bucket}", file=sys.stderr)
            return 130
    if arguments.evaluate:
        evaluate(options, arguments.evaluate)
    _report(arguments, store, record, config)
    return 0


def _report(arguments: argparse.Namespace, store: Store, record: RunRecord, config: RunConfig) -> None:
    from bucketrl.jobs import report

    summary = report.summarise(store, record)
    print(report.text(summary))
    path = arguments.plot or RUNS / config.name / "reward.png"
    report.plot(summary, path)
    print(f"  plot       {path}")
    if arguments.record:
        command = "bucketrl " + shlex.join(sys.argv[1:])
        print(
            f"  record     {report.record(summary, arguments.record, command, '', Path('benchmarks/results'))}"
        )


def _is_finished(store: Store, record: RunRecord) -> bool:
    reader = LogReader(store, record)
    reader.refresh()
    step = reader.state.step
    return step is not None and step.step >= record.config.algorithm.steps


def add_arguments(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser(
        "run", help="proxy, rollout workers and learner on this machine, from a TOML file"
    )
    verb.add_argument("config", type=Path)
    verb.add_argument("--bucket", default="", metavar="URL", help="default: runs/<name>/bucket")
    verb.add_argument("--workers", type=_positive, default=1, metavar="N")
    verb.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    verb.add_argument("--port", type=int, default=0, metavar="P", help="of the proxy; default: any free one")
    verb.add_argument("--groups-in-flight", type=_positive, default=8, metavar="N", help="of each worker")
    verb.add_argument("--kv-cache-mb", type=int, default=0, metavar="N", help="0: the engine decides")
    verb.add_argument(
        "--evaluate", type=int, default=0, metavar="N", help="held-out problems, before and after"
    )
    verb.add_argument("--plot", type=Path, metavar="PNG", help="default: runs/<name>/reward.png")
    verb.add_argument("--record", metavar="NAME", help="write benchmarks/results/NAME.json")
    verb.set_defaults(command=run)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise UserError(f"{text!r}: want a whole number above 0")
    return value
