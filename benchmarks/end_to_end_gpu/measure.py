"""The run itself: the roles as processes, then held-out problems, then what the bucket and the traces say."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.roles import Fleet, Role, cli, fleet

from benchmarks.end_to_end_gpu import analysis
from benchmarks.end_to_end_gpu.traced_role import TRACES, read_trace
from bucketrl.bucket.audit import audit
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.stores import open_store
from bucketrl.jobs import report
from bucketrl.jobs.runs import create_or_join

LIMIT_S = 1500.0
GRACE_S = 30.0
WINDOWS = 60
PHASES = ("training", "publishing", "waiting")


class TracedRole(Role):
    """A role that writes down what it is busy with."""

    module = "benchmarks.end_to_end_gpu.traced_role"


@dataclass(frozen=True)
class Machine:
    """Arguments of the commands that differ between a GPU and a CPU."""

    engine: str
    learner: tuple[str, ...]
    rollout: tuple[str, ...]


@dataclass(frozen=True)
class Timeline:
    """What the roles did while the run sampled and trained: from the first request to the last commit."""

    seconds: list[float]
    """End of each window."""
    worker_busy: list[float]
    """Share of the window in which requests were running."""
    worker_tokens_per_s: list[float]
    learner_training: list[float]
    """Share of the window."""


@dataclass(frozen=True)
class Result:
    summary: report.Summary
    figures: dict[str, Any]
    staleness: dict[int, int]
    """Loss tokens by lag."""
    timeline: Timeline


def measure(
    config: RunConfig, url: str, folder: Path, machine: Machine, *, problems: int, say: Callable[[str], None]
) -> Result:
    """In the empty bucket at `url`. Raises AssertionError with the ends of the logs if a role fails."""
    store = open_store(url)
    run = create_or_join(store, config, progress=say)
    # Two torch programs that each take every core run slower than with a share each.
    env = {TRACES: str(folder), "OMP_NUM_THREADS": str(max(1, min(8, (os.cpu_count() or 2) // 2)))}
    with fleet(
        url,
        folder,
        engine=machine.engine,
        env=env,
        role_type=TracedRole,
        learner=machine.learner,
        rollout=machine.rollout,
    ) as roles:
        for role in roles.roles:
            role.start()
        started = time.time()
        _until_finished(roles, config.algorithm.steps, say)
    say(f"evaluating version 0 and the last one on {problems} held-out problems")
    versions = ("--version", "0", "--version", "latest")
    done = cli(
        "evaluate", "--bucket", url, *versions, "--problems", str(problems), "--engine", machine.engine,
        env=env, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    summary = report.summarise(store, run)
    figures, timeline = _utilisation(folder, started)
    figures = summary.figures() | figures | {"audit_violations": len(audit(store).violations)}
    histogram = analysis.staleness_histogram(step.metrics for step in summary.steps)
    return Result(summary, figures, histogram, timeline)


def _until_finished(roles: Fleet, steps: int, say: Callable[[str], None]) -> None:
    learner, worker = roles.learner, roles.workers[0]

    def finished() -> bool:
        failed = [role for role in roles.roles if not role.alive and role.wait(0) != 0]
        assert not failed, f"{failed[0].name} failed\n{roles.tails()}"
        say(f"step {max(0, roles.step())} of {steps}")
        return not learner.alive

    roles.wait_for(finished, seconds=LIMIT_S, what="the last step")
    assert worker.wait(GRACE_S) == 0, worker.tail()


def _utilisation(folder: Path, started: float) -> tuple[dict[str, float], Timeline]:
    """Figures, and what they are over time."""
    phases = [(at, phase) for at, phase in read_trace(folder, "learner")]
    samples = read_trace(folder, "rollout")
    running = [(at, float(requests)) for at, requests, _ in samples]
    tokens = [(at, float(total)) for at, _, total in samples]
    begin = next(at for at, requests in running if requests > 0)
    end = next(at for at, phase in phases if phase == "finished")

    def busy(since: float, until: float) -> float:
        return analysis.share(running, since, until, lambda requests: requests > 0)

    def learner(phase: str, since: float, until: float) -> float:
        return analysis.share(phases, since, until, lambda found: found == phase)

    figures = {
        "start_s": begin - started,
        "measured_s": end - begin,
        "worker_busy_share": busy(begin, end),
        "worker_running_requests": analysis.mean(running, begin, end),
        "worker_tokens_per_s": analysis.rate(tokens, begin, end),
        **{f"learner_{phase}_share": learner(phase, begin, end) for phase in PHASES},
    }
    windows = analysis.windows(begin, end, WINDOWS)
    timeline = Timeline(
        seconds=[round(until - begin, 2) for _, until in windows],
        worker_busy=[round(busy(*window), 3) for window in windows],
        worker_tokens_per_s=[round(analysis.rate(tokens, *window), 1) for window in windows],
        learner_training=[round(learner("training", *window), 3) for window in windows],
    )
    return {name: round(value, 3) for name, value in figures.items()}, timeline
