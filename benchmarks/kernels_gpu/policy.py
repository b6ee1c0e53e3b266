"""K2: the policy loss, forward and backward, against the same in plain torch and under torch.compile."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels_gpu.timing import interleaved
from bucketrl.kernels import policy, policy_reference

IN_A_GRAPH = ", in a graph"


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

    functions = {
        "ours": policy.packed_policy_loss,
        "torch eager": policy_reference.packed_policy_loss,
        "torch.compile": torch.compile(policy_reference.packed_policy_loss),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        try:
            both_ways(function)()
            calls[name] = both_ways(function)
            calls[name + IN_A_GRAPH] = _graph(calls[name]).replay
        except Exception as error:  # noqa: BLE001 whatever a peer cannot do here, the others can be measured
            print(f"  {name:<40} cut short: {type(error).__name__}: {str(error)[:120]}", flush=True)
    print(f"\nK2  {tokens} tokens, {sequences} sequences, forward and backward")
    times = interleaved(calls, rounds, warmups=5)
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
        call()
    return graph
