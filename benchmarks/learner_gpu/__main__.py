"""python -m benchmarks.learner_gpu [--model both] [--rounds N] [--quick]

A full LoRA GRPO step on random weights of Qwen3-1.7B and 8B: forward, loss, backward, clipping, AdamW. The
learner's own and PEFT with TRL's loss take turns on the same batches of 16 completions of 2048 tokens: `separate`,
where nothing is shared and both do the same work, and `group`, two prompts with eight completions each. One H200,
some 4 minutes. `--model tiny`: to try the script without a GPU. `--quick`: two rounds, nothing recorded.
"""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels_gpu.timing import gemm_tflops
from benchmarks.learner_gpu.measure import OURS, SAME_TRAINING, Measurement, Times
from benchmarks.learner_gpu.shapes import SHAPES, Shape
from benchmarks.live import live
from bucketrl.jobs import benchmark_record

PEAK_TFLOPS = {"": 989, "_of_gemm": 790}
"""Dense bfloat16 of one H200: as printed on the box, and what large products reach."""


def main(arguments: argparse.Namespace) -> int:
    names = ["1.7b", "8b"] if arguments.model == "both" else [arguments.model]
    if names != ["tiny"] and not torch.cuda.is_available():
        print("no CUDA device: this benchmark needs an NVIDIA GPU, or --model tiny", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        # What libraries allocate by themselves has room even where a provider fills its memory.
        torch.cuda.set_per_process_memory_fraction(0.95)
    start = time.monotonic()
    figures: dict[str, Any] = {}
    models: dict[str, Any] = {name: {} for name in names}
    failed = 0
    for name in names:
        try:
            _measure(SHAPES[name], device, arguments, figures, models[name])
        except Exception as error:  # noqa: BLE001 one model that cannot run leaves the other's figures
            traceback.print_exc()
            models[name]["failed"] = f"{type(error).__name__}: {error}"
            failed += 1
        if not arguments.quick:
            path = _record(figures, models, arguments)
        # A model that failed may leave cycles that hold its memory.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n" + "\n".join(f"{name:<34} {_short(value)}" for name, value in figures.items()))
    print(f"{time.monotonic() - start:.0f} s" + ("" if arguments.quick else f"; record: {path}"))
    return 1 if failed else 0


def _measure(
    shape: Shape,
    device: torch.device,
    arguments: argparse.Namespace,
    figures: dict[str, Any],
    details: dict[str, Any],
) -> None:
    """Adds to `figures` and `details` as soon as there is something to add."""
    if device.type == "cuda":
        figures[f"gemm_tflops{shape.suffix}"] = gemm_tflops()
    measurement = Measurement(shape, device, live("learner_gpu"))
    details["left_out"] = measurement.left_out
    details |= {"heads": measurement.heads(), **measurement.errors()}
    if "agrees" in details:
        figures[f"agrees{shape.suffix}"] = details["agrees"]
    rounds = 2 if arguments.quick else arguments.rounds or shape.rounds
    for workload, prefix in {"separate": "", "group": "group_"}.items():
        times = measurement.times(workload, rounds)
        details[workload] = {name: of_it.summary() for name, of_it in times.items()}
        found = _figures(shape, times)
        if workload == "separate" and OURS in times:
            found |= _mfu(shape, measurement, times)
            if profile := measurement.profile():
                details["profile"] = profile
                found["gpu_busy_share"] = profile["busy"] / times[OURS].median
                _show(profile)
        figures |= {f"{prefix}{name}{shape.suffix}": value for name, value in found.items()}
        _table(workload, times)


def _figures(shape: Shape, times: Mapping[str, Times]) -> dict[str, Any]:
    """Of one workload. `trl_path`: the faster of the peer's ways that train the same."""
    if OURS not in times:
        return {}
    ours = times[OURS]
    figures: dict[str, Any] = {
        "ms": ours.median,
        "tokens_per_s": shape.tokens / ours.median * 1e3,
        "peak_gib": ours.peak_gib,
        "activation_checkpointing": ours.checkpointing,
    }
    same = [times[name] for name in SAME_TRAINING if name in times]
    if same:
        peer = min(same, key=lambda each: each.median)
        ratios = [theirs / own for theirs, own in zip(peer.ms, ours.ms, strict=True)]
        figures |= {
            "ratio_vs_trl_path": peer.median / ours.median,
            "ratio_vs_trl_path_spread": [min(ratios), max(ratios)],
            "trl_path_ms": peer.median,
            "trl_path_tokens_per_s": shape.tokens / peer.median * 1e3,
            "trl_path_peak_gib": peer.peak_gib,
            "trl_path_activation_checkpointing": peer.checkpointing,
        }
    figures |= {
        f"ratio_vs_{name}": of_it.median / ours.median for name, of_it in times.items() if name != OURS
    }
    return {name: value for name, value in figures.items() if value is not None}


def _mfu(shape: Shape, measurement: Measurement, times: Mapping[str, Times]) -> dict[str, Any]:
    """Shares of the device's peak, of the work that the step needs; on a CPU the FLOPs alone."""
    figures: dict[str, Any] = {}
    for per_weight in (4, 6):
        flops = measurement.flops("separate", per_weight)
        figures[f"tflop_per_step_{per_weight}n"] = flops / 1e12
        for suffix, peak in PEAK_TFLOPS.items():
            figures[f"mfu_{per_weight}n{suffix}"] = flops / (times[OURS].median * 1e-3) / (peak * 1e12)
    return figures


def _table(workload: str, times: Mapping[str, Times]) -> None:
    print(f"\n{workload:<24}{'ms':>9}  {'rounds':<20}{'GiB':>7}  micro-batch")
    for name, of_it in times.items():
        spread = f"[{min(of_it.ms):.1f}, {max(of_it.ms):.1f}]"
        peak = "" if of_it.peak_gib is None else f"{of_it.peak_gib:.1f}"
        more = ", checkpointed" * of_it.checkpointing + f", {of_it.allocator_retries} retries" * bool(
            of_it.allocator_retries
        )
        print(f"{name:<24}{of_it.median:9.1f}  {spread:<20}{peak:>7}  {of_it.microbatch}{more}", flush=True)


def _show(profile: dict[str, Any]) -> None:
    print(f"\nprofile of one step of ours: {profile['busy']} ms of kernels")
    for name, ms in (*profile["by_kind"].items(), *profile["top"].items()):
        print(f"{ms:10.2f} ms  {name}")


def _record(figures: dict[str, Any], models: dict[str, Any], arguments: argparse.Namespace) -> Path:
    suffix = "" if arguments.model == "both" else "_" + arguments.model.replace(".", "p")
    rounds = f" --rounds {arguments.rounds}" if arguments.rounds else ""
    return benchmark_record.write(
        f"learner_gpu{suffix}",
        figures,
        command=f"python -m benchmarks.learner_gpu --model {arguments.model}{rounds}",
        seeds=[0],
        notes=NOTES,
        folder=arguments.results,
        models=models,
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


NOTES = (
    "Random weights, LoRA r=16 on all linear layers, 16 completions of 2048 tokens a step; figures "
    "without a suffix are of Qwen3-1.7B, those with _8b of 8B. Medians of rounds in which all took turns, "
    "a new batch each round. No prefix: every completion has a prompt of its own (256 tokens), so that "
    "both sides do the same work. group_: two prompts of 1024 tokens with eight completions each; tokens "
    "are counted as the peer computes them, ours computes a prompt once. trl_path: transformers' sdpa "
    "attention on rows of equal length, PEFT with float32 adapters under bfloat16 autocast, TRL's chunked "
    "head and clipped loss, fused AdamW; micro-batches of the largest power of two of rows that fits, "
    "with activation checkpointing or without, whichever was faster. mfu_4n: 4 FLOPs per frozen weight "
    "and token without the embedding, 6·L²·heads·head_dim per layer and sequence for attention, 4·H·V per "
    "scored token, at 989 TFLOP/s; _of_gemm at 790, which large products reach; 6n: 6 per weight. "
    "peak_gib: without what the other providers keep. gpu_busy_share: time of all kernels in one profiled "
    "step over the median step."
)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learner_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--rounds", type=int, help="default: 5 for 1.7b, 3 for 8b")
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing recorded")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    sys.exit(main(parser.parse_args()))
