"""python -m benchmarks.data_parallel_gpu [--processes N]: the learner's data parallelism over a machine's GPUs.

Its own processes and collectives (NCCL) on a random Llama of SmolLM2-135M's shape: the gradient of N processes
against that of one, and the time of a step with both, in turns. About a minute. Without a GPU the same with gloo
and a tiny model, and nothing is recorded.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.live import live
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.trajectories import Trajectory, TrajectoryGroup
from bucketrl.jobs import benchmark_record
from bucketrl.learner.data_parallel import DataParallel, Peers
from bucketrl.learner.flat import flat, flat_gradients
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.trainer import Gradients, Trainer

ROOT = Path(__file__).parents[1]
GROUP_SIZE = 8


@dataclass(frozen=True)
class Workload:
    model: dict[str, int]
    dtype: str
    tolerance: float
    """Of the gradient's relative difference. The same micro-batches run on the same kind of device, so all that may
    differ is the order of sums: float32 at the end, and whatever order a kernel's atomics take, which shows as the
    difference of one process to itself: twice that passes too."""
    groups: int
    prompt: tuple[int, int]
    """Least and greatest length."""
    completion: tuple[int, int]
    tokens_per_microbatch: int
    rounds: int
    """Steps timed of each, after one that warms up."""


WORKLOADS = {
    "cuda": Workload(
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3},
        "bfloat16", 2**-8, groups=96, prompt=(64, 256), completion=(128, 512), tokens_per_microbatch=16384,
        rounds=5,
    ),
    "cpu": Workload(
        {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1},
        "float32", 1e-5, groups=6, prompt=(3, 6), completion=(2, 6), tokens_per_microbatch=80, rounds=2,
    ),
}  # fmt: skip


class _KeptGradient(Optimizer):
    """Keeps the gradient that AdamW would use; changes nothing."""

    gradient: Tensor

    def step(self, step: int, update: int = 0) -> float:
        self.gradient = flat_gradients(self._parameters)
        return float(self.gradient.norm())


def measure(workload: Workload, device: torch.device, processes: int) -> dict[str, Any]:
    """The figures. Raises PeerLost."""
    say = live("data parallel")
    with tempfile.TemporaryDirectory(prefix="bucketrl-benchmark-") as name:
        folder, config = Path(name) / "model", _config(workload)
        say("making the model")
        _save_model(workload, folder)
        load = partial(PolicyModel.load, folder, config)
        with Peers(processes, load, device, Path(name) / "ranks") as peers:
            policy = load(device)
            _perturb(policy)
            say("waiting for the processes")
            peers.wait_until_up(_never)
            groups = _groups(workload)
            ways: dict[str, Gradients | None] = {"one": None, "many": DataParallel(policy, peers)}
            say("comparing gradients")
            figures = _compare(policy, groups, ways)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            optimizer = Optimizer(policy.parameters, config.algorithm)
            trainers = {way: Trainer(policy, optimizer, gradients) for way, gradients in ways.items()}
            tokens = 0.0
            for step in range(1, workload.rounds + 2):
                for way, trainer in trainers.items():
                    say(f"step {step} of {workload.rounds + 1}, {way}")
                    begun = time.monotonic()
                    tokens = trainer.train(groups, step, _never)["tokens"]
                    float(flat(list(policy.parameters.values())).sum())  # waits for the optimizer
                    seconds[way].append(time.monotonic() - begun)
    one, many = (statistics.median(times[1:]) for times in seconds.values())
    return figures | {
        "processes": processes,
        "tokens": int(tokens),
        "step_s_one": one,
        "step_s_many": many,
        "tokens_per_second_many": tokens / many,
        "speedup": one / many,
        "scaling_efficiency": one / many / processes,
    }


def _compare(
    policy: PolicyModel, groups: Sequence[TrajectoryGroup], ways: dict[str, Gradients | None]
) -> dict[str, float]:
    """Relative differences of the gradient: of many processes to one, and of one to itself made again."""
    kept = _KeptGradient(policy.parameters, policy.config.algorithm)
    found = []
    for way in ("one", "one", "many"):
        metrics = Trainer(policy, kept, ways[way]).train(groups, 1, _never)
        found.append((kept.gradient, metrics))
    (want, metrics), (again, _), (shared, shared_metrics) = found
    return {
        "gradient_norm": float(want.norm()),
        "gradient_difference": float((shared - want).norm() / want.norm()),
        "gradient_difference_of_one_to_itself": float((again - want).norm() / want.norm()),
        "metrics_difference": max(
            abs(shared_metrics[name] - value) / max(1.0, abs(value))
            for name, value in metrics.items()
            if name != "tokens_per_second"
        ),
    }


def _never() -> bool:
    return False


def _save_model(workload: Workload, folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**workload.model, max_position_embeddings=8192, tie_word_embeddings=True)
    ).to(getattr(torch, workload.dtype)).save_pretrained(folder)


def _config(workload: Workload) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "data-parallel",
            "model": {"id": "random", "dtype": workload.dtype},
            "task": {"kind": "arithmetic"},
            "sampling": {"group_size": GROUP_SIZE, "max_tokens": workload.completion[1]},
            "algorithm": {"groups_per_step": workload.groups, "learning_rate": 1e-6},
            "rollout": {"max_model_len": workload.prompt[1] + workload.completion[1]},
            "learner": {"tokens_per_microbatch": workload.tokens_per_microbatch},
        }
    )


@torch.no_grad()
def _perturb(policy: PolicyModel) -> None:
    """Both LoRA factors, so that both have gradients."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters.values():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.device))


def _groups(workload: Workload) -> list[TrajectoryGroup]:
    """Random tokens of random lengths, as likely as a random model finds them, with random rewards."""
    rng = np.random.default_rng(2)
    vocabulary = workload.model["vocab_size"]

    def draw(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.integers(vocabulary, size=rng.integers(bounds[0], bounds[1] + 1)).tolist())

    def trajectory(sample: int, prompt: tuple[int, ...]) -> Trajectory:
        completion = draw(workload.completion)
        count = len(completion)
        return Trajectory(
            sample=sample,
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            behaviour_logprobs=tuple((rng.normal(0.0, 0.1, count) - np.log(vocabulary)).tolist()),
            policy_versions=(0,) * count,
            loss_mask=(True,) * count,
            reward=float(rng.random()),
            reward_parts={},
            finish_reason="length",
            seed=sample,
            started_at="",
            seconds=0.0,
            completion_text="",
        )

    def group(ordinal: int) -> TrajectoryGroup:
        prompt = draw(workload.prompt)
        return TrajectoryGroup(
            run_id="data-parallel",
            group_id=str(GroupId(0, ordinal)),
            attempt="a",
            worker_id="w",
            engine="none",
            prompt_text="",
            trajectories=tuple(trajectory(sample, prompt) for sample in range(GROUP_SIZE)),
        )

    return [group(ordinal) for ordinal in range(workload.groups)]


def main(arguments: argparse.Namespace) -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    processes = arguments.processes or (torch.cuda.device_count() if kind == "cuda" else 2)
    if processes < 2 or (kind == "cuda" and processes > torch.cuda.device_count()):
        print(f"{processes} processes: want two or more, and a GPU for each", file=sys.stderr)
        return 2
    if kind == "cpu":
        torch.set_num_threads(1)
    figures = measure(WORKLOADS[kind], torch.device(kind), processes)
    print("\n" + "\n".join(f"{name:<38} {value:.4g}" for name, value in figures.items()))
    if kind == "cuda":
        path = benchmark_record.write(
            "data_parallel_gpu",
            figures,
            command="python -m benchmarks.data_parallel_gpu",
            seeds=[0, 1, 2],
            notes="SmolLM2-135M's shape, random weights, bfloat16; LoRA on all linear layers. Medians of steps in "
            "turns on the same batch: one process, then all. Differences of gradients are relative to the norm; "
            f"at most {WORKLOADS[kind].tolerance:.2g} passes, and twice that of one process to itself. "
            "scaling_efficiency: speedup over processes.",
            folder=arguments.out,
        )
        print(f"record: {path}")
    difference = figures["gradient_difference"]
    most = max(WORKLOADS[kind].tolerance, 2 * figures["gradient_difference_of_one_to_itself"])
    if not difference <= most:
        print(f"FAILED  the gradients differ by {difference:.3g}, at most {most:.3g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=0, help="default: as many as there are GPUs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for the record")
    sys.exit(main(parser.parse_args()))
