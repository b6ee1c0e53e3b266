"""python -m benchmarks.staleness [--model smollm2] [--steps 60] [--seeds 3] [--lags 0,1,2,…] [--methods clip,…]

Reward against the age of the samples for each correction, on the built-in tiny model or on SmolLM2. Every run
samples with the policy of exactly so many steps before; nothing is dropped, so that what is compared is the loss.

`--model smollm2` needs a GPU, or several: as many runs at once on each as `--processes` says. `--minutes`: what
cannot be made by then is left out, the lags between and further seeds first. `--device cpu`: all of it very small,
nothing recorded unless --out says where.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.live import live
from benchmarks.staleness.grid import METHODS, STUDIES, Key, Study, in_order
from benchmarks.staleness.play import Curve
from benchmarks.staleness.schedule import Order, Outcome, name, play_all
from bucketrl.jobs import benchmark_record
from bucketrl.jobs.models import resolve_model

ROOT = Path(__file__).parents[2]
LAST = 3
"""Evaluations at the end of a run that its reward is the mean of."""
RUNS_ON_A_GPU = 6
"""At once: one alone mostly waits for its own Python."""


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


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    study = STUDIES[options.model, options.device]
    steps, problems = options.steps or study.steps, options.problems or study.problems
    lags = [int(lag) for lag in options.lags.split(",")]
    keys = in_order(options.methods.split(","), lags, options.seeds or study.seeds)
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    processes = options.processes or (RUNS_ON_A_GPU * gpus if gpus else len(os.sched_getaffinity(0)))
    end = time.time() + 60 * options.minutes
    folder = resolve_model(
        study.config("clip", 0, steps).model, progress=lambda text: print(text, flush=True)
    )
    order = Order(study, folder, steps, problems, end)
    outcome = play_all(keys, order, gpus, min(processes, len(keys)), live("staleness"))
    found = figures(outcome.curves)
    print(f"\n{outcome.seconds_a_run:.0f} s a run")
    for method, by_lag in found["reward_by_method_and_lag"].items():
        print(f"{method:10}", "  ".join(f"{lag:>2}: {m:.3f} ± {s:.3f}" for lag, (m, s) in by_lag.items()))
    left_out = [name(key) for key in keys if key not in outcome.curves]
    if left_out:
        print("left out:", ", ".join(left_out))
    out = options.out or (None if study.is_trial else ROOT / "benchmarks" / "results")
    if out is not None and outcome.curves:
        _record(study, outcome, found, left_out, _command(argv), out)
    return 1 if outcome.failed or not outcome.curves else 0


def _record(
    study: Study,
    outcome: Outcome,
    found: dict[str, Any],
    left_out: Sequence[str],
    command: str,
    out: Path,
) -> None:
    from benchmarks.staleness.plot import plot

    path = benchmark_record.write(
        study.record,
        found,
        command=command,
        seeds=sorted({seed for _, _, seed in outcome.curves}),
        notes=NOTES,
        folder=out,
        left_out=left_out,
        curves=_by_name(outcome.curves),
        cut_short=_by_name(outcome.cut_short),
    )
    plot(found["reward_by_method_and_lag"], path.with_suffix(".png"))
    print(f"record: {path}, plot: {path.with_suffix('.png')}")


def _by_name(curves: Mapping[Key, Curve]) -> dict[str, Any]:
    return {name(key): asdict(curve) for key, curve in sorted(curves.items())}


def _command(argv: Sequence[str] | None) -> str:
    return " ".join(["python -m benchmarks.staleness", *(sys.argv[1:] if argv is None else argv)])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness")
    parser.add_argument("--model", choices=sorted({model for model, _ in STUDIES}), default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cpu for tiny, cuda for smollm2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--lags", default="0,1,2,4,8,16")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--problems", type=int)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--processes", type=int, help=f"default: a core each, or {RUNS_ON_A_GPU} on a GPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    options.device = options.device or ("cpu" if options.model == "tiny" else "cuda")
    if (options.model, options.device) not in STUDIES:
        parser.error(f"--model {options.model} has no study on --device {options.device}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no usable GPU; --device cpu is a small trial")
    return options


NOTES = (
    "reward_by_method_and_lag: share of held-out problems solved at the run's temperature, mean of the last "
    f"{LAST} evaluations of a run, then mean and standard deviation over the seeds. Lag: steps between the policy "
    "that sampled and the one that the step starts from. Every step makes two updates, each on half of its groups. "
    "sync_reward: clip at lag 0. left_out: runs that the time was too short for, in no mean; cut_short: as far as "
    "some of them came."
)

if __name__ == "__main__":
    sys.exit(main())
