"""Frozen linear layers with LoRA adapters, fused with the norm or activation before and the residual after.

Shape suffixes: T tokens, H size of the input, N of the output, I size of the MLP's middle.
"""

from functools import cache

import torch
from torch import Tensor

from bucketrl.kernels import lora_reference
from bucketrl.kernels.lora_reference import LoraLayer, LoraLinears
from bucketrl.kernels.triton_here import triton_is_here

__all__ = ["LoraLayer", "LoraLinears", "lora_linear", "rmsnorm_lora_linear", "swiglu_lora_linear"]


def lora_linear(x_TH: Tensor, linears: LoraLinears, residual_TN: Tensor | None = None) -> Tensor:
    """out = x Wᵀ + scaling · (x Aᵀ) Bᵀ [+ residual] of all layers, side by side, by the fastest way there is.

    bfloat16 on an NVIDIA GPU with Triton: `lora_cuda`, with the adapter inside the base's GEMM. Anything else:
    plain torch. Gradients go to x, to the residual and to the masters of the adapters.
    Raises ValueError if x is not [T, H].
    """
    _take_over(linears, x_TH, 1)
    if _has_kernel(linears, x_TH, residual_TN):
        from bucketrl.kernels import lora_cuda

        return lora_cuda.lora_linear(x_TH, linears, residual_TN)
    return lora_reference.lora_linear(x_TH, linears, residual_TN)


def rmsnorm_lora_linear(x_TH: Tensor, norm_weight_H: Tensor, eps: float, linears: LoraLinears) -> Tensor:
    """`lora_linear` of x / rms(x) · weight, [H]. Raises ValueError if the weight wants a gradient or is not [H]."""
    if norm_weight_H.requires_grad:
        raise ValueError(
            "norm_weight_H is trained; rmsnorm_lora_linear is for a frozen norm: requires_grad_(False)"
        )
    _take_over(linears, x_TH, 1)
    if norm_weight_H.shape != x_TH.shape[1:]:
        raise ValueError(f"norm_weight_H is {tuple(norm_weight_H.shape)}; expected {tuple(x_TH.shape[1:])}")
    if _has_kernel(linears, x_TH, norm_weight_H):
        from bucketrl.kernels import lora_cuda

        return lora_cuda.rmsnorm_lora_linear(x_TH, norm_weight_H, eps, linears)
    return lora_reference.rmsnorm_lora_linear(x_TH, norm_weight_H, eps, linears)


def swiglu_lora_linear(
    gate_up_T2I: Tensor, linears: LoraLinears, residual_TN: Tensor | None = None
) -> Tensor:
    """`lora_linear` of silu(gate) · up, from [gate | up] side by side."""
    _take_over(linears, gate_up_T2I, 2)
    if _has_kernel(linears, gate_up_T2I, residual_TN):
        from bucketrl.kernels import lora_cuda

        return lora_cuda.swiglu_lora_linear(gate_up_T2I, linears, residual_TN)
    return lora_reference.swiglu_lora_linear(gate_up_T2I, linears, residual_TN)


def _take_over(linears: LoraLinears, input_: Tensor, halves: int) -> None:
    width = halves * linears.down_RH.shape[1]
    if input_.ndim != 2 or input_.shape[1] != width:
        raise ValueError(f"the input is {tuple(input_.shape)}; these layers read (tokens, {width})")
    if input_.device != linears.weight_NK.device:
        raise ValueError(
            f"the input is on {input_.device}, these layers on {linears.weight_NK.device}: "
            "build LoraLinears when the model is on its device"
        )
    linears.refresh()


def _has_kernel(linears: LoraLinears, input_: Tensor, other: Tensor | None) -> bool:
    return (
        input_.is_cuda
        and input_.dtype == linears.weight_NK.dtype == torch.bfloat16
        and (other is None or other.dtype == torch.bfloat16)
        and triton_is_here()
        and linears.ranks <= _most_ranks(input_.device)
    )


@cache
def _most_ranks(device: torch.device) -> int:
    """Of one `LoraLinears`: a tile has them all, in a multiprocessor's 160 KB or, on GeForce and the like, 100."""
    capability = torch.cuda.get_device_capability(device)
    return 0 if capability < (8, 0) else 256 if capability == (8, 0) or capability[0] in (9, 10) else 64
