"""How `bucketrl run` shows a run: a live panel on a terminal, one line a step elsewhere. All it shows
comes from the proxy, as anybody could ask it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bucketrl.api.client import ProxyClient
from bucketrl.api.errors import ProxyUnavailable
from bucketrl.api.messages import LearnerState, RunStatus, StepSummary, WorkerSummary

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60
POLL_S = 0.2


def sparkline(values: list[float], width: int = SPARK_WIDTH) -> str:
    """Values as bars between 0 and 1 (or their maximum, if above); the newest `width`, or means of runs."""
    if not values:
        return ""
    top = max(1.0, *values)
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    return "".join(BARS[round(max(0.0, mean) / top * (len(BARS) - 1))] for mean in means)


@contextmanager
def bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that draws a bar on stderr, silent where nobody looks."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class Display:
    """A context manager; `update` asks the proxy and shows the answer."""

    def __init__(self, client: ProxyClient, logs: str, *, console: Console | None = None) -> None:
        self._client = client
        self._logs = logs
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._steps: list[StepSummary] = []
        self._waiting = ""

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        """An event: a role started, died, was started again."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def update(self) -> RunStatus | None:
        """The newest status; None while the proxy is away."""
        try:
            status = self._client.run_status()
            workers = self._client.workers()
            fresh = self._client.steps(after=self._steps[-1].step if self._steps else 0)
        except ProxyUnavailable:
            return None
        self._steps.extend(fresh)
        if self._live:
            self._live.update(self._panel(status, workers), refresh=True)
        else:
            self._lines(status, workers, fresh)
        return status

    def last_look(self, seconds: float) -> None:
        """Updates until the proxy has seen the end of the run, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not ((status := self.update()) and status.finished) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _lines(self, status: RunStatus, workers: list[WorkerSummary], fresh: list[StepSummary]) -> None:
        for step in fresh:
            self.say(step_line(step, status))
        waiting = (
            ""
            if self._steps
            else ", ".join(f"{worker.role} {_activity(worker, counting=False)}" for worker in workers)
        )
        if waiting and waiting != self._waiting:
            self.say(f"  {waiting}")
        self._waiting = waiting
        sys.stdout.flush()

    def _panel(self, status: RunStatus, workers: list[WorkerSummary]) -> RenderableType:
        rewards = [step.metrics["reward_mean"] for step in self._steps if "reward_mean" in step.metrics]
        facts = Table.grid(padding=(0, 2))
        rows: list[tuple[str, RenderableType]] = [
            ("step", Text(f"{status.step} of {status.steps}   {_time_left(status)}")),
            ("", ProgressBar(total=status.steps, completed=status.step, width=SPARK_WIDTH)),
            ("reward", Text(f"{_shown(status.reward, 3)}")),
            ("", Text(sparkline(rewards), style="blue")),
            ("staleness", Text(f"mean {_shown(status.staleness_mean)}, max {_shown(status.staleness_max, 0)}")),
            ("throughput", Text(f"{status.rollout_tokens_per_second:.0f} sampled tokens/s")),
            ("bucket", Text(f"{status.store_requests_per_minute:.0f} requests/min")),
            ("version", Text(str(status.version))),
            ("groups", Text(
                f"{status.leases.outstanding_groups} of {status.leases.max_outstanding_groups} outstanding, "
                f"{status.leases.reissued_total} issued again"
            )),
        ]  # fmt: skip
        for name, value in rows:
            facts.add_row(Text(name, style="dim"), value)
        for worker in workers:
            style = "" if worker.alive else "red"
            facts.add_row(Text(worker.role, style="dim"), Text(_activity(worker, counting=True), style=style))
        return Panel(Group(facts), title=status.name, subtitle=Text(self._logs, style="dim"), width=100)


def step_line(step: StepSummary, status: RunStatus) -> str:
    """One step for a log file."""
    metrics = step.metrics
    return (
        f"step {step.step:4d}/{status.steps}  reward {_shown(metrics.get('reward_mean'), 3)}  staleness "
        f"{_shown(metrics.get('staleness_mean'))}  version {step.version}  {step.groups} groups "
        f"(+{step.skipped} skipped)  {status.rollout_tokens_per_second:.0f} tokens/s"
    )


def _activity(worker: WorkerSummary, *, counting: bool) -> str:
    """`counting`: with times that change from second to second."""
    state = worker.state
    if not worker.alive:
        return f"{worker.id}: silent" + (f" for {worker.seconds_since_seen:.0f} s" if counting else "")
    doing = state.phase if isinstance(state, LearnerState) else state.state
    return f"{worker.id}: {doing}" + (f" ({state.note})" if state.note else "")


def _time_left(status: RunStatus) -> str:
    if status.finished or status.steps_per_minute <= 0:
        return ""
    minutes = (status.steps - status.step) / status.steps_per_minute
    return f"about {minutes * 60:.0f} s left" if minutes < 3 else f"about {minutes:.0f} min left"


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
