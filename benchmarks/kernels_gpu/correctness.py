"""The cases that the interpreter cannot show: real rounding, real tiles, large offsets, no wait for the GPU.

Each check returns what it measured and the most that it may be.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_gpu import correctness_policy
from benchmarks.kernels_gpu.correctness_policy import Check
from benchmarks.kernels_gpu.heads import REGIMES, Head, Truth, make, relative, truth
from bucketrl.kernels import policy, reference
from bucketrl.kernels.logprob import linear_logprob
from bucketrl.kernels.logprob_cuda import Plan
from bucketrl.kernels.logprob_cuda import linear_logprob as kernel

LOGPROB, GRADIENT = 5e-5, 5e-3
PLANS = {
    "whole rows": Plan(workspace_bytes=1 << 28),
    "tiles": Plan(columns=4096, workspace_bytes=1 << 28),
    "fused": Plan(fused=True, block=256, workspace_bytes=1 << 28),
    "fused, 128 wide": Plan(fused=True, block=128, warps=4, resident=2, workspace_bytes=1 << 28),
}


def checks(plans: Mapping[str, Plan]) -> Iterator[tuple[str, Check]]:
    for name, plan in plans.items():
        for regime in REGIMES:
            yield f"K1 {name}, {regime}: log-probabilities", partial(_values, plan, regime)
            yield f"K1 {name}, {regime}: gradient", partial(_gradient, plan, regime)
        yield f"4 K1 {name}: ragged vocabularies", partial(_ragged, plan)
        yield f"5 K1 {name}: logits far below zero", partial(_shifted, plan)
        yield f"9 K1 {name}: ignored rows that hold NaN", partial(_ignored, plan)
        yield f"17 K1 {name}: entropy gradient", partial(_entropy, plan)
        yield f"31 K1 {name}: softcap and temperature", partial(_softcap, plan)
        yield f"K1 {name}: rows that overflow", partial(_overflow, plan)
        yield f"K1 {name}: the same bits three times", partial(_repeats, plan)
    for name, fused in {"cuBLAS": False, "fused": True}.items():
        yield f"1 K1 {name}: a chunk of more than 2^31 logits", partial(_beyond_int32, fused)
    yield "1 K1: more than 2^31 hidden values", _long
    yield "8 K1: gradient error over that of bfloat16 autograd", _against_autograd
    yield "10 K1: gradient of the most confident rows", _confident
    yield "13 K1: under torch.compile", _compiled
    yield "23, 29 K1: the same bits under autocast, in a second backward pass", _autocast_twice
    yield "14 K1: strided hidden states", _strided
    yield "18 K1: memory beside the results, GiB", _memory
    yield "20 K1, K2: the host never waits", _no_wait
    yield "25 K1: GEMMs on float32 operands", _float32_gemms
    yield "32 K1: the greatest log-probability", _above_zero
    yield from correctness_policy.checks()


def run(quick: bool) -> tuple[int, int]:
    """Prints a line for each that fails; returns how many there were and how many failed."""
    count = failed = 0
    plans = dict(list(PLANS.items())[:1]) if quick else PLANS
    for name, check in checks(plans):
        count += 1
        try:
            value, most = check()
        except Exception as error:  # noqa: BLE001 a check that cannot run is one that failed, not the end
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        if not value <= most:
            failed += 1
            print(f"FAILED  {name}: {value:.3g}, at most {most:.3g}", flush=True)
    return count, failed


def _results(head: Head, plan: Plan, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden = head.hidden.clone().requires_grad_()
    logprobs, entropy = kernel(hidden, head.weight, head.targets, plan=plan, **options)
    loss = (logprobs * head.upstream).sum()
    if options.get("entropy_grad"):
        loss = loss + (entropy * head.upstream.flip(0)).sum()
    loss.backward()
    assert hidden.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad


def _small(regime: str = "mixed", rows: int = 700, vocabulary: int = 32003, size: int = 512) -> Head:
    return make(rows, size, vocabulary, regime, seed=rows)


def _compare(head: Head, plan: Plan, **options: Any) -> tuple[float, float, float]:
    """Largest error of log-probability and of entropy, and relative error of the gradient."""
    found = _results(head, plan, **options)
    hidden = head.hidden.double().requires_grad_()
    logprobs, entropy = reference.linear_logprob(
        hidden, head.weight.double(), head.targets, options.pop("temperature", 1.0), 256, **options
    )
    loss = (logprobs * head.upstream).sum()
    if options.get("entropy_grad"):
        loss = loss + (entropy * head.upstream.flip(0)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    return (
        float((found[0] - logprobs).abs().max()),
        float((found[1] - entropy).abs().max()),
        relative(found[2], hidden.grad),
    )


def _worst(errors: tuple[float, float, float], logprob: float = LOGPROB, grad: float = GRADIENT) -> float:
    """As a share of what is allowed."""
    return max(errors[0] / logprob, errors[1] / logprob, errors[2] / grad)


def _values(plan: Plan, regime: str) -> tuple[float, float]:
    errors = _compare(_small(regime), plan)
    return max(errors[:2]), LOGPROB


def _gradient(plan: Plan, regime: str) -> tuple[float, float]:
    return _compare(_small(regime), plan)[2], GRADIENT


def _ragged(plan: Plan) -> tuple[float, float]:
    heads = [
        _small("uniform", 130, vocabulary, 256) for vocabulary in (1, 7, 1000, 4097, 22016, 151935, 152063)
    ]
    return max(_worst(_compare(head, plan)) for head in heads), 1.0


def _shifted(plan: Plan) -> tuple[float, float]:
    head = _small()
    head.hidden[:, 0], head.weight[:, 0] = 1.0, -500.0
    found = _results(head, plan)
    want = truth(head)
    return float((found[0][want.rows] - want.logprobs).abs().max()), 5e-3


def _ignored(plan: Plan) -> tuple[float, float]:
    head = _small()
    head.targets[::3], head.hidden[::3] = reference.IGNORE_INDEX, torch.nan
    grads = _results(head, plan)[2][::3]
    return _worst(_compare(head, plan)) + float(grads.abs().sum()), 1.0


def _entropy(plan: Plan) -> tuple[float, float]:
    return _worst(_compare(_small(), plan, entropy_grad=True)), 1.5


def _softcap(plan: Plan) -> tuple[float, float]:
    temperature = torch.linspace(0.5, 2.0, 700, device="cuda")
    return _worst(_compare(_small(), plan, softcap=20.0, temperature=temperature), 2e-4), 1.0


def _overflow(plan: Plan) -> tuple[float, float]:
    head = _small(rows=300)
    head.hidden.mul_(16)
    head.targets.random_(32003)
    return _worst(_compare(head, plan, entropy_grad=True), 1e-2, 1e-2), 1.0


def _repeats(plan: Plan) -> tuple[float, float]:
    head = _small()
    first, *others = [_results(head, plan) for _ in range(3)]
    return float(
        sum(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    ), 0.0


def _beyond_int32(fused: bool) -> tuple[float, float]:
    head = make(16384, 256, 151936, "uniform", seed=1)
    block = 256 if fused else 4096
    whole = _results(head, Plan(fused=fused, block=block, workspace_bytes=16 << 30))
    parts = _results(head, Plan(workspace_bytes=1 << 30))
    return relative(whole[0], parts[0].double()) + relative(whole[2], parts[2].double()), 3e-3


def _long() -> tuple[float, float]:
    """Backward's rows, too: the last ones are looked at by themselves."""
    rows, size = (1 << 31) // 4096 + 700, 4096
    short = make(700, size, 1000, "mixed", seed=3)
    hidden = torch.zeros(rows, size, dtype=torch.bfloat16, device="cuda")
    hidden[-700:] = short.hidden
    targets = torch.full((rows,), reference.IGNORE_INDEX, device="cuda")
    targets[-700:] = short.targets
    upstream = torch.cat([torch.ones(rows - 700, device="cuda"), short.upstream])
    found = _results(Head(hidden, short.weight, targets, upstream), Plan())
    want = _results(short, Plan())
    return max(relative(ours[-700:], theirs.double()) for ours, theirs in zip(found, want, strict=True)), 3e-3


def _against_autograd() -> tuple[float, float]:
    head = _small()
    want = truth(head)
    ours = relative(_results(head, Plan())[2][want.rows], want.grad)
    hidden = head.hidden.clone().requires_grad_()
    log_softmax = torch.log_softmax((hidden @ head.weight.T).float(), dim=1)
    log_softmax.gather(1, head.targets[:, None])[:, 0].backward(head.upstream)  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    return ours / relative(hidden.grad[want.rows], want.grad), 1.2


def _confident() -> tuple[float, float]:
    head = _small("confident")
    want: Truth = truth(head, 256)
    found = _results(head, Plan())[2][want.rows].double()
    rows = (want.logprobs > -1e-2) & (want.grad.norm(dim=1) > 1e-30)
    error = (found - want.grad).norm(dim=1) / want.grad.norm(dim=1)
    return float(error[rows].max()), 1e-2


def _compiled() -> tuple[float, float]:
    head = _small(rows=64)

    def call(hidden: Tensor) -> Tensor:
        return linear_logprob(hidden * 1.5, head.weight, head.targets, 0.7)[0] * 2.0

    def results(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        hidden = head.hidden.clone().requires_grad_()
        logprobs = function(hidden)
        return logprobs.detach(), torch.autograd.grad(logprobs, hidden, head.upstream)[0]

    pairs = zip(results(torch.compile(call)), results(call), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs), 0.0


def _autocast_twice() -> tuple[float, float]:
    head = _small()
    want = _results(head, Plan())
    hidden = head.hidden.clone().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logprobs, entropy = kernel(hidden, head.weight, head.targets, plan=Plan())
        grads = [torch.autograd.grad(logprobs, hidden, head.upstream, retain_graph=True)[0] for _ in range(2)]
    pairs = zip([logprobs, entropy, *grads], [*want, want[2]], strict=True)
    return float(sum(not torch.equal(ours, theirs) for ours, theirs in pairs)), 0.0


def _strided() -> tuple[float, float]:
    head = _small()
    wide = torch.full((700, 600), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :512] = head.hidden
    return _worst(_compare(replace(head, hidden=wide[:, :512]), Plan())), 1.0


def _memory() -> tuple[float, float]:
    head = make(8192, 1024, 151936, "uniform", seed=2)
    hidden = head.hidden.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = linear_logprob(hidden, head.weight, head.targets)
    logprobs.backward(head.upstream)  # type: ignore[no-untyped-call]
    assert head.weight.grad is None
    return (torch.cuda.max_memory_allocated() - before) / 2**30, 2.2


def _no_wait() -> tuple[float, float]:
    head, (inputs, objective) = _small(), correctness_policy.policy_inputs("gspo")
    rows = torch.arange(700) % 3 != 0
    hidden = head.hidden.requires_grad_()

    def work() -> None:
        logprobs, _ = linear_logprob(hidden, head.weight, head.targets, 0.8, grad_rows_N=rows)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        policy.packed_policy_loss(**inputs, objective=objective)[0].backward()  # type: ignore[no-untyped-call]
        policy.group_advantage(inputs["advantages_B"], torch_groups)

    inputs["norm"] = torch.tensor(9.0, device="cuda")
    inputs["logprobs_N"].requires_grad_()
    torch_groups = torch.arange(0, 257, 8, device="cuda")
    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0.0, 0.0


def _float32_gemms() -> tuple[float, float]:
    head = _small()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _results(head, Plan())
    names = [event.key.lower() for event in profile.key_averages()]
    if not any("gemm" in name or "nvjet" in name for name in names):
        raise RuntimeError(f"no GEMM among {names}")
    return float(sum("sgemm" in name or "f32f32_f32f32" in name for name in names)), 0.0


def _above_zero() -> tuple[float, float]:
    head = _small("confident", rows=4096)
    best = (head.hidden @ head.weight.T).argmax(dim=1)
    return float(linear_logprob(head.hidden, head.weight, best)[0].max()), 0.0
