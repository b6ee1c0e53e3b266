"""One Qwen3 layer's linears with LoRA, with their norms and SwiGLU: ours, and what others do for them.

norm → q, k, v; o + residual; norm → gate, up → silu · up → down + residual, with a random tensor in place of what
attention gives. A peer that is not installed raises ImportError. "-style" marks an algorithm that is written here.
Shape suffixes: T tokens, H hidden size, Q queries, N outputs of q, k and v together, I size of the MLP's middle.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bucketrl.kernels import lora

RANK, SCALING, EPS = 16, 2.0, 1e-6

Built = tuple[Callable[[Tensor, Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""From x and attention to (qkv, out) or (q, k, v, out); and its adapters, A and B by turns."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    middle: int
    head_dim: int = 128

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs)."""
        hidden, middle = self.hidden, self.middle
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (middle, hidden), "up_proj": (middle, hidden), "down_proj": (hidden, middle),
        }  # fmt: skip


SHAPES = {"1p7b": Shape(2048, 16, 8, 6144), "8b": Shape(4096, 32, 8, 12288)}
"""Of Qwen3."""
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Those that read the same input."""


@dataclass(frozen=True)
class Layer:
    shape: Shape
    weights: dict[str, Tensor]
    adapters: dict[str, tuple[Tensor, Tensor]]
    """A and B in float32, of values that the base's type holds too: all peers compute the same function."""
    norms: tuple[Tensor, Tensor]
    inputs: tuple[Tensor, Tensor]
    """x [T, H] and what attention gives, [T, Q]."""
    upstream: tuple[Tensor, Tensor]
    """Gradients of qkv [T, N] and of the layer's output [T, H]."""

    def to(self, dtype: torch.dtype) -> "Layer":
        """All but inputs and upstream gradients."""
        return replace(
            self,
            weights={name: weight.to(dtype) for name, weight in self.weights.items()},
            adapters={name: (a.to(dtype), b.to(dtype)) for name, (a, b) in self.adapters.items()},
            norms=(self.norms[0].to(dtype), self.norms[1].to(dtype)),
        )

    def separate(self) -> tuple[Tensor, ...]:
        """The upstream gradients of q, k, v and the output, each a tensor of its own."""
        widths = [self.shape.linears[name][0] for name in GROUPS[0]]
        parts = self.upstream[0].split(widths, dim=1)  # type: ignore[no-untyped-call]
        return *(part.contiguous() for part in parts), self.upstream[1]


def make(shape: Shape, tokens: int, device: str, dtype: torch.dtype, seed: int = 0) -> Layer:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device, generator=generator) * scale).to(dtype)

    linears = shape.linears
    queries = linears["o_proj"][1]
    columns = sum(linears[name][0] for name in GROUPS[0])
    return Layer(
        shape,
        {name: normal(rows, size, scale=size**-0.5) for name, (rows, size) in linears.items()},
        {
            name: (normal(RANK, size, scale=size**-0.5).float(), normal(rows, RANK, scale=0.02).float())
            for name, (rows, size) in linears.items()
        },
        (1 + normal(shape.hidden, scale=0.1), 1 + normal(shape.hidden, scale=0.1)),
        (normal(tokens, shape.hidden), normal(tokens, queries)),
        (normal(tokens, columns), normal(tokens, shape.hidden)),
    )


def ours(layer: Layer) -> Built:
    def linear(name: str) -> lora.LoraLayer:
        a, b = (nn.Parameter(master) for master in layer.adapters[name])
        return lora.LoraLayer(nn.Parameter(layer.weights[name], requires_grad=False), a, b, SCALING)

    qkv, o, gate_up, down = (lora.LoraLinears([linear(name) for name in group]) for group in GROUPS)

    def forward(x_TH: Tensor, attention_TQ: Tensor) -> Sequence[Tensor]:
        qkv_TN = lora.rmsnorm_lora_linear(x_TH, layer.norms[0], EPS, qkv)
        middle_TH = lora.lora_linear(attention_TQ, o, x_TH)
        gate_up_T2I = lora.rmsnorm_lora_linear(middle_TH, layer.norms[1], EPS, gate_up)
        return qkv_TN, lora.swiglu_lora_linear(gate_up_T2I, down, middle_TH)

    return forward, [master for each in (qkv, o, gate_up, down) for master in each.adapter()]


class _Modules(nn.Module):
    """As transformers has it, without attention."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        for name, weight in layer.weights.items():
            rows, size = weight.shape
            linear = nn.Linear(size, rows, bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            self.add_module(name, linear)
        self.first_norm, self.second_norm = (norm_module(weight) for weight in layer.norms)

    def forward(self, x_TH: Tensor, attention_TQ: Tensor) -> Sequence[Tensor]:
        by_name: Any = self
        normed = self.first_norm(x_TH)
        qkv = by_name.q_proj(normed), by_name.k_proj(normed), by_name.v_proj(normed)
        middle = x_TH + by_name.o_proj(attention_TQ)
        normed = self.second_norm(middle)
        return *qkv, middle + by_name.down_proj(F.silu(by_name.gate_proj(normed)) * by_name.up_proj(normed))


def norm_module(weight: Tensor) -> Any:
    norm = qwen3().Qwen3RMSNorm(len(weight), EPS)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def qwen3() -> Any:
    return importlib.import_module("transformers.models.qwen3.modeling_qwen3")


def no_adapter(layer: Layer) -> Built:
    return _Modules(layer), []


def peft_bf16(layer: Layer) -> Built:
    """Adapters of the base's type, no autocast: the least that PEFT's layers cost."""
    return _peft(layer, layer.weights["q_proj"].dtype)


def peft_autocast(layer: Layer) -> Built:
    """Float32 adapters under bfloat16 autocast: PEFT's default, `autocast_adapter_dtype`, as TRL runs it."""
    module, adapters = _peft(layer, torch.float32)
    weight = layer.weights["q_proj"]

    def forward(x_TH: Tensor, attention_TQ: Tensor) -> Sequence[Tensor]:
        mixed: AbstractContextManager[Any] = nullcontext()
        if weight.dtype == torch.bfloat16:
            mixed = torch.autocast(weight.device.type, torch.bfloat16)
        with mixed:
            return module(x_TH, attention_TQ)

    return forward, adapters


def _peft(layer: Layer, dtype: torch.dtype) -> Built:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=RANK, lora_alpha=SCALING * RANK, lora_dropout=0.0, target_modules=list(layer.weights)
    )
    module: Any = peft.inject_adapter_in_model(config, _Modules(layer))
    adapters = []
    for name, masters in layer.adapters.items():
        linear = getattr(module, name)
        for part, master in zip((linear.lora_A, linear.lora_B), masters, strict=True):
            part["default"].weight = nn.Parameter(master.to(dtype))
            adapters.append(part["default"].weight)
    return module, adapters


def compiled(layer: Layer) -> Built:
    """`peft_bf16` under torch.compile."""
    module, adapters = peft_bf16(layer)
    return torch.compile(module, dynamic=False), adapters


def unsloth_style(layer: Layer) -> Built:
    """A re-implementation: base GEMM, then `addmm_` of the low-rank part, in the output and in dX.

    Norm and SwiGLU under torch.compile, in place of unsloth's Triton kernels.
    """
    norms: list[Any] = [torch.compile(norm_module(weight), dynamic=False) for weight in layer.norms]
    swiglu: Any = torch.compile(_swiglu, dynamic=False)
    masters = {name: [nn.Parameter(master) for master in pair] for name, pair in layer.adapters.items()}

    def linears(input_: Tensor, group: Sequence[str]) -> tuple[Tensor, ...]:
        apply: Any = _AddmmLinears.apply
        outputs: tuple[Tensor, ...] = apply(
            input_, *(each for name in group for each in (layer.weights[name], *masters[name]))
        )
        return outputs

    def forward(x_TH: Tensor, attention_TQ: Tensor) -> Sequence[Tensor]:
        qkv = linears(norms[0](x_TH), GROUPS[0])
        middle = x_TH + linears(attention_TQ, GROUPS[1])[0]
        gate, up = linears(norms[1](middle), GROUPS[2])
        return *qkv, middle + linears(swiglu(gate, up), GROUPS[3])[0]

    return forward, [master for pair in masters.values() for master in pair]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _AddmmLinears(torch.autograd.Function):
    """Linears that read the same input, each as (W, A, B)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        saved, outputs = [x], []
        for weight, a, b in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            a, b = a.to(x.dtype), b.to(x.dtype)
            down = x @ a.T
            outputs.append((x @ weight.T).addmm_(down, b.T, alpha=SCALING))
            saved += [weight, a, b, down]
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        grad_x, results = None, []
        for index, grad in enumerate(grads):
            weight, a, b, down = saved[4 * index : 4 * index + 4]
            grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
            grad_down = grad @ b
            grad_x.addmm_(grad_down, a, alpha=SCALING)
            results += [None, (grad_down.T @ x).float() * SCALING, (grad.T @ down).float() * SCALING]
        return grad_x, *results


PEERS: dict[str, Callable[[Layer], Built]] = {
    "PEFT, autocast": peft_autocast,
    "PEFT, bf16": peft_bf16,
    "unsloth-style": unsloth_style,
    "torch.compile": compiled,
    "no adapter": no_adapter,
}
