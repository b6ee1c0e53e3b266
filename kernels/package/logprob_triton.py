"""The Triton kernels of `linear_logprob`: float32 accuracy, bfloat16 speed, 4·N·H·V FLOPs.

Two GEMMs, with a pass over the logits between them that needs no maximum: a row's softmax is anchored at its
target's logit, which is known beforehand and, for a sampled token, within some 30 nats of the maximum.

    E_v = exp(z_v - a) for v ≠ y     S = Σ E_v     U = Σ E_v (z_v - a)     q = exp(z_y - a)     a = z_y, so q = 1
    logprob = (z_y - a) - log(S + q)               entropy = log(S + q) - (U + q (z_y - a)) / (S + q)
    ∂ logprob / ∂ hidden = -(Σ E_v W_v - S W_y) / ((S + q) · temperature)

E is written in bfloat16 with -S in the target's place, so that one GEMM with the weight, accumulated in float32
over the whole vocabulary, gives the derivative up to a factor per row. Nothing is subtracted from 1: a token of
probability 1 - 1e-8 keeps its gradient. A tile of a row that would overflow (a target 69 nats below another
token) is anchored at its own maximum instead; `finish_rows` brings the tiles of such a row together.

Shape suffixes: N rows, H hidden size, V vocabulary, C columns of the logits that exist at once, K tiles of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bucketrl.kernels.reference import IGNORE_INDEX

OVERFLOW = tl.constexpr(1e30)
"""Σ E of a tile beyond which the tile gets an anchor of its own: e^69, and bfloat16 ends at e^88."""
ANCHOR_REACH = tl.constexpr(60.0)
"""Nats above the target at which the fused GEMM gives a tile an anchor of its own."""
IGNORED = tl.constexpr(IGNORE_INDEX)


@triton.jit
def _softcapped(x, softcap, HAS_CAP: tl.constexpr):
    """cap(x), and its derivative."""
    if HAS_CAP:
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0
        return softcap * tanh, 1.0 - tanh * tanh
    else:
        return x, 1.0


@triton.jit
def target_logits(X, W, Y, INV_T, ZY, H, V, sxn, swv, softcap, HAS_CAP: tl.constexpr, BH: tl.constexpr):
    """z of each row's target, in float32: one program a row."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + row)
    if (y >= 0) & (y < V):
        total = tl.full((BH,), 0.0, tl.float32)
        for first in range(0, H, BH):
            h = first + tl.arange(0, BH)
            x = tl.load(X + row * sxn + h, mask=h < H, other=0.0).to(tl.float32)
            w = tl.load(W + y.to(tl.int64) * swv + h, mask=h < H, other=0.0).to(tl.float32)
            total += x * w
        z, _ = _softcapped(tl.sum(total, 0), softcap, HAS_CAP)
        tl.store(ZY + row, z * tl.load(INV_T + row))
    else:
        tl.store(ZY + row, 0.0)


@triton.jit
def exp_tile(
    Z, Y, INV_T, ZY, E, A, S, U, first_column, V, C, N, szn, sen, softcap,
    HAS_CAP: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """E of one tile of one row, and the tile's anchor and sums. Z holds columns `first_column` to + C."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = (first_column // BLOCK + tile).to(tl.int64) * N + row
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    # All loads before the first branch: none waits for another.
    x = tl.load(Z + row * szn + column, mask=inside, other=-float("inf"))
    y = tl.load(Y + row)
    zy = tl.load(ZY + row)
    inverse = tl.load(INV_T + row)
    if (y >= 0) & (y < V):
        capped, slope = _softcapped(x, softcap, HAS_CAP)
        z = capped * inverse
        live = inside & (column != y.to(tl.int32) - first_column)
        anchor = zy
        e = tl.where(live, tl.exp(z - zy), 0.0)
        total = tl.sum(e, 0)
        if not total < OVERFLOW:
            anchor = tl.max(tl.where(live, z, -float("inf")), 0)
            e = tl.where(live, tl.exp(z - anchor), 0.0)
            total = tl.sum(e, 0)
        # 0 · -inf, where a logit is -inf or a column is beyond the last.
        weighted = tl.sum(tl.where(e > 0.0, e * (z - anchor), 0.0), 0)
        tl.store(A + slot, anchor)
        tl.store(S + slot, total)
        tl.store(U + slot, weighted)
        if STORE:
            tl.store(E + row * sen + first_column + column, (e * slope).to(E.dtype.element_ty), mask=inside)
    elif STORE:
        zero = tl.full((BLOCK,), 0.0, tl.float32)
        tl.store(E + row * sen + first_column + column, zero.to(E.dtype.element_ty), mask=inside)


@triton.jit
def gemm_exp(
    X, W, E, Y, INV_T, ZY, A, S, U, N, V, H, SLOTS, softcap,
    HAS_CAP: tl.constexpr, STORE: tl.constexpr, DOT: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The logits' GEMM and `exp_tile` in one: the logits never leave the registers. X, W, E: descriptors."""
    across = tl.cdiv(V, BLOCK)
    down = tl.cdiv(N, BM)
    half: tl.constexpr = BLOCK // 2
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS):
        first_of_group = tile // (GROUP * across) * GROUP
        group = min(down - first_of_group, GROUP)
        row_tile = first_of_group + tile % (GROUP * across) % group
        column_tile = tile % (GROUP * across) // group
        first_row = row_tile * BM
        first_column = column_tile * BLOCK
        logits = tl.full((BM, BLOCK), 0.0, tl.float32)
        for k in range(0, H, BK):
            x = X.load([first_row, k]).to(DOT)
            w = W.load([first_column, k]).to(DOT)
            logits = tl.dot(x, w.T, logits)
        row = first_row + tl.arange(0, BM)
        y = tl.load(Y + row, mask=row < N, other=-1)
        zy = tl.load(ZY + row, mask=row < N, other=0.0)
        inverse = tl.load(INV_T + row, mask=row < N, other=1.0)
        # In halves: fewer registers.
        halves = tl.split(tl.permute(tl.reshape(logits, (BM, 2, half)), (0, 2, 1)))
        anchor = tl.full((BM,), -float("inf"), tl.float32)
        for i in tl.static_range(2):
            column = first_column + i * half + tl.arange(0, half)
            capped, _ = _softcapped(halves[i], softcap, HAS_CAP)
            z = tl.where(column[None, :] < V, capped * inverse[:, None], -float("inf"))
            anchor = tl.maximum(anchor, tl.max(z, 1))
        anchor = tl.where(anchor > zy + ANCHOR_REACH, anchor, zy)
        total = tl.full((BM,), 0.0, tl.float32)
        weighted = tl.full((BM,), 0.0, tl.float32)
        target = tl.where((y >= 0) & (y < V), y, V).to(tl.int32)
        for i in tl.static_range(2):
            column = first_column + i * half + tl.arange(0, half)
            capped, slope = _softcapped(halves[i], softcap, HAS_CAP)
            d = capped * inverse[:, None] - anchor[:, None]
            live = (column[None, :] < V) & (column[None, :] != target[:, None]) & (target[:, None] < V)
            e = tl.where(live, tl.exp(d), 0.0)
            total += tl.sum(e, 1)
            weighted += tl.sum(tl.where(e > 0.0, e * d, 0.0), 1)
            if STORE:
                E.store([first_row, first_column + i * half], (e * slope).to(E.dtype))
        slot = column_tile.to(tl.int64) * SLOTS + row
        tl.store(A + slot, anchor, mask=row < N)
        tl.store(S + slot, total, mask=row < N)
        tl.store(U + slot, weighted, mask=row < N)


@triton.jit
def finish_rows(
    Y, INV_T, ZY, E, A, S, U, LOGP, ENTROPY, SCALE, MEAN, V, K, N, sen, softcap,
    HAS_CAP: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds a row's tiles up, in a fixed order; one program a row. MEAN is the mean of z - a under softmax(z)."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + row)
    if (y >= 0) & (y < V):
        zy = tl.load(ZY + row)
        k = tl.arange(0, BK)
        slots = k.to(tl.int64) * N + row
        anchors = tl.load(A + slots, mask=k < K, other=-float("inf"))
        anchor = tl.maximum(tl.max(anchors, 0), zy)
        shift = tl.where(k < K, anchors - anchor, 0.0)
        weight = tl.exp(shift)
        s = tl.load(S + slots, mask=k < K, other=0.0)
        u = tl.load(U + slots, mask=k < K, other=0.0)
        others = tl.sum(s * weight, 0)
        weighted = tl.sum((u + s * shift) * weight, 0)
        q = tl.exp(zy - anchor)
        # log1p(x), by Kahan: exact where x is tiny, as it is for a confident token.
        x = others + (q - 1.0)
        one_more = 1.0 + x
        log_sum = tl.where(one_more == 1.0, x, tl.log(one_more) * (x / (one_more - 1.0)))
        mean = (weighted + tl.where(q > 0.0, q * (zy - anchor), 0.0)) / one_more
        tl.store(LOGP + row, (zy - anchor) - log_sum)
        entropy = log_sum - mean
        tl.store(ENTROPY + row, tl.where(entropy < 0.0, 0.0, entropy))
        if STORE:
            tl.store(SCALE + row, -tl.load(INV_T + row) / one_more)
            tl.store(MEAN + row, mean)
            if anchor > zy:
                for tile in range(0, K):
                    factor = tl.exp(tl.load(A + tl.cast(tile, tl.int64) * N + row) - anchor)
                    column = tile * BLOCK + tl.arange(0, BLOCK)
                    here = E + row * sen + column
                    e = tl.load(here, mask=column < V, other=0.0).to(tl.float32)
                    tl.store(here, (e * factor).to(E.dtype.element_ty), mask=column < V)
                tl.debug_barrier()
            slope = 1.0
            if HAS_CAP:
                ratio = zy / (softcap * tl.load(INV_T + row))
                slope = 1.0 - ratio * ratio
            tl.store(E + row * sen + y, (-others * slope).to(E.dtype.element_ty))
    else:
        # A target outside the vocabulary has no probability: NaN shows it, where 0 would hide it.
        tl.store(LOGP + row, tl.where(y == IGNORED, 0.0, float("nan")))
        tl.store(ENTROPY + row, 0.0)
        if STORE:
            tl.store(SCALE + row, 0.0)
            tl.store(MEAN + row, 0.0)


@triton.jit
def entropy_tile(Y, INV_T, LOGP, ENTROPY, SCALE, MEAN, E, V, sen, BLOCK: tl.constexpr):
    """E_v to E_v (z_v - a - mean), in place: times SCALE and the weight it is ∂ entropy / ∂ hidden."""
    row = tl.program_id(1).to(tl.int64)
    y = tl.load(Y + row)
    if (y >= 0) & (y < V):
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        here = E + row * sen + column
        e = tl.load(here, mask=column < V, other=0.0).to(tl.float32)
        term = tl.where(e > 0.0, e * (tl.log(tl.where(e > 0.0, e, 1.0)) - tl.load(MEAN + row)), 0.0)
        # In the target's place stands -S. z_y - a - mean = logprob + entropy, and q = p (S + q).
        logprob = tl.load(LOGP + row)
        q = -tl.exp(logprob) * tl.load(INV_T + row) / tl.load(SCALE + row)
        own = tl.where(q > 0.0, q * (logprob + tl.load(ENTROPY + row)), 0.0)
        term = tl.where(column == y.to(tl.int32), own, term)
        tl.store(here, term.to(E.dtype.element_ty), mask=column < V)


@triton.jit
def scale_rows(X, G, X2, G2, OUT, H, sxn, son, TWO: tl.constexpr, BH: tl.constexpr):
    """OUT = G·X (+ G2·X2), a factor a row, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(G + row)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        value = g * tl.load(X + row * sxn + h, mask=h < H, other=0.0).to(tl.float32)
        if TWO:
            value += tl.load(G2 + row) * tl.load(X2 + row * sxn + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(OUT + row * son + h, value.to(OUT.dtype.element_ty), mask=h < H)
