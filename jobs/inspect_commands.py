"""`bucketrl status | audit | report | replay`: looking at a run; none of them changes it."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bucketrl.bucket.stores import open_store
from bucketrl.jobs.role_commands import READ_TOKEN, WORKER_TOKEN
from bucketrl.jobs.runs import load_parts, open_run

if TYPE_CHECKING:  # heavy: imported where they are used, so that --help stays quick
    from rich.progress import Progress

    from bucketrl.api.messages import RunStatus
    from bucketrl.bucket.audit import AuditReport


def run_status(arguments: argparse.Namespace) -> int:
    from bucketrl.api.client import ProxyClient
    from bucketrl.jobs import report

    if arguments.bucket:
        store = open_store(arguments.bucket)
        print(report.text(report.summarise(store, open_run(store))))
        return 0
    token = os.environ.get(READ_TOKEN) or os.environ.get(WORKER_TOKEN, "")
    print(_status_text(ProxyClient(arguments.proxy, token).run_status()))
    return 0


def run_audit(arguments: argparse.Namespace) -> int:
    from bucketrl.bucket.audit import audit

    with bar("auditing") as progress:
        task = progress.add_task("objects", total=None)
        found = audit(
            open_store(arguments.bucket),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    print(_audit_text(found))
    return 1 if found.violations else 0


def run_report(arguments: argparse.Namespace) -> int:
    from bucketrl.jobs import report

    store = open_store(arguments.bucket)
    summary = report.summarise(store, open_run(store))
    print(report.text(summary))
    if arguments.plot:
        report.plot(summary, arguments.plot)
        print(f"plot: {arguments.plot}")
    if arguments.record:
        path = report.record(
            summary, arguments.record, arguments.command_line, arguments.notes, Path("benchmarks/results")
        )
        print(f"record: {path}")
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    source, target = open_store(arguments.source), open_store(arguments.target)
    run = open_run(source)
    _, model_path = load_parts(run, progress=_say)
    from bucketrl.jobs.replay import replay

    versions, differences = replay(source, target, run, model_path=model_path, progress=_say)
    for item in differences:
        print(f"version {item.version}: {item.file}: run {item.there[:12]}…, replay {item.here[:12]}…")
    print(f"{versions} versions compared: {'DIFFERENT' if differences else 'all bytes equal'}")
    return 1 if differences else 0


def bar(title: str) -> "Progress":
    """A progress bar on stderr that leaves nothing behind; silent where nobody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


def add_arguments(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("status", help="how a run goes, from its proxy or its bucket")
    where = verb.add_mutually_exclusive_group(required=True)
    where.add_argument("--proxy", metavar="URL")
    where.add_argument("--bucket", metavar="URL")
    verb.set_defaults(command=run_status)

    verb = verbs.add_parser(
        "audit", help="prove from the bucket alone that nothing was lost or trained twice"
    )
    verb.add_argument("bucket", metavar="BUCKET_URL")
    verb.set_defaults(command=run_audit)

    verb = verbs.add_parser("report", help="summary, plot and benchmark record of a run")
    verb.add_argument("bucket", metavar="BUCKET_URL")
    verb.add_argument("--plot", type=Path, metavar="PNG")
    verb.add_argument("--record", metavar="NAME", help="write benchmarks/results/NAME.json")
    verb.add_argument("--command-line", default="", help="for the record: the command that made the run")
    verb.add_argument("--notes", default="", help="for the record")
    verb.set_defaults(command=run_report)

    verb = verbs.add_parser("replay", help="train the same batches again and compare every adapter's bytes")
    verb.add_argument("source", metavar="BUCKET_URL")
    verb.add_argument("target", metavar="EMPTY_BUCKET_URL")
    verb.set_defaults(command=run_replay)


def _status_text(status: "RunStatus") -> str:
    def shown(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    leases = status.leases
    return "\n".join(
        [
            f"run {status.run_id} in {status.bucket}, since {status.run_started_at}",
            f"  step       {status.step} of {status.steps}, policy version {status.version}"
            + (", finished" if status.finished else ""),
            f"  reward     {shown(status.reward, 3)}",
            f"  staleness  mean {shown(status.staleness_mean)}, maximum {shown(status.staleness_max, 0)}",
            f"  workers    {status.workers_alive} alive; learner {'alive' if status.learner_alive else 'silent'}",
            f"  leases     {leases.active} active, {leases.outstanding_groups} of at most "
            f"{leases.max_outstanding_groups} groups outstanding, {leases.reissued_total} issued again",
            f"  throughput {status.rollout_tokens_per_second:.0f} sampled tokens/s, "
            f"{status.steps_per_minute:.1f} steps/min",
        ]
    )


def _audit_text(found: "AuditReport") -> str:
    lines = [f"VIOLATION of invariant {v.invariant}: {v.key}: {v.message}" for v in found.violations]
    lines += [f"note: {note}" for note in found.notes]
    lines.append(
        f"run {found.run_id}: {found.records} log records, {found.steps} commits, {found.trained} groups trained, "
        f"{found.skipped} skipped, {found.unconsumed} not consumed yet, {found.duplicates} losing attempts, "
        f"{found.quarantined} quarantined"
    )
    lines.append(
        f"{len(found.violations)} violations" if found.violations else "clean: every invariant holds"
    )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
