"""What people ask: the run's status, its workers, one group. Made from a `ProxyCore` when it is asked."""

import statistics
from collections.abc import Sequence
from datetime import datetime
from itertools import islice, pairwise, takewhile

from bucketrl.api.messages import GroupStatus, LearnerState, RunStatus, StepSummary, WorkerSummary
from bucketrl.proxy.core import ProxyCore

RATE_WINDOW = 20
"""Commits over which `steps_per_minute` is taken."""


def run_status(core: ProxyCore) -> RunStatus:
    now = core.clock()
    newest = core.state.step
    metrics = newest.metrics if newest and newest.step > 0 else {}
    alive = core.roster.rollouts_alive(now)
    recent = list(islice(reversed(core.steps), RATE_WINDOW + 1))[::-1]
    return RunStatus(
        run_id=core.run.run_id,
        name=core.run.config.name,
        bucket=core.store.url,
        step=newest.step if newest else 0,
        steps=core.run.config.algorithm.steps,
        version=core.version,
        finished=core.finished,
        reward=metrics.get("reward_mean"),
        staleness_mean=metrics.get("staleness_mean"),
        staleness_max=metrics.get("staleness_max"),
        workers_alive=len(alive),
        learner_alive=core.roster.learner_alive(now),
        leases=core.scheduler.counts(),
        rollout_tokens_per_second=sum(state.tokens_per_second for state in alive),
        steps_per_minute=steps_per_minute(recent),
        store_requests=dict(core.traffic.totals),
        store_requests_per_minute=core.traffic.per_minute(now),
        proxy_started_at=core.started_at,
        run_started_at=core.run.created_at,
        last_commit_at=newest.written_at if newest else None,
        seconds_since_commit=None if core.committed_at is None else now - core.committed_at,
    )


def worker_rows(core: ProxyCore) -> list[WorkerSummary]:
    now = core.clock()
    return [
        WorkerSummary(
            id=member.id,
            role=member.state.role,
            alive=core.roster.is_alive(member, now),
            seconds_since_seen=now - member.seen_at,
            leases=0 if isinstance(member.state, LearnerState) else core.scheduler.leases_of(member.id),
            state=member.state,
        )
        for member in core.roster.members()
    ]


def group_status(core: ProxyCore, group_id: str) -> GroupStatus:
    """Raises IntegrityError for a group that this run cannot have."""
    ordinal = core.ordinal(group_id)
    attempts = core.scheduler.attempts(ordinal)
    holder = core.scheduler.holder(ordinal)
    if core.scheduler.is_consumed(ordinal):
        return GroupStatus(group_id=group_id, state="consumed")
    if attempts:
        return GroupStatus(group_id=group_id, state="uploaded", attempts=attempts)
    return GroupStatus(group_id=group_id, state="leased" if holder else "not_issued", worker_id=holder)


def steps_after(core: ProxyCore, step: int, limit: int) -> list[StepSummary]:
    """Committed steps above `step`, ascending; the newest `limit` of them. Walks over no others."""
    newest = takewhile(lambda one: one.step > step, reversed(core.steps))
    return list(islice(newest, limit))[::-1]


def steps_per_minute(steps: Sequence[StepSummary]) -> float:
    """From the median time between commits, by the clock of the learner that wrote them; 0 if unknown."""
    try:
        times = [datetime.fromisoformat(step.written_at).timestamp() for step in steps]
    except ValueError:
        return 0.0
    gaps = [after - before for before, after in pairwise(times) if after > before]
    return 60.0 / statistics.median(gaps) if gaps else 0.0
