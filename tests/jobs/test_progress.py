"""What a person sees while a run goes on; all of it from the proxy's answers."""

import io
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bucketrl.api.errors import ProxyUnavailable
from bucketrl.api.messages import (
    LearnerState,
    LeaseCounts,
    RolloutState,
    RunStatus,
    StepSummary,
    WorkerSummary,
)
from bucketrl.jobs.progress import BARS, Display, sparkline


def status(step: int, *, steps: int = 4) -> RunStatus:
    return RunStatus(
        run_id="demo-1", name="demo", bucket="b", step=step, steps=steps, version=step,
        finished=step >= steps, reward=0.25 * step if step > 0 else None, staleness_mean=0.5, staleness_max=2.0,
        workers_alive=1, learner_alive=True,
        leases=LeaseCounts(
            active=3, outstanding_groups=5, max_outstanding_groups=10, issued_total=9, completed_total=6,
            expired_total=0, reissued_total=1,
        ),
        rollout_tokens_per_second=812.0, steps_per_minute=2.0, proxy_started_at="t", run_started_at="t",
        last_commit_at=None, seconds_since_commit=None,
    )  # fmt: skip


def summary(step: int) -> StepSummary:
    return StepSummary(
        step=step, version=step, log_seq=step + 1, written_at="t", groups=2, skipped=1,
        metrics={"reward_mean": 0.25 * step, "staleness_mean": 0.5},
    )  # fmt: skip


STARTING = WorkerSummary(
    id="w-1", role="rollout", alive=True, seconds_since_seen=1.0, leases=0,
    state=RolloutState(
        worker_id="w-1", engine="vllm", loaded_version=-1, state="starting", note="loading the engine"
    ),
)  # fmt: skip
SILENT = WorkerSummary(
    id="l-1", role="learner", alive=False, seconds_since_seen=42.0, leases=0,
    state=LearnerState(learner_id="l-1", epoch=1, step=0, phase="waiting"),
)  # fmt: skip


class FakeProxy:
    """Answers with what the test set; down while `step` is None."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.members: list[WorkerSummary] = []

    def run_status(self) -> RunStatus:
        if self.step is None:
            raise ProxyUnavailable("refused")
        return status(self.step)

    def workers(self) -> list[WorkerSummary]:
        return self.members

    def steps(self, after: int = -1) -> list[StepSummary]:
        assert self.step is not None
        return [summary(step) for step in range(after + 1, self.step + 1) if step > 0]


def display(proxy: FakeProxy, *, terminal: bool) -> tuple[Display, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, height=40)
    return Display(cast(Any, proxy), "runs/demo", console=console), text


class TestLines:
    def test_each_step_is_one_line_once(self) -> None:
        """A log file that somebody follows: no step twice, none left out when several commit between looks."""
        proxy = FakeProxy()
        show, text = display(proxy, terminal=False)
        with show:
            for step in (None, 0, 1, 1, 4):
                proxy.step = step
                show.update()
        lines = [line for line in text.getvalue().splitlines() if line.startswith("step")]
        assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
        assert "reward 0.500" in lines[1]
        assert "staleness 0.50" in lines[1]
        assert "812 tokens/s" in lines[1]

    def test_before_the_first_step_it_says_what_everybody_does(self) -> None:
        """An engine's start takes half a minute: silence would look like a hang. Said once, not twice a second."""
        proxy = FakeProxy()
        proxy.step, proxy.members = 0, [STARTING, SILENT]
        show, text = display(proxy, terminal=False)
        with show:
            show.update()
            show.update()
        assert text.getvalue().count("w-1: starting (loading the engine)") == 1
        assert "l-1: silent\n" in text.getvalue(), "no new line for every second of silence"

    def test_a_proxy_that_is_away_is_nothing_to_show(self) -> None:
        show, text = display(FakeProxy(), terminal=False)
        with show:
            assert show.update() is None
        assert text.getvalue() == ""


class TestPanel:
    def test_it_shows_the_run(self) -> None:
        """Step, reward with its curve, staleness, throughput, version, workers, time left."""
        proxy = FakeProxy()
        proxy.step, proxy.members = 2, [STARTING, SILENT]
        show, text = display(proxy, terminal=True)
        with show:
            show.update()
        for words in (
            "2 of 4", "about 60 s left", "0.500", "mean 0.50, max 2", "812 sampled tokens/s",
            "5 of 10 outstanding", "w-1: starting (loading the engine)", "l-1: silent for 42 s",
        ):  # fmt: skip
            assert words in text.getvalue(), words
        assert BARS[2] in text.getvalue()


def test_the_last_look_waits_for_the_last_step() -> None:
    """The proxy sees the last commit a moment after the learner has ended."""

    class Late(FakeProxy):
        looks = 0

        def run_status(self) -> RunStatus:
            self.looks += 1
            self.step = 4 if self.looks >= 3 else 3
            return super().run_status()

    proxy = Late()
    show, text = display(proxy, terminal=False)
    with show:
        show.last_look(30.0)
    assert proxy.looks == 3
    assert "4/4" in text.getvalue()


def test_the_last_look_ends_without_a_proxy() -> None:
    show, _ = display(FakeProxy(), terminal=False)
    show.last_look(0.0)


@given(st.lists(st.floats(0, 1), max_size=300), st.integers(1, 80))
def test_a_sparkline_fits_its_width(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= width
    assert bool(line) == bool(values)
    assert set(line) <= set(BARS)


@pytest.mark.parametrize(
    ("values", "line"),
    [([0.0, 1.0], "▁█"), ([0.0, 10.0], "▁█"), ([-3.0, 0.5], "▁▅"), ([0.0, 0.0, 1.0, 1.0], "▁█")],
)
def test_sparkline_scale(values: list[float], line: str) -> None:
    """0 to 1, or to the maximum if that is above; narrow ones show means."""
    assert sparkline(values, 2) == line
