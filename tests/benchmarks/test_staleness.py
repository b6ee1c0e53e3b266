"""The staleness study samples with the policy that it says, in the order and the time that it says, and reports
what its runs ended with."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.staleness import __main__ as program
from benchmarks.staleness import schedule
from benchmarks.staleness.__main__ import figures, main
from benchmarks.staleness.grid import METHODS, OUTER_LAGS, STUDIES, Key, Study, in_order
from benchmarks.staleness.play import Curve, Run
from benchmarks.staleness.sampler import Decoder
from benchmarks.staleness.schedule import Order, Outcome, play_all
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.jobs.models import TINY_ARITHMETIC
from bucketrl.learner import packing

TINY = STUDIES["tiny", "cpu"]
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def curve(*heldout: float) -> Curve:
    return Curve(list(range(len(heldout))), list(heldout), [], 1.0)


def test_the_figures_are_means_over_the_end_and_over_the_seeds() -> None:
    found = figures(
        {
            ("clip", 0, 0): curve(0.0, 0.5, 0.6, 0.7),
            ("clip", 0, 1): curve(0.0, 0.7, 0.8, 0.9),
            ("tis", 4, 0): curve(0.0, 0.1),
        }
    )
    assert found["reward_by_method_and_lag"]["clip"]["0"] == [0.7, pytest.approx(0.1414, abs=1e-4)]
    assert found["reward_by_method_and_lag"]["tis"] == {"4": [0.05, 0.0]}
    assert found["sync_reward"] == 0.7


@pytest.mark.parametrize("study", STUDIES.values(), ids=map(" ".join, STUDIES))
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_configuration_of_every_study(study: Study, method: str) -> None:
    config = study.config(method, 1, 10)
    assert (config.algorithm.steps, config.seed) == (10, 1)
    assert study.drawing.groups * study.drawing.times >= config.algorithm.groups_per_step


def test_the_outer_lags_of_the_first_seed_come_first_and_nothing_twice() -> None:
    keys = in_order(list(METHODS), [0, 1, 2, 4, 8, 16], 2)
    assert len(set(keys)) == len(keys) == 2 * 6 * len(METHODS)
    first = 3 * len(METHODS)
    assert {(method, lag, 0) for method in METHODS for lag in OUTER_LAGS} == set(keys[:first])
    assert [seed for _, _, seed in keys] == [0] * 2 * first + [1] * 2 * first


@pytest.mark.parametrize("of", [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
def test_the_decoder_computes_what_transformers_does(of: tuple[Any, Any]) -> None:
    """With shared key heads, padding, the cache, and an adapter in the weights."""
    causal = of[0](of[1](**SHAPE))
    generator = torch.Generator().manual_seed(0)
    scale = 2.0
    adapter: dict[str, torch.Tensor] = {}
    merged: dict[str, torch.Tensor] = {}
    for name, weight in causal.requires_grad_(False).named_parameters():
        weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
        if "_proj" in name:
            prefix = "base_model.model." + name.removesuffix("weight")
            a, b = (0.3 * torch.randn(size, 4, generator=generator) for size in reversed(weight.shape))
            adapter |= {f"{prefix}lora_A.weight": a.T, f"{prefix}lora_B.weight": b}
            merged[name] = weight + scale * b @ a.T
    decoder = Decoder(causal, scale)
    decoder.load(adapter)
    tokens = torch.randint(0, 40, (2, 7), generator=generator)
    lengths = torch.tensor([4, 7])
    following = torch.randint(0, 40, (4, 3), generator=generator)
    logits, cache = decoder.read(tokens, lengths, copies=2, room=3)
    found = [logits] + [decoder.advance(following[:, column, None], cache) for column in range(3)]
    causal.load_state_dict(merged, strict=False)
    for row in range(4):
        prompt = tokens[row // 2, 7 - lengths[row // 2] :]
        want = causal(torch.cat([prompt, following[row]])[None]).logits[0, -4:]
        assert torch.allclose(torch.stack(found, 1)[row], want, atol=1e-4)


def test_a_run_is_cut_short_when_it_is_told_to() -> None:
    run = Run(TINY.config("clip", 3, 4), TINY_ARITHMETIC, 4, TINY.drawing, torch.device("cpu"))
    seen: list[tuple[int, float]] = []

    def report(step: int, heldout: float) -> bool:
        seen.append((step, heldout))
        return step == 1

    short = run.play(lag=0, every=1, report=report)
    assert short.steps == [0, 1]
    assert seen == list(zip(short.steps, short.heldout, strict=True))


KEYS: list[Key] = [("clip", lag, 0) for lag in range(5)]


def played(monkeypatch: pytest.MonkeyPatch, play: Callable[[Key], Curve], seconds: float) -> Outcome:
    """What comes of `KEYS` one after the other, each by `play`, in threads."""
    monkeypatch.setattr(schedule, "ProcessPoolExecutor", lambda processes, **_: ThreadPoolExecutor(processes))
    monkeypatch.setattr(schedule, "_play", lambda key, order: play(key))
    order = Order(TINY, TINY_ARITHMETIC, 2, 4, time.time() + seconds)
    return play_all(KEYS, order, 0, 1, lambda text: None)


def test_what_does_not_fit_into_the_time_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(key: Key) -> Curve:
        time.sleep(0.05)
        return curve(0.0, 0.5, 0.6) if key[1] == 0 else curve(0.0, 0.5)

    outcome = played(monkeypatch, play, 0.12)
    begun = [*outcome.curves, *outcome.cut_short]
    assert list(outcome.curves) == KEYS[:1]
    assert begun + outcome.not_started == KEYS
    assert outcome.not_started
    assert outcome.seconds_a_run >= 0.05


def test_nothing_is_started_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(key: Key) -> Curve:
        if key[1] == 1:
            raise ValueError("out of luck")
        return curve(0.0, 0.5, 0.6)

    outcome = played(monkeypatch, play, 60)
    assert list(outcome.curves) == KEYS[:1]
    assert outcome.failed == {KEYS[1]: "ValueError: out of luck"}
    assert outcome.not_started == KEYS[2:]


@pytest.mark.parametrize(("failed", "status"), [({}, 0), ({("clip", 1, 0): "why"}, 1)])
def test_the_record_names_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failed: dict[Key, str], status: int
) -> None:
    outcome = Outcome({("clip", 0, 0): curve(0.2, 0.4)}, {("clip", 2, 0): curve(0.2)}, failed)
    monkeypatch.setattr(program, "play_all", lambda *_: outcome)
    assert main(["--lags", "0,1,2", "--methods", "clip", "--seeds", "1", "--out", str(tmp_path)]) == status
    record = json.loads((tmp_path / "staleness.json").read_text())
    assert record["left_out"] == ["clip lag 1 seed 0", "clip lag 2 seed 0"]
    assert list(record["curves"]) == ["clip lag 0 seed 0"]
    assert record["figures"]["reward_by_method_and_lag"] == {"clip": {"0": [0.3, 0.0]}}
    assert (tmp_path / "staleness.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_step_trains_on_what_the_policy_of_lag_steps_before_has_drawn() -> None:
    run = Run(TINY.config("clip", 3, 4), TINY_ARITHMETIC, 8, TINY.drawing, torch.device("cpu"))
    adapters = [run._adapter()]
    seen: list[int] = []
    train = run._trainer.train

    def checked(groups: Sequence[TrajectoryGroup], step: int, stopping: object) -> dict[str, float]:
        now = run._adapter()
        [version] = {v for g in groups for t in g.trajectories for v in t.policy_versions}
        seen.append(version)
        with torch.no_grad():
            for name, parameter in run._policy.parameters.items():
                parameter.copy_(adapters[version][name])
        [batch] = packing.pack(packing.sequences(groups), 1 << 20)
        logprobs, _ = run._policy.logprobs(batch)
        assert logprobs.detach().numpy() == pytest.approx(batch.behaviour_logprobs, abs=1e-4)
        with torch.no_grad():
            for name, parameter in run._policy.parameters.items():
                parameter.copy_(now[name])
        metrics = train(groups, step, lambda: False)
        adapters.append(run._adapter())
        return metrics

    run._trainer.train = checked  # type: ignore[method-assign]
    run.play(lag=2, every=2, report=lambda step, heldout: False)
    assert seen == [0, 0, 0, 1]
