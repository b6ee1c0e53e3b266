"""A tiny random Qwen3 model with adapters, and the reference that engines are compared with."""

import os
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 96
EOS, END_OF_TURN = 1, 2
RANK, ALPHA = 8, 16.0
TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def save_model(folder: Path) -> Path:
    """head_dim 32 is the smallest that vLLM's CPU attention takes. generation_config names two stop tokens
    and sampling defaults that no engine may apply."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
        # Spread logits: with near-uniform ones no test could tell one policy from another.
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [EOS, END_OF_TURN]
    model.generation_config.do_sample = True
    model.generation_config.top_k = 1
    model.generation_config.temperature = 0.1
    model.generation_config.repetition_penalty = 2.0
    model.save_pretrained(folder)
    return folder


def save_adapter(model_folder: Path, folder: Path, seed: int, scale: float = 0.05) -> Path:
    """A PEFT folder whose policy differs clearly from the base model and from other seeds."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=scale)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """What transformers and PEFT alone say about a sequence of n tokens."""

    logprobs: list[float]
    """[n - 1] of token i+1 given 0..i."""
    entropies: list[float]
    """[n - 1] of the distribution that token i+1 is drawn from."""


class ReferencePolicy:
    """The base model, or one adapter on it."""

    def __init__(self, model_folder: Path, adapter: Path | None) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        if adapter is not None:
            self._model = PeftModel.from_pretrained(self._model, str(adapter))

    @torch.no_grad()
    def __call__(self, token_ids: tuple[int, ...], temperature: float = 1.0) -> Reference:
        tokens = torch.tensor([token_ids])
        logprobs = torch.log_softmax(self._model(tokens).logits[0, :-1].float() / temperature, -1)
        chosen = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
        return Reference(chosen.tolist(), (-(logprobs.exp() * logprobs).sum(-1)).tolist())
