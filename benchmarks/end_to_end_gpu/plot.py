"""One figure: reward by step, staleness, what the two roles did over time."""

from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from benchmarks.end_to_end_gpu.measure import Result, Timeline
from bucketrl.jobs.report import EDGE, Summary

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import PercentFormatter

BLUE, PALE, BROWN, GREEN, GREY = "#2563eb", "#b9cdf8", "#b45309", "#15803d", "#6b7280"


def plot(result: Result, path: Path) -> None:
    """A PNG."""
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(11, 7), layout="constrained")
        grid = figure.add_gridspec(2, 3, height_ratios=(1.15, 1))
        _reward(figure.add_subplot(grid[0, :2]), result.summary)
        _staleness(figure.add_subplot(grid[0, 2]), result)
        _utilisation(figure.add_subplot(grid[1, :]), result.timeline, result.figures)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _reward(axes: Any, summary: Summary) -> None:
    reward, steps = summary.curve("reward_mean"), summary.numbers("reward_mean")
    trailing = [fmean(reward[max(0, i - EDGE + 1) : i + 1]) for i in range(len(reward))]
    axes.plot(steps, reward, color=PALE, linewidth=1, marker=".", markersize=4, label="reward of the step")
    axes.plot(steps, trailing, color=BLUE, linewidth=2, label=f"mean of {EDGE} steps")
    for number, each in enumerate(summary.evaluations):
        label = f"{each.problems} held-out problems" if number == 0 else None
        axes.plot(each.version, each.mean_reward, "D", color=BROWN, markersize=7, zorder=3, label=label)
        axes.annotate(
            f"{each.mean_reward:.2f}",
            (each.version, each.mean_reward),
            xytext=(8 if number == 0 else 0, -16),
            textcoords="offset points",
            ha="left" if number == 0 else "right",
            color=BROWN,
            fontweight="bold",
        )
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    _title(axes, f"Reward: {summary.run.config.model.id}, {summary.run.config.name}")


def _staleness(axes: Any, result: Result) -> None:
    total = max(1, sum(result.staleness.values()))
    lags, shares = list(result.staleness), [tokens / total for tokens in result.staleness.values()]
    bars = axes.bar(lags, shares, color=BLUE, width=0.75)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, color=GREY)
    bound = result.summary.run.config.algorithm.max_staleness
    axes.axvline(bound + 0.5, color=BROWN, linestyle=":", linewidth=1.5)
    axes.annotate(
        f"bound {bound}",
        (bound + 0.45, 0.97),
        xycoords=("data", "axes fraction"),
        ha="right",
        va="top",
        color=BROWN,
    )
    axes.set(xlabel="steps between sampling and training", xlim=(-0.6, bound + 0.8), xticks=range(bound + 1))
    axes.set_ylim(0, max(shares, default=0) * 1.25 or 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.25, axis="y")
    _title(axes, f"Staleness of the tokens: mean {result.figures['staleness_mean']:.2f}")


def _utilisation(axes: Any, timeline: Timeline, figures: dict[str, Any]) -> None:
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.fill_between(timeline.seconds, timeline.worker_tokens_per_s, color=PALE, alpha=0.6, linewidth=0)
    right.set_ylabel("tokens/s of the worker (area)", color=GREY)
    right.set_ylim(bottom=0)
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)
    for values, color, name, mean in (
        (timeline.worker_busy, BLUE, "worker: requests running", figures["worker_busy_share"]),
        (timeline.learner_training, GREEN, "learner: training", figures["learner_training_share"]),
    ):
        axes.plot(timeline.seconds, values, color=color, linewidth=2, label=f"{name} (mean {mean:.0%})")
    axes.set(xlabel="seconds since the first request", ylabel="share of the time", ylim=(0, 1.05))
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right", ncols=2, bbox_to_anchor=(1.0, 0.99))
    _title(axes, f"Use of both roles: {figures['worker_tokens_per_s']:,.0f} sampled tokens/s")


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold")
