"""Backward for Hopper (sm_90) in Gluon: dQ, dK and dV in one kernel, from the saved log-sum-exp.

Formulas as in portable/backward.py. A program owns a tile of keys and walks the queries that see it: one warp loads by
TMA, four or eight multiply, and one adds dQ to a float32 sum in global memory. That and the gradient of gates are added
in no particular order, so two runs may differ in their last bits. Scores are [keys, queries]: P^T and dS^T are already
the left operands of dV and dK.

A step multiplies five times. Comments refer to these numbers, and warpgroup_mma_wait(n) waits for all products but the
n that were issued last:

    (1) S^T = K Q^T    (2) dP^T = V dO^T    (3) dV += P^T dO    (4) dQ = dS K    (5) dK += dS^T Q

(2) runs while the threads turn (1) into P, and (3) while they turn (2) into dS. Then dS goes to shared memory for (4),
whose left operand it is not. (5) runs meanwhile, if PLAN.dk_before_dq, or while (4) is handed to the adding warp.

The multiplying warps meet four or five times a step, at each partition_barrier(), and in release() and commit(): before
its mbarrier.arrive, which is one arrival for them all, Triton has them meet.

Source: Shah et al., FlashAttention-3, and its backward for sm_90 (Dao-AILab/flash-attention).

Letters: B batch, T sequence, H heads, D head dim.
"""

from typing import NamedTuple

import triton.language as tl

from ..score import LOG2E, ahead, alibi_slope2, behind, cap_scores, dp_factor, dropout_key, relative_bias
from ..tiles import FAR
from .channel import Channel, acquire, barriers, commit, load, release, shared_layout, slot_and_phase, wait_full
from .decay import Gates, add_column, gates_of, no_sums, ones, sum_over_keys, sum_over_queries
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
from .prepare import WIDTH
from .ragged import corner, extents
from .scores import keep_columns, modify, negate_dropped, positive_part, ramp
from .work import (
    BackwardProgram,
    accumulator,
    advance,
    has_mask,
    number_of,
    operand_layout,
    plan_work,
    scores_layout,
    staged,
)


class Sums(NamedTuple):
    """What a program sums."""

    dk: gl.tensor
    dv: gl.tensor
    dgate: gl.tensor  # [keys, columns] sum of dS over queries, the same in each column: minus the keys' part


class Step(NamedTuple):
    """A step of a program: one tile of queries."""

    count: gl.tensor  # of steps before it
    tile: gl.tensor  # of queries, of its head
    head: gl.tensor
    masked: gl.tensor  # whether some pair of the tiles may be hidden
    alibi_slope2: gl.tensor  # of ALiBi and the head, in base 2; 0 if there is none
    philox_key: gl.tensor  # of dropout and the head
    gates: Gates  # if there are any


@gluon.jit
def flat(dq, PLAN: gl.constexpr):
    """dQ [queries, dim] -> [queries * dim / WIDTH, WIDTH], in the order in which threads hold it.

    A thread holds 2 neighbours in each of 2 rows: 4 floats that are now one 16-byte access. finish_kernel undoes it.
    Element (q, d) lies at (q // 16 * dim / 8 + d // 8) * 128 + q % 8 * 16 + d % 8 // 2 * 4 + q % 16 // 8 * 2 + d % 2.
    """
    dq = dq.reshape([PLAN.block_q // 16, 2, 8, PLAN.dim // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    return dq.reshape([PLAN.block_q * PLAN.dim // WIDTH, WIDTH])


@gluon.jit
def loader(work, program):
    """The loading warp: keys and values once, then queries with their lse2, and dO with delta."""
    PLAN: gl.constexpr = program.PLAN
    k, v, kv_loaded = program.k, program.v, program.kv_loaded
    queries, keys = extents(work.seq, program.q_len, program.k_len)
    mbarrier.expect(kv_loaded, k.block_type.nbytes + v.block_type.nbytes)
    tma_load(k, corner(keys, work.k_start, work.kv_head, PLAN.ragged), kv_loaded, program.k_tile.reshape(k.block_shape))
    v_start = work.k_start
    if dp_factor(keys.length, program.RULE) == 0.0:
        v_start = keys.length  # dP shall be 0: values past the end are; prepare_kernel leaves dO.O out
    tma_load(v, corner(keys, v_start, work.kv_head, PLAN.ragged), kv_loaded, program.v_tile.reshape(v.block_shape))
    tile, head = work.start, work.head
    for count in range(work.steps):
        at = corner(queries, tile * PLAN.block_q, head, PLAN.ragged)
        first = number_of(tile, head, work) * (2 * PLAN.block_q)
        # not acquire(): Triton 3.6 needs fewer instructions if `full` is looked up before the wait
        slot, phase = slot_and_phase(program.q_tiles, count)
        full = program.q_tiles.full.index(slot)
        mbarrier.wait(program.q_tiles.empty.index(slot), phase ^ 1)  # dout of this slot was released with q
        load(program.q_tiles, slot, full, program.q, at, program.stats, first)
        full = program.dout_tiles.full.index(slot)
        load(program.dout_tiles, slot, full, program.dout, at, program.stats, first, OFFSET=PLAN.block_q)
        tile, head = advance(tile, head, work)


@gluon.jit
def adder(work, program):
    """The adding warp: dQ of each step to the sum, which lies tile by tile of a head."""
    PLAN: gl.constexpr = program.PLAN
    if PLAN.dq_stages > 0:
        tile, head = work.start, work.head
        for count in range(work.steps):
            number = number_of(tile, head, work)
            slot = wait_full(program.dq_tiles, count)
            row = number * (PLAN.block_q * PLAN.dim // WIDTH)
            tma_add(program.dq_sum, [row, 0], program.dq_tiles.tiles.index(slot))
            tma_wait(0)
            release(program.dq_tiles, count)
            tile, head = advance(tile, head, work)


@gluon.jit
def add_dq(dq, step, work, program):
    """Hand dQ of a step to the adding warp, or add it from registers."""
    PLAN: gl.constexpr = program.PLAN
    dq = flat(dq, PLAN)
    if PLAN.dq_stages > 0:
        program.dq_tiles.tiles.index(acquire(program.dq_tiles, step.count)).store(dq)
        fence_async_shared()
        commit(program.dq_tiles, step.count)
    else:
        layout: gl.constexpr = dq.type.layout
        SIZE: gl.constexpr = PLAN.block_q * PLAN.dim
        row = gl.arange(0, SIZE // WIDTH, gl.SliceLayout(1, layout))[:, None]
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
        tile = program.dq_sum + tl.cast(number_of(step.tile, step.head, work), tl.int64) * SIZE
        gl.atomic_add(tile + (row * WIDTH + column), dq, sem="relaxed")


@gluon.jit
def hide_weights(weights, query, work, program):
    """0 where a query does not see a key; query: the first of the tile. Keys past the end have scores of 0."""
    RULE: gl.constexpr = program.RULE
    key = work.k_start + gl.arange(0, program.PLAN.block_k, gl.SliceLayout(1, weights.type.layout))
    own = key - work.shift - query  # the query of this tile that stands at this key
    first = own - ahead(RULE)  # the first column that sees the key
    if program.TAIL:
        first = gl.where(key < work.seq.k_len, first, FAR)
    end = own + behind(RULE) + 1 if RULE.window > 0 else None
    return keep_columns(weights, first, end, 0.0)


@gluon.jit
def weigh_backward(scores, lse2, step, work, program):
    """Raw scores [keys, queries] -> weights, and weights times d score / d (scale q.k); both negative where dropped.

    With dropout, weights are 1 / (1 - dropout) times as large, and delta is smaller by as much: see prepare_kernel.
    """
    RULE: gl.constexpr = program.RULE
    PLAN: gl.constexpr = program.PLAN
    terms = program.terms
    offset = lse2[None, :]
    query = step.tile * PLAN.block_q
    key = work.k_start + gl.arange(0, PLAN.block_k, gl.SliceLayout(1, scores_layout(PLAN)))
    after = query + work.shift - key  # how far the first query is after each key
    if RULE.alibi:
        distance = ramp(scores, after, gl.float32)
        offset += (distance if RULE.causal else gl.abs(distance)) * step.alibi_slope2
    if terms.relative is not None:
        offset -= relative_bias(terms, step.head, ramp(scores, after, gl.int32)) * LOG2E
    if RULE.decay:
        offset += (step.gates.k_gate2 - step.gates.q_gate2)[:, None]
    scores, factor = cap_scores(scores, terms.scale, RULE)
    slope = 1 - scores * scores if RULE.softcap > 0 else 1.0
    if RULE.score_mod is not None:
        q_pos = query + work.shift + gl.arange(0, PLAN.block_q, gl.SliceLayout(0, scores_layout(PLAN)))
        scores *= factor / LOG2E
        scores, derivative = modify(scores, q_pos[None, :], key[:, None], step.head, work.seq, terms, RULE)
        slope *= derivative
        factor = LOG2E
    weights = gl.exp2(scores * factor - offset)
    if has_mask(RULE) or program.TAIL:
        masked = True
        if PLAN.mask_edges_only:
            masked = step.masked
        if masked:
            weights = hide_weights(weights, query, work, program)
    if RULE.dropout:  # a sign takes no register
        weights = negate_dropped(weights, work.k_start, query, step.philox_key, terms.dropout)
    sloped = weights * slope
    if RULE.score_mod is not None:  # its derivative may be NaN where a key is hidden
        sloped = gl.where(weights == 0, 0.0, sloped)
    return weights, sloped


@gluon.jit
def sloped_score_gradient(sloped, dweights, delta, RULE: gl.constexpr):
    """dS times the slope, without the scale, from results of weigh_backward() and dO.v."""
    if RULE.dropout:
        return gl.maximum(sloped, 0.0) * dweights - gl.abs(sloped) * delta
    else:
        return sloped * (dweights - delta)


@gluon.jit
def backward_step(sums, k, v, step, work, program):
    """One step: what a tile of queries adds to the Sums, and its dQ. Numbers: see the top of this file."""
    RULE: gl.constexpr = program.RULE
    PLAN: gl.constexpr = program.PLAN
    dk, dv, dgate = sums.dk, sums.dv, sums.dgate
    dtype: gl.constexpr = k.dtype
    queries: gl.constexpr = gl.SliceLayout(0, scores_layout(PLAN))
    q_tiles, dout_tiles = program.q_tiles, program.dout_tiles
    slot, phase = slot_and_phase(q_tiles, step.count)
    q, dout = q_tiles.tiles.index(slot), dout_tiles.tiles.index(slot)

    mbarrier.wait(q_tiles.full.index(slot), phase)
    unused = accumulator(PLAN.block_k, PLAN.block_q, PLAN)  # both products write registers of their own
    scores = warpgroup_mma(k, q.permute((1, 0)), unused, use_acc=False, is_async=True)  # (1)
    mbarrier.wait(dout_tiles.full.index(slot), phase)
    dweights = warpgroup_mma(v, dout.permute((1, 0)), unused, use_acc=False, is_async=True)  # (2)
    lse2 = q_tiles.stats.index(slot).load(queries)
    scores = warpgroup_mma_wait(1, deps=(scores,))  # (1) is done
    weights, sloped = weigh_backward(scores, lse2, step, work, program)
    weights = positive_part(weights, dtype) if RULE.dropout else weights.to(dtype)
    no_dq = accumulator(PLAN.block_q, PLAN.dim, PLAN)
    if staged(PLAN):
        left = program.weights
        left.store(weights)
        fence_async_shared()
        partition_barrier()  # all of P is in shared memory
    else:
        left = gl.convert_layout(weights, operand_layout(PLAN, PLAN.value_dim))
    dweights = warpgroup_mma_wait(0, deps=(dweights,))  # (2) is done
    dv = warpgroup_mma(left, dout, dv, is_async=True)  # (3)
    delta = dout_tiles.stats.index(slot).load(queries)[None, :]
    dscores = sloped_score_gradient(sloped, dweights, delta, RULE).to(dtype)
    left = program.dscores if staged(PLAN) else gl.convert_layout(dscores, operand_layout(PLAN, PLAN.dim))
    if PLAN.dk_before_dq:
        dk = warpgroup_mma(left, q, dk, is_async=True)  # (5)
        dv = warpgroup_mma_wait(1, deps=(dv,))  # (3) is done, and P's registers are free
    program.dscores.store(dscores)
    fence_async_shared()
    partition_barrier()  # all of dS is in shared memory
    dq = warpgroup_mma(program.dscores.permute((1, 0)), program.k_tile, no_dq, use_acc=False, is_async=True)  # (4)
    SUMS: gl.constexpr = 2 if RULE.decay else 0  # products of gates, issued after (4)
    if RULE.decay:
        dgate = sum_over_queries(left, program.ones, dgate, PLAN)
        of_queries = sum_over_keys(program.dscores, program.ones, PLAN)
    if PLAN.dk_before_dq:
        dk = warpgroup_mma_wait(1 + SUMS, deps=(dk,))  # (5) is done
        release(q_tiles, step.count)
        dq = warpgroup_mma_wait(SUMS, deps=(dq,))  # (4) is done
        add_dq(dq, step, work, program)
    else:
        dk = warpgroup_mma(left, q, dk, is_async=True)  # (5)
        dv = warpgroup_mma_wait(2 + SUMS, deps=(dv,))  # (3) is done
        dq = warpgroup_mma_wait(1 + SUMS, deps=(dq,))  # (4) is done
        add_dq(dq, step, work, program)
        dk = warpgroup_mma_wait(0, deps=(dk,))  # (5) is done
        release(q_tiles, step.count)
    if RULE.decay:
        dgate, of_queries = warpgroup_mma_wait(0, deps=(dgate, of_queries))
        add_column(step.gates.dgate, step.tile * PLAN.block_q + work.shift, of_queries, work.seq.k_len)
    partition_barrier()  # all products are done: weights and dscores, and at the end k and v, may be overwritten
    return Sums(dk, dv, dgate)


@gluon.jit
def store_part(part, x, work, program):
    """dK or dV [keys, dim] of one query head to part, float32 [B, Tk, H, dim]."""
    DIM: gl.constexpr = x.shape[1]
    key = work.k_start + gl.arange(0, program.PLAN.block_k, gl.SliceLayout(1, x.type.layout))[:, None]
    column = gl.arange(0, DIM, gl.SliceLayout(0, x.type.layout))[None, :]
    first = tl.cast(work.seq.batch * program.k_len + work.seq.k_start, tl.int64)  # key of the sequence
    at = ((first + key) * program.heads + work.head) * DIM + column
    gl.store(part + at, x, key < work.seq.k_len)


@gluon.jit
def store(dk, dv, work, program):
    """dK and dV, through the memory of K and V."""
    dtype: gl.constexpr = program.k_tile.dtype
    program.k_tile.store(dk.to(dtype))
    program.v_tile.store(dv.to(dtype))
    fence_async_shared()
    partition_barrier()
    _, keys = extents(work.seq, program.q_len, program.k_len)
    at = corner(keys, work.k_start, work.kv_head, program.PLAN.ragged)
    tma_store(program.dk, at, program.k_tile.reshape(program.dk.block_shape))
    tma_store(program.dv, at, program.v_tile.reshape(program.dv.block_shape))
    tma_wait(0)


@gluon.jit
def consumer(work, program):
    """The multiplying warps: all steps of a program, then dK and dV."""
    RULE: gl.constexpr = program.RULE
    PLAN: gl.constexpr = program.PLAN
    terms = program.terms
    mbarrier.wait(program.kv_loaded, 0)
    k, v = program.k_tile, program.v_tile
    if PLAN.kv_in_registers:
        left: gl.constexpr = gl.DotOperandLayout(0, scores_layout(PLAN), 2)
        k, v = k.load(left), v.load(left)
    dk, dv = accumulator(PLAN.block_k, PLAN.dim, PLAN), accumulator(PLAN.block_k, PLAN.value_dim, PLAN)
    sums = Sums(dk, dv, no_sums(RULE, PLAN))
    tile, head = work.start, work.head
    philox_key = dropout_key(work.seq.index, head, terms.seed, RULE)
    for count in range(work.steps):  # one loop over all heads and tiles: nested ones cost registers
        masked = (tile < work.full_lo) | (tile >= work.full_hi)
        slope2 = alibi_slope2(terms, head, work.seq)
        step = Step(count, tile, head, masked, slope2, philox_key, gates_of(head, tile, work, program))
        sums = backward_step(sums, k, v, step, work, program)
        tile, head = advance(tile, head, work)
        if RULE.decay:
            if tile == work.start:  # the end of a head
                add_column(step.gates.dgate, work.k_start, -sums.dgate, work.seq.k_len)
            sums = Sums(sums.dk, sums.dv, gl.where(tile == work.start, 0.0, sums.dgate))
        if RULE.dropout and tile == work.start:  # of the next head
            philox_key = dropout_key(work.seq.index, head, terms.seed, RULE)

    dk = sums.dk * terms.scale
    if program.dk_part is not None:
        store_part(program.dk_part, dk, work, program)
        store_part(program.dv_part, sums.dv, work, program)
    else:
        store(dk, sums.dv, work, program)


@gluon.jit(do_not_specialize=["q_len", "k_len", "batches", "heads", "group", "members", "q_slots"])
def backward_kernel(
    q, k, v, dout, stats, dq_sum, dk, dv, dk_part, dv_part, q_len, k_len, batches, heads, group, members, terms,
    dgate, k_list, ragged, q_slots,
    RULE: gl.constexpr, PLAN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, and what it adds to dQ, for `members` query heads of one key head.

    Tensors are descriptors, but for the parts, and for dq_sum if it is added to from registers; stats and dq_sum are as
    prepare_kernel leaves them. With dk_part and dv_part [B, Tk, H, D], float32 and D padded, members is 1 and each
    query head writes its own. TAIL: a tile of keys may reach past the last one. k_list, of ragged sequences: as
    list_kernel lists them; q_slots: tiles of queries of a head in stats and dq_sum. terms: Terms with the gate
    of split_gate(), whose gradient is added to dgate [B, H, Tk] float32.
    """
    if PLAN.ragged and gl.program_id(0) >= gl.load(k_list + 1) * (heads // members):
        return
    dtype: gl.constexpr = q.dtype
    keys: gl.constexpr = [PLAN.block_k, PLAN.dim]
    queries: gl.constexpr = [PLAN.stages, PLAN.block_q, PLAN.dim]
    values: gl.constexpr = [PLAN.block_k, PLAN.value_dim]
    douts: gl.constexpr = [PLAN.stages, PLAN.block_q, PLAN.value_dim]
    scores: gl.constexpr = [PLAN.block_k, PLAN.block_q]
    weights = 0
    dq = 0
    # allocated in this order: in another one, Triton 3.6 computes addresses with more instructions in each step
    if staged(PLAN):
        weights = gl.allocate_shared_memory(dtype, scores, shared_layout(scores, dtype))
    if PLAN.dq_stages > 0:
        dq = gl.allocate_shared_memory(
            gl.float32, [PLAN.dq_stages, PLAN.block_q * PLAN.dim // WIDTH, WIDTH], dq_sum.layout
        )
    k_tile = gl.allocate_shared_memory(dtype, keys, shared_layout(keys, dtype))
    v_tile = gl.allocate_shared_memory(dtype, values, shared_layout(values, dtype))
    q_tiles = gl.allocate_shared_memory(dtype, queries, shared_layout(queries, dtype))
    dout_tiles = gl.allocate_shared_memory(dtype, douts, shared_layout(douts, dtype))
    lse2 = gl.allocate_shared_memory(gl.float32, [PLAN.stages, PLAN.block_q], stats.layout)
    delta = gl.allocate_shared_memory(gl.float32, [PLAN.stages, PLAN.block_q], stats.layout)
    dscores = gl.allocate_shared_memory(dtype, scores, shared_layout(scores, dtype))
    # loading warp -> multiplying warps: kv_loaded once, before the first step; q_full before (1), dout_full before (2).
    # multiplying -> loading: q_empty, after (3) and (5). multiplying -> adding: dq_full, after (4); back: dq_empty.
    kv_loaded = barriers(1, 1).index(0)
    q_full, dout_full, q_empty = barriers(PLAN.stages, 1), barriers(PLAN.stages, 1), barriers(PLAN.stages, 1)
    # dout_tiles has no empty barriers of its own: (3), which reads dO last, is done before (5) is.
    # unused barriers would share their memory with other values
    dq_full = barriers(PLAN.dq_stages, 1) if PLAN.dq_stages > 0 else 0
    dq_empty = barriers(PLAN.dq_stages, 1) if PLAN.dq_stages > 0 else 0
    program = BackwardProgram(
        q, k, v, dout, stats, dq_sum, dk, dv, dk_part, dv_part, dgate, terms, q_len, k_len, batches, heads, group,
        members, k_list, ragged, q_slots, k_tile, v_tile, kv_loaded, Channel(q_tiles, q_full, q_empty, lse2),
        Channel(dout_tiles, dout_full, q_empty, delta), Channel(dq, dq_full, dq_empty), weights, dscores,
        ones(dtype, PLAN) if RULE.decay else 0, RULE, PLAN, TAIL,
    )  # fmt: skip
    work = plan_work(program)
    # loader and adder have one warp each, with 24 registers a thread
    gl.warp_specialize(
        [(consumer, (work, program)), (loader, (work, program)), (adder, (work, program))], [1, 1], [24, 24]
    )
