"""The LoRA linears in bfloat16 on a GPU: cuBLAS for the GEMMs, `lora_triton` for what lies between.

    forward    [n | s] by one kernel, s = n·Aᵀ         out = [n | s] · [W | scaling·B]ᵀ (+ residual), one GEMM
    backward   [d | ds] = dout · [W | scaling·B], one GEMM      d + ds·A in the kernel that goes on to dx
               dA = dsᵀ·n      dB = scaling · doutᵀ·s

Kept for the backward pass: the input and s, and of the norm a factor a row, which dA puts into ds to read the input
in n's place; h = silu(gate) · up is formed anew where its gradient is. dA and dB are products over all tokens with
few columns: kernels of ours, that sum parts of the tokens in float32 and add the parts in a fixed order. The same
GPU gives the same bits every time, each operand is read once, and nothing depends on whether cuBLAS splits such a
sum.

Shape suffixes: T tokens, H size of the input, N of the output, R ranks, padded, K = H + R,
I size of the MLP's middle, RP the power of two that holds the ranks in use.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bucketrl.kernels import lora_triton as kernels
from bucketrl.kernels.lora_reference import LoraLinears
from bucketrl.kernels.triton_here import on_device_of

TILES: dict[str, dict[str, int]] = {
    "augment": {"BT": 64, "BH": 128, "num_warps": 8, "num_stages": 1},
    "swiglu_augment": {"BT": 32, "BH": 128, "num_warps": 8, "num_stages": 1},
    "add_low_rank": {"BT": 32, "BH": 128, "num_warps": 4, "num_stages": 1},
    "rmsnorm_backward": {"BT": 32, "BH": 64, "num_warps": 4, "num_stages": 1},
    "swiglu_backward": {"BT": 16, "BH": 64, "num_warps": 4, "num_stages": 1},
    "tall_product": {"BT": 64, "BH": 128, "num_warps": 4, "num_stages": 3},
}
"""How the work of each kernel is cut: rows and columns of a tile. Results differ by rounding only."""
PROGRAMS = {"swiglu_backward": 64, "tall_product": 32}
"""Per multiprocessor, where tokens can be cut into parts at will: many waves, so that the last is no loss."""


def lora_linear(x_TH: Tensor, linears: LoraLinears, residual_TN: Tensor | None) -> Tensor:
    out_TN: Tensor = _apply(_LoraLinear, _rows(x_TH), residual_TN, linears)
    return out_TN


def rmsnorm_lora_linear(x_TH: Tensor, norm_weight_H: Tensor, eps: float, linears: LoraLinears) -> Tensor:
    out_TN: Tensor = _apply(_RmsNormLoraLinear, _rows(x_TH), norm_weight_H, eps, linears)
    return out_TN


def swiglu_lora_linear(gate_up_T2I: Tensor, linears: LoraLinears, residual_TN: Tensor | None) -> Tensor:
    out_TN: Tensor = _apply(_SwigluLoraLinear, _rows(gate_up_T2I), residual_TN, linears)
    return out_TN


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    linears: LoraLinears = arguments[-1]
    apply: Any = function.apply
    weight_NK = linears.weight_NK
    with torch.autocast(weight_NK.device.type, enabled=False), on_device_of(weight_NK):
        out_TN: Tensor = apply(*arguments, *linears.adapter())
    return out_TN


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, residual_TN: Tensor | None, linears: LoraLinears, *masters: Tensor
    ) -> Tensor:
        x_TK, s_TR = x_TH, None
        if linears.enabled:
            x_TK, s_TR, _ = _augment(x_TH, linears)
        _keep(ctx, linears, x_TH, s_TR)
        return _project(x_TK, linears, residual_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK, down_RH, x_TH, s_TR = ctx.saved_tensors
        residual_TN = grad_TN if ctx.needs_input_grad[1] else None
        grad_TN = _rows(grad_TN)
        if s_TR is None:
            return grad_TN @ weight_NK[:, : x_TH.shape[1]], residual_TN, None, *_no_master(ctx)
        d_TK = grad_TN @ weight_NK
        count, size = x_TH.shape
        grad_x_TH = None
        if ctx.needs_input_grad[0]:
            grad_x_TH, tile = x_TH.new_empty(x_TH.shape), TILES["add_low_rank"]
            grid = (triton.cdiv(count, tile["BT"]), triton.cdiv(size, tile["BH"]))
            kernels.add_low_rank[grid](
                d_TK, down_RH, grad_x_TH, count, size, len(down_RH), d_TK.stride(0), **_ranks(ctx.linears), **tile
            )  # fmt: skip
        a_RH = _tall_product(x_TH, d_TK[:, size : size + ctx.linears.ranks])
        return grad_x_TH, residual_TN, None, *_master_gradients(ctx.linears, grad_TN, s_TR, a_RH)


class _RmsNormLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, norm_weight_H: Tensor, eps: float, linears: LoraLinears, *masters: Tensor
    ) -> Tensor:
        norm_weight_H = norm_weight_H.contiguous()
        n_TK, s_TR, rstd_T = _augment(x_TH, linears, norm_weight_H, eps)
        _keep(ctx, linears, x_TH, s_TR, norm_weight_H, rstd_T)
        return _project(n_TK, linears, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK, down_RH, x_TH, s_TR, norm_weight_H, rstd_T = ctx.saved_tensors
        grad_TN = _rows(grad_TN)
        count, size = x_TH.shape
        d_TK = grad_TN @ (weight_NK if s_TR is not None else weight_NK[:, :size])
        grad_x_TH = None
        if ctx.needs_input_grad[0]:
            grad_x_TH, tile = x_TH.new_empty(x_TH.shape), TILES["rmsnorm_backward"]
            kernels.rmsnorm_backward[(triton.cdiv(count, tile["BT"]),)](
                d_TK, x_TH, norm_weight_H, down_RH, s_TR, rstd_T, grad_x_TH, count, size, len(down_RH),
                d_TK.stride(0), x_TH.stride(0), ADAPTER=s_TR is not None, **_ranks(ctx.linears), **tile,
            )  # fmt: skip
        if s_TR is None:
            return grad_x_TH, None, None, None, *_no_master(ctx)
        a_RH = _tall_product(x_TH, d_TK[:, size : size + ctx.linears.ranks], norm_weight_H, rstd_T)
        return grad_x_TH, None, None, None, *_master_gradients(ctx.linears, grad_TN, s_TR, a_RH)


class _SwigluLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up_T2I: Tensor, residual_TN: Tensor | None, linears: LoraLinears, *masters: Tensor
    ) -> Tensor:
        (count, double), tile = gate_up_T2I.shape, TILES["swiglu_augment"]
        h_TK, s_TR = _outputs(gate_up_T2I, linears)
        kernels.swiglu_augment[(triton.cdiv(count, tile["BT"]),)](
            gate_up_T2I, linears.down_RH, h_TK, s_TR, count, double // 2, len(linears.down_RH),
            gate_up_T2I.stride(0), h_TK.stride(0), ADAPTER=linears.enabled, **_ranks(linears), **tile,
        )  # fmt: skip
        _keep(ctx, linears, gate_up_T2I, s_TR)
        return _project(h_TK, linears, residual_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK, down_RH, gate_up_T2I, s_TR = ctx.saved_tensors
        residual_TN = grad_TN if ctx.needs_input_grad[1] else None
        grad_TN = _rows(grad_TN)
        (count, double), tile, ranks = gate_up_T2I.shape, TILES["swiglu_backward"], _ranks(ctx.linears)
        size = double // 2
        d_TK = grad_TN @ (weight_NK if s_TR is not None else weight_NK[:, :size])
        grad_gate_up_T2I = gate_up_T2I.new_empty(gate_up_T2I.shape)
        blocks = triton.cdiv(size, tile["BH"])
        parts, tokens = _parts("swiglu_backward", count, blocks, ranks["RP"], grad_TN.device)
        sums = d_TK.new_empty(parts if s_TR is not None else 0, ranks["RP"], size, dtype=torch.float32)
        kernels.swiglu_backward[(blocks, parts)](
            d_TK, gate_up_T2I, down_RH, grad_gate_up_T2I, sums, count, size, len(down_RH), tokens,
            d_TK.stride(0), gate_up_T2I.stride(0), ADAPTER=s_TR is not None, **ranks, **tile,
        )  # fmt: skip
        if s_TR is None:
            return grad_gate_up_T2I, residual_TN, None, *_no_master(ctx)
        masters = _master_gradients(ctx.linears, grad_TN, s_TR, sums.sum(dim=0))
        return grad_gate_up_T2I, residual_TN, None, *masters


def _rows(matrix: Tensor) -> Tensor:
    """With neighbours in a row side by side, as the kernels read them."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _ranks(linears: LoraLinears) -> dict[str, Any]:
    dot = tl.bfloat16 if linears.weight_NK.is_cuda else tl.float32
    return {"RP": max(16, triton.next_power_of_2(linears.ranks)), "DOT": dot}


def _outputs(like: Tensor, linears: LoraLinears) -> tuple[Tensor, Tensor | None]:
    """[n | s] and s; n alone if the adapter is off."""
    count, (ranks, size) = len(like), linears.down_RH.shape
    if not linears.enabled:
        return like.new_empty(count, size), None
    return like.new_empty(count, size + ranks), like.new_empty(count, ranks)


def _augment(
    x_TH: Tensor, linears: LoraLinears, norm_weight_H: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """[n | s], s and, of the norm if there is one, 1 / rms(x)."""
    (count, size), tile = x_TH.shape, TILES["augment"]
    n_TK, s_TR = _outputs(x_TH, linears)
    rstd_T = None if norm_weight_H is None else x_TH.new_empty(count, dtype=torch.float32)
    kernels.augment[(triton.cdiv(count, tile["BT"]),)](
        x_TH, norm_weight_H, linears.down_RH, n_TK, s_TR, rstd_T, count, size, len(linears.down_RH), eps,
        x_TH.stride(0), n_TK.stride(0), NORM=norm_weight_H is not None, ADAPTER=linears.enabled,
        **_ranks(linears), **tile,
    )  # fmt: skip
    return n_TK, s_TR, rstd_T


def _project(n_TK: Tensor, linears: LoraLinears, residual_TN: Tensor | None) -> Tensor:
    weight_NK = linears.weight_NK[:, : n_TK.shape[1]]
    if residual_TN is None:
        return n_TK @ weight_NK.T
    return torch.addmm(residual_TN, n_TK, weight_NK.T)


def _keep(ctx: Any, linears: LoraLinears, *tensors: Tensor | None) -> None:
    ctx.linears = linears
    ctx.save_for_backward(linears.weight_NK, linears.down_RH, *tensors)


def _parts(kernel: str, count: int, blocks: int, padded: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts `kernel` cuts a sum over `count` tokens, and the tokens of a part.

    A part's sums, `padded` columns of float32, stay small beside the bfloat16 that it reads.
    """
    wanted = triton.cdiv(PROGRAMS[kernel] * _multiprocessors(device), blocks)
    tokens = max(triton.cdiv(count, wanted), 32 * padded)
    tokens = triton.cdiv(tokens, 64) * 64
    return max(1, triton.cdiv(count, tokens)), tokens


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _tall_product(
    p_TH: Tensor, q_TR: Tensor, norm_weight_H: Tensor | None = None, rstd_T: Tensor | None = None
) -> Tensor:
    """qᵀ·p in float32, of p · rstd · norm weight if they are given."""
    (count, columns), ranks, tile = p_TH.shape, q_TR.shape[1], TILES["tall_product"]
    padded = max(16, triton.next_power_of_2(ranks))
    blocks = triton.cdiv(columns, tile["BH"])
    parts, tokens = _parts("tall_product", count, blocks, padded, p_TH.device)
    sums = p_TH.new_empty(parts, padded, columns, dtype=torch.float32)
    kernels.tall_product[(blocks, parts)](
        p_TH, q_TR, rstd_T, norm_weight_H, sums, count, columns, ranks, tokens, p_TH.stride(0), q_TR.stride(0),
        NORM=rstd_T is not None, RP=padded, DOT=tl.bfloat16 if p_TH.is_cuda else tl.float32, **tile,
    )  # fmt: skip
    return sums.sum(dim=0)[:ranks]


def _master_gradients(linears: LoraLinears, grad_TN: Tensor, s_TR: Tensor, a_RH: Tensor) -> list[Tensor]:
    """Of (A_1, B_1, A_2, B_2, …), where `a_RH` holds the A's one below the other."""
    grads = []
    for layer, (rows, ranks) in zip(linears.layers, linears.parts, strict=True):
        b = _tall_product(grad_TN[:, rows], s_TR[:, ranks])
        grads += [a_RH[ranks], b.T * layer.scaling]
    return grads


def _no_master(ctx: Any) -> list[None]:
    return [None] * len(ctx.linears.adapter())
