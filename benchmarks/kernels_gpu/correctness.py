"""The cases that the interpreter cannot show: real rounding, real tiles, large offsets, no wait for the GPU.

Each check returns what it measured and the most that it may be.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_gpu import correctness_layers, correctness_policy
from benchmarks.kernels_gpu.correctness_policy import Check
from benchmarks.kernels_gpu.heads import REGIMES, Head, Truth, make, relative, truth
from bucketrl.kernels import policy, reference
from bucketrl.kernels.logprob_cuda import linear_logprob as kernel
from bucketrl.kernels.logprob_plan import HOPPER, HOPPER_TOLERANCE, Plan, hopper_error, is_hopper

LOGPROB, GRADIENT = 5e-5, 5e-3
PLANS = {
    "whole rows": Plan(workspace_bytes=1 << 28),
    "hopper": replace(HOPPER, workspace_bytes=1 << 28),
    "tiles": Plan(columns=4096, workspace_bytes=1 << 28),
    "triton": Plan(first="triton", block=256, workspace_bytes=1 << 28),
    "triton, 128 wide": Plan(first="triton", block=128, warps=4, resident=2, workspace_bytes=1 << 28),
}
DEFAULTS = {"cuBLAS": Plan(), "hopper": HOPPER}
"""The plans that are taken where nobody gives one."""


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
    for name, plan in (DEFAULTS | {"triton": Plan(first="triton", block=256)}).items():
        yield f"1 K1 {name}: a chunk of more than 2^31 logits", partial(_beyond_int32, plan)
    for name, plan in DEFAULTS.items():
        yield f"1 K1 {name}: more than 2^31 hidden values", partial(_long, plan)
        yield f"8 K1 {name}: gradient error over that of bfloat16 autograd", partial(_against_autograd, plan)
        yield f"10 K1 {name}: gradient of the most confident rows", partial(_confident, plan)
        yield f"13 K1 {name}: under torch.compile", partial(_compiled, plan)
        yield f"14 K1 {name}: strided hidden states", partial(_strided, plan)
        yield f"18 K1 {name}: memory beside the results, GiB", partial(_memory, plan)
        yield f"20 K1 {name}, K2: the host never waits", partial(_no_wait, plan)
        yield (
            f"23, 29 K1 {name}: the same bits under autocast, in a second backward pass",
            partial(_autocast_twice, plan),
        )
        yield f"25 K1 {name}: GEMMs on float32 operands", partial(_float32_gemms, plan)
        yield f"32 K1 {name}: the greatest log-probability", partial(_above_zero, plan)
        yield f"K1 {name}: few rows, small heads", partial(_few_rows, plan)
        yield f"K1 {name}: values without a gradient", partial(_score, plan)
    if is_hopper(torch.device("cuda")):
        yield "K1: the Hopper kernel's trial at first use", _trial
    yield from correctness_policy.checks()
    yield from correctness_layers.checks()


def run(quick: bool) -> tuple[int, int]:
    """Prints a line for each that fails; returns how many there were and how many failed."""
    count = failed = 0
    plans = dict(list(PLANS.items())[:2]) if quick else PLANS
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


def _beyond_int32(plan: Plan) -> tuple[float, float]:
    head = make(16384, 256, 151936, "uniform", seed=1)
    whole = _results(head, replace(plan, workspace_bytes=16 << 30))
    parts = _results(head, Plan(workspace_bytes=1 << 30))
    return relative(whole[0], parts[0].double()) + relative(whole[2], parts[2].double()), 3e-3


def _long(plan: Plan) -> tuple[float, float]:
    """Backward's rows, too: the last ones are looked at by themselves."""
    rows, size = (1 << 31) // 4096 + 700, 4096
    short = make(700, size, 1000, "mixed", seed=3)
    hidden = torch.zeros(rows, size, dtype=torch.bfloat16, device="cuda")
    hidden[-700:] = short.hidden
    targets = torch.full((rows,), reference.IGNORE_INDEX, device="cuda")
    targets[-700:] = short.targets
    upstream = torch.cat([torch.ones(rows - 700, device="cuda"), short.upstream])
    found = _results(Head(hidden, short.weight, targets, upstream), plan)
    want = _results(short, plan)
    return max(relative(ours[-700:], theirs.double()) for ours, theirs in zip(found, want, strict=True)), 3e-3


def _against_autograd(plan: Plan) -> tuple[float, float]:
    head = _small()
    want = truth(head)
    ours = relative(_results(head, plan)[2][want.rows], want.grad)
    hidden = head.hidden.clone().requires_grad_()
    log_softmax = torch.log_softmax((hidden @ head.weight.T).float(), dim=1)
    log_softmax.gather(1, head.targets[:, None])[:, 0].backward(head.upstream)  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    return ours / relative(hidden.grad[want.rows], want.grad), 1.2


def _confident(plan: Plan) -> tuple[float, float]:
    head = _small("confident")
    want: Truth = truth(head, 256)
    found = _results(head, plan)[2][want.rows].double()
    rows = (want.logprobs > -1e-2) & (want.grad.norm(dim=1) > 1e-30)
    error = (found - want.grad).norm(dim=1) / want.grad.norm(dim=1)
    return float(error[rows].max()), 1e-2


def _compiled(plan: Plan) -> tuple[float, float]:
    head = _small(rows=64)

    def call(hidden: Tensor) -> Tensor:
        logprobs: Tensor = kernel(hidden * 1.5, head.weight, head.targets, 0.7, plan=plan)[0]
        return logprobs * 2.0

    def results(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        hidden = head.hidden.clone().requires_grad_()
        logprobs = function(hidden)
        return logprobs.detach(), torch.autograd.grad(logprobs, hidden, head.upstream)[0]

    pairs = zip(results(torch.compile(call)), results(call), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs), 0.0


def _autocast_twice(plan: Plan) -> tuple[float, float]:
    head = _small()
    want = _results(head, plan)
    hidden = head.hidden.clone().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logprobs, entropy = kernel(hidden, head.weight, head.targets, plan=plan)
        grads = [torch.autograd.grad(logprobs, hidden, head.upstream, retain_graph=True)[0] for _ in range(2)]
    pairs = zip([logprobs, entropy, *grads], [*want, want[2]], strict=True)
    return float(sum(not torch.equal(ours, theirs) for ours, theirs in pairs)), 0.0


def _strided(plan: Plan) -> tuple[float, float]:
    head = _small()
    wide = torch.full((700, 600), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :512] = head.hidden
    return _worst(_compare(replace(head, hidden=wide[:, :512]), plan)), 1.0


def _memory(plan: Plan) -> tuple[float, float]:
    head = make(8192, 1024, 151936, "uniform", seed=2)
    hidden = head.hidden.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = kernel(hidden, head.weight, head.targets, plan=plan)
    logprobs.backward(head.upstream)
    assert head.weight.grad is None
    return (torch.cuda.max_memory_allocated() - before) / 2**30, 2.2


def _no_wait(plan: Plan) -> tuple[float, float]:
    head, (inputs, objective) = _small(), correctness_policy.policy_inputs("gspo")
    rows = torch.arange(700) % 3 != 0
    hidden = head.hidden.requires_grad_()

    def work() -> None:
        logprobs, _ = kernel(hidden, head.weight, head.targets, 0.8, grad_rows_N=rows, plan=plan)
        logprobs.sum().backward()
        policy.packed_policy_loss(**inputs, objective=objective)[0].backward()  # type: ignore[no-untyped-call]
        policy.packed_policy_grad(**inputs, objective=objective)
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


def _float32_gemms(plan: Plan) -> tuple[float, float]:
    head = _small()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _results(head, plan)
    names = [event.key.lower() for event in profile.key_averages()]
    if not any("gemm" in name or "nvjet" in name for name in names):
        raise RuntimeError(f"no GEMM among {names}")
    return float(sum("sgemm" in name or "f32f32_f32f32" in name for name in names)), 0.0


def _above_zero(plan: Plan) -> tuple[float, float]:
    head = _small("confident", rows=4096)
    best = (head.hidden @ head.weight.T).argmax(dim=1)
    return float(kernel(head.hidden, head.weight, best, plan=plan)[0].max()), 0.0


def _few_rows(plan: Plan) -> tuple[float, float]:
    """Fewer than a tile has, and one more; and heads smaller than a tile."""
    heads = [_small(rows=rows) for rows in (1, 5, 64, 127, 129)]
    heads += [_small(rows=129, vocabulary=200, size=size) for size in (8, 40, 264)]
    return max(_worst(_compare(head, plan), grad=1e-2) for head in heads), 1.0


def _score(plan: Plan) -> tuple[float, float]:
    head = _small()
    want = _results(head, plan)
    with torch.no_grad():
        found = kernel(head.hidden, head.weight, head.targets, plan=plan)
    return max(float((a - b).abs().max()) for a, b in zip(found, want[:2], strict=True)), 1e-5


def _trial() -> tuple[float, float]:
    return hopper_error(torch.device("cuda", torch.cuda.current_device())), HOPPER_TOLERANCE
