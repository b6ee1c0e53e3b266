"""The Triton kernels around the GEMMs of `lora_cuda`: each reads its operands once and writes its results once.

A GEMM over [n | s], with s = n·Aᵀ, applies base and adapter at once, so what writes n also writes s. Its transpose
gives [d | ds], so what reads the gradient d of n adds ds·A in registers. Row offsets are 64-bit throughout.

Shape suffixes: T tokens, H size of the input, R ranks, padded, K = H + R. RP is the power of two, 16 or
more, that holds the ranks in use; DOT the type that products of tiles are formed in; BT rows and BH columns a tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _store_image(acc, OUT, S, row, T, H, R, so, RP: tl.constexpr):
    """s, behind n for the GEMM, with zeros up to the padding, and by itself for the backward pass."""
    rank = tl.arange(0, RP)
    image = acc.to(OUT.dtype.element_ty)
    own = (row[:, None] < T) & (rank[None, :] < R)
    tl.store(OUT + row[:, None] * so + H + rank[None, :], image, mask=own)
    tl.store(S + row[:, None] * R + rank[None, :], image, mask=own)
    for first in range(RP, R, RP):
        own = (row[:, None] < T) & (first + rank[None, :] < R)
        tl.store(OUT + row[:, None] * so + H + first + rank[None, :], tl.zeros_like(image), mask=own)


@triton.jit
def augment(
    X, W, A, OUT, S, RSTD, T, H, R, eps, sx, so,
    NORM: tl.constexpr, ADAPTER: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """OUT = [n | n·Aᵀ], with n = x or x / rms(x) · w. The second look at x is mostly the cache's."""
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    rank = tl.arange(0, RP)
    rstd = tl.full((BT,), 1.0, tl.float32)
    if NORM:
        squares = tl.full((BT, BH), 0.0, tl.float32)
        for first in range(0, H, BH):
            h = first + tl.arange(0, BH)
            mask = (row[:, None] < T) & (h[None, :] < H)
            x = tl.load(
                X + row[:, None] * sx + h[None, :], mask=mask, other=0.0, eviction_policy="evict_last"
            )
            x = x.to(tl.float32)
            squares += x * x
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 1) / H + eps)
        tl.store(RSTD + row, rstd, mask=row < T)
    acc = tl.full((BT, RP), 0.0, tl.float32)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        mask = (row[:, None] < T) & (h[None, :] < H)
        n = tl.load(X + row[:, None] * sx + h[None, :], mask=mask, other=0.0)
        if NORM:
            n = _normed(n, rstd, tl.load(W + h, mask=h < H, other=0.0))
        tl.store(OUT + row[:, None] * so + h[None, :], n, mask=mask)
        if ADAPTER:
            a = tl.load(
                A + rank[None, :] * H + h[:, None], mask=(rank[None, :] < R) & (h[:, None] < H), other=0.0
            )
            acc = tl.dot(n.to(DOT), a.to(DOT), acc, input_precision="ieee")
    if ADAPTER:
        _store_image(acc, OUT, S, row, T, H, R, so, RP)


@triton.jit
def _normed(x, rstd, w):
    """As transformers has it: rounded to x's type before the weight, and after it."""
    n = (x.to(tl.float32) * rstd[:, None]).to(x.dtype).to(tl.float32)
    return (n * w.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def swiglu_augment(
    GU, A, OUT, S, T, H, R, sgu, so,
    ADAPTER: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """OUT = [h | h·Aᵀ], with h = silu(gate) · up, rounded once."""
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    rank = tl.arange(0, RP)
    acc = tl.full((BT, RP), 0.0, tl.float32)
    for first in range(0, H, BH):
        c = first + tl.arange(0, BH)
        mask = (row[:, None] < T) & (c[None, :] < H)
        gate = tl.load(GU + row[:, None] * sgu + c[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(GU + row[:, None] * sgu + H + c[None, :], mask=mask, other=0.0).to(tl.float32)
        h = (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty)
        tl.store(OUT + row[:, None] * so + c[None, :], h, mask=mask)
        if ADAPTER:
            a = tl.load(
                A + rank[None, :] * H + c[:, None], mask=(rank[None, :] < R) & (c[:, None] < H), other=0.0
            )
            acc = tl.dot(h.to(DOT), a.to(DOT), acc, input_precision="ieee")
    if ADAPTER:
        _store_image(acc, OUT, S, row, T, H, R, so, RP)


@triton.jit
def add_low_rank(
    D, A, OUT, T, H, R, sd, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr
):
    """OUT = d + ds·A for D = [d | ds]."""
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    rank = tl.arange(0, RP)
    mask = (row[:, None] < T) & (h[None, :] < H)
    ranks = (row[:, None] < T) & (rank[None, :] < R)
    ds = tl.load(D + row[:, None] * sd + H + rank[None, :], mask=ranks, other=0.0)
    a = tl.load(A + rank[:, None] * H + h[None, :], mask=(rank[:, None] < R) & (h[None, :] < H), other=0.0)
    d = tl.load(D + row[:, None] * sd + h[None, :], mask=mask, other=0.0).to(tl.float32)
    d = tl.dot(ds.to(DOT), a.to(DOT), d, input_precision="ieee")
    tl.store(OUT + row[:, None] * H + h[None, :], d.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def rmsnorm_backward(
    D, X, W, A, S, RSTD, OUT, T, H, R, sd, sx,
    ADAPTER: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """OUT = rstd · (w dn - x̂ · mean(x̂ w dn)), with x̂ = x · rstd and dn = d + ds·A for D = [d | ds].

    Of the mean, the part of ds·A is ds·s, so that A is needed in one of the two loops only.
    """
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    rank = tl.arange(0, RP)
    rstd = tl.load(RSTD + row, mask=row < T, other=0.0)
    products = tl.full((BT, BH), 0.0, tl.float32)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        mask = (row[:, None] < T) & (h[None, :] < H)
        d = tl.load(D + row[:, None] * sd + h[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.load(X + row[:, None] * sx + h[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
        w = tl.load(W + h, mask=h < H, other=0.0).to(tl.float32)
        products += d.to(tl.float32) * x.to(tl.float32) * w[None, :]
    along = tl.sum(products, 1) * rstd
    if ADAPTER:
        ranks = (row[:, None] < T) & (rank[None, :] < R)
        ds = tl.load(D + row[:, None] * sd + H + rank[None, :], mask=ranks, other=0.0)
        s = tl.load(S + row[:, None] * R + rank[None, :], mask=ranks, other=0.0)
        along += tl.sum(ds.to(tl.float32) * s.to(tl.float32), 1)
    along = along * rstd / H
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        mask = (row[:, None] < T) & (h[None, :] < H)
        d = tl.load(D + row[:, None] * sd + h[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + row[:, None] * sx + h[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(W + h, mask=h < H, other=0.0).to(tl.float32)
        if ADAPTER:
            a = tl.load(
                A + rank[:, None] * H + h[None, :], mask=(rank[:, None] < R) & (h[None, :] < H), other=0.0
            )
            d = tl.dot(ds.to(DOT), a.to(DOT), d, input_precision="ieee")
        dx = rstd[:, None] * (w[None, :] * d - x * along[:, None])
        tl.store(OUT + row[:, None] * H + h[None, :], dx.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward(
    D, GU, A, OUT, PART, T, H, R, tokens, sd, sgu,
    ADAPTER: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """OUT = [dgate | dup] of dh = d + ds·A for D = [d | ds]; PART[split] = hᵀ·ds over the split's tokens.

    A program stays with its columns, so that its sums are in registers and h is never stored.
    """
    c = tl.program_id(0) * BH + tl.arange(0, BH)
    start = tl.program_id(1) * tokens
    stop = tl.minimum(start + tokens, T)
    rank = tl.arange(0, RP)
    part = tl.full((BH, RP), 0.0, tl.float32)
    if ADAPTER:
        a = tl.load(
            A + rank[:, None] * H + c[None, :], mask=(rank[:, None] < R) & (c[None, :] < H), other=0.0
        )
    for first in range(start, stop, BT):
        row = (first + tl.arange(0, BT)).to(tl.int64)
        mask = (row[:, None] < stop) & (c[None, :] < H)
        here = GU + row[:, None] * sgu + c[None, :]
        gate = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(here + H, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(D + row[:, None] * sd + c[None, :], mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if ADAPTER:
            ranks = (row[:, None] < stop) & (rank[None, :] < R)
            ds = tl.load(D + row[:, None] * sd + H + rank[None, :], mask=ranks, other=0.0)
            dh = tl.dot(ds.to(DOT), a.to(DOT), dh, input_precision="ieee")
            h = (silu * up).to(OUT.dtype.element_ty)
            part = tl.dot(tl.trans(h.to(DOT)), ds.to(DOT), part, input_precision="ieee")
        dgate = dh * up * (sigmoid + silu * (1.0 - sigmoid))
        out = OUT + row[:, None] * (2 * H) + c[None, :]
        tl.store(out, dgate.to(OUT.dtype.element_ty), mask=mask)
        tl.store(out + H, (dh * silu).to(OUT.dtype.element_ty), mask=mask)
    if ADAPTER:
        place = tl.program_id(1).to(tl.int64) * H + c
        tl.store(PART + place[:, None] * RP + rank[None, :], part, mask=c[:, None] < H)


@triton.jit
def tall_product(
    P, Q, RSTD, W, PART, T, H, R, tokens, sp, sq,
    NORM: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """PART[split] = Pᵀ·Q, [H, R], over the split's tokens; of x / rms(x) · w for P = x if NORM."""
    c = tl.program_id(0) * BH + tl.arange(0, BH)
    start = tl.program_id(1) * tokens
    stop = tl.minimum(start + tokens, T)
    rank = tl.arange(0, RP)
    part = tl.full((BH, RP), 0.0, tl.float32)
    for first in range(start, stop, BT):
        row = (first + tl.arange(0, BT)).to(tl.int64)
        p = tl.load(
            P + row[:, None] * sp + c[None, :], mask=(row[:, None] < stop) & (c[None, :] < H), other=0.0
        )
        if NORM:
            rstd = tl.load(RSTD + row, mask=row < stop, other=0.0)
            p = _normed(p, rstd, tl.load(W + c, mask=c < H, other=0.0))
        q = tl.load(
            Q + row[:, None] * sq + rank[None, :], mask=(row[:, None] < stop) & (rank[None, :] < R), other=0.0
        )
        part = tl.dot(tl.trans(p.to(DOT)), q.to(DOT), part, input_precision="ieee")
    place = tl.program_id(1).to(tl.int64) * H + c
    tl.store(PART + place[:, None] * RP + rank[None, :], part, mask=c[:, None] < H)
