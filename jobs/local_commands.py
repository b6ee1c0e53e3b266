"""`bucketrl run`: the whole thing on one machine, from a TOML file to a summary and a plot."""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.retention import resolve_keep
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.jobs import report
from bucketrl.jobs.config_file import load_config
from bucketrl.jobs.local import LocalOptions, Stopped, check_port, evaluate, supervise
from bucketrl.jobs.memory_check import check_all
from bucketrl.jobs.models import resolve_model
from bucketrl.jobs.runs import create, is_finished, join

RUNS = Path("runs")
RESULTS = Path("benchmarks/results")


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config)
    resolve_keep(config, arguments.keep)  # what the learner would refuse
    folder = RUNS / config.name
    bucket = arguments.bucket or str(folder / "bucket")
    options = LocalOptions(
        bucket=bucket,
        workers=arguments.workers,
        engine=arguments.engine,
        port=arguments.port,
        folder=folder,
        groups_in_flight=arguments.groups_in_flight,
        kv_cache_mb=arguments.kv_cache_mb,
        keep=arguments.keep,
    )
    store = open_store(bucket)
    record = join(store, config)
    if record is not None and is_finished(store, record):
        print(f"run {record.run_id} in {bucket} is finished already; give --bucket for another one")
    else:
        _check_machine(config, options)
        record = record or create(store, config, progress=_say)
        try:
            supervise(options, f"run {record.run_id} in {bucket}", partial(is_finished, store, record))
        except Stopped:
            print(f"stopped; the same command goes on from the last commit in {bucket}", file=sys.stderr)
            return 130
    evaluated = evaluate(options, arguments.evaluate) if arguments.evaluate else True
    _report(arguments, store, record)
    return 0 if evaluated else 1


def _check_machine(config: RunConfig, options: LocalOptions) -> None:
    """Raises UserError for a port in use and for roles that cannot all fit; before anything is written."""
    if options.port:
        check_port(options.port)
    kv_cache_bytes = options.kv_cache_mb << 20 if options.kv_cache_mb else None
    model = resolve_model(config.model, progress=_say)
    _say(check_all(config, model, workers=options.workers, kv_cache_bytes=kv_cache_bytes))


def _report(arguments: argparse.Namespace, store: Store, run: RunRecord) -> None:
    summary = report.summarise(store, run)
    print(report.text(summary))
    path = arguments.plot or RUNS / run.config.name / "reward.png"
    report.plot(summary, path)
    print(f"  plot       {path}")
    if arguments.record:
        command = "bucketrl " + shlex.join(sys.argv[1:])
        written = report.record(summary, arguments.record, command=command, notes="", folder=RESULTS)
        print(f"  record     {written}")


def _say(line: str) -> None:
    print(line, flush=True)
