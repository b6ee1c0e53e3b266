"""What `correctness` checks of K2."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_gpu.heads import relative
from bucketrl.kernels import policy, policy_reference

Check = Callable[[], tuple[float, float]]
OBJECTIVES = {
    "ppo": policy.Objective(
        dual_clip=3.0, importance_weight="token", importance_cap=1.3, kl_coefficient=0.05, entropy_coefficient=0.01
    ),
    "gspo": policy.Objective(
        ratio_level="sequence", clip_low=3e-2, clip_high=4e-2, importance_mask="sequence",
        importance_mask_low=0.9, importance_mask_high=1.1, kl_coefficient=0.05, kl_estimator="k2",
    ),
    "cispo": policy.Objective(surrogate="cispo", importance_weight="sequence", importance_cap=1.02),
    "reinforce": policy.Objective(
        surrogate="reinforce", importance_weight="token", importance_mask="token", entropy_coefficient=0.01
    ),
}  # fmt: skip


def checks() -> Iterator[tuple[str, Check]]:
    for kind in OBJECTIVES:
        yield f"20, 21 K2 {kind}: against float64, poisoned", partial(_policy, kind)
        yield f"13 K2 {kind}: the same bits under torch.compile", partial(_compiled, kind)
    yield "K2: the same bits with and without autograd", _forms
    yield "23 K2: the same bits under autocast", _autocast
    yield "29 K2: the same bits in a second backward pass", _twice
    yield "K2: the same bits three times", _repeats
    yield "K2: the same bits on two streams at once, and in a graph", _streams
    yield "22 K2: group advantages", _groups


def policy_inputs(kind: str, poison: bool = False) -> tuple[dict[str, Any], policy.Objective]:
    count, sequences = 65536, 256
    generator = torch.Generator("cuda").manual_seed(7)

    def normal(scale: float, size: int = count) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator) * scale

    logprobs = -normal(1.0).abs()
    cu = torch.randint(0, count - 100, (sequences + 1,), device="cuda", generator=generator).sort()[0]
    cu[0] = 0
    inputs: dict[str, Any] = {
        "logprobs_N": logprobs, "behaviour_N": logprobs + normal(0.3),
        "advantages_B": normal(1.0, sequences), "cu_seqlens": cu, "norm": 40000.0, "mask_N": normal(1.0) > -0.3,
        "proximal_N": logprobs + normal(0.2), "reference_N": logprobs + normal(0.4),
        "entropy_N": normal(1.0).abs(), "weights_B": normal(1.0, sequences).abs(),
    }  # fmt: skip
    if poison:
        for value in (torch.nan, torch.inf, -torch.inf, -1e10):
            places = torch.randint(count, (500,), device="cuda", generator=generator)
            inputs["behaviour_N"][places] = value
            inputs["logprobs_N"][places[~inputs["mask_N"][places]]] = value
    return inputs, OBJECTIVES[kind]


def _results(function: Any, inputs: dict[str, Any], objective: policy.Objective) -> list[Tensor]:
    """Loss, statistics, and the gradients in the log-probabilities and entropies, by autograd."""
    inputs = dict(inputs) | {
        name: inputs[name].clone().requires_grad_() for name in ("logprobs_N", "entropy_N")
    }
    loss, stats = function(**inputs, objective=objective)
    loss.backward()
    return [loss.detach(), stats, inputs["logprobs_N"].grad, inputs["entropy_N"].grad]


def _direct(inputs: dict[str, Any], objective: policy.Objective) -> list[Tensor]:
    loss, by_logprob, by_entropy, stats = policy.packed_policy_grad(**inputs, objective=objective)
    assert by_entropy is not None
    return [loss, stats, by_logprob, by_entropy]


def _both(inputs: dict[str, Any], objective: policy.Objective) -> list[Tensor]:
    return [*_direct(inputs, objective), *_results(policy.packed_policy_loss, inputs, objective)]


def _policy(kind: str) -> tuple[float, float]:
    inputs, objective = policy_inputs(kind, poison=True)
    found = _both(inputs, objective)
    exact = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    exact["norm"] = torch.tensor(inputs["norm"], dtype=torch.float64, device="cuda")
    want = _results(policy_reference.packed_policy_loss, exact, objective)
    if not all(bool(tensor.isfinite().all()) for tensor in found):
        raise RuntimeError("something not finite")
    return max(relative(ours, theirs.double()) for ours, theirs in zip(found, want * 2, strict=True)), 1e-5


def _differ(one: list[Tensor], two: list[Tensor]) -> float:
    return float(sum(not torch.equal(a, b) for a, b in zip(one, two, strict=True)))


def _repeats() -> tuple[float, float]:
    inputs, objective = policy_inputs("gspo")
    first, *others = [_both(inputs, objective) for _ in range(3)]
    return sum(_differ(first, other) for other in others), 0.0


def _streams() -> tuple[float, float]:
    """Calls on two streams at once, and two in a graph."""
    inputs, objective = policy_inputs("ppo")
    want, found = _direct(inputs, objective), []
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for stream in streams * 50:
        with torch.cuda.stream(stream):
            found.append(_direct(inputs, objective))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found += [_direct(inputs, objective) for _ in range(2)]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return sum(_differ(other, want) for other in found), 0.0


def _forms() -> tuple[float, float]:
    differing = 0.0
    for kind in OBJECTIVES:
        inputs, objective = policy_inputs(kind, poison=True)
        differing += _differ(
            _direct(inputs, objective), _results(policy.packed_policy_loss, inputs, objective)
        )
    return differing, 0.0


def _compiled(kind: str) -> tuple[float, float]:
    """`norm` as a Python float: it is one where a loss is written by hand."""
    inputs, objective = policy_inputs(kind)

    def call(**given: Any) -> tuple[Tensor, Tensor]:
        loss, stats = policy.packed_policy_loss(**given)
        return loss * 2.0, stats

    def direct(inputs: dict[str, Any]) -> list[Tensor]:
        return [result * 2.0 for result in _direct(inputs, objective)]

    found = [*_results(torch.compile(call), inputs, objective), *torch.compile(direct)(inputs)]
    return _differ(found, [*_results(call, inputs, objective), *direct(inputs)]), 0.0


def _autocast() -> tuple[float, float]:
    inputs, objective = policy_inputs("ppo")
    want = _both(inputs, objective)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = _both(inputs, objective)
    return _differ(found, want), 0.0


def _twice() -> tuple[float, float]:
    inputs, objective = policy_inputs("gspo")
    leaves = [inputs[name].requires_grad_() for name in ("logprobs_N", "entropy_N")]
    loss, _ = policy.packed_policy_loss(**inputs, objective=objective)
    first = [gradient.clone() for gradient in torch.autograd.grad(loss, leaves, retain_graph=True)]
    for gradient in torch.autograd.grad(loss, leaves, retain_graph=True):
        gradient.zero_()
    return _differ(list(torch.autograd.grad(loss, leaves)), first), 0.0


def _groups() -> tuple[float, float]:
    rewards = torch.randn(4096, device="cuda")
    rewards[::50], rewards[8:16] = torch.nan, 0.3
    cu = torch.arange(0, 4097, 8, device="cuda")
    worst = 0.0
    for scale in ("none", "group", "batch"):
        found, flat = policy.group_advantage(rewards, cu, scale)
        want, want_flat = policy_reference.group_advantage(rewards.double(), cu, scale)
        worst = max(worst, relative(found, want), float((flat != want_flat).sum()))
    return worst, 1e-5
