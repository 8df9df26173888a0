"""Backward for Hopper (sm_90) in Gluon: dQ, dK and dV in one kernel, from the saved log-sum-exp.

Formulas as in backward.py. A program owns a tile of keys and walks the queries that see it: one warp loads by TMA, four
or eight multiply, and one adds dQ to a float32 sum in global memory, in no particular order: two runs may differ in the
last bits. Scores are [keys, queries]: P^T and dS^T are born as the left operands of dV and dK.
Source: Shah et al., FlashAttention-3, and its backward for sm_90 (Dao-AILab/flash-attention).

Letters: B batch, T sequence, H heads, D head dim.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import hopper_tiles
from .gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_add,
    tma_load,
    tma_store,
    tma_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_ragged import Rows, corner, first_slot, listed
from .hopper_tiles import barriers, bounds, keep_columns, meeting_range, tanh
from .score import LOG2E, ahead, behind, choice
from .tiles import (
    FAR,
    Sequence,
    load_rows,
    load_tile,
    locate,
    padded,
    row_lane,
    sequence,
    store_rows,
    store_tile,
    tile_lane,
)

# Floats in a row of the dQ sum: 128 bytes, one pass over the banks of shared memory.
WIDTH = tl.constexpr(32)
# Bytes of queries, dO and dQ sums of the slots that take turns, counting one query head of each. From T 1024 on these
# have 128 programs at head dim 128 and 256, and 512 at 64: as many as an H200 runs at a time, or twice that.
TURN_BYTES = tl.constexpr(16 * 2**20)


class Plan(NamedTuple):
    """Static choices of backward_kernel: a constexpr argument."""

    block_q: int  # queries per step
    block_k: int  # keys per program
    dim: int  # head dim, padded to a power of two
    warps: int  # that multiply: 4 or 8
    stages: int  # tiles of queries, and of dO, in shared memory
    dq_stages: int  # tiles of dQ on their way to the sum; 0 = added from registers
    branch: bool  # mask only where something may be hidden, not everywhere
    hold: bool  # K and V in registers, not shared memory, as left operands
    early: bool  # dK before dQ, under the meeting of all warps, not after it, under the way of dQ out of the registers
    ragged: bool = False  # whether sequences have lengths of their own, and tiles come from lists


class Shared(NamedTuple):
    """Tiles in shared memory; all but k and v and the last three in stages."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    dscores: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor  # if staged()
    dq: gl.shared_memory_descriptor  # in stages, if any


class Signals(NamedTuple):
    """Barriers: what is full may be read, what is empty may be written."""

    keys_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor  # both
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor


class Work(NamedTuple):
    """What a program does: its keys, its query heads, and the tiles of queries that meet the keys."""

    queries: Rows  # of the sequence
    keys: Rows
    kv_head: gl.tensor
    head: gl.tensor  # first of `span` query heads
    span: gl.tensor
    heads: gl.tensor  # query heads of the call
    k_start: gl.tensor
    shift: gl.tensor  # query i stands at key i + shift
    first_tile: gl.tensor  # number of the first tile of `head`, counted over all heads and sequences
    q_tiles: gl.tensor  # from one head to the next
    lo: gl.tensor  # tiles lo..hi-1 meet the keys, full_lo..full_hi-1 all of them
    full_lo: gl.tensor
    full_hi: gl.tensor
    hi: gl.tensor
    start: gl.tensor  # the tile to begin with
    steps: gl.tensor  # tiles over all heads


class Place(NamedTuple):
    """Where a step stands."""

    step: gl.tensor  # number
    tile: gl.tensor  # of queries, of its head
    number: gl.tensor  # of that tile, counted over all heads
    edge: gl.tensor  # whether some pair of the tiles may be hidden


@gluon.constexpr_function
def hides(rule):
    """Whether a query may be unable to see a key."""
    return rule.causal or rule.window > 0


@gluon.constexpr_function
def staged(plan):
    """Whether P and dS reach their matmuls through shared memory: a warp holds too few of their columns."""
    return plan.block_k < plan.warps * 16


@gluon.constexpr_function
def mma_layout(warps, rows, columns):
    """Of a matmul's result: 16 rows a warp, in groups of four warps; groups that this leaves over share the columns."""
    down = min(warps, rows // 16)
    across = warps // down
    return gl.NVMMADistributedLayout([3, 0], [down, across], [16, columns // across, 16])


@gluon.constexpr_function
def scores_layout(plan):
    """Of [keys, queries]."""
    return mma_layout(plan.warps, plan.block_k, plan.block_q)


@gluon.constexpr_function
def keys_layout(plan):
    """Of dK and dV [keys, dim]."""
    return mma_layout(plan.warps, plan.block_k, plan.dim)


@gluon.jit
def zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr, PLAN: gl.constexpr):
    """A float32 accumulator of a matmul."""
    return gl.full([ROWS, COLUMNS], 0.0, gl.float32, mma_layout(PLAN.warps, ROWS, COLUMNS))


@gluon.jit
def flat(dq, PLAN: gl.constexpr):
    """dQ [queries, dim] -> [queries * dim / WIDTH, WIDTH], in the order in which threads hold it.

    A thread holds 2 neighbours in each of 2 rows: 4 floats that are now one 16-byte access. finish_kernel undoes it.
    """
    dq = dq.reshape([PLAN.block_q // 16, 2, 8, PLAN.dim // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    return dq.reshape([PLAN.block_q * PLAN.dim // WIDTH, WIDTH])


@gluon.jit
def ring(step, STAGES: gl.constexpr):
    """Stage of a step, and the phase in which its full barrier ends; the empty one ends in the other."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def advance(tile, member, work):
    """The tile after this one: of the same head, round and round from work.start, then of the group's next member."""
    tile += 1
    tile = gl.where(tile == work.hi, work.lo, tile)
    return tile, member + gl.where(tile == work.start, 1, 0)


@gluon.jit
def load(q, k, v, dout, rows, shared, signals, work, RULE: gl.constexpr, PLAN: gl.constexpr):
    """The loading warp: keys and values once, then queries with their lse2, and dO with delta."""
    mbarrier.expect(signals.keys_full, k.block_type.nbytes + v.block_type.nbytes)
    at = corner(work.keys, work.k_start, work.kv_head, PLAN.ragged)
    tma_load(k, at, signals.keys_full, shared.k.reshape(k.block_shape))
    if choice(work.keys.length, RULE) == 0.0:
        # values past the end, which are 0, make dP 0; dO.O prepare_kernel leaves out
        at = corner(work.keys, work.keys.length, work.kv_head, PLAN.ragged)
    tma_load(v, at, signals.keys_full, shared.v.reshape(v.block_shape))
    tile = work.start
    member = 0
    for step in range(work.steps):
        at = corner(work.queries, tile * PLAN.block_q, work.head + member, PLAN.ragged)
        row = (work.first_tile + member * work.q_tiles + tile) * (2 * PLAN.block_q)
        slot, phase = ring(step, PLAN.stages)
        full = signals.q_full.index(slot)
        mbarrier.wait(signals.empty.index(slot), phase ^ 1)
        mbarrier.expect(full, q.block_type.nbytes + PLAN.block_q * 4)
        tma_load(q, at, full, shared.q.index(slot).reshape(q.block_shape))
        tma_load(rows, [row], full, shared.lse2.index(slot))
        full = signals.dout_full.index(slot)
        mbarrier.expect(full, dout.block_type.nbytes + PLAN.block_q * 4)
        tma_load(dout, at, full, shared.dout.index(slot).reshape(dout.block_shape))
        tma_load(rows, [row + PLAN.block_q], full, shared.delta.index(slot))
        tile, member = advance(tile, member, work)


@gluon.jit
def add(dq_sum, shared, signals, work, PLAN: gl.constexpr):
    """The adding warp: dQ of each step to the sum, which lies tile by tile of a head."""
    if PLAN.dq_stages > 0:
        tile = work.start
        member = 0
        for step in range(work.steps):
            number = work.first_tile + member * work.q_tiles + tile
            slot, phase = ring(step, PLAN.dq_stages)
            mbarrier.wait(signals.dq_full.index(slot), phase)
            tma_add(dq_sum, [number * (PLAN.block_q * PLAN.dim // WIDTH), 0], shared.dq.index(slot))
            tma_wait(0)
            mbarrier.arrive(signals.dq_empty.index(slot))
            tile, member = advance(tile, member, work)


@gluon.jit
def give_dq(dq, dq_sum, shared, signals, place, PLAN: gl.constexpr):
    """Hand dQ of a step to the adding warp, or add it from registers."""
    dq = flat(dq, PLAN)
    if PLAN.dq_stages > 0:
        slot, phase = ring(place.step, PLAN.dq_stages)
        mbarrier.wait(signals.dq_empty.index(slot), phase ^ 1)
        shared.dq.index(slot).store(dq)
        fence_async_shared()
        mbarrier.arrive(signals.dq_full.index(slot))
    else:
        layout: gl.constexpr = dq.type.layout
        SIZE: gl.constexpr = PLAN.block_q * PLAN.dim
        row = gl.arange(0, SIZE // WIDTH, gl.SliceLayout(1, layout))[:, None]
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
        gl.atomic_add(dq_sum + tl.cast(place.number, tl.int64) * SIZE + (row * WIDTH + column), dq, sem="relaxed")


@gluon.jit
def weigh(scores, lse2, place, work, scale, RULE: gl.constexpr, PLAN: gl.constexpr, TAIL: gl.constexpr):
    """Raw scores [keys, queries] -> weights, and weights times d score / d (scale q.k)."""
    if RULE.softcap > 0:
        cap = tanh(scores * (scale / RULE.softcap))
        weights = gl.exp2(cap * (RULE.softcap * LOG2E) - lse2[None, :])
    else:
        weights = gl.exp2(scores * (scale * LOG2E) - lse2[None, :])
    if hides(RULE) or TAIL:
        edge = True
        if PLAN.branch:
            edge = place.edge
        if edge:
            key = work.k_start + gl.arange(0, PLAN.block_k, gl.SliceLayout(1, scores_layout(PLAN)))
            own = key - work.shift - place.tile * PLAN.block_q  # the query of this tile that stands at this key
            first = own - ahead(RULE)
            if TAIL:
                first = gl.where(key < work.keys.length, first, FAR)
            if RULE.window > 0:
                weights = keep_columns(weights, first, own + behind(RULE) + 1, 0.0)
            else:
                weights = keep_columns(weights, first, None, 0.0)
    sloped = weights
    if RULE.softcap > 0:
        sloped = weights * (1 - cap * cap)
    return weights, sloped


@gluon.jit
def meet(
    dk, dv, k, v, place, dq_sum, shared, signals, work, scale,
    RULE: gl.constexpr, PLAN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """One step: what a tile of queries adds to dK and dV, and its dQ."""
    dtype: gl.constexpr = shared.q.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, keys_layout(PLAN), 2)
    columns: gl.constexpr = gl.SliceLayout(0, scores_layout(PLAN))
    slot, phase = ring(place.step, PLAN.stages)
    q, dout = shared.q.index(slot), shared.dout.index(slot)

    mbarrier.wait(signals.q_full.index(slot), phase)
    empty = zeros(PLAN.block_k, PLAN.block_q, PLAN)
    scores = warpgroup_mma(k, q.permute((1, 0)), empty, use_acc=False, is_async=True)
    mbarrier.wait(signals.dout_full.index(slot), phase)
    dweights = warpgroup_mma(v, dout.permute((1, 0)), empty, use_acc=False, is_async=True)
    lse2 = shared.lse2.index(slot).load(columns)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    weights, sloped = weigh(scores, lse2, place, work, scale, RULE, PLAN, TAIL)
    no_dq = zeros(PLAN.block_q, PLAN.dim, PLAN)
    # weights and dscores may be written: since the products of the last step all warps have met, because Triton lets
    # them meet before each mbarrier.arrive (tests/test_compile.py looks for it in the PTX)
    if staged(PLAN):
        shared.weights.store(weights.to(dtype))
        fence_async_shared()
        partition_barrier()
        dweights = warpgroup_mma_wait(0, deps=(dweights,))
        dv = warpgroup_mma(shared.weights, dout, dv, is_async=True)
        delta = shared.delta.index(slot).load(columns)[None, :]
        shared.dscores.store((sloped * (dweights - delta)).to(dtype))
        fence_async_shared()
        partition_barrier()
        left = shared.dscores
    else:
        left = gl.convert_layout(weights.to(dtype), operand)
        dweights = warpgroup_mma_wait(0, deps=(dweights,))
        dv = warpgroup_mma(left, dout, dv, is_async=True)
        delta = shared.delta.index(slot).load(columns)[None, :]
        dscores = (sloped * (dweights - delta)).to(dtype)
        left = gl.convert_layout(dscores, operand)
        if PLAN.early:
            dk = warpgroup_mma(left, q, dk, is_async=True)
            dv = warpgroup_mma_wait(1, deps=(dv,))
        shared.dscores.store(dscores)
        fence_async_shared()
        partition_barrier()
    dq = warpgroup_mma(shared.dscores.permute((1, 0)), shared.k, no_dq, use_acc=False, is_async=True)
    if PLAN.early:
        dk = warpgroup_mma_wait(1, deps=(dk,))
        mbarrier.arrive(signals.empty.index(slot))
        dq = warpgroup_mma_wait(0, deps=(dq,))
        give_dq(dq, dq_sum, shared, signals, place, PLAN)
    else:
        dk = warpgroup_mma(left, q, dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=(dv,))
        dq = warpgroup_mma_wait(1, deps=(dq,))
        give_dq(dq, dq_sum, shared, signals, place, PLAN)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(signals.empty.index(slot))
    return dk, dv


@gluon.jit
def multiply(
    dk_out, dv_out, dk_part, dv_part, dq_sum, shared, signals, work, scale,
    RULE: gl.constexpr, PLAN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: all steps of a program, then dK and dV."""
    dtype: gl.constexpr = shared.q.dtype
    mbarrier.wait(signals.keys_full, 0)
    k, v = shared.k, shared.v
    if PLAN.hold:
        left: gl.constexpr = gl.DotOperandLayout(0, scores_layout(PLAN), 2)
        k, v = k.load(left), v.load(left)
    dk = zeros(PLAN.block_k, PLAN.dim, PLAN)
    dv = zeros(PLAN.block_k, PLAN.dim, PLAN)
    tile = work.start
    member = 0
    for step in range(work.steps):  # one loop over all heads and tiles: nested ones cost registers
        edge = (tile < work.full_lo) | (tile >= work.full_hi)
        number = work.first_tile + member * work.q_tiles + tile
        place = Place(step, tile, number, edge)
        dk, dv = meet(dk, dv, k, v, place, dq_sum, shared, signals, work, scale, RULE, PLAN, TAIL)
        tile, member = advance(tile, member, work)

    dk = dk * scale
    if dk_part is not None:
        key = work.k_start + gl.arange(0, PLAN.block_k, gl.SliceLayout(1, keys_layout(PLAN)))[:, None]
        column = gl.arange(0, PLAN.dim, gl.SliceLayout(0, keys_layout(PLAN)))[None, :]
        first = tl.cast(work.keys.end - work.keys.length, tl.int64)  # key of the sequence
        at = ((first + key) * work.heads + work.head) * PLAN.dim + column
        gl.store(dk_part + at, dk, key < work.keys.length)
        gl.store(dv_part + at, dv, key < work.keys.length)
    else:
        partition_barrier()  # all warps are through with k and v
        shared.k.store(dk.to(dtype))
        shared.v.store(dv.to(dtype))
        fence_async_shared()
        partition_barrier()
        at = corner(work.keys, work.k_start, work.kv_head, PLAN.ragged)
        tma_store(dk_out, at, shared.k.reshape(dk_out.block_shape))
        tma_store(dv_out, at, shared.v.reshape(dv_out.block_shape))
        tma_wait(0)


@gluon.constexpr_function
def shared_layout(shape, dtype):
    """Of the last two dimensions of an allocation."""
    return gl.NVMMASharedLayout.get_default_for([int(x) for x in shape[-2:]], dtype)


@gluon.jit
def locate_keys(q_len, k_len, batches, slots, RULE: gl.constexpr, PLAN: gl.constexpr):
    """Program id -> (tile of keys, slot of query heads, batch), tile by tile of a slot.

    Under a causal mask without a window the first tiles take longest and come first; as many slots take turns as have
    TURN_BYTES of queries, dO and dQ together, but two at least.
    """
    tiles_k = gl.cdiv(k_len, PLAN.block_k)
    program = gl.program_id(0)
    tile = program % tiles_k
    slot = program // tiles_k
    if RULE.causal and RULE.window == 0:
        fit = gl.maximum(TURN_BYTES // (gl.maximum(q_len, 1024) * (PLAN.dim * 8)), 2)
        turn = program // (fit * tiles_k)
        size = gl.minimum(fit, slots * batches - turn * fit)
        rest = program - turn * fit * tiles_k
        tile = rest // size
        slot = turn * fit + rest % size
    return tile, slot % slots, slot // slots


@gluon.jit
def plan_work(
    q_rows, k_rows, batches, heads, group, span, k_tiles, ragged, q_slots, RULE: gl.constexpr, PLAN: gl.constexpr
):
    """The Work of this program, of tensors with so many rows of queries and of keys."""
    slots = heads // span
    if PLAN.ragged:  # all heads of a tile, then the next one
        tile, index, exists = hopper_tiles.listed(k_tiles, gl.program_id(0) // slots)
        seq = bounds(index, q_rows, k_rows, ragged, RULE)
        q_len = gl.where(exists, seq.q_len, 0)
        k_len = gl.where(exists, seq.k_len, 0)
        slot = gl.program_id(0) % slots
        head = slot * span
        q_tiles = q_slots
        first_tile = head * q_slots + first_slot(seq, q_rows, PLAN.block_q)
    else:
        tile, slot, batch = locate_keys(q_rows, k_rows, batches, slots, RULE, PLAN)
        seq = Sequence(batch, batch, 0, q_rows, 0, k_rows)
        q_len, k_len = q_rows, k_rows
        head = slot * span
        q_tiles = gl.cdiv(q_rows, PLAN.block_q)
        first_tile = (batch * heads + head) * q_tiles
    k_start = tile * PLAN.block_k
    shift = k_len - q_len
    last = gl.minimum(k_start + PLAN.block_k, k_len) - 1
    # in query indices a key meets [k - shift - ahead, k - shift + behind]
    BLOCK: gl.constexpr = PLAN.block_q
    meets = meeting_range(k_start - shift, last - shift, ahead(RULE), behind(RULE), q_len, BLOCK, BLOCK)
    lo = meets.lo // PLAN.block_q
    hi = gl.maximum(gl.cdiv(meets.hi, PLAN.block_q), lo)
    full_lo = meets.full_lo // PLAN.block_q
    full_hi = hi  # beyond the last query lse2 hides all
    if RULE.window > 0:
        full_hi = meets.full_hi // PLAN.block_q
    full_lo = gl.where(k_start + PLAN.block_k > k_len, hi, full_lo)
    # Programs of one head add to dQ at the same time: let them begin apart. Masks have them do so anyway.
    start = lo
    if not hides(RULE):
        tiles = gl.cdiv(k_len, PLAN.block_k)
        if PLAN.ragged:  # a program past the end of the list has none
            tiles = gl.maximum(tiles, 1)
        start = lo + tile * (hi - lo) // tiles
    queries = Rows(seq.row, seq.row * q_rows + seq.q_start + q_len, q_len)
    keys = Rows(seq.row, seq.row * k_rows + seq.k_start + k_len, k_len)
    return Work(
        queries, keys, head // group, head, span, heads, k_start, shift, first_tile, q_tiles, lo, full_lo, full_hi, hi,
        start, (hi - lo) * span,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["q_len", "k_len", "batches", "heads", "group", "span", "q_slots"])
def backward_kernel(
    q, k, v, dout, rows, dq_sum, dk, dv, dk_part, dv_part, q_len, k_len, batches, heads, group, span, scale,
    k_tiles, ragged, q_slots,
    RULE: gl.constexpr, PLAN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, and what it adds to dQ, for `span` query heads of one key head.

    Tensors are descriptors, but for the parts, and for dq_sum if it is added to from registers; rows and dq_sum are as
    prepare_kernel leaves them. With dk_part and dv_part [B, Tk, H, D], float32 and D padded, span is 1 and each query
    head writes its own. TAIL: a tile of keys may reach past the last one. k_tiles, of ragged sequences: as list_kernel
    lists them; q_slots: tiles of queries of a head in rows and dq_sum.
    """
    work = plan_work(q_len, k_len, batches, heads, group, span, k_tiles, ragged, q_slots, RULE, PLAN)
    dtype: gl.constexpr = q.dtype
    keys: gl.constexpr = [PLAN.block_k, PLAN.dim]
    queries: gl.constexpr = [PLAN.block_q, PLAN.dim]
    scores: gl.constexpr = [PLAN.block_k, PLAN.block_q]
    weights = 0
    dq = 0
    if staged(PLAN):
        weights = gl.allocate_shared_memory(dtype, scores, shared_layout(scores, dtype))
    if PLAN.dq_stages > 0:
        dq = gl.allocate_shared_memory(
            gl.float32, [PLAN.dq_stages, PLAN.block_q * PLAN.dim // WIDTH, WIDTH], dq_sum.layout
        )
    shared = Shared(
        gl.allocate_shared_memory(dtype, keys, shared_layout(keys, dtype)),
        gl.allocate_shared_memory(dtype, keys, shared_layout(keys, dtype)),
        gl.allocate_shared_memory(dtype, [PLAN.stages, PLAN.block_q, PLAN.dim], shared_layout(queries, dtype)),
        gl.allocate_shared_memory(dtype, [PLAN.stages, PLAN.block_q, PLAN.dim], shared_layout(queries, dtype)),
        gl.allocate_shared_memory(gl.float32, [PLAN.stages, PLAN.block_q], rows.layout),
        gl.allocate_shared_memory(gl.float32, [PLAN.stages, PLAN.block_q], rows.layout),
        gl.allocate_shared_memory(dtype, scores, shared_layout(scores, dtype)),
        weights,
        dq,
    )
    signals = Signals(
        barriers(1, 1).index(0),
        barriers(PLAN.stages, 1), barriers(PLAN.stages, 1), barriers(PLAN.stages, 1),
        barriers(max(PLAN.dq_stages, 1), 1), barriers(max(PLAN.dq_stages, 1), 1),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (multiply, (dk, dv, dk_part, dv_part, dq_sum, shared, signals, work, scale, RULE, PLAN, TAIL)),
            (load, (q, k, v, dout, rows, shared, signals, work, RULE, PLAN)),
            (add, (dq_sum, shared, signals, work, PLAN)),
        ],
        [1, 1],
        [24, 24],
    )


@triton.jit
def locate_queries(q_tiles, ragged, q_slots, q_len, k_len, TILE: tl.constexpr):
    """Program id -> (first query, how many from there on, head, Sequence, number of the tile in rows and dq_sum)."""
    program = tl.program_id(0)
    if q_tiles is None:
        tile, head, batch = locate(tl.cdiv(q_len, TILE.block_q), TILE.heads)
        start = tile * TILE.block_q
        return start, q_len - start, head, Sequence(batch, batch, 0, q_len, 0, k_len), program
    else:
        tile, index, exists = listed(q_tiles, program // TILE.heads)
        head = program % TILE.heads
        start = tile * TILE.block_q
        seq = sequence(index, q_len, k_len, ragged)
        number = head * q_slots + first_slot(seq, q_len, TILE.block_q) + tile
        return start, tl.where(exists, seq.q_len - start, 0), head, seq, number


@triton.jit(do_not_specialize=["q_slots", "q_len", "k_len"])
def prepare_kernel(
    out, dout, lse2, dlse, rows, dq_sum, delta, q_tiles, ragged, q_slots, q_len, k_len,
    RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Before backward_kernel, for one tile of queries of one head: rows = [lse2, delta], and a dQ sum of zeros.

    delta_i = choice() sum_d dO_id O_id - dlse_i; dlse may be None. lse2 is +inf, which makes all weights 0, for rows
    that see no key or do not exist; delta of these is 0. With delta [B, H, Tq] not None that is filled too.
    """
    start, count, head, seq, number = locate_queries(q_tiles, ragged, q_slots, q_len, k_len, TILE)
    if q_tiles is not None and count <= 0:
        return
    first = seq.q_start
    out_tile = load_tile(tile_lane(out, seq.row, head, first), start, 0, seq.q_len, TILE.block_q, TILE.dim, True)
    dout_tile = load_tile(tile_lane(dout, seq.row, head, first), start, 0, seq.q_len, TILE.block_q, TILE.dim, True)
    lse = load_rows(row_lane(lse2, seq.row, head, first), start, seq.q_len, float("inf"), TILE.block_q, True)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    sums = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1) * choice(seq.k_len, RULE)
    if dlse is not None:
        sums -= load_rows(row_lane(dlse, seq.row, head, first), start, seq.q_len, 0.0, TILE.block_q, True)
    if delta is not None:
        store_rows(delta, sums, seq.row, head, first + start, 0, count, TILE.block_q)
    row = tl.arange(0, TILE.block_q)
    rows += tl.cast(number, tl.int64) * (2 * TILE.block_q)
    tl.store(rows + row, lse)
    tl.store(rows + TILE.block_q + row, tl.where(lse == float("inf"), 0.0, sums))
    SIZE: tl.constexpr = TILE.block_q * padded(TILE.dim)
    place = tl.arange(0, SIZE)
    tl.store(dq_sum + tl.cast(number, tl.int64) * SIZE + place, place.to(tl.float32) * 0.0)


@triton.jit(do_not_specialize=["q_slots", "q_len", "k_len"])
def finish_kernel(dq_sum, dq, q_tiles, ragged, q_slots, q_len, k_len, scale, TILE: tl.constexpr):
    """After backward_kernel: dq = scale times the sum for one tile of queries of one head, in the order of dq again."""
    start, count, head, seq, number = locate_queries(q_tiles, ragged, q_slots, q_len, k_len, TILE)
    if q_tiles is not None and count <= 0:
        return
    SIZE: tl.constexpr = TILE.block_q * padded(TILE.dim)
    total = tl.load(dq_sum + tl.cast(number, tl.int64) * SIZE + tl.arange(0, SIZE))
    total = total.reshape(TILE.block_q // 16, padded(TILE.dim) // 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5)
    total = total.reshape(TILE.block_q, padded(TILE.dim))
    lane = tile_lane(dq, seq.row, head, seq.q_start)
    store_tile(lane, total * scale, start, seq.q_len, TILE.block_q, TILE.dim)
