"""What an algorithm makes of a micro-batch, against one loop over tokens that knows every choice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bucketrl.bucket.algorithm_config import PRESETS
from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.learner.objective import Denominators, Samples, loss_and_gradients, proximal_logprobs

MAX_TOKENS = 7


@dataclass(frozen=True)
class Token:
    logprob: float
    entropy: float
    behaviour: float
    start: float
    reference: float
    lag: int


Completion = tuple[float, list[Token]]
"""Advantage and tokens."""

hundredths = st.integers(-2400, 0).map(lambda value: value / 100)
near = st.integers(-60, 0).map(lambda value: value / 100)
tokens = st.one_of(
    *(
        st.builds(
            Token,
            logprob=value,
            entropy=st.floats(0.0, 3.0),
            behaviour=value,
            start=value,
            reference=value,
            lag=st.integers(0, 5),
        )
        for value in (near, hundredths)
    )
)
completions = st.lists(
    st.tuples(st.integers(-12, 12).map(lambda value: value / 4), st.lists(tokens, min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


@st.composite
def algorithms(draw: st.DrawFn) -> AlgorithmConfig:
    """Every combination of choices that is not refused."""
    choices: dict[str, Any] = {
        "surrogate": draw(st.sampled_from(["ppo_clip", "cispo", "reinforce"])),
        "aggregation": draw(st.sampled_from(["token_mean", "sequence_mean", "constant"])),
        "proximal": draw(st.sampled_from(["none", "recomputed", "interpolated"])),
        "importance_weight": draw(st.sampled_from(["none", "token", "sequence"])),
        "importance_mask": draw(st.sampled_from(["none", "token", "sequence"])),
        "kl_coefficient": draw(st.sampled_from([0.0, 0.3])),
        "entropy_coefficient": draw(st.sampled_from([0.0, 0.2])),
    }
    if choices["surrogate"] != "reinforce":
        choices["ratio_level"] = draw(st.sampled_from(["token", "sequence"]))
    if choices["surrogate"] == "ppo_clip" and draw(st.booleans()):
        choices["dual_clip"] = 3.0
    if choices["kl_coefficient"]:
        choices["kl_estimator"] = draw(st.sampled_from(["k2", "k3"]))
    if choices["importance_mask"] == "sequence":
        choices |= {"importance_mask_low": 0.8, "importance_mask_high": 1.3}
    try:
        return AlgorithmConfig(**choices)
    except ValidationError:
        assume(False)
        raise


def clamped(x: float) -> float:
    return min(20.0, max(-20.0, x))


def naive(algorithm: AlgorithmConfig, batch: Sequence[Completion]) -> tuple[float, list[float], list[float]]:
    """The loss, and its derivatives by the log-probability and by the entropy of each token."""
    a = algorithm
    loss, by_logprob, by_entropy = 0.0, [], []
    for advantage, members in batch:
        proximal = [
            {
                "none": t.behaviour,
                "recomputed": t.start,
                "interpolated": t.behaviour + t.lag / (t.lag + 1) * (t.logprob - t.behaviour),
            }[a.proximal]
            for t in members
        ]
        xs = [clamped(t.logprob - p) for t, p in zip(members, proximal, strict=True)]
        ws = [
            clamped((t.logprob if a.proximal == "none" else p) - t.behaviour)
            for t, p in zip(members, proximal, strict=True)
        ]
        for t, p, own_x, own_w in zip(members, proximal, xs, ws, strict=True):
            mean_w = sum(ws) / len(ws)
            ratio = math.exp(sum(xs) / len(xs) if a.ratio_level == "sequence" else own_x)
            moves = abs(t.logprob - p) <= 20.0
            if a.surrogate == "reinforce":
                value, slope = -advantage * t.logprob, -advantage
            elif a.surrogate == "cispo":
                weight = min(ratio, 1 + a.clip_high)
                value, slope = -weight * advantage * t.logprob, -weight * advantage
            else:
                inside = min(1 + a.clip_high, max(1 - a.clip_low, ratio))
                value, slope = -ratio * advantage, -ratio * advantage if moves else 0.0
                if -inside * advantage > value:
                    value, slope = -inside * advantage, 0.0
                if a.dual_clip and advantage < 0 and value > -a.dual_clip * advantage:
                    value, slope = -a.dual_clip * advantage, 0.0
            factor = 1.0
            if a.importance_weight != "none":
                factor = min(a.importance_cap, math.exp(own_w if a.importance_weight == "token" else mean_w))
            if a.importance_mask != "none":
                mask_w = math.exp(own_w if a.importance_mask == "token" else mean_w)
                factor *= a.importance_mask_low <= mask_w <= a.importance_mask_high
            value, slope = factor * value, factor * slope
            if a.kl_coefficient:
                gap = clamped(t.logprob - t.reference)
                free = abs(t.logprob - t.reference) <= 20.0
                if a.kl_estimator == "k2":
                    value, slope = value + 0.3 * gap**2 / 2, slope + 0.3 * gap * free
                else:
                    value += 0.3 * (math.exp(-gap) - 1 + gap)
                    slope += 0.3 * (1 - math.exp(-gap)) * free
            value -= a.entropy_coefficient * t.entropy
            share = {
                "token_mean": 1 / sum(len(other) for _, other in batch),
                "sequence_mean": 1 / (len(members) * len(batch)),
                "constant": 1 / (len(batch) * MAX_TOKENS),
            }[a.aggregation]
            loss += share * value
            by_logprob.append(share * slope)
            by_entropy.append(-share * a.entropy_coefficient)
    return loss, by_logprob, by_entropy


def computed(
    algorithm: AlgorithmConfig, batch: Sequence[Completion], parts: Sequence[Sequence[int]]
) -> tuple[float, list[float], list[float]]:
    """The same from the code under test, in micro-batches of the completions named in `parts`."""
    denominators = Denominators(sum(len(members) for _, members in batch), len(batch), MAX_TOKENS)
    total, by_logprob, by_entropy = 0.0, {}, {}
    for part in parts:
        flat = [(index, t) for index in part for t in batch[index][1]]
        column = {
            name: torch.tensor([getattr(t, name) for _, t in flat], dtype=torch.float64)
            for name in ("logprob", "entropy", "behaviour", "start", "reference", "lag")
        }
        samples = Samples(
            behaviour_logprobs=column["behaviour"],
            advantages=torch.tensor([batch[index][0] for index in part], dtype=torch.float64),
            lag=column["lag"].long(),
            cu_seqlens=torch.tensor([0, *(len(batch[index][1]) for index in part)]).cumsum(0),
            start_logprobs=column["start"],
            reference_logprobs=column["reference"],
        )
        logprobs, entropy = column["logprob"].requires_grad_(), column["entropy"].requires_grad_()
        proximal = proximal_logprobs(algorithm, logprobs, samples)
        loss, grad, slopes = loss_and_gradients(algorithm, logprobs, entropy, proximal, samples, denominators)
        assert (slopes is None) == (algorithm.entropy_coefficient == 0)
        slopes = torch.zeros(len(flat)) if slopes is None else slopes
        total += loss.item()
        for (index, _), one, two in zip(flat, grad.tolist(), slopes.tolist(), strict=True):
            by_logprob.setdefault(index, []).append(one)
            by_entropy.setdefault(index, []).append(two)
    order = range(len(batch))
    return total, [x for i in order for x in by_logprob[i]], [x for i in order for x in by_entropy[i]]


def close(one: Any, two: Any) -> None:
    for ours, want in zip(one, two, strict=True):
        assert ours == pytest.approx(want, rel=1e-9, abs=1e-12)


@settings(max_examples=150)
@given(algorithms(), completions)
def test_every_combination_matches_the_loop(algorithm: AlgorithmConfig, batch: list[Completion]) -> None:
    close(computed(algorithm, batch, [range(len(batch))]), naive(algorithm, batch))


@settings(max_examples=100)
@given(algorithms(), completions, st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_the_gradient_does_not_depend_on_the_split(
    algorithm: AlgorithmConfig, batch: list[Completion], where: list[int]
) -> None:
    parts = [[i for i in range(len(batch)) if where[i] == part] for part in range(3)]
    whole = computed(algorithm, batch, [range(len(batch))])
    for ours, want in zip(computed(algorithm, batch, [p for p in parts if p]), whole, strict=True):
        scale = max(1.0, abs(whole[0]))
        assert ours == pytest.approx(want, rel=1e-12, abs=1e-12 * scale)


@given(st.lists(tokens, min_size=1, max_size=20))
def test_the_guessed_proximal_policy_lies_between_as_the_versions_do(batch: list[Token]) -> None:
    """Written with AReaL's versions: step 100 makes version 100 and starts from version 99."""
    policy, behaviour = (
        torch.tensor([getattr(t, name) for t in batch], dtype=torch.float64)
        for name in ("logprob", "behaviour")
    )
    samples = Samples(
        behaviour_logprobs=behaviour,
        advantages=torch.zeros(1),
        lag=torch.tensor([t.lag for t in batch]),
        cu_seqlens=torch.tensor([0, len(batch)]),
    )
    found = proximal_logprobs(AlgorithmConfig(proximal="interpolated"), policy.requires_grad_(), samples)
    want = []
    for t in batch:
        made, proximal, sampled = 100, 99, 99 - t.lag
        want.append(t.behaviour + (proximal - sampled) / (made - sampled) * (t.logprob - t.behaviour))
    assert found is not None
    assert found.tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert not found.requires_grad


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_all_presets_are_one(name: str) -> None:
    """At ratio 1, with completions of one token, each is the plain policy gradient up to its normaliser."""
    batch = [(advantage, [Token(-1.0, 1.0, -1.0, -1.0, -1.0, 0)]) for advantage in (0.5, -1.5, 1.0)]
    algorithm = AlgorithmConfig.model_validate({"name": name})
    _, slopes, _ = computed(algorithm, batch, [range(3)])
    normaliser = 3 * (MAX_TOKENS if algorithm.aggregation == "constant" else 1)
    assert [slope * normaliser for slope in slopes] == pytest.approx([-0.5, 1.5, -1.0], rel=1e-12)


@pytest.mark.parametrize("name", ["default", "grpo", "dr_grpo", "dapo", "reinforce_pp"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Of the presets whose loss is a plain function of the log-probabilities: what is detached in the others
    is held against the loop above."""
    algorithm = AlgorithmConfig.model_validate({"name": name})
    batch = [(1.0, [Token(-0.9, 1.0, -1.0, -1.0, -1.3, 1), Token(-0.4, 1.0, -0.5, -0.5, -0.1, 1)]),
             (-0.5, [Token(-2.0, 1.0, -1.95, -2.0, -2.0, 1)])]  # fmt: skip

    def computed_at(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = [t for _, members in batch for t in members]
        samples = Samples(
            behaviour_logprobs=torch.tensor([t.behaviour for t in flat], dtype=torch.float64),
            advantages=torch.tensor([1.0, -0.5], dtype=torch.float64),
            lag=torch.ones(3, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, 2, 3]),
            reference_logprobs=torch.tensor([t.reference for t in flat], dtype=torch.float64),
        )
        denominators = Denominators(3, 2, MAX_TOKENS)
        return loss_and_gradients(algorithm, logprobs, torch.zeros(3), None, samples, denominators)[:2]

    at = torch.tensor([t.logprob for _, members in batch for t in members], dtype=torch.float64)
    steps = torch.eye(3, dtype=torch.float64) * 1e-6
    want = [(computed_at(at + step)[0] - computed_at(at - step)[0]).item() / 2e-6 for step in steps]
    assert computed_at(at)[1].tolist() == pytest.approx(want, rel=1e-6, abs=1e-8)


def test_what_is_masked_has_no_gradient_and_stays_in_the_denominator() -> None:
    """A weight of 0.01 scales the gradient by just that (Liger-Kernel #1082); a masked token leaves the others
    as they are."""
    weighed = AlgorithmConfig(surrogate="reinforce", importance_weight="token")
    rare = [(1.0, [Token(math.log(0.01), 0.0, 0.0, 0.0, 0.0, 0)])]
    assert computed(weighed, rare, [[0]])[1] == pytest.approx([-0.01])
    masking = AlgorithmConfig(importance_mask="token")
    batch = [(1.0, [Token(-3.0, 0.0, -0.1, 0.0, 0.0, 0), Token(-1.0, 0.0, -1.0, 0.0, 0.0, 0)])]
    assert computed(masking, batch, [[0]])[1] == [0.0, -0.5]


@pytest.mark.parametrize("name", PRESETS)
def test_extreme_log_probabilities_leave_everything_finite(name: str) -> None:
    values = (0.0, -1e-30, -1e4, -1e10)
    batch = [(a, [Token(p, 0.0, m, p, m, 3) for p in values for m in values]) for a in (1.0, -1.0)]
    loss, slopes, _ = computed(AlgorithmConfig.model_validate({"name": name}), batch, [range(2)])
    assert all(map(math.isfinite, [loss, *slopes]))
