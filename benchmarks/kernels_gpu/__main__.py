"""python -m benchmarks.kernels_gpu: on one NVIDIA GPU, some 5 minutes. `--quick`: fewer rounds, nothing recorded.

`--tune`: instead, our own ways to cut the work of the output head and of K3, side by side. Peers that are not
installed are left out: liger-kernel, cut-cross-entropy, trl, verl, quack-kernels, nvidia-cutlass-dsl, peft,
transformers.
"""

import argparse
import sys
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels_gpu import correctness, head, linears, linears_tune, policy, rope
from benchmarks.kernels_gpu.linears_peers import SHAPES
from benchmarks.kernels_gpu.peers import PEERS, Peer
from benchmarks.kernels_gpu.timing import gemm_tflops
from bucketrl.jobs import benchmark_record

SIZES = (2048, 4096)
"""Hidden sizes of Qwen3-1.7B and 8B."""
SLOW_TO_START = ("torch.compile", "CCE", "CCE exact", "verl", "verl-style")
"""Left out of `--quick`."""
MODES = {"": "", policy.IN_A_GRAPH: "graph_"}
"""As called, where the host's launches are the time, and without them."""


def main(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 2
    start = time.monotonic()
    rounds = 5 if arguments.quick else 15
    before = gemm_tflops()
    if arguments.tune:
        linears_tune.measure(rounds)
        for size in SIZES:
            head.parts(size, rounds)
            head.measure(size, rounds, {name: head.planned(plan) for name, plan in head.PLANS.items()})
        print(f"bf16 GEMM of 8192: {before:.0f} TFLOP/s before, {gemm_tflops():.0f} after")
        return 0
    count, failed = correctness.run(arguments.quick)
    print(f"{count} checks, {failed} failed; {time.monotonic() - start:.0f} s", flush=True)
    figures: dict[str, Any] = {"checks": count, "checks_failed": failed}
    left_out = SLOW_TO_START if arguments.quick else ()
    peers = {name: peer for name, peer in PEERS.items() if name not in left_out}
    for section in (partial(_head, peers), _policy, partial(_linears, left_out), partial(_rope, left_out)):
        try:
            figures |= section(rounds)
        except Exception as error:  # noqa: BLE001 one section that cannot run leaves the others' figures
            print(f"section left out: {type(error).__name__}: {error}", flush=True)
            failed += 1
    figures |= {"gemm_tflops_before": before, "gemm_tflops_after": gemm_tflops()}
    print("\n" + "\n".join(f"{name:<28} {value:.4g}" for name, value in figures.items()))
    print(f"{time.monotonic() - start:.0f} s")
    if not arguments.quick:
        path = benchmark_record.write(
            "kernels_gpu",
            figures,
            command="python -m benchmarks.kernels_gpu",
            seeds=[0, 1, 3, 7],
            notes="Medians of rounds in which all took turns; 32768 rows, vocabulary 151936, bfloat16, forward and "
            "backward with a frozen head. k1_vs_…: their time over ours, at H 2048. k1_floor_…: 4·N·H·V FLOPs at "
            "790 TFLOP/s over our time. k1_rms: of log-probabilities against float64, the worst of three regimes. "
            "k2: loss and gradient, ours by packed_policy_grad as the learner calls it, peers and k2_autograd_us "
            "by forward and backward; k2_vs_…: as called; …_graph: one of ten calls in a CUDA graph, so that the "
            "host costs nothing. k3: the linears of one Qwen3 layer with norms and SwiGLU, rank 16; k3_floor_…: "
            "the base's bare GEMMs over our time, k3_vs_peft_…: the faster of PEFT's two. k4_floor_…: bytes at "
            "4.3 TB/s. Their errors: relative to float64, the worst tensor.",
            folder=Path(__file__).parents[1] / "results",
        )
        print(f"record: {path}")
    return 1 if failed else 0


def _head(peers: Mapping[str, Peer], rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"k1_rms": max(head.rms(size) for size in SIZES)}
    for size in SIZES:
        found = head.measure(size, rounds, {"ours": head.ours, **peers})
        figures[f"k1_score_ms_{size}"] = head.score_only(size, rounds).median
        ours = found["ms"]["ours"]
        figures[f"k1_floor_{size}"] = found["floor_ms"] / ours
        figures[f"k1_ms_{size}"] = ours
        trl = [ms for name, ms in found["ms"].items() if name.startswith("TRL")]
        named = {"trl": min(trl, default=None)} | {
            key: found["ms"].get(name)
            for key, name in {
                "liger_sm90": "Liger SM90",
                "liger_flce": "Liger FLCE",
                "prime_rl": "prime-rl-style",
                "verl": "verl",
                "verl_style": "verl-style",
                "cce": "CCE exact",
                "quack": "quack (sum only)",
                "eager": "torch eager",
                "compile": "torch.compile",
            }.items()
        }
        suffix = "" if size == SIZES[0] else f"_{size}"
        figures |= {f"k1_vs_{key}{suffix}": ms / ours for key, ms in named.items() if ms is not None}
    return figures


def _policy(rounds: int) -> dict[str, Any]:
    found = policy.measure(rounds * 10)
    figures = {f"k2_{mode}us": found[f"ours{name}"] for name, mode in MODES.items() if f"ours{name}" in found}
    if "ours" + policy.BY_AUTOGRAD in found:
        figures["k2_autograd_us"] = found["ours" + policy.BY_AUTOGRAD]
    for name, mode in MODES.items():
        for peer, key in {"torch eager": "k2_vs_eager", "torch.compile": "k2_vs_compile"}.items():
            if peer + name in found and f"ours{name}" in found:
                figures[key + mode.replace("graph_", "_graph")] = found[peer + name] / found[f"ours{name}"]
    return figures


def _linears(left_out: Collection[str], rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for suffix, shape in SHAPES.items():
        found = linears.measure(shape, rounds, left_out)
        peft = [ms for name, ms in found["ms"].items() if name.startswith("PEFT")]
        named = {"peft": min(peft, default=None)} | {
            key: found["ms"].get(name)
            for key, name in {
                "peft_bf16": "PEFT, bf16",
                "peft_autocast": "PEFT, autocast",
                "unsloth_style": "unsloth-style",
                "compile": "torch.compile",
                "no_adapter": "no adapter",
            }.items()
        }
        figures |= _against("k3", suffix, found, named)
        for part, error in zip(("out", "dx", "adapter"), found["errors"].get("PEFT, bf16", ()), strict=False):
            figures[f"k3_error_{part}_peft_bf16_{suffix}"] = error
    return figures


def _rope(left_out: Collection[str], rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for suffix, shape in SHAPES.items():
        found = rope.measure(shape, rounds, left_out)
        names = {"eager": "transformers", "compile": "torch.compile", "liger": "Liger"}
        named = {key: found["ms"].get(name) for key, name in names.items()}
        figures |= _against("k4", suffix, found, named)
    return figures


def _against(
    kernel: str, suffix: str, found: Mapping[str, Any], named: Mapping[str, float | None]
) -> dict[str, Any]:
    ours = found["ms"]["ours"]
    figures = {f"{kernel}_ms_{suffix}": ours, f"{kernel}_floor_{suffix}": found["floor_ms"] / ours}
    figures |= {f"{kernel}_vs_{key}_{suffix}": ms / ours for key, ms in named.items() if ms is not None}
    for part, error in zip(("out", "dx", "adapter"), found["errors"]["ours"], strict=False):
        figures[f"{kernel}_error_{part}_{suffix}"] = error
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, nothing recorded")
    parser.add_argument("--tune", action="store_true", help="our own plans only, nothing recorded")
    sys.exit(main(parser.parse_args()))
