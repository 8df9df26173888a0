"""Forward kernel for Hopper (sm_90): matrix products, softmax and loads of several query tiles run at once.

A program is one warp that loads by TMA and two or three consumers: warpgroups of 64 query rows each. While a consumer
takes the softmax of one block of keys, its tensor core works on the product of the weights and values of the block
before, and on the products of the other consumers. Programs are persistent: the next tile loads during this one.
Source: Shah et al., FlashAttention-3; scores in base 2.
"""

from typing import NamedTuple

from ..score import LOG2E, cap_scores, end_softmax, relative_bias
from .channel import Channel, barriers, filled, new_channel, release
from .decay import relative_gate2
from .gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_store,
    tma_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pipeline import (
    MAILBOX,
    PER_CONSUMER,
    WORDS,
    ForwardProgram,
    blocks,
    in_or_past,
    loader,
    own_blocks,
    own_queries,
    pass_turn,
    receive,
    skip,
    take_turn,
)
from .ragged import corner, extents
from .scores import add_ramp, drop_pairs, keep_columns, minus_rows, modify, ramp, row_max


class State(NamedTuple):
    """Online softmax of the queries of a consumer."""

    acc: gl.tensor  # [queries, Dv] sum of exp2(score - top) * v, without the last block
    weights: gl.tensor  # [queries, keys / 2] exp2(score - top) of the last block, packed
    top: gl.tensor  # [queries] largest score
    total: gl.tensor  # [queries] sum of exp2(score - top)
    count: gl.tensor  # blocks of keys so far, of all tiles
    start: gl.tensor  # first key of the next block


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    """An accumulator of a consumer: [PER_CONSUMER, COLUMNS] float32."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.full([PER_CONSUMER, COLUMNS], 0.0, gl.float32, layout)


@gluon.jit
def hide(scores, start, queries, RULE: gl.constexpr):
    """-inf where a query does not see key start + j."""
    layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    pos = queries.first_pos - start + gl.arange(0, PER_CONSUMER, layout)
    begin = None
    end = gl.full([PER_CONSUMER], queries.seq.k_len - start, gl.int32, layout)
    if RULE.causal:  # no key that a query sees lies past the end
        end = pos + 1
    elif RULE.window > 0:
        end = gl.minimum(pos + RULE.window, end)
    if RULE.window > 0:
        begin = pos - (RULE.window - 1)
    return keep_columns(scores, begin, end, float("-inf"))


@gluon.jit
def weigh_forward(scores, top, total, start, queries, program, MASKED: gl.constexpr):
    """Raw scores of a block -> (weights, top, total, fade): fade is what the sums so far shrink by."""
    RULE: gl.constexpr = program.RULE
    terms = program.terms
    if program.PIPE.negate_scores:  # the maximum is taken of raw scores, so their factor must be positive
        scores = -scores
    scores, factor = cap_scores(scores, terms.scale, RULE)
    if RULE.score_mod is not None:
        q_pos = queries.first_pos + gl.arange(0, PER_CONSUMER, gl.SliceLayout(1, scores.type.layout))
        k_pos = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores *= factor / LOG2E
        scores, _ = modify(scores, q_pos[:, None], k_pos[None, :], queries.head, queries.seq, terms, RULE)
        factor = LOG2E
    lead2 = None  # what is still to be added to the scores
    # how far the first key is ahead of each query
    first = start - queries.first_pos - gl.arange(0, PER_CONSUMER, gl.SliceLayout(1, scores.type.layout))
    if RULE.alibi:
        slope = queries.alibi_slope2 / factor
        if RULE.causal:
            scores, lead = add_ramp(scores, slope, first)
            lead2 = lead * queries.alibi_slope2
        else:
            scores -= gl.abs(ramp(scores, first, gl.float32)) * slope
    if RULE.decay or terms.relative is not None:  # what is added has no factor
        scores *= factor
        factor = 1.0
    if RULE.decay:  # the gate of a query adds the same to all its scores: see end_rows()
        key = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        exist = key < queries.seq.k_len if MASKED else None
        scores -= relative_gate2(queries.gates, key, exist, queries.pivot)[None, :]
    if terms.relative is not None:
        scores += relative_bias(terms, queries.head, 0 - ramp(scores, first, gl.int32)) * LOG2E
    if MASKED:
        scores = hide(scores, start, queries, RULE)
    new_top = gl.maximum(top, row_max(scores, factor, lead2))
    if MASKED or RULE.hides:  # a row that has seen no key yet: a finite pivot keeps inf - inf away
        pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        pivot = new_top
    if lead2 is None:  # here, because Triton 3.9 spills if minus_rows() does it
        weights = gl.exp2(scores * factor - pivot[:, None])
    else:
        weights = gl.exp2(minus_rows(scores, factor, pivot, lead2))
    fade = gl.exp2(top - pivot)
    total = total * fade + gl.sum(weights, 1)
    return weights, new_top, total, fade


@gluon.jit
def pack(weights, DTYPE: gl.constexpr):
    """float32 [PER_CONSUMER, keys] -> pairs of 16 bits, int32 [PER_CONSUMER, keys / 2].

    In assembly, because the compiler would unpack them again before the next iteration.
    """
    PAIRS: gl.constexpr = weights.shape[1] // 2
    even, odd = gl.split(weights.reshape([PER_CONSUMER, PAIRS, 2]))
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CONVERT, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, acc, DTYPE: gl.constexpr):
    """What was packed as the left operand of a product that adds to acc."""
    COLS: gl.constexpr = pairs.shape[1] * 2
    weights = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    return gl.convert_layout(weights.reshape([PER_CONSUMER, COLS]), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def pack_kept(weights, start, queries, program):
    """pack() with zeros where dropout drops. `total` has these weights too: dropout acts on normalised ones."""
    pairs = pack(weights, program.q.dtype)
    if program.RULE.dropout:
        pairs = drop_pairs(pairs, queries.start, start, queries.philox_key, program.terms.dropout)
    return pairs


@gluon.jit
def attend_first(count, start, queries, program, KEYS: gl.constexpr):
    """The State after the first block, of which no query sees more than the first KEYS keys. Numbers: see attend()."""
    BLOCK: gl.constexpr = program.TILE.block_k
    none = zeros(KEYS)
    k_tile = filled(program.k_tiles, count).slice(0, KEYS).permute((1, 0))
    take_turn(program, count, queries.INDEX)
    scores = warpgroup_mma(queries.tile, k_tile, none, use_acc=False, is_async=True)  # (1)
    pass_turn(program, queries.INDEX)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    release(program.k_tiles, count)
    rows: gl.constexpr = gl.SliceLayout(1, none.type.layout)
    top = gl.full([PER_CONSUMER], float("-inf"), gl.float32, rows)
    total = gl.full([PER_CONSUMER], 0.0, gl.float32, rows)
    weights, top, total, _ = weigh_forward(scores, top, total, start, queries, program, MASKED=True)
    pairs = pack_kept(weights, start, queries, program)
    if KEYS < BLOCK:  # (2) multiplies whole blocks: the other half has weight 0
        block = zeros(BLOCK)
        like = pack(block, program.q.dtype)
        pairs = gl.join(pairs, gl.zeros_like(pairs)).permute((0, 2, 1)).reshape(like.shape)
        pairs = gl.convert_layout(pairs, like.type.layout, assert_trivial=True)
        whole: gl.constexpr = gl.SliceLayout(1, block.type.layout)
        top, total = gl.convert_layout(top, whole), gl.convert_layout(total, whole)
    return State(zeros(program.TILE.value_dim), pairs, top, total, count + 1, start - BLOCK)


@gluon.jit
def attend(state, steps, queries, program, MASKED: gl.constexpr):
    """Absorb `steps` blocks of keys, from state.start down.

    Two products a block, (1) S = Q K^T and (2) acc += P V. (2) is that of the block before, and runs while the softmax
    turns (1) into weights.
    """
    BLOCK: gl.constexpr = program.TILE.block_k
    none = zeros(BLOCK)
    for _ in range(steps):
        count, start = state.count, state.start
        k_tile = filled(program.k_tiles, count).permute((1, 0))
        take_turn(program, count, queries.INDEX)
        scores = warpgroup_mma(queries.tile, k_tile, none, use_acc=False, is_async=True)  # (1)
        v_tile = filled(program.v_tiles, count - 1)
        weights = unpack(state.weights, state.acc, program.q.dtype)
        acc = warpgroup_mma(weights, v_tile, state.acc, is_async=True)  # (2)
        pass_turn(program, queries.INDEX)
        scores = warpgroup_mma_wait(1, deps=(scores,))  # (1) is done
        release(program.k_tiles, count)
        weights, top, total, fade = weigh_forward(scores, state.top, state.total, start, queries, program, MASKED)
        acc = warpgroup_mma_wait(0, deps=(acc,))  # (2) is done
        release(program.v_tiles, count - 1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
        pairs = pack_kept(weights, start, queries, program)
        state = State(acc, pairs, top, total, count + 1, start - BLOCK)
    return state


@gluon.jit
def end_rows(state, queries, program):
    """The log-sum-exp of a consumer's queries, their largest scores, and the factor of their sums."""
    top = state.top
    if program.RULE.decay:
        position = queries.first_pos + gl.arange(0, PER_CONSUMER, top.type.layout)
        exist = (position >= 0) & (position < queries.seq.k_len)
        top += relative_gate2(queries.gates, position, exist, queries.pivot)
    logit = None
    if program.sink is not None:
        logit = gl.load(program.sink + queries.head).to(gl.float32) * LOG2E
    lse2, factor = end_softmax(top, state.total, logit)
    if program.RULE.dropout:
        factor /= 1 - program.terms.dropout
    return lse2, top, factor


@gluon.jit
def output_tile(acc, program, INDEX: gl.constexpr):
    """The output of a consumer in its shared memory, where TMA will read it; that of its tile before has left."""
    tma_wait(0)
    partition_barrier()
    program.out_tiles.index(INDEX).store(acc.to(program.q.dtype))
    fence_async_shared()
    return program.out_tiles.index(INDEX).reshape(program.out.block_shape)


@gluon.jit
def consumer(program, INDEX: gl.constexpr):
    """Attention of PER_CONSUMER queries of each tile."""
    RULE: gl.constexpr = program.RULE
    TILE: gl.constexpr = program.TILE
    PIPE: gl.constexpr = program.PIPE
    count = 0  # of blocks
    visit = 0  # of tiles
    tile_start, head, index = receive(program.mail, visit)
    while head >= 0:
        queries = own_queries(tile_start, head, index, visit, program, INDEX)
        seq = queries.seq
        tile_begin, _, _, tile_end = blocks(tile_start, TILE.block_q, seq, program)
        begin, full_begin, full_end, end = own_blocks(queries.start, seq, tile_end, program)
        next_tile = count + tile_end - tile_begin

        count = skip(program, count, tile_end - end, INDEX)
        start = (end - 1) * TILE.block_k
        # no query sees a key after first_pos + 63
        if RULE.causal and TILE.block_k > PER_CONSUMER and queries.first_pos <= start:
            state = attend_first(count, start, queries, program, KEYS=PER_CONSUMER)
        else:
            state = attend_first(count, start, queries, program, KEYS=TILE.block_k)
        state = attend(state, end - 1 - full_end, queries, program, MASKED=True)
        state = attend(state, full_end - full_begin, queries, program, MASKED=False)
        if RULE.window > 0:
            state = attend(state, full_begin - begin, queries, program, MASKED=True)
        if not PIPE.out_in_q_memory:
            release(program.q_tiles, queries.number)
        v_tile = filled(program.v_tiles, state.count - 1)
        weights = unpack(state.weights, state.acc, program.q.dtype)
        acc = warpgroup_mma(weights, v_tile, state.acc, is_async=True)  # (2)

        lse2, top, factor = end_rows(state, queries, program)
        offset = queries.start + gl.arange(0, PER_CONSUMER, lse2.type.layout)
        is_query = (offset >= 0) & (offset < seq.q_len)
        gl.store(program.lse2 + (queries.flat_head.to(gl.int64) * program.q_len + seq.q_start) + offset, lse2, is_query)

        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(program.v_tiles, state.count - 1)
        count = skip(program, state.count, next_tile - state.count, INDEX)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
        out_tile = output_tile(acc, program, INDEX)
        extent, _ = extents(seq, program.q_len, program.k_len)
        tma_store(program.out, corner(extent, in_or_past(queries.start, seq.q_len), head, PIPE.ragged), out_tile)
        if PIPE.out_in_q_memory:
            tma_wait(0)
            release(program.q_tiles, queries.number)
        if program.max_logit2 is not None:  # last, when there are registers for it
            largest = gl.max(gl.where(is_query, top, float("-inf")), 0)
            gl.atomic_max(program.max_logit2 + head, largest, sem="relaxed")
        visit += 1
        tile_start, head, index = receive(program.mail, visit)
    tma_wait(0)


@gluon.jit(do_not_specialize=["q_len", "k_len", "batches"])
def hopper_forward_kernel(
    q, k, v, out, lse2, max_logit2, sink, tile_list, ragged, q_len, k_len, batches, terms,
    RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr,
):  # fmt: skip
    """out = softmax(rule(q k^T)) v and lse2 = log2 sum 2^score, for tiles of queries as long as there are any.

    max_logit2 [H], if not None, is raised to the largest score of each head.
    terms: Terms with a scale of at least 1e-30, and the gate of split_gate().
    tile_list: of ragged sequences, as list_kernel lists their tiles; else a 0, in which programs count the tiles that
    they take, and which is 0 again at the end.
    """
    # full barriers: the loader, or its TMA, arrives. Empty ones: each consumer; of q the one whose tile it is.
    q_tiles = new_channel(PIPE.consumers * PIPE.q_stages, PER_CONSUMER, TILE.dim, q.dtype, 1)
    k_tiles = new_channel(PIPE.stages, TILE.block_k, TILE.dim, q.dtype, PIPE.consumers)
    v_tiles = new_channel(PIPE.stages, TILE.block_k, TILE.value_dim, q.dtype, PIPE.consumers)
    out_tiles = q_tiles.tiles
    if not PIPE.out_in_q_memory:
        outputs: gl.constexpr = [PIPE.consumers, PER_CONSUMER, TILE.value_dim]
        out_tiles = gl.allocate_shared_memory(q.dtype, outputs, q_tiles.tiles.layout)
    may_issue = 0
    if PIPE.ping_pong:
        # may_issue[i]: consumer i - 1 arrives, i waits; unused ones would share their memory with other values
        may_issue = barriers(PIPE.consumers, 1)
    mail_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [WORDS * MAILBOX, 1], mail_layout)
    mail = Channel(words, barriers(MAILBOX, 1), barriers(MAILBOX, PIPE.consumers))
    if PIPE.ping_pong:  # the first block of the first consumer has no consumer before it
        mbarrier.arrive(may_issue.index(0))
    program = ForwardProgram(
        q, k, v, out, lse2, max_logit2, sink, terms, q_tiles, k_tiles, v_tiles, mail, out_tiles, may_issue,
        q_len, k_len, batches, tile_list, ragged, RULE, TILE, PIPE,
    )  # fmt: skip
    # Who does what. The first consumer is the warps that were launched, with the registers that maxnreg leaves; then
    # come warps and registers (of a thread) of the others.
    if PIPE.consumers == 2:
        gl.warp_specialize(
            [(consumer, (program, 0)), (consumer, (program, 1)), (loader, (program,))],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [(consumer, (program, 0)), (consumer, (program, 1)), (consumer, (program, 2)), (loader, (program,))],
            [4, 4, 1],
            [160, 160, 32],
        )
