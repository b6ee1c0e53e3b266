"""The Triton kernels around the GEMMs of `lora_cuda`: each reads its operands once and writes its results once.

A GEMM over [n | s], with s = n·Aᵀ, applies base and adapter at once, so what writes n also writes s. Its transpose
gives [d | ds], so what reads the gradient d of n adds ds·A in registers. Row offsets are 64-bit throughout.

Shape suffixes: T tokens, H size of the input, R ranks, padded, K = H + R. RP is the power of two, 16 or
more, that holds the ranks in use; DOT the type that products of tiles are formed in; BT rows and BH columns a tile.

All is limited by the memory. So loops load the next tile before they work on this one, by hand: Triton does it only
for what goes straight into `tl.dot`. A loop that does nothing but read is unrolled instead.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _tile(P, row, column, stride, rows, columns):
    """P[row, column], 0 beyond `rows` and `columns`."""
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(P + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store(OUT, values, row, column, stride, rows, columns):
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(OUT + row[:, None] * stride + column[None, :], values.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _low_rank(ds, a, DOT: tl.constexpr):
    """ds·A. The added axis holds the compiler back from doing all that follows in the tensor cores' layout.

    That would move each tile that meets the product through shared memory instead of the product alone.
    """
    product = tl.dot(ds.to(DOT), a.to(DOT), input_precision="ieee")
    return tl.reshape(product[:, :, None], product.shape)


@triton.jit
def _store_image(acc, OUT, S, row, T, H, R, so, RP: tl.constexpr):
    """s, behind n for the GEMM, with zeros up to the padding, and by itself for the backward pass."""
    rank = tl.arange(0, RP)
    _store(OUT + H, acc, row, rank, so, T, R)
    _store(S, acc, row, rank, R, T, R)
    for first in range(RP, R, RP):
        _store(OUT + H, tl.zeros_like(acc), row, first + rank, so, T, R)


@triton.jit
def augment(
    X, W, A, OUT, S, RSTD, T, H, R, eps, sx, so,
    NORM: tl.constexpr, ADAPTER: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """OUT = [n | n·Aᵀ], with n = x or x / rms(x) · w.

    The first look at x goes from right to left: what the second, from left to right, needs first was read last.
    """
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    rank, columns = tl.arange(0, RP), tl.arange(0, BH)
    rstd = tl.full((BT,), 1.0, tl.float32)
    if NORM:
        squares = tl.full((BT, BH), 0.0, tl.float32)
        last = (tl.cdiv(H, BH) - 1) * BH
        for first in tl.range(0, H, BH, loop_unroll_factor=4):
            x = _tile(X, row, last - first + columns, sx, T, H).to(tl.float32)
            squares += x * x
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 1) / H + eps)
        tl.store(RSTD + row, rstd, mask=row < T)
    acc = tl.full((BT, RP), 0.0, tl.float32)
    n = _tile(X, row, columns, sx, T, H)
    if ADAPTER:
        a = _tile(A, rank, columns, H, R, H)
    for first in range(0, H, BH):
        h = first + columns
        next_x = _tile(X, row, h + BH, sx, T, H)
        if NORM:
            n = _normed(n, rstd, tl.load(W + h, mask=h < H, other=0.0))
        _store(OUT, n, row, h, so, T, H)
        if ADAPTER:
            next_a = _tile(A, rank, h + BH, H, R, H)
            acc = tl.dot(n.to(DOT), tl.trans(a.to(DOT)), acc, input_precision="ieee")
            a = next_a
        n = next_x
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
    rank, columns = tl.arange(0, RP), tl.arange(0, BH)
    acc = tl.full((BT, RP), 0.0, tl.float32)
    gate = _tile(GU, row, columns, sgu, T, H)
    up = _tile(GU + H, row, columns, sgu, T, H)
    if ADAPTER:
        a = _tile(A, rank, columns, H, R, H)
    for first in range(0, H, BH):
        c = first + columns
        next_gate = _tile(GU, row, c + BH, sgu, T, H)
        next_up = _tile(GU + H, row, c + BH, sgu, T, H)
        gate = gate.to(tl.float32)
        h = (gate * tl.sigmoid(gate) * up.to(tl.float32)).to(OUT.dtype.element_ty)
        _store(OUT, h, row, c, so, T, H)
        if ADAPTER:
            next_a = _tile(A, rank, c + BH, H, R, H)
            acc = tl.dot(h.to(DOT), tl.trans(a.to(DOT)), acc, input_precision="ieee")
            a = next_a
        gate = next_gate
        up = next_up
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
    d = _tile(D, row, h, sd, T, H).to(tl.float32)
    d += _low_rank(_tile(D + H, row, rank, sd, T, R), _tile(A, rank, h, H, R, H), DOT)
    _store(OUT, d, row, h, H, T, H)


@triton.jit
def rmsnorm_backward(
    D, X, W, A, S, RSTD, OUT, T, H, R, sd, sx,
    ADAPTER: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """OUT = rstd · (w dn - x̂ · mean(x̂ w dn)), with x̂ = x · rstd and dn = d + ds·A for D = [d | ds].

    Of the mean, the part of ds·A is ds·s, so that A is needed in one of the two loops only, which go over d and x
    in opposite directions as in `augment`.
    """
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    rank, columns = tl.arange(0, RP), tl.arange(0, BH)
    rstd = tl.load(RSTD + row, mask=row < T, other=0.0)
    products = tl.full((BT, BH), 0.0, tl.float32)
    last = (tl.cdiv(H, BH) - 1) * BH
    for first in tl.range(0, H, BH, loop_unroll_factor=4):
        h = last - first + columns
        d = _tile(D, row, h, sd, T, H).to(tl.float32)
        x = _tile(X, row, h, sx, T, H).to(tl.float32)
        products += d * x * tl.load(W + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    along = tl.sum(products, 1) * rstd
    if ADAPTER:
        ds = _tile(D + H, row, rank, sd, T, R)
        s = _tile(S, row, rank, R, T, R)
        along += tl.sum(ds.to(tl.float32) * s.to(tl.float32), 1)
        a = _tile(A, rank, columns, H, R, H)
    along = along * rstd / H
    d = _tile(D, row, columns, sd, T, H)
    x = _tile(X, row, columns, sx, T, H)
    for first in range(0, H, BH):
        h = first + columns
        next_d = _tile(D, row, h + BH, sd, T, H)
        next_x = _tile(X, row, h + BH, sx, T, H)
        w = tl.load(W + h, mask=h < H, other=0.0).to(tl.float32)
        d = d.to(tl.float32)
        if ADAPTER:
            next_a = _tile(A, rank, h + BH, H, R, H)
            d += _low_rank(ds, a, DOT)
            a = next_a
        dx = rstd[:, None] * (w[None, :] * d - x.to(tl.float32) * along[:, None])
        _store(OUT, dx, row, h, H, T, H)
        d = next_d
        x = next_x


@triton.jit
def swiglu_backward(
    D, GU, A, OUT, PART, T, H, R, tokens, sd, sgu,
    ADAPTER: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """OUT = [dgate | dup] of dh = d + ds·A for D = [d | ds]; PART[split] = dsᵀ·h over the split's tokens.

    A program stays with its columns, so that its sums are in registers and h is never stored.
    """
    c = tl.program_id(0) * BH + tl.arange(0, BH)
    start = tl.program_id(1) * tokens
    stop = tl.minimum(start + tokens, T)
    rank = tl.arange(0, RP)
    part = tl.full((RP, BH), 0.0, tl.float32)
    row = (start + tl.arange(0, BT)).to(tl.int64)
    gate = _tile(GU, row, c, sgu, stop, H)
    up = _tile(GU + H, row, c, sgu, stop, H)
    d = _tile(D, row, c, sd, stop, H)
    if ADAPTER:
        a = _tile(A, rank, c, H, R, H)
        ds = _tile(D + H, row, rank, sd, stop, R)
    for first in range(start, stop, BT):
        row = (first + tl.arange(0, BT)).to(tl.int64)
        next_gate = _tile(GU, row + BT, c, sgu, stop, H)
        next_up = _tile(GU + H, row + BT, c, sgu, stop, H)
        next_d = _tile(D, row + BT, c, sd, stop, H)
        gate = gate.to(tl.float32)
        up = up.to(tl.float32)
        dh = d.to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if ADAPTER:
            next_ds = _tile(D + H, row + BT, rank, sd, stop, R)
            dh += _low_rank(ds, a, DOT)
            h = (silu * up).to(OUT.dtype.element_ty)
            part = tl.dot(tl.trans(ds.to(DOT)), h.to(DOT), part, input_precision="ieee")
            ds = next_ds
        dgate = dh * up * (sigmoid + silu * (1.0 - sigmoid))
        _store(OUT, dgate, row, c, 2 * H, stop, H)
        _store(OUT + H, dh * silu, row, c, 2 * H, stop, H)
        gate = next_gate
        up = next_up
        d = next_d
    if ADAPTER:
        _store(PART + tl.program_id(1).to(tl.int64) * RP * H, part, rank, c, H, RP, H)


@triton.jit
def tall_product(
    P, Q, RSTD, W, PART, T, H, R, tokens, sp, sq,
    NORM: tl.constexpr, RP: tl.constexpr, DOT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """PART[split] = Qᵀ·P over the split's tokens; of x / rms(x) · w for P = x if NORM.

    Then a row's factor goes to Q and a column's to the sums: both are smaller than P, and P needs no rounding.
    """
    c = tl.program_id(0) * BH + tl.arange(0, BH)
    start = tl.program_id(1) * tokens
    stop = tl.minimum(start + tokens, T)
    rank = tl.arange(0, RP)
    part = tl.full((RP, BH), 0.0, tl.float32)
    for first in range(start, stop, BT):
        row = (first + tl.arange(0, BT)).to(tl.int64)
        p = _tile(P, row, c, sp, stop, H)
        q = _tile(Q, row, rank, sq, stop, R)
        if NORM:
            rstd = tl.load(RSTD + row, mask=row < stop, other=0.0)
            q = (q.to(tl.float32) * rstd[:, None]).to(q.dtype)
        part = tl.dot(tl.trans(q.to(DOT)), p.to(DOT), part, input_precision="ieee")
    if NORM:
        part *= tl.load(W + c, mask=c < H, other=0.0).to(tl.float32)[None, :]
    _store(PART + tl.program_id(1).to(tl.int64) * RP * H, part, rank, c, H, RP, H)
