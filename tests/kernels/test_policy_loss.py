"""The definition of the packed policy loss: the formulas, token by token in float64; the same without autograd.

The numbers in the names are those of the bug reports of other implementations that the case comes from.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrl.kernels.policy import Objective, packed_policy_grad, packed_policy_loss

N = 23
CU = torch.tensor([0, 4, 4, 15, 21])
"""Four sequences, the second empty; two tokens of padding."""
OBJECTIVES = {
    "ppo": Objective(dual_clip=1.5),
    "gspo": Objective(ratio_level="sequence", clip_low=3e-2, clip_high=4e-2),
    "cispo": Objective(surrogate="cispo", kl_coefficient=0.1, kl_estimator="k1"),
    "reinforce, all terms": Objective(
        surrogate="reinforce", importance_weight="token", importance_cap=1.2, importance_mask="token",
        importance_mask_low=0.6, importance_mask_high=1.6, kl_coefficient=0.1, entropy_coefficient=0.02,
    ),
    "ppo, k2": Objective(
        kl_coefficient=0.5, kl_estimator="k2", importance_weight="token", importance_cap=1.0
    ),
    "all by sequence": Objective(
        surrogate="cispo", ratio_level="sequence", importance_weight="sequence", importance_cap=1.02,
        importance_mask="sequence", importance_mask_low=0.9, importance_mask_high=1.3,
    ),
    "masked by sequence": Objective(
        importance_weight="token", importance_mask="sequence", importance_mask_low=0.97, importance_mask_high=1.3
    ),
}  # fmt: skip


def batch(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(N, generator=generator) * scale

    logprobs = -torch.rand(N, generator=generator) * 3
    return {
        "logprobs_N": logprobs,
        "behaviour_N": logprobs + normal(0.4),
        "advantages_B": torch.tensor([1.0, 5.0, -1.5, 0.7]),
        "cu_seqlens": CU,
        "norm": 11.0,
        "mask_N": torch.rand(N, generator=generator) > 0.3,
        "proximal_N": logprobs + normal(0.3),
        "reference_N": logprobs + normal(0.5),
        "entropy_N": torch.rand(N, generator=generator),
        "weights_B": torch.tensor([1.0, 1.0, 0.5, 0.25]),
    }


def run(inputs: dict[str, Any], objective: Objective, kernels: SimpleNamespace | None = None) -> list[Tensor]:
    """Loss, statistics, and the gradients in the log-probabilities and entropies."""
    given = dict(inputs)
    given["logprobs_N"] = given["logprobs_N"].clone().requires_grad_()
    entropy = given.get("entropy_N")
    given["entropy_N"] = entropy = None if entropy is None else entropy.clone().requires_grad_()
    if kernels is None:
        loss, stats = packed_policy_loss(**given, objective=objective)
    else:
        loss, stats = kernels.policy.packed_policy_loss(
            given["logprobs_N"],
            entropy,
            (given["behaviour_N"], given["advantages_B"], given["cu_seqlens"], given["norm"]),
            tuple(given.get(name) for name in ("mask_N", "proximal_N", "reference_N", "weights_B")),
            objective,
        )
    (loss * 4.0).backward()
    found = [loss.detach(), stats, given["logprobs_N"].grad]
    return found if entropy is None else [*found, entropy.grad]


def run_direct(
    inputs: dict[str, Any], objective: Objective, kernels: SimpleNamespace | None = None
) -> list[Tensor]:
    """What `run` gives, without autograd, and with gradients of the loss itself."""
    if kernels is None:
        loss, grad, entropy_grad, stats = packed_policy_grad(**inputs, objective=objective)
    else:
        loss, grad, entropy_grad, stats = kernels.policy.packed_policy_grad(
            inputs["logprobs_N"],
            inputs.get("entropy_N"),
            (inputs["behaviour_N"], inputs["advantages_B"], inputs["cu_seqlens"], inputs["norm"]),
            tuple(inputs.get(name) for name in ("mask_N", "proximal_N", "reference_N", "weights_B")),
            objective,
        )
    assert (entropy_grad is None) == (inputs.get("entropy_N") is None)
    found = [loss, stats, grad]
    return found if entropy_grad is None else [*found, entropy_grad]


def in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def agree(
    inputs: dict[str, Any], objective: Objective, kernels: SimpleNamespace | None = None
) -> list[Tensor]:
    """`run` after the form without autograd was found to give the same bits, nothing of it with a gradient."""
    found, direct = run(inputs, objective, kernels), run_direct(inputs, objective, kernels)
    assert not any(tensor.requires_grad for tensor in direct)
    for one, two, factor in zip(found, direct, (1.0, 1.0, 4.0, 4.0), strict=False):
        assert one is None or torch.equal(one, two * factor)
    return found


def levels(logs: dict[int, float]) -> dict[str, dict[int, float]]:
    """Ratios by token and, of a sequence's tokens, as their geometric mean."""
    mean = math.exp(sum(logs.values()) / len(logs)) if logs else 1.0
    return {"token": {t: math.exp(log) for t, log in logs.items()}, "sequence": dict.fromkeys(logs, mean)}


def by_hand(inputs: dict[str, Any], o: Objective) -> tuple[float, list[float]]:
    """Loss and ∂ loss / ∂ log π, token by token from the formulas; everything live is finite."""
    bounds = CU.tolist()
    live = [t for t in range(bounds[-1]) if bool(inputs["mask_N"][t])]
    get = {name: value.tolist() for name, value in inputs.items() if isinstance(value, Tensor)}
    proximal_given = "proximal_N" in get
    loss, grads = 0.0, [0.0] * N
    for first, stop, advantage, weight in zip(
        bounds, bounds[1:], get["advantages_B"], get["weights_B"], strict=False
    ):
        tokens = [t for t in live if first <= t < stop]
        proximal = get["proximal_N" if proximal_given else "logprobs_N"]
        centre = get["proximal_N" if proximal_given else "behaviour_N"]
        ratios = levels({t: get["logprobs_N"][t] - centre[t] for t in tokens})
        quotients = levels({t: proximal[t] - get["behaviour_N"][t] for t in tokens})
        for t in tokens:
            ratio, logprob = ratios[o.ratio_level][t], get["logprobs_N"][t]
            bounded = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
            if o.surrogate == "ppo_clip":
                value = min(ratio * advantage, bounded * advantage)
                slope = ratio * advantage if value == ratio * advantage else 0.0
                if o.dual_clip is not None and advantage < 0 and value < o.dual_clip * advantage:
                    value, slope = o.dual_clip * advantage, 0.0
            else:
                slope = advantage * (min(ratio, 1 + o.clip_high) if o.surrogate == "cispo" else 1.0)
                value = slope * logprob
            correction = 1.0
            if o.importance_weight != "none":
                correction = min(quotients[o.importance_weight][t], o.importance_cap)
            if o.importance_mask != "none":
                quotient = quotients[o.importance_mask][t]
                correction *= o.importance_mask_low <= quotient <= o.importance_mask_high
            d = get["reference_N"][t] - logprob
            kl, kl_slope = {
                "k1": (-d, 1.0),
                "k2": (d * d / 2, -d),
                "k3": (math.exp(d) - d - 1, 1 - math.exp(d)),
            }[o.kl_estimator]
            entropy = o.entropy_coefficient * get["entropy_N"][t]
            loss += weight * (o.kl_coefficient * kl - correction * value - entropy) / inputs["norm"]
            grads[t] = weight * (o.kl_coefficient * kl_slope - correction * slope) / inputs["norm"]
    return loss, grads


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("seed", range(6))
def test_the_definition_is_the_formulas(objective: Objective, seed: int) -> None:
    inputs = in_float64(batch(seed))
    if seed % 2:
        del inputs["proximal_N"]
    loss, _, grad, entropy_grad = run(inputs, objective)
    want, want_grads = by_hand(inputs, objective)
    assert float(loss) == pytest.approx(want, abs=1e-12)
    assert (grad / 4.0).tolist() == pytest.approx(want_grads, abs=1e-12)
    weights_N = torch.tensor([1.0] * 4 + [0.5] * 11 + [0.25] * 6 + [0.0] * 2) * inputs["mask_N"]
    torch.testing.assert_close(entropy_grad, -4 * objective.entropy_coefficient * weights_N.double() / 11)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_the_gradient_without_autograd_is_the_same_bits(objective: Objective) -> None:
    """Also of leaves of a graph, inside `no_grad`, and without optional inputs."""
    inputs = in_float64(batch())
    agree(inputs, objective)
    agree({name: inputs[name] for name in list(inputs)[:5]}, objective)
    want = run_direct(inputs, objective)
    in_a_graph = inputs | {
        name: inputs[name].clone().requires_grad_() for name in ("logprobs_N", "entropy_N")
    }
    with torch.no_grad():
        assert all(map(torch.equal, run_direct(in_a_graph, objective), want))


def test_11_a_small_importance_weight_scales_the_gradient() -> None:
    """log π_prox - log μ = log 0.01 everywhere: every gradient is a hundredth."""
    inputs = in_float64(batch()) | {"reference_N": None, "entropy_N": None}
    same = inputs | {"behaviour_N": inputs["proximal_N"]}
    small = inputs | {"behaviour_N": inputs["proximal_N"] - math.log(0.01)}
    weighed = Objective(importance_weight="token")
    torch.testing.assert_close(run(small, weighed)[2], run(same, weighed)[2] * 0.01)
    assert torch.equal(run(small, Objective())[2], run(same, Objective())[2])


@pytest.mark.parametrize("pieces", [2, 3])
def test_12_any_split_into_micro_batches_has_the_same_gradient(pieces: int) -> None:
    inputs = in_float64(batch())
    whole = run(inputs, OBJECTIVES["gspo"])
    loss, grads = 0.0, []
    # Between sequences: 0 to 4, 4 to 15 (to 4 and 4 to 4 are empty), 15 to 21.
    for first, stop in [(0, 1), (1, 4)] if pieces == 2 else [(0, 1), (1, 3), (3, 4)]:
        begin, end = int(CU[first]), int(CU[stop])
        part = {
            name: value[begin:end] if name.endswith("_N") else value for name, value in inputs.items()
        } | {
            "cu_seqlens": CU[first : stop + 1] - begin,
            "advantages_B": inputs["advantages_B"][first:stop],
            "weights_B": inputs["weights_B"][first:stop],
        }
        found = run(part, OBJECTIVES["gspo"])
        loss += float(found[0])
        grads.append(found[2])
    assert loss == pytest.approx(float(whole[0]), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), whole[2][: CU[-1]])


def test_13_the_same_bits_under_torch_compile() -> None:
    inputs = batch()
    want = packed_policy_loss(**inputs, objective=Objective())[0]
    compiled = torch.compile(
        lambda x: packed_policy_loss(**(inputs | {"logprobs_N": x}), objective=Objective())[0],
        backend="eager",
    )
    assert torch.equal(compiled(inputs["logprobs_N"]), want)


def test_a_dual_clip_that_clips_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dual_clip is 1\.0"):
        replace(Objective(), dual_clip=1.0)
