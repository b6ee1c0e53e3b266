"""What a run achieved, from its bucket alone: summary, plot, benchmark record."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.bucket.records import EvaluationRecord, RunRecord, StepRecord, decode
from bucketrl.bucket.store import Store
from bucketrl.jobs import benchmark_record
from bucketrl.jobs.runs import read_log

EDGE = 5
"""Steps at each end of the run over which the reward is averaged."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures carry the names of `benchmarks/results`."""

    run: RunRecord
    steps: tuple[StepRecord, ...]
    """Optimizer steps, step 0 excluded."""
    evaluations: tuple[EvaluationRecord, ...]
    """Newest version last; of each version the one with the most problems."""
    seconds: float
    """From the first commit to the last, by the learner's clock."""

    def curve(self, name: str) -> list[float]:
        """One metric of the commit records, of the steps that have it."""
        return [step.metrics[name] for step in self.steps if name in step.metrics]

    def numbers(self, name: str) -> list[int]:
        """The steps that `curve(name)` is about."""
        return [step.step for step in self.steps if name in step.metrics]

    def figures(self) -> dict[str, float]:
        """What was measured; a figure that was not is absent."""
        figures: dict[str, float] = {"steps": len(self.steps), "seconds": round(self.seconds, 1)}
        reward = self.curve("reward_mean")
        if len(reward) >= 2 * EDGE:
            figures["reward_first5"] = round(fmean(reward[:EDGE]), 4)
            figures["reward_last5"] = round(fmean(reward[-EDGE:]), 4)
        if len(self.evaluations) >= 2:
            before, after = self.evaluations[0], self.evaluations[-1]
            figures["heldout_before"] = round(before.mean_reward, 4)
            figures["heldout_after"] = round(after.mean_reward, 4)
            figures["heldout_problems"] = after.problems
        if self.curve("staleness_mean") and self.curve("staleness_max"):
            figures["staleness_mean"] = round(fmean(self.curve("staleness_mean")), 3)
            figures["staleness_max"] = max(self.curve("staleness_max"))
        if self.curve("tokens"):
            figures["tokens"] = sum(self.curve("tokens"))
            figures["tokens_per_s"] = round(figures["tokens"] / max(self.seconds, 1e-9), 1)
        skipped = [group for step in self.steps for group in step.skipped]
        figures["groups_trained"] = sum(len(step.groups) for step in self.steps)
        figures["groups_skipped"] = len(skipped)
        figures["dropped"] = sum(group.reason == "stale" for group in skipped)
        return figures


def summarise(store: Store, run: RunRecord) -> Summary:
    """Raises UserError if the run has no optimizer step yet."""
    commits = [record for record in read_log(store, run) if isinstance(record, StepRecord)]
    steps = tuple(commit for commit in commits if commit.step > 0)
    if not steps:
        raise UserError(f"bucket {store.url}: run {run.run_id} has no optimizer step yet")
    times = [datetime.fromisoformat(commit.written_at).timestamp() for commit in commits]
    return Summary(run, steps, _evaluations(store), times[-1] - times[0])


def text(summary: Summary) -> str:
    """For people, a few lines."""
    run, figures = summary.run, summary.figures()
    lines = [f"run {run.run_id}: {figures['steps']:.0f} steps in {summary.seconds:.0f} s"]
    if "reward_first5" in figures:
        lines.append(
            f"  reward     first {EDGE} steps {figures['reward_first5']:.3f} -> last {EDGE} steps "
            f"{figures['reward_last5']:.3f}"
        )
    if "heldout_before" in figures:
        lines.append(
            f"  held-out   version {summary.evaluations[0].version} {figures['heldout_before']:.3f} -> version "
            f"{summary.evaluations[-1].version} {figures['heldout_after']:.3f} "
            f"({figures['heldout_problems']:.0f} problems)"
        )
    if "staleness_mean" in figures:
        lines.append(
            f"  staleness  mean {figures['staleness_mean']:.2f}, maximum {figures['staleness_max']:.0f}, "
            f"bound {run.config.algorithm.max_staleness}"
        )
    if "tokens" in figures:
        lines.append(
            f"  tokens     {figures['tokens']:.0f} trained on, {figures['tokens_per_s']:.0f} a second from the "
            "first commit to the last"
        )
    lines.append(
        f"  groups     {figures['groups_trained']:.0f} trained, {figures['groups_skipped']:.0f} skipped and named, "
        f"{figures['dropped']:.0f} of them dropped as stale"
    )
    return "\n".join(lines)


def plot(summary: Summary, path: Path) -> None:
    """A PNG: reward per step above, staleness below. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'bucketrl[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    reward, numbers = summary.curve("reward_mean"), summary.numbers("reward_mean")
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(numbers, reward, color="#93b4f5", linewidth=1, marker=".", label="mean reward of the step")
    trailing = [fmean(reward[max(0, i - EDGE + 1) : i + 1]) for i in range(len(reward))]
    top.plot(numbers, trailing, color="#2563eb", linewidth=2, label=f"mean of {EDGE} steps")
    if len(reward) >= 2 * EDGE:
        for part, values in ((numbers[:EDGE], reward[:EDGE]), (numbers[-EDGE:], reward[-EDGE:])):
            top.hlines(fmean(values), part[0], part[-1], color="#111827", linewidth=3)
            top.annotate(
                f"{fmean(values):.2f}",
                (part[-1], fmean(values)),
                xytext=(0, 6),
                textcoords="offset points",
                ha="right",
            )
    if len(summary.evaluations) >= 2:
        versions = [item.version for item in summary.evaluations]
        scores = [item.mean_reward for item in summary.evaluations]
        top.plot(versions, scores, "D", color="#b45309", label="held-out problems")
    top.set_ylabel("reward")
    top.set_title(f"{summary.run.config.name}: {summary.run.config.model.id}", loc="left", fontsize=11)
    top.grid(alpha=0.25)
    top.legend(frameon=False, loc="lower right")
    for name, color, label in (
        ("staleness_max", "#f0b35b", "maximum"),
        ("staleness_mean", "#15803d", "mean"),
    ):
        bottom.plot(summary.numbers(name), summary.curve(name), color=color, linewidth=2, label=label)
    bottom.axhline(summary.run.config.algorithm.max_staleness, color="#b91c1c", linestyle=":", label="bound")
    bottom.set_ylabel("staleness")
    bottom.set_xlabel("optimizer step")
    bottom.grid(alpha=0.25)
    bottom.legend(frameon=False, ncols=3, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def record(summary: Summary, name: str, *, command: str, notes: str, folder: Path) -> Path:
    """Writes `<folder>/<name>.json`, the figures with what it takes to repeat them."""
    return benchmark_record.write(
        name,
        summary.figures(),
        command=command,
        seeds=[summary.run.config.seed],
        notes=notes,
        folder=folder,
        config=summary.run.config.model_dump(mode="json"),
        reward_per_step=[round(value, 4) for value in summary.curve("reward_mean")],
    )


def _evaluations(store: Store) -> tuple[EvaluationRecord, ...]:
    best: dict[int, EvaluationRecord] = {}
    for info in store.list(keys.EVALUATION_PREFIX):
        try:
            found = decode(EvaluationRecord, store.get(info.key))
        except IntegrityError:
            continue  # only people read these; the audit names what is foreign
        known = best.get(found.version)
        if known is None or found.problems > known.problems:
            best[found.version] = found
    return tuple(best[version] for version in sorted(best))
