"""`bucketrl status | audit | report | replay`: looking at a run; none of them changes it."""

import argparse
import os
import sys
from pathlib import Path

from bucketrl.api.client import ProxyClient
from bucketrl.api.messages import RunStatus
from bucketrl.bucket.audit import AuditReport, audit
from bucketrl.bucket.stores import open_store
from bucketrl.jobs import report
from bucketrl.jobs.progress import bar
from bucketrl.jobs.role_commands import READ_TOKEN, WORKER_TOKEN
from bucketrl.jobs.runs import load_model, open_run

RESULTS = Path("benchmarks/results")


def status(arguments: argparse.Namespace) -> int:
    if arguments.bucket:
        store = open_store(arguments.bucket)
        print(report.text(report.summarise(store, open_run(store))))
        return 0
    token = os.environ.get(READ_TOKEN) or os.environ.get(WORKER_TOKEN, "")
    print(_status_text(ProxyClient(arguments.proxy, token).run_status()))
    return 0


def run_audit(arguments: argparse.Namespace) -> int:
    """1 if there is a violation."""
    with bar("auditing", "objects") as progress:
        found = audit(open_store(arguments.bucket), progress=progress)
    print(_audit_text(found))
    return 1 if found.violations else 0


def run_report(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    summary = report.summarise(store, open_run(store))
    print(report.text(summary))
    if arguments.plot:
        report.plot(summary, arguments.plot)
        print(f"  plot       {arguments.plot}")
    if arguments.record:
        path = report.record(
            summary,
            arguments.record,
            command=arguments.command_line,
            notes=arguments.notes,
            folder=RESULTS,
        )
        print(f"  record     {path}")
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """1 if a byte differs."""
    source, target = open_store(arguments.source), open_store(arguments.target)
    run = open_run(source)
    model_path = load_model(run, progress=_say)
    from bucketrl.jobs.replay import replay

    versions, differences = replay(source, target, run, model_path=model_path, progress=_say)
    for item in differences:
        print(f"version {item.version}: {item.file}: run {item.there[:12]}…, replay {item.here[:12]}…")
    print(f"{versions} versions compared: {'DIFFERENT' if differences else 'all bytes equal'}")
    return 1 if differences else 0


def _status_text(status: RunStatus) -> str:
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


def _audit_text(found: AuditReport) -> str:
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
