"""Decoder blocks of transformers by our kernels: the same function of the same parameters, in fewer passes.

q k v   = norm(x) [Wq Wk Wv]                      rmsnorm_lora_linear
q k v   = rotated(norms of heads)                 qknorm_rope
x'      = x + attention(q, k, v) Wo               the layout's attention, lora_linear
gate up = norm(x') [Wg Wu]                        rmsnorm_lora_linear
output  = x' + (silu(gate) · up) Wd               swiglu_lora_linear
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from bucketrl.kernels.lora import (
    LoraLayer,
    LoraLinears,
    lora_linear,
    rmsnorm_lora_linear,
    swiglu_lora_linear,
)
from bucketrl.kernels.rope import qknorm_rope

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""PEFT's name for the only adapter of a model."""
WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: attention.config.sliding_window,
    "Qwen3DecoderLayer": lambda attention: attention.sliding_window,
}
"""The blocks that compute the above, and the attention window of each."""
LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The linear layers of a block; those that read the same input side by side."""


def fuse_blocks(peft_model: nn.Module) -> int:
    """From now on a decoder block of `peft_model` that is called with a `layout` is computed by the kernels.

    Without one it is computed by transformers, as before. Modules, parameters and their names stay what they are.
    Where the kernels do not cover the architecture or its adapter, nothing changes at all. Call this when the model
    is on its device, and before `activations.checkpoint_blocks`. Returns the number of blocks fused.
    """
    blocks = [module for module in peft_model.modules() if type(module).__name__ in WINDOWS]
    reason = f"the model has no {', '.join(WINDOWS)}"
    if blocks:
        reason = next((found for found in map(_why_not, blocks) if found), "")
    if reason:
        logger.info("decoder blocks: not fused: %s", reason)
        return 0
    for block in blocks:
        block.forward = _FusedBlock(block)
    torch.cuda.empty_cache()  # of the storages that the weights had before
    logger.info("decoder blocks: %d fused", len(blocks))
    return len(blocks)


def restore_blocks(peft_model: nn.Module) -> None:
    """Undoes `fuse_blocks`, but for where the weights lie."""
    for module in peft_model.modules():
        if isinstance(vars(module).get("forward"), _FusedBlock):
            del module.forward


class _FusedBlock:
    def __init__(self, block: Any) -> None:
        self._own: Callable[..., Tensor] = block.forward
        self._attention = attention = block.self_attn
        self._norms = block.input_layernorm, block.post_attention_layernorm
        self._layers = {
            name: [block.get_submodule(path) for path in paths] for name, paths in LINEARS.items()
        }
        self._linears = {name: LoraLinears([*map(_lora_layer, each)]) for name, each in self._layers.items()}
        for name, linears in self._linears.items():
            # So that the memory of the model includes it.
            block.register_buffer(f"fused_{name}_down", linears.down_RH, persistent=False)
        q_proj, k_proj, _ = self._layers["qkv"]
        self._shape = q_proj.out_features // attention.head_dim, k_proj.out_features // attention.head_dim
        self._window = WINDOWS[type(block).__name__](attention)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, H] to [1, T, H]; the arguments are what transformers gives to a block."""
        layout = kwargs.get("layout")
        if layout is None:
            return self._own(hidden_states, *args, **kwargs)
        for name, layers in self._layers.items():
            self._linears[name].enabled = not layers[0].disable_adapters
        linears, attention = self._linears, self._attention
        before, after = self._norms
        # Not hidden_states[0]: its gradient would be copied into zeros. So too below.
        x_TH = hidden_states.squeeze(0)
        qkv_TN = rmsnorm_lora_linear(x_TH, before.weight, before.variance_epsilon, linears["qkv"])
        cos_TD, sin_TD = (each[0] for each in kwargs["position_embeddings"])
        heads = qknorm_rope(qkv_TN, *self._shape, attention.head_dim, cos_TD, sin_TD, **self._head_norms())
        query, key, value = (each[None].transpose(1, 2) for each in heads)
        attended = layout.attend(query, key, value, attention.scaling, self._window)
        x_TH = lora_linear(attended.squeeze(0).flatten(1), linears["o"], x_TH)
        gate_up = rmsnorm_lora_linear(x_TH, after.weight, after.variance_epsilon, linears["gate_up"])
        return swiglu_lora_linear(gate_up, linears["down"], x_TH)[None]

    def _head_norms(self) -> dict[str, Any]:
        q_norm = getattr(self._attention, "q_norm", None)
        if q_norm is None:
            return {}
        weights = {"q_weight": q_norm.weight, "k_weight": self._attention.k_norm.weight}
        return weights | {"eps": q_norm.variance_epsilon}


def _lora_layer(layer: Any) -> LoraLayer:
    return LoraLayer(
        layer.base_layer.weight,
        layer.lora_A[ADAPTER].weight,
        layer.lora_B[ADAPTER].weight,
        layer.scaling[ADAPTER],
    )


def _why_not(block: Any) -> str:
    """What of a block the kernels do not cover; empty if there is nothing."""
    activation = block.self_attn.config.hidden_act
    if activation != "silu":
        return f"its activation is {activation}, not silu"
    adapters: set[nn.Parameter] = set()
    for path in (path for paths in LINEARS.values() for path in paths):
        layer = block.get_submodule(path)
        name = path.rsplit(".", 1)[-1]
        if type(layer) is not Linear or set(layer.lora_A) != {ADAPTER}:
            return f"{name} has no LoRA adapter, or not one alone"
        plain = type(layer.base_layer) is nn.Linear and layer.base_layer.bias is None
        if not plain or layer.lora_B[ADAPTER].bias is not None:
            return f"{name} is no plain linear layer without bias"
        dropout = type(layer.lora_dropout[ADAPTER]) is not nn.Identity
        if dropout or layer.lora_variant or layer.merged or layer.fan_in_fan_out:
            return f"the adapter of {name} has dropout, is of a kind of its own, or is merged"
        adapters |= {layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight}
    for name, parameter in block.named_parameters():
        if parameter.requires_grad and parameter not in adapters:
            return f"{name} is trained"
    return ""
