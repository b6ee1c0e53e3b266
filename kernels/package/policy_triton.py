"""The Triton kernels of `packed_policy_loss` and `group_advantage`.

Partial sums are added up in a fixed order, so the same input gives the same bits. Nothing is read back by the host.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bucketrl.kernels.policy_reference import STATS, STD_EPSILON
from bucketrl.kernels.policy_terms import MAX_LOG_RATIO

REACH = tl.constexpr(MAX_LOG_RATIO)
EPSILON = tl.constexpr(STD_EPSILON)
ROWS = tl.constexpr(len(STATS))


@triton.jit
def _finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def _clamped(x):
    return tl.minimum(tl.maximum(x, -REACH), REACH)


@triton.jit
def _count(x):
    return tl.sum(x.to(tl.int32), 0)


@triton.jit
def _load(token, there, LOGP, BEH, MASK, PROX, REF, ENT):
    """All about each token; no load waits for another. A pointer that is None is not there."""
    unmasked = there
    if MASK is not None:
        unmasked = unmasked & (tl.load(MASK + token, mask=there, other=0) != 0)
    logp = tl.load(LOGP + token, mask=there, other=0.0)
    beh = tl.load(BEH + token, mask=there, other=0.0)
    prox, ref, ent = beh, logp, logp
    if PROX is not None:
        prox = tl.load(PROX + token, mask=there, other=0.0)
    if REF is not None:
        ref = tl.load(REF + token, mask=there, other=0.0)
    if ENT is not None:
        ent = tl.load(ENT + token, mask=there, other=0.0)
    return unmasked, logp, beh, prox, ref, ent


@triton.jit
def _live(unmasked, sequence, logp, beh, prox, ref, ent, ADV, WEIGHT):
    """Which tokens are live, and all about them, 0 for the others."""
    adv = tl.load(ADV + sequence, mask=unmasked, other=0.0)
    weight = tl.where(unmasked, 1.0, 0.0)
    if WEIGHT is not None:
        weight = tl.load(WEIGHT + sequence, mask=unmasked, other=0.0)
    live = unmasked & _finite(logp) & _finite(beh) & _finite(prox) & _finite(ref) & _finite(ent)
    live = live & _finite(adv) & _finite(weight)
    return (
        live, tl.where(live, logp, 0.0), tl.where(live, beh, 0.0), tl.where(live, prox, 0.0),
        tl.where(live, ref, 0.0), tl.where(live, ent, 0.0), tl.where(live, adv, 0.0), tl.where(live, weight, 0.0),
    )  # fmt: skip


@triton.jit
def _sequences(token, first, stop, CU, B, span, WAYS: tl.constexpr):
    """Of each token from `first` on the last sequence that begins at or before it; empty ones are passed over.

    That of the first token is sought `WAYS` places at a time, for each search waits for memory once. Then the
    bounds in the block are counted. span: a power of WAYS, at least B.
    """
    low = 0
    while span > 1:
        span = span // WAYS
        place = low + span * (1 + tl.arange(0, WAYS))
        begun = (tl.load(CU + place, mask=place < B, other=0) <= first) & (place < B)
        low += span * _count(begun)
    sequence = low + 0 * token
    after = tl.minimum(low + 1, B)
    bound = tl.load(CU + after)
    while bound < stop:
        sequence += tl.where(bound <= token, 1, 0)
        after += 1
        bound = tl.load(CU + after)
    return sequence


@triton.jit
def _log_ratios(logp, beh, prox, PROX):
    """Those of the surrogate and of the importance weight."""
    numerator = logp
    if PROX is not None:
        numerator = prox
    return _clamped(logp - prox), _clamped(numerator - beh)


@triton.jit(do_not_specialize=["N"])
def sequence_means(CU, LOGP, BEH, ADV, MASK, PROX, REF, ENT, WEIGHT, MEANS, N, BT: tl.constexpr):
    """Means of the two log ratios over the live tokens of a sequence; one program a sequence."""
    sequence = tl.program_id(0)
    first = tl.load(CU + sequence)
    stop = tl.minimum(tl.load(CU + sequence + 1), N)
    ratio = tl.full((BT,), 0.0, tl.float32)
    weighing = tl.full((BT,), 0.0, tl.float32)
    count = tl.full((BT,), 0.0, tl.float32)
    for start in range(first, stop, BT):
        token = start + tl.arange(0, BT)
        unmasked, logp, beh, prox, ref, ent = _load(token, token < stop, LOGP, BEH, MASK, PROX, REF, ENT)
        live, logp, beh, prox, _, _, _, _ = _live(
            unmasked, sequence + 0 * token, logp, beh, prox, ref, ent, ADV, WEIGHT
        )
        x, w = _log_ratios(logp, beh, prox, PROX)
        ratio += x
        weighing += w
        count += tl.where(live, 1.0, 0.0)
    length = tl.maximum(tl.sum(count, 0), 1.0)
    tl.store(MEANS + 2 * sequence, tl.sum(ratio, 0) / length)
    tl.store(MEANS + 2 * sequence + 1, tl.sum(weighing, 0) / length)


@triton.jit(do_not_specialize=["N", "B", "span"])
def policy_loss(
    CU, LOGP, BEH, ADV, MASK, PROX, REF, ENT, WEIGHT, MEANS, NORM, GRAD, GRAD_ENT, WORK, TOTALS, LOSS,
    scale, N, B, span, OBJ: tl.constexpr, BT: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """One block of tokens: ∂ loss / ∂ log π, ∂ loss / ∂ entropy, and the block's row of partial `STATS`.

    The block that ends last adds the rows up. WORK: a row for the number of blocks that have ended, an integer that
    is 0 before and after, then one for each block. OBJ: the `Objective`. scale: 1 / norm, if NORM is None.
    """
    block = tl.program_id(0)
    token = block * BT + tl.arange(0, BT)
    unmasked, logp, beh, prox, ref, ent = _load(token, token < N, LOGP, BEH, MASK, PROX, REF, ENT)
    if NORM is not None:
        norm = tl.load(NORM)
        scale = tl.where(norm > 0.0, 1.0 / tl.where(norm > 0.0, norm, 1.0), 0.0)
    end = tl.minimum(tl.load(CU + B), N)
    unmasked = unmasked & (token < end) & (token >= tl.load(CU))
    sequence = _sequences(token, block * BT, tl.minimum((block + 1) * BT, end), CU, B, span, WAYS)
    live, logp, beh, prox, ref, ent, adv, weight = _live(
        unmasked, sequence, logp, beh, prox, ref, ent, ADV, WEIGHT
    )
    one = tl.where(live, 1.0, 0.0)
    never = one > 2.0

    x, w = _log_ratios(logp, beh, prox, PROX)
    moves = tl.abs(logp - prox) <= REACH
    if OBJ.ratio_level == "sequence":
        x = tl.load(MEANS + 2 * sequence, mask=live, other=0.0)
    r = tl.exp(x)
    is_low, is_high, is_dual = never, never, never
    if OBJ.surrogate == "ppo_clip":
        is_low = (r < 1.0 - OBJ.clip_low) & (adv < 0.0)
        is_high = (r > 1.0 + OBJ.clip_high) & (adv > 0.0)
        gain = tl.where(is_low, (1.0 - OBJ.clip_low) * adv, r * adv)
        gain = tl.where(is_high, (1.0 + OBJ.clip_high) * adv, gain)
        if OBJ.dual_clip is not None:
            is_dual = (r > OBJ.dual_clip) & (adv < 0.0)
            gain = tl.where(is_dual, OBJ.dual_clip * adv, gain)
        slope = tl.where(is_low | is_high | is_dual | ~moves, 0.0, r * adv)
    elif OBJ.surrogate == "cispo":
        is_high = r > 1.0 + OBJ.clip_high
        slope = tl.minimum(r, 1.0 + OBJ.clip_high) * adv
        gain = slope * logp
    else:
        slope = adv
        gain = adv * logp

    correction = one
    is_corrected = never
    if OBJ.importance_weight != "none":
        by_weight = w
        if OBJ.importance_weight == "sequence":
            by_weight = tl.load(MEANS + 2 * sequence + 1, mask=live, other=0.0)
        correction = one * tl.minimum(tl.exp(by_weight), OBJ.importance_cap)
        is_corrected = tl.exp(by_weight) > OBJ.importance_cap
    if OBJ.importance_mask != "none":
        by_mask = w
        if OBJ.importance_mask == "sequence":
            by_mask = tl.load(MEANS + 2 * sequence + 1, mask=live, other=0.0)
        outside = (tl.exp(by_mask) < OBJ.importance_mask_low) | (tl.exp(by_mask) > OBJ.importance_mask_high)
        correction = tl.where(outside, 0.0, correction)
        is_corrected = is_corrected | outside
    per_token = -correction * gain
    grad = -correction * slope
    kl = tl.full((BT,), 0.0, tl.float32)
    if REF is not None:
        d = _clamped(ref - logp)
        if OBJ.kl_estimator == "k1":
            kl = -d
            kl_slope = one
        elif OBJ.kl_estimator == "k2":
            kl = d * d * 0.5
            kl_slope = -d
        else:
            kl = tl.exp(d) - d - 1.0
            kl_slope = 1.0 - tl.exp(d)
        per_token += OBJ.kl_coefficient * kl
        grad += OBJ.kl_coefficient * tl.where(tl.abs(ref - logp) <= REACH, kl_slope, 0.0)
    if ENT is not None:
        per_token += -OBJ.entropy_coefficient * ent
        tl.store(GRAD_ENT + token, -OBJ.entropy_coefficient * weight * scale, mask=token < N)
    tl.store(GRAD + token, tl.where(live, grad * weight * scale, 0.0), mask=token < N)

    drift = _clamped(logp - beh)
    ratio = tl.exp(drift)
    out = WORK + (block + 1) * ROWS
    tl.store(out, tl.sum(per_token * weight, 0) * scale)
    tl.store(out + 1, _count(live))
    tl.store(out + 2, _count(unmasked & ~live))
    tl.store(out + 3, tl.sum(one * ratio, 0))
    tl.store(out + 4, tl.sum(one * ratio * ratio, 0))
    tl.store(out + 5, _count(live & is_low))
    tl.store(out + 6, _count(live & is_high))
    tl.store(out + 7, _count(live & is_dual))
    tl.store(out + 8, _count(live & is_corrected))
    tl.store(out + 9, tl.sum(correction, 0))
    tl.store(out + 10, tl.sum(-drift * one, 0))
    tl.store(out + 11, tl.sum((ratio - 1.0 - drift) * one, 0))
    tl.store(out + 12, tl.sum(kl * one, 0))
    if ENT is not None:
        tl.store(out + 13, tl.sum(ent, 0))
    else:
        tl.store(out + 13, 0.0)
    tl.store(out + 14, tl.max(tl.where(live, ratio, 0.0), 0))
    tl.store(out + 15, tl.min(tl.where(live, ratio, float("inf")), 0))

    # The barriers keep the row before the count, which releases it, and all that follows behind it.
    tl.debug_barrier()
    counter = WORK.to(tl.pointer_type(tl.int32))
    ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    tl.debug_barrier()
    if ended == tl.num_programs(0):
        tl.store(counter, 0)
        _add_rows(WORK + ROWS, ended, TOTALS, LOSS, BT)


@triton.jit
def _add_rows(PART, blocks, TOTALS, LOSS, CHUNK: tl.constexpr):
    """The rows of partial sums of all blocks, in their order; read past the L1 cache, which may be stale."""
    column = tl.arange(0, ROWS)
    total = tl.full((ROWS,), 0.0, tl.float32)
    largest = tl.full((ROWS,), 0.0, tl.float32)
    smallest = tl.full((ROWS,), float("inf"), tl.float32)
    for first in range(0, blocks, CHUNK):
        row = first + tl.arange(0, CHUNK)[:, None]
        place = PART + row * ROWS + column[None, :]
        value = tl.load(place, mask=row < blocks, other=0.0, cache_modifier=".cg")
        total += tl.sum(value, 0)
        largest = tl.maximum(largest, tl.max(value, 0))
        smallest = tl.minimum(smallest, tl.min(tl.where(row < blocks, value, float("inf")), 0))
    smallest = tl.where(smallest < float("inf"), smallest, 0.0)
    extreme = tl.where(column == ROWS - 1, smallest, largest)
    result = tl.where(column < ROWS - 2, total, extreme)
    tl.store(TOTALS + column, result)
    tl.store(LOSS + 0 * column, result, mask=column == 0)


@triton.jit
def group_moments(REWARDS, CU, MOMENTS, BT: tl.constexpr):
    """count, sum, min, max, and the sum of squares about the mean of a group's finite rewards."""
    group = tl.program_id(0)
    first = tl.load(CU + group)
    stop = tl.load(CU + group + 1)
    count, total = 0.0, 0.0
    smallest, largest = float("inf"), -float("inf")
    for start in range(first, stop, BT):
        at = start + tl.arange(0, BT)
        reward = tl.load(REWARDS + at, mask=at < stop, other=float("nan"))
        valid = _finite(reward)
        count += tl.sum(tl.where(valid, 1.0, 0.0), 0)
        total += tl.sum(tl.where(valid, reward, 0.0), 0)
        smallest = tl.minimum(smallest, tl.min(tl.where(valid, reward, float("inf")), 0))
        largest = tl.maximum(largest, tl.max(tl.where(valid, reward, -float("inf")), 0))
    mean = total / tl.maximum(count, 1.0)
    squares = 0.0
    for start in range(first, stop, BT):
        at = start + tl.arange(0, BT)
        reward = tl.load(REWARDS + at, mask=at < stop, other=float("nan"))
        apart = tl.where(_finite(reward), reward - mean, 0.0)
        squares += tl.sum(apart * apart, 0)
    out = MOMENTS + group * 4
    tl.store(out, count)
    tl.store(out + 1, mean)
    tl.store(out + 2, squares)
    tl.store(out + 3, tl.where(smallest < largest, 1.0, 0.0))


@triton.jit(do_not_specialize=["G"])
def group_advantages(
    REWARDS, CU, MOMENTS, ADV, FLAT, G, BATCH: tl.constexpr, GROUP: tl.constexpr, BT: tl.constexpr
):
    """(reward - mean) / divisor of one group; the batch's moments are added up again by every program."""
    group = tl.program_id(0)
    first = tl.load(CU + group)
    stop = tl.load(CU + group + 1)
    mean = tl.load(MOMENTS + group * 4 + 1)
    varied = tl.load(MOMENTS + group * 4 + 3)
    divisor = 1.0
    if GROUP:
        count = tl.load(MOMENTS + group * 4)
        divisor = tl.sqrt(tl.load(MOMENTS + group * 4 + 2) / tl.maximum(count - 1.0, 1.0)) + EPSILON
    if BATCH:
        n, total, squares = 0.0, 0.0, 0.0
        for other in range(0, G):
            count = tl.load(MOMENTS + other * 4)
            n += count
            total += count * tl.load(MOMENTS + other * 4 + 1)
        centre = total / tl.maximum(n, 1.0)
        for other in range(0, G):
            apart = tl.load(MOMENTS + other * 4 + 1) - centre
            squares += tl.load(MOMENTS + other * 4 + 2) + tl.load(MOMENTS + other * 4) * apart * apart
        divisor = tl.where(n > 1.0, tl.sqrt(squares / tl.maximum(n - 1.0, 1.0)) + EPSILON, 1.0)
    tl.store(FLAT + group, tl.where(varied > 0.0, 0, 1).to(tl.int8))
    for start in range(first, stop, BT):
        at = start + tl.arange(0, BT)
        reward = tl.load(REWARDS + at, mask=at < stop, other=0.0)
        apart = tl.where(_finite(reward), reward - mean, 0.0)
        tl.store(ADV + at, tl.where(varied > 0.0, apart / divisor, 0.0), mask=at < stop)
