"""Fused decoder blocks against transformers' and PEFT's own."""

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.learner.worlds import VOCAB, make_config, make_group, save_tiny_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bucketrl.learner.activations import checkpoint_blocks
from bucketrl.learner.fused_block import fuse_blocks
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.packing import MicroBatch, pack, sequences
from bucketrl.learner.publish import save_adapter

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 0.01,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALED_ROPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **SLIDING, tie_word_embeddings=True)),
}


def tiny(model: Callable[[], Any]) -> Any:
    """Norms that do something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        causal = model()
        for name, parameter in causal.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return causal


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    tiny(MODELS[request.param]).save_pretrained(path)
    return path


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers computes norms in float32 whatever the model's type, which would hide what is compared here."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        normed: Tensor = (
            self.weight * hidden * (hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        )
        return normed

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def train(policy: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(policy.device))


def policies(folder: Path) -> tuple[PolicyModel, PolicyModel]:
    """One with transformers' blocks and one with ours, float64, with the same trained adapter."""
    pair = tuple(PolicyModel.load(folder, make_config(), CPU) for _ in range(2))
    for policy in pair:
        policy._peft.double()
    assert fuse_blocks(pair[1]._peft) == 2
    for policy in pair:
        train(policy)  # after the blocks were fused, as it will be
    return pair[0], pair[1]


def batches() -> list[MicroBatch]:
    """Prompts shared by several completions and by one."""
    first = make_group(
        0, prompt=(5, 6, 7, 8, 9), completions=[(9, 10, 11, 3), (12,), (13, 4, 40, 41, 42)], rewards=[1, 0, 0]
    )
    alone = make_group(1, prompt=(30, 31, 32), completions=[(33, 50)], rewards=[1])
    return list(pack(sequences([first, alone]), 1000))


def results(policy: PolicyModel) -> list[Tensor]:
    """Log-probabilities, and the gradients of a sum in which every token has a weight of its own."""
    logprobs = torch.cat([policy.logprobs(batch)[0] for batch in batches()])
    weights = torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype, device=policy.device)
    return [logprobs.detach(), *torch.autograd.grad(logprobs, list(policy.parameters.values()), weights)]


def check(found: list[Tensor], want: list[Tensor]) -> None:
    assert max(float(each.abs().max()) for each in want[1:]) > 0.1
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("exact_norms")
def test_log_probabilities_and_every_gradient_are_those_of_transformers_and_peft(folder: Path) -> None:
    """With activations kept, and computed again."""
    own, fused = policies(folder)
    want = results(own)
    check(results(fused), want)
    checkpoint_blocks(fused._decoder)
    check(results(fused), want)


@pytest.mark.usefixtures("exact_norms")
def test_the_adapter_can_be_switched_off_and_on_again(folder: Path) -> None:
    own, fused = policies(folder)
    tokens = tuple(range(2, 22))
    scores = []
    for policy in (own, fused):
        for context in (nullcontext(), policy.base_only(), nullcontext()):
            with context:
                scores.append(torch.tensor(policy.score(tokens)))
    for theirs, ours in zip(scores[:3], scores[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    assert float((scores[0] - scores[1]).abs().max()) > 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_gradients_of_the_cpu(folder: Path) -> None:
    """In bfloat16, by the kernels, which is what a learner does by itself."""
    cpu = PolicyModel.load(folder, make_config(), CPU)
    gpu = PolicyModel.load(folder, make_config(model={"dtype": "bfloat16"}), torch.device("cuda"))
    assert "forward" in vars(gpu._decoder.layers[0])
    for policy in (cpu, gpu):
        train(policy)
    for ours, theirs in zip(results(gpu), results(cpu), strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < 0.1


def test_without_a_layout_a_block_is_transformers_own(folder: Path) -> None:
    """Bit for bit: what the model's own log-probabilities are taken from."""
    own, fused = policies(folder)
    ids = torch.arange(2, 20)[None]
    logits = []
    for policy in (own, fused):
        policy._causal.set_attn_implementation("sdpa")
        logits.append(policy._causal(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*logits)


def test_names_and_files_stay_what_they_are(model_folder: Path, tmp_path: Path) -> None:
    digests, names = [], []
    for fuse in (False, True):
        policy = PolicyModel.load(model_folder, make_config(), CPU)
        if fuse:
            assert fuse_blocks(policy._peft) == 2
        save_adapter(tmp_path, policy)
        digests.append({path.name: hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.iterdir()})
        names.append(([name for name, _ in policy._peft.named_parameters()], [*policy._peft.state_dict()]))
    assert digests[0] == digests[1]
    assert names[0] == names[1]


def test_what_the_kernels_keep_counts_as_weights(tmp_path: Path) -> None:
    """And the base weights live once: what fused blocks add is the columns and rows of the adapter."""

    def resident(model: nn.Module) -> int:
        storages = [each.untyped_storage() for each in (*model.parameters(), *model.buffers())]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    folder = save_tiny_model(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    policy = PolicyModel.load(folder, make_config(), CPU)
    before = resident(policy._peft)
    assert fuse_blocks(policy._peft) == 1
    linears = policy._decoder.layers[0].forward._linears.values()
    added = sum(
        each.weight_NK.nbytes + each.down_RH.nbytes - sum(layer.weight.nbytes for layer in each.layers)
        for each in linears
    )
    assert resident(policy._peft) - before == added
    assert added < before / 2


def lora(**changes: Any) -> dict[str, Any]:
    return {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes


@pytest.mark.filterwarnings("ignore:.lora_bias=True")
@pytest.mark.parametrize(
    ("model", "adapter", "reason"),
    [
        (
            lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
            lora(),
            "the model has no LlamaDecoderLayer, Mistral",
        ),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)), lora(), "q_proj is no plain"),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True)), lora(), "gate_proj is no plain"),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")), lora(), "is gelu, not silu"),
        (MODELS["llama"], lora(target_modules=["q_proj", "v_proj"]), "k_proj has no LoRA adapter"),
        (MODELS["llama"], lora(exclude_modules=r".*layers\.1.*"), "q_proj has no LoRA adapter"),
        (MODELS["llama"], lora(lora_dropout=0.1), "q_proj has dropout"),
        (MODELS["llama"], lora(use_dora=True), "q_proj has dropout, is of a kind of its own"),
        (MODELS["llama"], lora(lora_bias=True), "q_proj is no plain"),
        (
            MODELS["qwen3"],
            lora(modules_to_save=["q_norm"]),
            "q_norm.modules_to_save.default.weight is trained",
        ),
    ],
)
def test_what_the_kernels_do_not_cover_is_left_alone(
    model: Callable[[], Any], adapter: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    peft_model = get_peft_model(tiny(model), LoraConfig(**adapter))
    with caplog.at_level(logging.INFO):
        assert fuse_blocks(peft_model) == 0
    (message,) = caplog.messages
    assert message.startswith("decoder blocks: not fused: ")
    assert reason in message
    assert all("forward" not in vars(module) for module in peft_model.modules())
    assert all(parameter.is_contiguous() for parameter in peft_model.parameters())


def test_a_scaling_by_the_root_of_the_rank_is_taken_over() -> None:
    """rsLoRA, and no other adapter beside it."""
    peft_model = get_peft_model(tiny(MODELS["llama"]), LoraConfig(**lora(use_rslora=True)))
    assert fuse_blocks(peft_model) == 2
    block = peft_model.get_base_model().get_decoder().layers[0]
    assert {layer.scaling for each in block.forward._linears.values() for layer in each.layers} == {4.0}
