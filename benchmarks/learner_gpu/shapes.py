"""Models of random weights, made where they are used, and what a step on them costs in FLOPs.

Shape suffixes: S sequences, L tokens of one, C completion tokens of one.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config


@dataclass(frozen=True)
class Shape:
    """A Qwen3, and the step that is measured on it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool
    suffix: str
    """Of its figures."""
    head_dim: int = 128
    vocabulary: int = 151_936
    dtype: str = "bfloat16"
    completions: int = 16
    length: int = 2048
    """Tokens of prompt and completion."""
    prompts: dict[str, int] = field(default_factory=lambda: {"separate": 256, "group": 1024})
    """Tokens of a prompt in each workload."""
    rounds: int = 5

    @property
    def tokens(self) -> int:
        """Of a step, with each completion's prompt counted."""
        return self.completions * self.length

    def make(self, device: torch.device) -> Any:
        """A causal LM, frozen; seeded."""
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.length,
            tie_word_embeddings=self.tied,
        )
        torch.manual_seed(0)
        with device:
            causal = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, self.dtype), attn_implementation="sdpa"
            )
        return causal.requires_grad_(False)

    def flops(self, causal: Any, workload: str, per_weight: int) -> float:
        """Of a step in which nothing is shared or computed twice.

        `per_weight` and token: 4 where weights are frozen (forward, and the gradient of the input), 6 by the usual
        convention, which also counts that of the weights. Causal attention is 6·L²·heads·head_dim per layer and
        sequence. The head counts for the tokens that are scored, adapters for nothing.
        """
        body = sum(each.numel() for each in causal.get_decoder().layers.parameters() if each.dim() == 2)
        attention = 6 * self.length**2 * self.heads * self.head_dim * self.layers * self.completions
        scored = self.completions * (self.length - self.prompts[workload])
        head = per_weight * scored * self.hidden * self.vocabulary
        return float(per_weight * body * self.tokens + attention + head)


SHAPES = {
    "1.7b": Shape(28, 2048, 16, 8, 6144, tied=True, suffix=""),
    "8b": Shape(36, 4096, 32, 8, 12288, tied=False, suffix="_8b", rounds=3),
    "tiny": Shape(
        2, 64, 2, 1, 96, tied=True, suffix="_tiny", head_dim=32, vocabulary=512, dtype="float32",
        completions=16, length=24, prompts={"separate": 8, "group": 12}, rounds=1,
    ),
}  # fmt: skip
"""Qwen3-1.7B and 8B; `tiny` is to try the script without a GPU."""


def twin(causal: Any, dtype: torch.dtype | None = None) -> Any:
    """A second model of the same weights, which takes no memory; with `dtype`, of copies in another type."""

    def kept(weight: nn.Parameter) -> nn.Parameter:
        return weight if dtype is None else nn.Parameter(weight.detach().to(dtype), requires_grad=False)

    return copy.deepcopy(causal, {id(weight): kept(weight) for weight in causal.parameters()})


def storage_bytes(tensors: list[Tensor]) -> int:
    """Memory behind them, counted once where they share it."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
