"""`qknorm_rope` on a GPU, by `rope_triton`."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from bucketrl.kernels import rope_triton as kernels
from bucketrl.kernels.triton_here import on_device_of

WARP_ELEMENTS = 512
"""Elements of a token's queries for each warp of its program: in bfloat16, 16 bytes a thread of each half."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def qknorm_rope(
    qkv_TN: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope.qknorm_rope`, its arguments checked. Kept for backward: cos, sin, and the input if there are norms."""
    apply: Any = _QKNormRope.apply
    with on_device_of(qkv_TN):
        query, key, value = apply(
            qkv_TN, (heads, kv_heads, head_dim), cos_TD, sin_TD, q_weight, k_weight, eps
        )
    return query, key, value


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TN: Tensor,
        shape: tuple[int, int, int],
        cos_TD: Tensor,
        sin_TD: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, head_dim = shape
        qkv_TN, cos_TD, sin_TD = (_dense_rows(each) for each in (qkv_TN, cos_TD, sin_TD))
        count = len(qkv_TN)
        query = qkv_TN.new_empty(count, heads, head_dim)
        key = qkv_TN.new_empty(count, kv_heads, head_dim)
        if count:
            kernels.qknorm_rope[(count,)](
                qkv_TN, query, key, *_weights(q_weight, k_weight, cos_TD), cos_TD, sin_TD, qkv_TN.stride(0),
                cos_TD.stride(0), sin_TD.stride(0), eps, **_cut(shape), HAS_NORM=q_weight is not None,
            )  # fmt: skip
        ctx.save_for_backward(cos_TD, sin_TD, q_weight, k_weight, None if q_weight is None else qkv_TN)
        ctx.shape, ctx.eps = shape, eps
        return query, key, qkv_TN.view(count, heads + 2 * kv_heads, head_dim)[:, heads + kv_heads :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_TD, sin_TD, q_weight, k_weight, qkv_TN = ctx.saved_tensors
        heads, kv_heads, head_dim = ctx.shape
        grads = tuple(_dense_rows(each) for each in grads)
        count = len(grads[0])
        grad_TN = grads[0].new_empty(count, (heads + 2 * kv_heads) * head_dim)
        x = grad_TN if qkv_TN is None else qkv_TN
        if count:
            kernels.qknorm_rope_backward[(count,)](
                *grads, x, grad_TN, *_weights(q_weight, k_weight, cos_TD), cos_TD, sin_TD,
                *[stride for each in grads for stride in each.stride()[:2]], x.stride(0), cos_TD.stride(0),
                sin_TD.stride(0), ctx.eps, **_cut(ctx.shape), HAS_NORM=q_weight is not None,
            )  # fmt: skip
        return grad_TN, *[None] * 6


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _weights(q_weight: Tensor | None, k_weight: Tensor | None, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """Without weights a pointer that is not read."""
    if q_weight is None or k_weight is None:
        return stand_in, stand_in
    return q_weight.contiguous(), k_weight.contiguous()


def _cut(shape: tuple[int, int, int]) -> dict[str, int]:
    heads, kv_heads, head_dim = shape
    power = triton.next_power_of_2
    tiles = {"BQ": power(heads), "BK": power(kv_heads), "BD": power(head_dim // 2)}
    warps = min(8, max(1, power(heads * head_dim) // WARP_ELEMENTS))
    return {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim} | tiles | {"num_warps": warps}
