"""`qknorm_rope`: from one projection's output to rotated queries and keys, and values, as attention takes them."""

import torch
from torch import Tensor

from bucketrl.kernels.triton_here import triton_is_here


def qknorm_rope(
    qkv_TN: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-head RMSNorm of queries and keys where weights are given (Qwen3), then rotary embedding.

        normed = (x · rsqrt(mean(x²) + eps)) rounded to the input's type · weight      over head_dim
        rotated = normed · cos + rotate_half(normed) · sin          rotate_half((a, b)) = (-b, a), in halves

    qkv_TN: [T, (heads + 2 kv_heads) · head_dim], queries before keys before values. cos_TD, sin_TD: [T, head_dim].
    q_weight, k_weight: [head_dim], both or neither; frozen: no gradient is formed for them.
    Returns queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim], in the input's type and
    differentiable in it; the arithmetic is float32, or float64 for float64 input. The values are a view of the
    input.
    Raises ValueError if the widths do not fit each other, or a weight comes alone or wants a gradient.
    """
    width = (heads + 2 * kv_heads) * head_dim
    if qkv_TN.shape[1] != width or head_dim % 2:
        raise ValueError(
            f"qkv_TN has {qkv_TN.shape[1]} columns; {heads} heads and 2 times {kv_heads} key-value heads of an "
            f"even head_dim, here {head_dim}, have {width}"
        )
    if cos_TD.shape != sin_TD.shape or cos_TD.shape != (len(qkv_TN), head_dim):
        raise ValueError(
            f"cos_TD is {tuple(cos_TD.shape)}, sin_TD {tuple(sin_TD.shape)}: expected {(len(qkv_TN), head_dim)}"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight: give both or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(f"{name} is {tuple(weight.shape)}; expected ({head_dim},)")
    if any(weight is not None and weight.requires_grad for weight in (q_weight, k_weight)):
        raise ValueError("qknorm_rope is for frozen norms: q_weight and k_weight must not require a gradient")
    if qkv_TN.is_cuda and qkv_TN.dtype != torch.float64 and triton_is_here():
        from bucketrl.kernels import rope_cuda

        results: tuple[Tensor, Tensor, Tensor] = rope_cuda.qknorm_rope(
            qkv_TN, heads, kv_heads, head_dim, cos_TD, sin_TD, q_weight, k_weight, eps
        )
        return results
    heads_THD = qkv_TN.view(len(qkv_TN), heads + 2 * kv_heads, head_dim)
    return (
        _norm_rope(heads_THD[:, :heads], cos_TD, sin_TD, q_weight, eps),
        _norm_rope(heads_THD[:, heads : heads + kv_heads], cos_TD, sin_TD, k_weight, eps),
        heads_THD[:, heads + kv_heads :],
    )


def _norm_rope(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """The definition, in plain torch."""
    x = x_THD.to(torch.promote_types(x_THD.dtype, torch.float32))
    if weight_D is not None:
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        x = normed.to(x_THD.dtype).to(x.dtype) * weight_D.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos_TD[:, None] + torch.cat([-second, first], dim=-1) * sin_TD[:, None]
    return rotated.to(x_THD.dtype)
