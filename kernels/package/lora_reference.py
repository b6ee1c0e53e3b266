"""Frozen linear layers with LoRA adapters as plain torch: the storage that all versions share, and the definition.

Shape suffixes: T tokens, H size of the input, N of the output, R ranks of all adapters together, padded,
K = H + R, I size of the MLP's middle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

ALIGNMENT = 64
"""K is a multiple of it: a row of bfloat16 starts on a cache line, and the GEMM has no partial step over K."""


_optimizer_steps = 0


def _count_step(*_: object) -> None:
    """Fused optimizers change parameters without a new `_version`."""
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


@dataclass(frozen=True)
class LoraLayer:
    """y = x Wᵀ + scaling · (x Aᵀ) Bᵀ (arXiv:2106.09685), with W frozen."""

    weight: nn.Parameter
    """W, [N, H]. Its storage moves into that of `LoraLinears`."""
    a: nn.Parameter
    """[r, H], float32: the master that the optimizer steps."""
    b: nn.Parameter
    """[N, r], float32."""
    scaling: float


class LoraLinears:
    """One or several frozen linear layers without bias that read the same input, side by side in one buffer.

    The adapter rides in the columns beyond H: with [x | x · downᵀ] for an input, one GEMM over K gives
    base and adapter, and its transpose the gradients in x and in x · downᵀ. The base weights live once:
    `layer.weight` becomes a view of the buffer. Build it when the model is on its device, in its dtype.
    """

    def __init__(self, layers: Sequence[LoraLayer]) -> None:
        """Raises ValueError for a weight that is trained, or shapes and dtypes that do not fit together."""
        self.layers = tuple(layers)
        self.enabled = True
        """False: the base alone, as if every B were 0."""
        first = self.layers[0].weight
        size = first.shape[1]
        rows = ranks = 0
        self.parts: list[tuple[slice, slice]] = []
        """Of each layer, its columns of the output and its ranks within R."""
        for index, layer in enumerate(self.layers):
            _check(index, layer, first)
            self.parts.append((slice(rows, rows + len(layer.weight)), slice(ranks, ranks + len(layer.a))))
            rows, ranks = rows + len(layer.weight), ranks + len(layer.a)
        self.ranks = ranks
        """R without the padding."""
        padded = size + ranks + (-(size + ranks)) % ALIGNMENT
        self.weight_NK = torch.zeros(rows, padded, dtype=first.dtype, device=first.device)
        """[W_1; W_2; … | block-diagonal of scaling · B | 0]."""
        self.down_RH = self.weight_NK.new_zeros(padded - size, size)
        """The A, one below the other, and rows of 0."""
        self._seen: list[int] = []
        for layer, (part, _) in zip(self.layers, self.parts, strict=True):
            view = self.weight_NK[part, :size].copy_(layer.weight.detach())
            layer.weight.data = view
        self.refresh()

    def adapter(self) -> tuple[Tensor, ...]:
        """The masters (A_1, B_1, A_2, B_2, …), which receive gradients."""
        return tuple(master for layer in self.layers for master in (layer.a, layer.b))

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the masters if an optimizer stepped or autograd saw them change. Every forward pass does this.

        A change that hides from both (`master.data`, an in-place collective) stays unseen: use `master.copy_`.
        Between a forward pass and its backward pass of `lora_cuda`, a change makes the latter raise.
        It copies on the current stream and a CUDA graph does not repeat it: after an optimizer's step call it once
        before other streams use the layers, or before a graph is replayed.
        """
        seen = [_optimizer_steps, *(master._version for master in self.adapter())]
        if seen == self._seen:
            return
        size = self.down_RH.shape[1]
        for layer, (rows, ranks) in zip(self.layers, self.parts, strict=True):
            self.down_RH[ranks].copy_(layer.a)
            columns = slice(size + ranks.start, size + ranks.stop)
            torch.mul(layer.b, layer.scaling, out=self.weight_NK[rows, columns])
        self._seen = seen


def _check(index: int, layer: LoraLayer, first: Tensor) -> None:
    weight, rank = layer.weight, len(layer.a)
    name = f"layers[{index}]"
    if weight.requires_grad:
        raise ValueError(
            f"{name}.weight is trained; LoraLinears is for frozen weights: requires_grad_(False)"
        )
    if (weight.shape[1], weight.dtype, weight.device) != (first.shape[1], first.dtype, first.device):
        raise ValueError(
            f"{name}.weight is {tuple(weight.shape)} {weight.dtype} on {weight.device}; layers side by side "
            f"need the input size, dtype and device of the first, {first.shape[1]} {first.dtype} {first.device}"
        )
    if layer.a.shape != (rank, weight.shape[1]) or layer.b.shape != (weight.shape[0], rank):
        raise ValueError(
            f"{name}: a is {tuple(layer.a.shape)} and b {tuple(layer.b.shape)}; with a weight of "
            f"{tuple(weight.shape)} they must be (r, {weight.shape[1]}) and ({weight.shape[0]}, r)"
        )


def lora_linear(x_TH: Tensor, linears: LoraLinears, residual_TN: Tensor | None = None) -> Tensor:
    """x Wᵀ + scaling · (x Aᵀ) Bᵀ of every layer, side by side, plus the residual. Any dtype, any device."""
    outputs = []
    for layer in linears.layers:
        output = F.linear(x_TH, layer.weight)
        if linears.enabled:
            down = F.linear(x_TH, layer.a.to(x_TH.dtype))
            output = output + layer.scaling * F.linear(down, layer.b.to(x_TH.dtype))
        outputs.append(output)
    out_TN = torch.cat(outputs, dim=1)
    return out_TN if residual_TN is None else residual_TN + out_TN


def rmsnorm_lora_linear(x_TH: Tensor, norm_weight_H: Tensor, eps: float, linears: LoraLinears) -> Tensor:
    """`lora_linear` of x / rms(x) · weight, in the order of transformers' RMSNorm: cast, then weight."""
    x = x_TH.to(torch.promote_types(x_TH.dtype, torch.float32))
    normed = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)
    return lora_linear(norm_weight_H * normed.to(x_TH.dtype), linears)


def swiglu_lora_linear(
    gate_up_T2I: Tensor, linears: LoraLinears, residual_TN: Tensor | None = None
) -> Tensor:
    """`lora_linear` of silu(gate) · up, with [gate | up] side by side."""
    gate, up = gate_up_T2I.chunk(2, dim=1)
    return lora_linear(F.silu(gate) * up, linears, residual_TN)
