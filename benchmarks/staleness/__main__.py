"""python -m benchmarks.staleness [--steps 60] [--seeds 3] [--lags 0,1,2,4,8,16] [--methods default,…]

Reward against the age of the samples for each correction, on the built-in tiny model. Every run
samples with the policy of exactly so many steps before; nothing is dropped, so that what is compared is the loss.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.live import live
from benchmarks.staleness.grid import METHODS, Key, play
from benchmarks.staleness.play import Curve
from bucketrl.jobs import benchmark_record

ROOT = Path(__file__).parents[2]
LAST = 3
"""Evaluations at the end of a run that its reward is the mean of."""


def figures(curves: Mapping[Key, Curve]) -> dict[str, Any]:
    """By method and lag: mean and spread over the seeds of the reward at the end of a run."""
    table: dict[str, dict[str, list[float]]] = {}
    for method, lag in sorted({key[:2] for key in curves}):
        ends = [statistics.fmean(c.heldout[-LAST:]) for k, c in curves.items() if k[:2] == (method, lag)]
        mean, spread = statistics.fmean(ends), statistics.stdev(ends) if len(ends) > 1 else 0.0
        table.setdefault(method, {})[str(lag)] = [round(mean, 4), round(spread, 4)]
    found: dict[str, Any] = {"reward_by_method_and_lag": table, "default_method": "clip"}
    if "0" in table.get("clip", {}):
        found["sync_reward"] = table["clip"]["0"][0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lags", default="0,1,2,4,8,16")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    keys: list[Key] = [
        (method, int(lag), seed)
        for seed in range(options.seeds)
        for lag in options.lags.split(",")
        for method in options.methods.split(",")
    ]
    say = live("staleness")
    curves: dict[Key, Curve] = {}
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(play, k, options.steps, options.problems) for k in keys]):
            key, curve = done.result()
            curves[key] = curve
            say(f"{len(curves)} of {len(keys)} runs; {key[0]} at lag {key[1]}: {curve.heldout[-1]:.3f}")
    found = figures(curves)
    print()
    for method, by_lag in found["reward_by_method_and_lag"].items():
        print(f"{method:10}", "  ".join(f"{lag:>2}: {m:.3f} ± {s:.3f}" for lag, (m, s) in by_lag.items()))
    path = benchmark_record.write(
        "staleness",
        found,
        command="python -m benchmarks.staleness " + " ".join(sys.argv[1:]),
        seeds=list(range(options.seeds)),
        notes=NOTES,
        folder=options.out,
        curves={f"{m} lag {lag} seed {seed}": asdict(c) for (m, lag, seed), c in sorted(curves.items())},
    )
    from benchmarks.staleness.plot import plot

    plot(found["reward_by_method_and_lag"], path.with_suffix(".png"))
    print(f"record: {path}, plot: {path.with_suffix('.png')}")
    return 0


NOTES = (
    "reward_by_method_and_lag: share of held-out problems solved at the run's temperature, mean of the last "
    f"{LAST} evaluations of a run, then mean and standard deviation over the seeds. Lag: steps between the policy "
    "that sampled and the one that the step starts from. Every step makes two updates, each on half of its groups. "
    "sync_reward: clip at lag 0."
)

if __name__ == "__main__":
    sys.exit(main())
