"""K1: the output head, in turns with its peers; and `--tune`, our own ways to cut the work."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_gpu.heads import QWEN3, REGIMES, Head, Truth, make, relative, truth
from benchmarks.kernels_gpu.peers import Peer
from benchmarks.kernels_gpu.timing import Time, interleaved
from bucketrl.kernels import logprob_triton as kernels
from bucketrl.kernels.logprob import linear_logprob
from bucketrl.kernels.logprob_cuda import linear_logprob as kernel
from bucketrl.kernels.logprob_plan import HOPPER, Plan

ROWS = 32768
PEAK_TFLOPS = 790.0
"""A large bfloat16 GEMM on an H200: what the floor, 4·N·H·V FLOPs, is reckoned at."""
PLANS = {
    "whole rows, block 4096, 8 warps": Plan(),
    "whole rows, block 2048, 4 warps": Plan(block=2048, warps=4),
    "whole rows, block 8192, 16 warps": Plan(block=8192, warps=16),
    "whole rows, 4 GiB": Plan(workspace_bytes=4 << 30),
    "tiles of 2048 x 4096": Plan(columns=4096, workspace_bytes=1 << 30),
    "tiles of 4096 x 2048": Plan(columns=2048, block=2048, warps=4),
    "tiles of 4096 x 8192": Plan(columns=8192),
    "hopper": HOPPER,
    "hopper, 1 GiB": replace(HOPPER, workspace_bytes=1 << 30),
    "hopper, 4 GiB": replace(HOPPER, workspace_bytes=4 << 30),
    "triton 128 x 256, 3 stages": Plan(first="triton", block=256),
    "triton 128 x 256, 4 stages": Plan(first="triton", block=256, stages=4),
    "triton 128 x 256, 4 GiB": Plan(first="triton", block=256, workspace_bytes=4 << 30),
    "triton 128 x 128, two a multiprocessor": Plan(first="triton", block=128, warps=4, resident=2),
    "triton 128 x 128, 8 warps, 4 stages": Plan(first="triton", block=128, stages=4),
}


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_logprob(hidden, weight, targets)[0]


def planned(plan: Plan) -> Peer:
    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logprobs: Tensor = kernel(hidden, weight, targets, plan=plan)[0]
        return logprobs

    return call


def measure(size: int, rounds: int, peers: Mapping[str, Peer]) -> dict[str, Any]:
    """Prints a table, its ratios to the first of `peers`; returns the figures of hidden size `size`."""
    head, other = (make(ROWS, size, QWEN3, "mixed", seed) for seed in (0, 1))
    floor_ms = 4 * ROWS * size * QWEN3 / PEAK_TFLOPS / 1e9
    want = truth(head)
    print(f"\nK1  N {ROWS}, H {size}, V {QWEN3}: floor {floor_ms:.1f} ms, forward and backward")
    errors: dict[str, tuple[float, float]] = {}
    calls: dict[str, Callable[[], object]] = {}
    for name, peer in peers.items():
        try:
            errors[name] = _errors(peer, head, want)
            calls[name] = _alternating(peer, head, other)
        except Exception as error:  # noqa: BLE001 whatever a peer cannot do here, the others can be measured
            print(f"  {name:<40} left out: {type(error).__name__}: {str(error)[:120]}", flush=True)
        torch.cuda.empty_cache()
    times = interleaved(calls, rounds)
    first = next(iter(times.values()))
    for name, time in times.items():
        logprob, grad = errors[name]
        print(
            f"  {name:<40} {time} ms   {floor_ms / time.median:.3f} of floor"
            f"   ours x {time.median / first.median:.2f}   rms {logprob:.1e}   gradient {grad:.1e}",
            flush=True,
        )
    return {
        "floor_ms": floor_ms,
        "ms": {name: time.median for name, time in times.items()},
        "errors": errors,
    }


def score_only(size: int, rounds: int) -> Time:
    """Log-probabilities without a gradient, as of a proximal or reference policy."""
    head, other = (make(ROWS, size, QWEN3, "mixed", seed) for seed in (0, 1))
    turns = itertools.cycle([head, other])

    @torch.no_grad()
    def call() -> None:
        now = next(turns)
        linear_logprob(now.hidden, now.weight, now.targets)

    time = interleaved({"score": call}, rounds)["score"]
    print(f"  {'ours, no gradient':<40} {time} ms", flush=True)
    return time


def parts(size: int, rounds: int) -> None:
    """What the two GEMMs take alone, by library and rows, and the pass between them: for `ROWS` rows."""
    weight = make(8, size, QWEN3, "uniform", seed=0).weight
    for rows in (2048, 4096, 8192):
        hidden = torch.randn(rows, size, device="cuda").bfloat16()
        exp = torch.rand(rows, QWEN3, device="cuda").bfloat16()
        logits = torch.empty(rows, QWEN3, device="cuda")
        out = torch.empty(rows, size, device="cuda")
        calls: dict[str, Callable[[], object]] = {}
        for library in ("cublas", "cublaslt"):

            def using(left: Tensor, right: Tensor, into: Tensor, library: str = library) -> None:
                torch.backends.cuda.preferred_blas_library(library)
                torch.mm(left, right, out_dtype=torch.float32, out=into)

            calls[f"{library}: logits"] = partial(using, hidden, weight.T, logits)
            calls[f"{library}: E · W"] = partial(using, exp, weight, out)
        for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)):
            calls[f"pass, block {block}, {warps} warps"] = partial(_pass, logits, exp, block, warps)
        for name, time in interleaved(calls, rounds).items():
            print(f"  {rows} rows, {name:<32} {time.median * ROWS / rows:8.2f} ms", flush=True)
        del logits, exp
        torch.cuda.empty_cache()
    torch.backends.cuda.preferred_blas_library("default")


def _pass(logits: Tensor, exp: Tensor, block: int, warps: int) -> None:
    rows, width = logits.shape
    tiles = -(-width // block)
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    one, target = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
    sums = torch.empty(3, tiles, rows, device="cuda")
    kernels.exp_tile[(tiles, rows)](
        logits, targets, one, target, exp, *sums, 0, width, width, rows, width, width, 1.0,
        HAS_CAP=False, STORE=True, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def rms(size: int) -> float:
    """The worst over the regimes of the root mean square error of ours, in nats."""
    worst = 0.0
    for regime in REGIMES:
        head = make(4096, size, QWEN3, regime, seed=3)
        logprob, grad = _errors(ours, head, truth(head, 256))
        print(f"  {'ours, ' + regime:<40} rms {logprob:.1e}   gradient {grad:.1e}", flush=True)
        worst = max(worst, logprob)
        torch.cuda.empty_cache()
    return worst


def _alternating(peer: Peer, *heads: Head) -> Callable[[], object]:
    turns = itertools.cycle(heads)

    def call() -> None:
        now = next(turns)
        _both_ways(peer, now)

    return call


def _both_ways(peer: Peer, head: Head) -> tuple[Tensor, Tensor]:
    hidden = head.hidden.detach().requires_grad_()
    logprobs = peer(hidden, head.weight, head.targets)
    grad = head.upstream if logprobs.dim() else torch.ones_like(logprobs)
    logprobs.backward(grad.to(logprobs.dtype))  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    return logprobs.detach(), hidden.grad


def _errors(peer: Peer, head: Head, want: Truth) -> tuple[float, float]:
    """Root mean square error of the log-probabilities, relative error of the gradient; NaN for a mere sum."""
    logprobs, grad = _both_ways(peer, head)
    if not logprobs.dim():
        return float("nan"), float("nan")
    apart = logprobs[want.rows].double() - want.logprobs
    return float(apart.square().mean().sqrt()), relative(grad[want.rows], want.grad)
