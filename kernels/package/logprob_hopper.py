"""The logits' GEMM with its anchored exponentials, warp-specialised for Hopper (Gluon): `logprob_triton.gemm_exp`
without a softcap, the same results up to rounding.

One warp loads by TMA into a ring of stages and runs ahead over the ends of tiles, of 128 x 256. Two warp groups own
64 rows each and share W: they multiply (wgmma) and form E, each at its own pace within the ring.

Shape suffixes: N rows, H hidden size, V vocabulary, K tiles of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bucketrl.kernels.logprob_plan import HOPPER_BLOCK
from bucketrl.kernels.logprob_triton import ANCHOR_REACH

# Names of Triton 3.9, and of 3.6.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
SIZES = ["N", "V", "H", "SLOTS"]
BY_ROW = ["Y", "INV_T", "ZY", "A", "S", "U"]
"""Read and written a number at a time: one compilation, wherever a chunk of rows begins."""


@gluon.jit
def _place(tile, down, across, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP rows of tiles at a time, down before across."""
    of_group = GROUP * across
    first = tile // of_group * GROUP
    group = gl.minimum(down - first, GROUP)
    return first + tile % of_group % group, tile % of_group // group


@gluon.jit
def _load(X, W, bars, x_ring, w_ring, N, V, H, GROUP: gl.constexpr):
    """The producer: every stage of every tile of this program."""
    full, empty = bars
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK: gl.constexpr = W.block_type.shape[0]
    BK: gl.constexpr = W.block_type.shape[1]
    ROWS: gl.constexpr = X.block_type.shape[0]
    down = gl.cdiv(N, 2 * ROWS)
    across = gl.cdiv(V, BLOCK)
    count = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        row_tile, column_tile = _place(tile, down, across, GROUP)
        for k in range(0, H, BK):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 2 * BK * (2 * ROWS + BLOCK))
            for part in gl.static_range(2):
                load_box(X, [(2 * row_tile + part) * ROWS, k], bar, x_ring.index(2 * stage + part))
            load_box(W, [column_tile * BLOCK, k], bar, w_ring.index(stage))
            count += 1


@gluon.jit
def _quarter(logits, part: gl.constexpr, layout: gl.constexpr):
    """64 of 256 columns: registers only."""
    ROWS: gl.constexpr = logits.shape[0]
    halves = logits.reshape((ROWS, 2, 128)).permute((0, 2, 1)).split()
    quarters = halves[part // 2].reshape((ROWS, 2, 64)).permute((0, 2, 1)).split()
    return gl.convert_layout(quarters[part % 2], layout, assert_trivial=True)


@gluon.jit
def _exp2_unless(x, column, own, known):
    """2^x, or 0 where column is own or the row is not known. Subnormal results are 0."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    column = column.expand_dims(0).broadcast_to((ROWS, COLUMNS))
    own = own.expand_dims(1).broadcast_to((ROWS, COLUMNS))
    known = known.expand_dims(1).broadcast_to((ROWS, COLUMNS))
    # One comparison and one selection an element: the compiler makes two selections of the same in Python.
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        .reg .f32 t;
        setp.ge.s32 q, $4, 0;
        setp.ne.and.s32 p, $2, $3, q;
        ex2.approx.ftz.f32 t, $1;
        selp.f32 $0, t, 0f00000000, p;
        }""",
        "=f,f,r,r,r", [x, column, own, known], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _finish(
    E, staging, logits, target, zy, inverse, first_row, first_column, V,
    STORE: gl.constexpr, RAGGED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """E of the tile, and each row's anchor, Σ E and Σ E (z - anchor)."""
    ROWS: gl.constexpr = logits.shape[0]
    across: gl.constexpr = gl.SliceLayout(0, layout)
    columns = gl.arange(0, 64, across)
    inside = V - first_column
    top = _quarter(logits, 0, layout)
    if RAGGED:
        top = gl.where((columns < inside)[None, :], top, -float("inf"))
    for part in gl.static_range(1, 4):
        x = _quarter(logits, part, layout)
        if RAGGED:
            x = gl.where((part * 64 + columns < inside)[None, :], x, -float("inf"))
        top = gl.maximum(top, x)
    highest = gl.max(top, 1) * inverse
    anchor = gl.where(highest > zy + ANCHOR_REACH, highest, zy)
    total = gl.full((ROWS,), 0.0, gl.float32, gl.SliceLayout(1, layout))
    weighted = gl.full((ROWS,), 0.0, gl.float32, gl.SliceLayout(1, layout))
    own = target - first_column
    # In powers of two.
    scale = inverse * LOG2_E
    shift = anchor * -LOG2_E
    for part in gl.static_range(4):
        column = part * 64 + columns
        d = _quarter(logits, part, layout) * scale[:, None] + shift[:, None]
        if RAGGED:
            d = gl.where((column < inside)[None, :], d, -float("inf"))
        e = _exp2_unless(d, column, own, target)
        total += gl.sum(e, 1)
        # 0 · -inf, where a logit is -inf.
        weighted += gl.sum(e * gl.maximum(d, -1e4), 1)
        if STORE:
            buffer = staging.index(part % 2)
            tma.store_wait(1)
            thread_barrier()
            buffer.store(e.to(gl.bfloat16))
            fence_async_shared()
            thread_barrier()
            store_box(E, [first_row, first_column + part * 64], buffer)
    return anchor, total, weighted * LN_2


@gluon.jit
def _multiply(
    E, bars, x_ring, w_ring, staging, Y, INV_T, ZY, A, S, U, N, V, H, SLOTS,
    STORE: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """A consumer: rows PART · ROWS and on of each tile."""
    full, empty = bars
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK: gl.constexpr = w_ring.shape[1]
    BK: gl.constexpr = w_ring.shape[2]
    ROWS: gl.constexpr = x_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    down = gl.cdiv(N, 2 * ROWS)
    across = gl.cdiv(V, BLOCK)
    steps = gl.cdiv(H, BK)
    count = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        row_tile, column_tile = _place(tile, down, across, GROUP)
        first_row = (2 * row_tile + PART) * ROWS
        first_column = column_tile * BLOCK
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        y = gl.load(Y + row, mask=row < N, other=-1)
        zy = gl.load(ZY + row, mask=row < N, other=0.0)
        inverse = gl.load(INV_T + row, mask=row < N, other=1.0)
        target = gl.where((y >= 0) & (y < V), y, -1).to(gl.int32)
        acc = warpgroup_mma_init(gl.zeros((ROWS, BLOCK), gl.float32, product))
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            x = x_ring.index(2 * stage + PART)
            acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            # One product stays in flight: the stage before this one is read.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        logits = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        if first_column + BLOCK <= V:
            anchor, total, weighted = _finish(
                E, staging, logits, target, zy, inverse, first_row, first_column, V, STORE, False, layout
            )
        else:
            anchor, total, weighted = _finish(
                E, staging, logits, target, zy, inverse, first_row, first_column, V, STORE, True, layout
            )
        slot = column_tile.to(gl.int64) * SLOTS + row
        gl.store(A + slot, anchor, mask=row < N)
        gl.store(S + slot, total, mask=row < N)
        gl.store(U + slot, weighted, mask=row < N)
    tma.store_wait(0)


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    return full, empty


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=BY_ROW)
def _gemm_exp(
    X, W, E, Y, INV_T, ZY, A, S, U, N, V, H, SLOTS,
    STORE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """X, W, E: descriptors of boxes [64, 64], [256, 64] and [64, 64]. 4 warps."""
    x_ring = gl.allocate_shared_memory(X.dtype, [2 * STAGES, 64, 64], X.layout)
    w_ring = gl.allocate_shared_memory(W.dtype, [STAGES, 256, 64], W.layout)
    staging0 = gl.allocate_shared_memory(E.dtype, [2, 64, 64], E.layout)
    staging1 = gl.allocate_shared_memory(E.dtype, [2, 64, 64], E.layout)
    bars = _barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                E, bars, x_ring, w_ring, staging0, Y, INV_T, ZY, A, S, U, N, V, H, SLOTS, STORE, GROUP, 0,
            )),
            (_multiply, (
                E, bars, x_ring, w_ring, staging1, Y, INV_T, ZY, A, S, U, N, V, H, SLOTS, STORE, GROUP, 1,
            )),
            (_load, (X, W, bars, x_ring, w_ring, N, V, H, GROUP)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def gemm_exp(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    inverse_N: Tensor,
    target_N: Tensor,
    exp_NV: Tensor,
    sums_3KN: Tensor,
    *,
    store: bool,
    programs: int,
) -> None:
    """Fills E (if `store`) and each tile's anchor, Σ E and Σ E (z - anchor), by at most `programs` at once.

    The matrices' rows start on 16 bytes. sums_3KN may have room for more rows than N.
    """
    count, size = hidden_NH.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    describe = TensorDescriptor.from_tensor
    # 168 registers a thread: 64 Ki for 3 warp groups. The consumers take what the loading warp does not need.
    _gemm_exp[(min(programs, triton.cdiv(count, 128) * sums_3KN.shape[1]),)](
        describe(hidden_NH, [64, 64], layout),
        describe(weight_VH, [HOPPER_BLOCK, 64], layout),
        describe(exp_NV, [64, 64], layout),
        targets_N, inverse_N, target_N, *sums_3KN, count, weight_VH.shape[0], size, sums_3KN.shape[2],
        STORE=store, GROUP=16, STAGES=4, num_warps=4, maxnreg=168,
    )  # fmt: skip
