"""python -m benchmarks.end_to_end_gpu: `examples/smollm2_mixture.toml` on one GPU, about 8 minutes.

`--device cpu`: all of it very small, nothing recorded unless --out says where.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.s3 import moto_server

from benchmarks.end_to_end_gpu.measure import Machine, measure
from benchmarks.end_to_end_gpu.plot import plot
from benchmarks.live import live
from bucketrl.bucket.config import RunConfig
from bucketrl.jobs import benchmark_record
from bucketrl.jobs.config_file import load_config

NAME = "end_to_end_gpu"
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2_mixture.toml"
PROBLEMS = 500

# Both roles on one GPU: a cache of fixed size keeps the engine from measuring memory that the learner takes.
GPU = Machine(
    engine="vllm",
    learner=("--device", "cuda"),
    rollout=("--gpu-memory-utilization", "0.3", "--kv-cache-mb", "8192"),
)
SMALL: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32"},
    "sampling": {"group_size": 2, "max_tokens": 12},
    "algorithm": {"steps": 3, "groups_per_step": 2, "max_staleness": 1, "filter_zero_variance": False},
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    cpu = options.device == "cpu"
    changes: dict[str, dict[str, Any]] = SMALL if cpu else {}
    changes = _merged(changes, "algorithm", {"steps": options.steps} if options.steps else {})
    changes = _merged(changes, "model", {"id": options.model} if options.model else {})
    config = changed(load_config(EXAMPLE), changes)
    machine = Machine(options.engine or "transformers", ("--device", "cpu"), ()) if cpu else GPU
    say = live(NAME)
    with tempfile.TemporaryDirectory(prefix="bucketrl-benchmark-") as folder, moto_server() as server:
        os.environ.update(server.environment)
        result = measure(
            config, server.url("run"), Path(folder), machine, problems=8 if cpu else PROBLEMS, say=say
        )
    print()
    for key, value in result.figures.items():
        print(f"{key:28} {value}")
    out = options.out or (None if cpu else ROOT / "benchmarks" / "results")
    if out is None:
        return 0
    path = benchmark_record.write(
        NAME,
        result.figures,
        command=_command(options),
        seeds=[config.seed],
        notes=NOTES,
        folder=out,
        staleness_histogram=result.staleness,
        config=config.model_dump(mode="json"),
        reward_per_step=[round(value, 4) for value in result.summary.curve("reward_mean")],
        timeline=asdict(result.timeline),
    )
    plot(result, path.with_suffix(".png"))
    print(f"record: {path}, plot: {path.with_suffix('.png')}")
    return 1 if result.figures["audit_violations"] else 0


def changed(config: RunConfig, changes: dict[str, dict[str, Any]]) -> RunConfig:
    """With other values in some of its tables."""
    settings = config.model_dump()
    return RunConfig.model_validate(
        settings | {table: settings[table] | values for table, values in changes.items()}
    )


def _merged(
    changes: dict[str, dict[str, Any]], table: str, values: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    return changes | {table: changes.get(table, {}) | values} if values else changes


def _command(options: argparse.Namespace) -> str:
    """All that changes the figures."""
    chosen = {name: getattr(options, name) for name in ("steps", "model", "device", "engine")}
    given = [f"--{name} {value}" for name, value in chosen.items() if value and value != "cuda"]
    return " ".join(["python -m benchmarks.end_to_end_gpu", *given])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end_gpu", description=__doc__)
    parser.add_argument("--steps", type=int, help="default: the example's")
    parser.add_argument("--model", help="a built-in name or a folder; default: the example's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--engine", choices=("vllm", "transformers"), help="on the CPU; default: transformers"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    return parser.parse_args(argv)


NOTES = (
    "One process for each role, as a user starts them; the S3 server (moto, requests one at a time) on the same "
    "machine. Measured from the first request to the last commit (measured_s); start_s before that is mostly the "
    "engine's. worker_busy_share: of that time, requests were running, looked at 20 times a second; "
    "worker_tokens_per_s: of completions, counted when they end. learner_training_share: forward, backward, "
    "optimizer; learner_publishing_share: adapter, checkpoint, commit, and the first look for the next groups; "
    "learner_waiting_share: for groups. staleness_histogram: loss tokens by steps between sampling and training. "
    "heldout_*: one completion for each problem at the run's temperature. dropped: groups that became too stale."
)

if __name__ == "__main__":
    sys.exit(main())
