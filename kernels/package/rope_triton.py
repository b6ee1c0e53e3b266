"""The Triton kernels of `qknorm_rope`: one program a token, each element read once and written once.

A head is worked on as its two halves, [heads, head_dim / 2] each, which the rotation mixes element by element:

    y1 = n1 · c1 - n2 · s1      y2 = n2 · c2 + n1 · s2      n = w · x · r      r = rsqrt(mean(x²) + eps)
    e1 = w1 · (d1 · c1 + d2 · s2)      e2 = w2 · (d2 · c2 - d1 · s1)      ∂x = r · (e - x · r² · mean(e · x))

for d the gradient of y. r is computed again in the backward pass, where x is read anyway.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _halves(START, inside, D: tl.constexpr, d):
    """The two halves of some rows in float32; START points to each row's first element."""
    first = tl.load(START + d, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(START + D // 2 + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(START, first, second, inside, D: tl.constexpr, d):
    tl.store(START + d, first.to(START.dtype.element_ty), mask=inside)
    tl.store(START + D // 2 + d, second.to(START.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rope(
    X, Y, W, COS, SIN, eps, HEADS: tl.constexpr, HAS_NORM: tl.constexpr, D: tl.constexpr, BH: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    head = tl.arange(0, BH)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (head < HEADS) & (d < D // 2)
    x1, x2 = _halves(X + head * D, inside, D, d)
    c1, c2 = _halves(COS, d < D // 2, D, d)
    s1, s2 = _halves(SIN, d < D // 2, D, d)
    if HAS_NORM:
        w1, w2 = _halves(W, d < D // 2, D, d)
        r = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / D + eps)[:, None]
        x1 = (x1 * r).to(X.dtype.element_ty).to(tl.float32) * w1
        x2 = (x2 * r).to(X.dtype.element_ty).to(tl.float32) * w2
    _store_halves(Y + head * D, x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, inside, D, d)


@triton.jit
def _norm_rope_backward(
    DY, X, DX, W, COS, SIN, eps, syh, HEADS: tl.constexpr, HAS_NORM: tl.constexpr, D: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BH)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (head < HEADS) & (d < D // 2)
    dy1, dy2 = _halves(DY + head * syh, inside, D, d)
    c1, c2 = _halves(COS, d < D // 2, D, d)
    s1, s2 = _halves(SIN, d < D // 2, D, d)
    e1 = dy1 * c1 + dy2 * s2
    e2 = dy2 * c2 - dy1 * s1
    if HAS_NORM:
        x1, x2 = _halves(X + head * D, inside, D, d)
        w1, w2 = _halves(W, d < D // 2, D, d)
        e1 *= w1
        e2 *= w2
        r = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / D + eps)[:, None]
        shared = r * r * (tl.sum(e1 * x1 + e2 * x2, 1) / D)[:, None]
        e1 = r * (e1 - x1 * shared)
        e2 = r * (e2 - x2 * shared)
    _store_halves(DX + head * D, e1, e2, inside, D, d)


@triton.jit
def qknorm_rope(
    QKV, Q, K, WQ, WK, COS, SIN, sx, sc, ss, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """sx, sc, ss: elements between two tokens of QKV, COS, SIN."""
    token = tl.program_id(0).to(tl.int64)
    x = QKV + token * sx
    cos, sin = COS + token * sc, SIN + token * ss
    _norm_rope(x, Q + token * HEADS * D, WQ, cos, sin, eps, HEADS, HAS_NORM, D, BQ, BD)
    _norm_rope(x + HEADS * D, K + token * KV_HEADS * D, WK, cos, sin, eps, KV_HEADS, HAS_NORM, D, BK, BD)


@triton.jit
def qknorm_rope_backward(
    DQ, DK, DV, QKV, DQKV, WQ, WK, COS, SIN, sqt, sqh, skt, skh, svt, svh, sx, sc, ss, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HAS_NORM: tl.constexpr, D: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """sqt, sqh: elements between two tokens, two heads of DQ; so for DK, DV."""
    token = tl.program_id(0).to(tl.int64)
    x = QKV + token * sx
    out = DQKV + token * (HEADS + 2 * KV_HEADS) * D
    cos, sin = COS + token * sc, SIN + token * ss
    _norm_rope_backward(DQ + token * sqt, x, out, WQ, cos, sin, eps, sqh, HEADS, HAS_NORM, D, BQ, BD)
    x += HEADS * D
    out += HEADS * D
    _norm_rope_backward(DK + token * skt, x, out, WK, cos, sin, eps, skh, KV_HEADS, HAS_NORM, D, BK, BD)
    head = tl.arange(0, BK)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (head < KV_HEADS) & (d < D // 2)
    v1, v2 = _halves(DV + token * svt + head * svh, inside, D, d)
    _store_halves(out + KV_HEADS * D + head * D, v1, v2, inside, D, d)
