"""python -m benchmarks.recovery [--repeats 5] [--seed 0]

A running fleet of a proxy, a learner and two rollout workers, each started as a user starts it, over a local
folder. Each role is killed several times: how long until its work goes on, and how many tokens have to be drawn
again.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.roles import cli, fleet
from tests.support.long_winded import long_winded_model

from benchmarks.live import live
from benchmarks.recovery.bucket_view import BucketView
from benchmarks.recovery.measure import LIMIT_S, Measured, Times
from bucketrl.bucket.audit import audit
from bucketrl.bucket.stores import open_store
from bucketrl.jobs import benchmark_record
from bucketrl.jobs.runs import open_run

WORKERS = 2
CONFIG = """
name = "recovery"
seed = {seed}
[model]
id = "{model}"
[lora]
rank = 8
[task]
kind = "arithmetic"
[sampling]
group_size = 8
max_tokens = 128
[algorithm]
steps = 100000
groups_per_step = 8
max_staleness = 4
learning_rate = 1e-5
filter_zero_variance = false
[rollout]
max_model_len = 192
"""
RESULTS = Path(__file__).parents[1] / "results"


@contextmanager
def running(folder: Path, seed: int, say: Callable[[str], None]) -> Iterator[Measured]:
    """The fleet, past its first steps."""
    config = folder / "recovery.toml"
    config.write_text(CONFIG.format(seed=seed, model=long_winded_model(folder)))
    url = str(folder / "bucket")
    made = cli("create", str(config), "--bucket", url)
    if made.returncode != 0:
        raise AssertionError(made.stderr)
    store = open_store(url)
    cache = ("--cache-dir", str(folder / "cache"))
    learner = ("--keep", "0", "--threads", "1", *cache)
    with fleet(url, folder, workers=WORKERS, learner=learner, rollout=cache) as roles:
        measured = Measured(roles, BucketView(store, open_run(store)), folder, random.Random(seed))
        roles.proxy.start()
        roles.learner.start()
        for place in range(WORKERS):
            measured.start_worker(place)
        say("starting")
        roles.wait_for(lambda: measured.view.step >= 3, seconds=LIMIT_S, what="the first steps")
        yield measured


def figures(samples: Mapping[str, Sequence[float]], repeats: int) -> dict[str, object]:
    """Medians, and the smallest and largest value of each."""
    found: dict[str, object] = {name: _shown(statistics.median(values)) for name, values in samples.items()}
    spread = {name: [_shown(min(v)), _shown(max(v))] for name, v in samples.items() if len(v) > 1}
    return {"tokens_lost": found["tokens_lost_worker"], **found, "spread": spread, "repeats": repeats}


def _shown(value: float) -> float:
    return round(value, 2) if value < 100 else round(value)


def _add(samples: dict[str, list[float]], times: Times) -> None:
    for name, value in times.items():
        samples.setdefault(name, []).append(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    samples: dict[str, list[float]] = {}
    say = live("recovery")
    with (
        tempfile.TemporaryDirectory(prefix="bucketrl-recovery-") as folder,
        running(Path(folder), options.seed, say) as measured,
    ):
        phases = {
            "worker": measured.kill_worker,
            "preempted": measured.preempt_worker,
            "learner": measured.kill_learner,
            "proxy": measured.kill_proxy,
        }
        for name, measure in phases.items():
            wasted = measured.view.wasted()
            for repeat in range(options.repeats):
                say(f"{name}, {repeat + 1} of {options.repeats}")
                _add(samples, measure())
            twice = (measured.view.wasted() - wasted) / options.repeats
            _add(samples, {f"tokens_drawn_twice_{name}": twice})
        load = round(os.getloadavg()[2], 1)
        step_s = measured.view.step_seconds()
        violations = len(audit(measured.view.store).violations)
    found = figures(samples, options.repeats) | {
        "step_s": _shown(step_s),
        "audit_violations": violations,
        "load_15_min": load,
    }
    print()
    for key, value in found.items():
        print(f"{key:38} {value}")
    path = benchmark_record.write(
        "recovery",
        found,
        command=f"python -m benchmarks.recovery --repeats {options.repeats} --seed {options.seed}",
        seeds=[options.seed],
        notes=NOTES,
        folder=RESULTS,
        samples={name: [round(value, 3) for value in values] for name, values in samples.items()},
    )
    print(f"record: {path}")
    return 1 if violations else 0


NOTES = (
    "Seconds from the signal; medians; spread: smallest and largest. The role is started again at once, by the "
    "command of a user. …_imports_s: until the new process has imported what it needs and checked its store; what "
    "follows is its own work. learner_to_fence_s: its start record; the commit takes up to a step (step_s: median "
    "between commits) more. A worker's groups are issued again when the proxy has not heard of it for 15 s; after "
    "SIGTERM it gives them back itself. worker_to_ready_s: the new worker serves a version; worker_to_upload_s: "
    "its first group is in the bucket. tokens_lost_worker, tokens_lost_preempted: drawn by the stopped worker "
    "(counted in a memory-mapped file that outlives it) and in no object of the bucket; tokens_lost is the "
    "former: the death of the other roles loses none by itself. tokens_drawn_twice_…: of second attempts and of "
    "groups skipped as stale that appeared meanwhile, per signal. ON PAPER, not measured: in TRL's AsyncGRPO the "
    "rollout worker and its queue are children of the trainer's process, so its death loses the queue and what is "
    "in flight. With this run's numbers that is between queued_tokens_at_learner_kill (groups in the bucket, not "
    "trained on yet) and outstanding_tokens_at_learner_kill (groups issued and not trained on, each with the mean "
    "tokens of a group), where here tokens_drawn_twice_learner were drawn again."
)


if __name__ == "__main__":
    sys.exit(main())
