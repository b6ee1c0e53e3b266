"""The packed forward against transformers' own, LoRA set-up, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from tests.learner.worlds import (
    VOCAB,
    make_config,
    make_group,
    sample_group,
    save_tiny_model,
    stock_model,
)
from transformers import AutoModelForCausalLM

from bucketrl.bucket.errors import UserError
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.packing import pack, sequences
from bucketrl.learner.publish import probe_tokens, save_adapter

CPU = torch.device("cpu")


def load(folder: Path, *, perturbed: bool = True, **sections: object) -> PolicyModel:
    """A policy whose adapter does something, unless `perturbed` is False."""
    policy = PolicyModel.load(folder, make_config(**sections), CPU)
    if perturbed:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
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
        if budget != 17:  # first fit keeps the order of the items if each or none gets its own
            torch.testing.assert_close(found, torch.cat(want), rtol=0, atol=1e-5)
            torch.testing.assert_close(found, sampled, rtol=0, atol=1e-5)
        assert sorted(found.tolist()) == pytest.approx(sorted(torch.cat(want).tolist()), abs=1e-5)


def test_entropy_equals_that_of_the_full_distribution(model_folder: Path) -> None:
    policy = load(model_folder, perturbed=False)
    (batch,) = pack(sequences([make_group(0, rewards=[0.0, 1.0])])[:1], 100)
    _, entropy = policy.logprobs(batch)
    stock = AutoModelForCausalLM.from_pretrained(model_folder)
    logits = stock(input_ids=torch.from_numpy(batch.input_ids)[None]).logits[0, batch.rows]
    want = torch.distributions.Categorical(logits=logits / policy.config.sampling.temperature).entropy()
    torch.testing.assert_close(entropy, want, rtol=0, atol=1e-5)


def test_sliding_window_attention_matches_transformers(tmp_path: Path) -> None:
    folder = save_tiny_model(
        tmp_path,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
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
