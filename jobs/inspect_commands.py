"""`bucketrl status | audit | report | replay`: looking at a run; none of them changes it. `bucketrl gc`: removing
what nobody needs.
"""

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bucketrl.api.client import ProxyClient
from bucketrl.api.messages import RunStatus
from bucketrl.bucket.audit import AuditReport, audit
from bucketrl.bucket.counting import HF_LIMIT, HF_WINDOW_S
from bucketrl.bucket.gc import GarbageCollector, Report, Tally
from bucketrl.bucket.retention import resolve_keep
from bucketrl.bucket.stores import open_store
from bucketrl.jobs import report
from bucketrl.jobs.progress import bar
from bucketrl.jobs.role_commands import READ_TOKEN, WORKER_TOKEN, new_member_id
from bucketrl.jobs.runs import load_model, open_run, read_state

RESULTS = Path("benchmarks/results")
NEAR = 0.8
"""Part of a limit from which on people are warned."""


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


def run_gc(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    run = open_run(store)
    collector = GarbageCollector(
        store,
        run,
        keep=resolve_keep(run.config, arguments.keep),
        collector_id=new_member_id(),
        now=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"),
        clock=time.monotonic,
    )
    state = read_state(store, run)
    with bar("collecting", "objects") as progress:
        found = collector.collect(state, dry_run=arguments.dry_run, progress=progress)
    print(_gc_text(found, dry_run=arguments.dry_run))
    return 0


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
            f"  bucket     {status.store_requests_per_minute:.0f} requests/min",
            *_near_the_limit(status),
        ]
    )


def _near_the_limit(status: RunStatus) -> list[str]:
    rate = status.store_requests_per_minute * HF_WINDOW_S / 60
    if not status.bucket.startswith("hf://") or rate <= NEAR * HF_LIMIT:
        return []
    return [
        f"  WARNING    {rate:.0f} API requests in 5 minutes; Hugging Face allows {HF_LIMIT} to a PRO account: use "
        "fewer workers, more groups a step, or the S3 gateway"
    ]


def _audit_text(found: AuditReport) -> str:
    lines = [f"VIOLATION of invariant {v.invariant}: {v.key}: {v.message}" for v in found.violations]
    lines += [f"note: {note}" for note in found.notes]
    lines.append(
        f"run {found.run_id}: {found.records} log records, {found.steps} commits, {found.trained} groups trained, "
        f"{found.skipped} skipped, {found.unconsumed} not consumed yet, {found.duplicates} losing attempts, "
        f"{found.quarantined} quarantined, {found.partials} partial"
    )
    if found.boundary:
        lines.append(
            f"garbage collection: steps 1 to {found.boundary}; {found.collected} objects that they name are gone"
        )
    lines.append(
        f"{len(found.violations)} violations" if found.violations else "clean: every invariant holds"
    )
    return "\n".join(lines)


def _gc_text(found: Report, *, dry_run: bool) -> str:
    def shown(tally: Tally) -> str:
        return f"{tally.objects} objects, {tally.bytes / 1e6:.1f} MB"

    verb, be = ("would remove", "would be") if dry_run else ("removed", "are")
    lines = [f"  {prefix:<14}{shown(tally)}" for prefix, tally in sorted(found.removed.items())]
    if found.unfinished:
        lines.append(f"  {found.unfinished} unfinished uploads of dead writers")
    where = f"; steps 1 to {found.boundary} {be} collected" if found.boundary else ""
    return "\n".join([f"{verb} {shown(found.total)}{where}", *lines])


def _say(line: str) -> None:
    print(line, file=sys.stderr)
