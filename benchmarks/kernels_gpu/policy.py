"""K2: the policy loss and its gradient, against the same in plain torch and under torch.compile.

"ours" is what the learner calls, `packed_policy_grad`; all others run forward and backward.
"""

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from benchmarks.kernels_gpu.timing import Time, interleaved
from bucketrl.kernels import policy, policy_reference

BY_AUTOGRAD = ", by autograd"
IN_A_GRAPH = ", in a graph"
CALLS = 10
"""In one graph, so that launching it is not what is timed."""


def measure(rounds: int, tokens: int = 65536, sequences: int = 256) -> dict[str, float]:
    """Prints a table; microseconds by name."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(scale: float, size: int = tokens) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=generator) * scale

    logprobs = -normal(1.0).abs()
    inputs: dict[str, Any] = {
        "behaviour_N": logprobs + normal(0.2),
        "advantages_B": normal(1.0, sequences),
        "cu_seqlens": torch.arange(0, tokens + 1, tokens // sequences, device="cuda"),
        "norm": torch.tensor(float(tokens), device="cuda"),
        "mask_N": normal(1.0) > -1.0,
        "proximal_N": logprobs + normal(0.1),
        "objective": policy.Objective(importance_weight="token"),
    }
    logprobs.requires_grad_()

    def both_ways(function: Any) -> Callable[[], object]:
        def call() -> None:
            logprobs.grad = None
            function(logprobs, **inputs)[0].backward()

        return call

    forms: dict[str, Callable[[], object]] = {
        "ours": lambda: policy.packed_policy_grad(logprobs, **inputs),
        "ours" + BY_AUTOGRAD: both_ways(policy.packed_policy_loss),
        "torch eager": both_ways(policy_reference.packed_policy_loss),
        "torch.compile": both_ways(torch.compile(policy_reference.packed_policy_loss)),
    }
    calls: dict[str, Callable[[], object]] = {}
    graphs: dict[str, Callable[[], object]] = {}
    for name, call in forms.items():
        try:
            call()
            calls[name] = call
            graphs[name + IN_A_GRAPH] = _graph(call).replay
        except Exception as error:  # noqa: BLE001 whatever a peer cannot do here, the others can be measured
            print(f"  {name:<40} cut short: {type(error).__name__}: {str(error)[:120]}", flush=True)
    print(f"\nK2  {tokens} tokens, {sequences} sequences: loss and gradient")
    times = interleaved(calls, rounds, warmups=5)
    # Not in the same turns: behind a graph the GPU is still busy, and a call's launches would cost nothing.
    for name, time in interleaved(graphs, rounds, warmups=5).items():
        times[name] = Time(*(value / CALLS for value in astuple(time)))
    for name, time in times.items():
        ours = times.get("ours" + IN_A_GRAPH * name.endswith(IN_A_GRAPH), times["ours"])
        print(f"  {name:<40} {time} ms   ours x {time.median / ours.median:.2f}", flush=True)
    return {name: time.median * 1000 for name, time in times.items()}


def _graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph
