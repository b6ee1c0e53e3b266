"""The packed forward against transformers' own, LoRA set-up, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.learner.worlds import (
    VOCAB,
    make_config,
    make_group,
    replace_first,
    sample_group,
    save_tiny_model,
    stock_model,
)
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner import activations, fused_block
from bucketrl.learner.attention_varlen import VarlenLayout
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.packing import MicroBatch, TokenSequence, pack, sequences
from bucketrl.learner.publish import probe_tokens, save_adapter

CPU = torch.device("cpu")


def load(
    folder: Path, *, perturbed: bool = True, device: torch.device = CPU, **sections: object
) -> PolicyModel:
    """A policy whose adapter does something, unless `perturbed` is False."""
    policy = PolicyModel.load(folder, make_config(**sections), device)
    if perturbed:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(device))
    return policy


def test_logprobs_equal_transformers_and_peft_for_any_packing(model_folder: Path, tmp_path: Path) -> None:
    """Stock model, one unpacked sequence at a time, full logits at the sampling temperature."""
    policy = load(model_folder)
    save_adapter(tmp_path, policy)
    stock = stock_model(model_folder, tmp_path)
    group = sample_group(stock, 3, config=policy.config, version=0)
    items = sequences([group])
    want = []
    for item in items:
        logits = stock(input_ids=torch.from_numpy(item.input_ids)[None]).logits[0, item.rows]
        log_softmax = torch.log_softmax(logits / policy.config.sampling.temperature, dim=-1)
        want.append(log_softmax.gather(1, torch.from_numpy(item.targets)[:, None])[:, 0])
    sampled = torch.cat([torch.from_numpy(item.behaviour_logprobs) for item in items])
    for budget in (1, 17, 1000):
        found = torch.cat([policy.logprobs(batch)[0] for batch in pack(items, budget)])
        torch.testing.assert_close(found, torch.cat(want), rtol=0, atol=1e-5)
        torch.testing.assert_close(found, sampled, rtol=0, atol=1e-5)


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers computes norms in float32 whatever the model's type, which would hide what is compared here."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon
        normed: torch.Tensor = self.weight * hidden * variance.rsqrt()
        return normed

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


def uneven_groups() -> list[TrajectoryGroup]:
    """Prompts and completions of one token among others, tokens of an environment, a group of one."""
    first = make_group(
        0,
        prompt=(5, 6, 7, 8),
        completions=[(9, 10, 11), (12,), (13,), (14, 15, 16, 17)],
        rewards=[1, 0, 0, 0],
    )
    masked = replace_first(first, loss_mask=(True, False, True))
    one_token = make_group(1, prompt=(20,), completions=[(21, 22), (23,), (24, 25)], rewards=[1, 0, 1])
    alone = make_group(2, prompt=(30, 31, 32), completions=[(33,)], rewards=[1])
    return [masked, one_token, alone]


def one_by_one(items: list[TokenSequence]) -> list[TokenSequence]:
    """As if no two had a prompt in common."""
    return [dataclasses.replace(item, group=place) for place, item in enumerate(items)]


def gradient_of(policy: PolicyModel, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Of a sum in which every token has a weight of its own."""
    for parameter in policy.parameters.values():
        parameter.grad = None
    for batch in batches:
        logprobs, _ = policy.logprobs(batch)
        weights = torch.from_numpy(np.sin(batch.targets + batch.sequence_ids)).to(policy.device)
        (logprobs * weights).sum().backward()
    assert all(
        (parameter.grad is not None) == parameter.requires_grad for parameter in policy._peft.parameters()
    )
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items()}


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("sliding", [False, True])
def test_the_gradient_with_shared_prompts_is_that_of_one_sequence_at_a_time(
    model_folder: Path, tmp_path: Path, sliding: bool
) -> None:
    folder = model_folder if not sliding else save_tiny_model(tmp_path, **SLIDING)
    policy = load(folder)
    policy._peft.double()
    items = sequences(uneven_groups())
    want = gradient_of(policy, pack(one_by_one(items), 1))
    assert max(float(each.abs().max()) for each in want.values()) > 0.1
    for some, budget in ((one_by_one(items), 1000), (items, 1000), (items, 8), (items, 12)):
        for name, gradient in gradient_of(policy, pack(some, budget)).items():
            torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-12, msg=f"{name}, {budget}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sliding", [False, True])
def test_a_gpu_computes_the_gradient_of_the_cpu(model_folder: Path, tmp_path: Path, sliding: bool) -> None:
    folder = model_folder if not sliding else save_tiny_model(tmp_path, **SLIDING)
    batches = pack(sequences(uneven_groups()), 1000)
    want = gradient_of(load(folder), batches)
    policy = load(folder, model={"dtype": "bfloat16"}, device=torch.device("cuda"))
    assert policy._make_layout.func is VarlenLayout
    for name, gradient in gradient_of(policy, batches).items():
        assert float((gradient.cpu() - want[name]).norm() / want[name].norm()) < 0.1, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_changes_no_bit_of_the_gradient_and_keeps_less(model_folder: Path, dtype: str) -> None:
    items = sequences(uneven_groups())

    def run(checkpointing: bool) -> tuple[dict[str, torch.Tensor], int]:
        learner = {"activation_checkpointing": checkpointing}
        policy = load(model_folder, learner=learner, model={"dtype": dtype})
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.logprobs(pack(items, 1000)[0])
        return gradient_of(policy, pack(items, 12)), sum(each.nbytes for each in kept)

    (whole, kept_whole), (again, kept_again) = run(False), run(True)
    for name, gradient in whole.items():
        assert torch.equal(gradient, again[name])
    assert kept_again < kept_whole / 4


def test_the_entropy_can_be_differentiated(model_folder: Path) -> None:
    policy = load(model_folder)
    (batch,) = pack(sequences(uneven_groups()), 1000)
    assert not policy.logprobs(batch)[1].requires_grad
    _, entropy = policy.logprobs(batch, entropy_grad=True)
    (name, parameter), *_ = policy.parameters.items()
    (found,) = torch.autograd.grad(entropy.sum(), [parameter])
    with torch.no_grad():
        step = 1e-3 * found / found.norm()
        parameter.add_(step)
        above = float(policy.logprobs(batch)[1].double().sum())
        parameter.sub_(2 * step)
        below = float(policy.logprobs(batch)[1].double().sum())
    assert (above - below) / 2e-3 == pytest.approx(float(found.norm()), rel=0.02), name


def test_a_learner_that_does_not_fit_is_refused_at_load(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "device_memory", lambda _: (1 << 20, "a toaster"))
    with pytest.raises(UserError, match=r"does not fit.*a toaster.*lower learner\.tokens_per_microbatch"):
        load(model_folder)


def test_entropy_equals_that_of_the_full_distribution(model_folder: Path) -> None:
    policy = load(model_folder, perturbed=False)
    (batch,) = pack(sequences([make_group(0, rewards=[0.0, 1.0])])[:1], 100)
    _, entropy = policy.logprobs(batch)
    stock = AutoModelForCausalLM.from_pretrained(model_folder)
    logits = stock(input_ids=torch.from_numpy(batch.input_ids)[None]).logits[0, batch.rows]
    want = torch.distributions.Categorical(logits=logits / policy.config.sampling.temperature).entropy()
    torch.testing.assert_close(entropy, want, rtol=0, atol=1e-5)


SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}


def test_sliding_window_attention_matches_transformers(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, **SLIDING)
    policy = load(folder, perturbed=False)
    tokens = tuple(range(2, 22))
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logits = stock(input_ids=torch.tensor([tokens])).logits[0, :-1]
    want = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert policy.score(tokens) == pytest.approx(want.tolist(), abs=1e-5)


def test_an_untrained_adapter_changes_nothing_and_a_trained_one_can_be_switched_off(
    model_folder: Path,
) -> None:
    probe = probe_tokens(0, VOCAB)
    fresh, trained = load(model_folder, perturbed=False), load(model_folder)
    base = fresh.score(probe)
    with trained.base_only():
        assert trained.score(probe) == base
    assert max(abs(a - b) for a, b in zip(trained.score(probe), base, strict=True)) > 0.01


def test_the_adapter_starts_from_the_seed_alone(model_folder: Path) -> None:
    torch.manual_seed(1)
    one = load(model_folder, perturbed=False)
    torch.manual_seed(2)
    two = load(model_folder, perturbed=False)
    other = load(model_folder, perturbed=False, seed=8)
    for name, value in one.parameters.items():
        assert torch.equal(value, two.parameters[name])
    assert any(not torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())


def test_only_the_adapter_is_trained_in_float32_on_a_bfloat16_base(model_folder: Path) -> None:
    policy = load(model_folder, perturbed=False, model={"dtype": "bfloat16"})
    assert {parameter.dtype for parameter in policy.parameters.values()} == {torch.float32}
    assert all("lora_" in name for name in policy.parameters)
    (batch,) = pack(sequences([make_group(0, rewards=[0.0, 1.0])]), 100)
    logprobs, _ = policy.logprobs(batch)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert all(parameter.grad is not None for parameter in policy.parameters.values())


def test_all_linear_is_every_projection_and_never_the_head(model_folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, load(model_folder, perturbed=False))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip


def test_named_targets_are_the_only_ones_adapted(model_folder: Path) -> None:
    policy = load(model_folder, perturbed=False, lora={"target_modules": ("v_proj", "q_proj")})
    assert {name.split(".")[-3] for name in policy.parameters} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("target", ["c_attn", "gate_up_proj"])
def test_a_target_that_the_model_lacks_is_refused_with_the_list_of_those_it_has(
    model_folder: Path, target: str
) -> None:
    with pytest.raises(UserError, match=rf"lora\.target_modules.*{target}; it has down_proj, gate_proj"):
        load(model_folder, lora={"target_modules": ("q_proj", target)})


@pytest.mark.parametrize("target", ["lm_head", "model.embed_tokens"])
def test_an_adapter_on_the_head_or_the_embeddings_is_refused(target: str) -> None:
    with pytest.raises(ValidationError, match=f"{target} cannot be served"):
        make_config(lora={"target_modules": ("q_proj", target)})


def test_a_model_that_transforms_its_logits_is_refused(tmp_path: Path) -> None:
    """Cohere scales its logits after the head: the fused head would be silently wrong."""
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    CohereForCausalLM(
        CohereConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            logit_scale=0.1,
            initializer_range=0.5,
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="CohereForCausalLM cannot be trained"):
        load(tmp_path)


def is_fused(policy: PolicyModel) -> bool:
    return any("forward" in vars(module) for module in policy._decoder.layers)


def test_fused_blocks_are_kept_when_they_compute_the_same(model_folder: Path) -> None:
    policy, plain = load(model_folder, perturbed=False), load(model_folder, perturbed=False)
    policy._fuse_blocks()
    assert is_fused(policy)
    for name, parameter in policy.parameters.items():
        assert torch.equal(parameter, plain.parameters[name])
        assert parameter.grad is None


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_fused_blocks_that_do_not_work_here_are_not_used(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    original = fused_block.swiglu_lora_linear

    def broken(gate_up: torch.Tensor, *rest: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel image")
        return original(gate_up.roll(1, dims=0), *rest)

    policy = load(model_folder, perturbed=False)
    want = policy.score(tuple(range(20)))
    monkeypatch.setattr(fused_block, "swiglu_lora_linear", broken)
    policy._fuse_blocks()
    assert "do not work here" in caplog.text
    assert not is_fused(policy)
    assert policy.score(tuple(range(20))) == pytest.approx(want, abs=1e-5)
