"""Reward against lag, a line for each method."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("#6b7280", "#2563eb", "#b45309", "#15803d", "#be123c", "#7c3aed", "#0891b2")
SPACING = 0.035
"""Between the methods' marks at one lag, of the distance to the next lag: their spreads would lie on each other."""


def plot(table: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """A PNG. `table`: by method and lag, mean and spread."""
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        lags = sorted({int(lag) for by_lag in table.values() for lag in by_lag})
        for index, ((method, by_lag), colour) in enumerate(zip(table.items(), COLOURS, strict=False)):
            aside = SPACING * (index - (len(table) - 1) / 2)
            places = [lags.index(int(lag)) + aside for lag in sorted(by_lag, key=int)]
            values = [by_lag[lag] for lag in sorted(by_lag, key=int)]
            means, spreads = [v[0] for v in values], [v[1] for v in values]
            axes.errorbar(
                places, means, spreads, color=colour, label=method, marker="o", capsize=3, linewidth=1.8
            )
        axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axes.set(xlabel="age of the samples, steps", ylabel="held-out problems solved")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, ncols=2)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)
