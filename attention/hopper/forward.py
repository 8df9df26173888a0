"""Forward kernel for Hopper (sm_90): matrix products, softmax and loads of several query tiles run at once.

A program is one warp that loads by TMA and two or three consumers: warpgroups of 64 query rows each. While a consumer
takes the softmax of one block of keys, its tensor core works on the product of the weights and values of the block
before, and on the products of the other consumers. Programs are persistent: the next tile loads during this one.
Source: Shah et al., FlashAttention-3; scores in base 2.
"""

from typing import NamedTuple

from ..score import LOG2E
from .channel import Channel, barriers, filled, release
from .decay import Decay, decay_from, log2_gate
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
    ForwardMemory,
    Sizes,
    TileTerms,
    blocks,
    channel,
    in_or_past,
    loader,
    pass_turn,
    receive,
    skip,
    take_turn,
    unpack_message,
    words,
)
from .ragged import Extent, corner
from .scores import (
    add_ramp,
    cap_scores,
    drop_pairs,
    end_softmax,
    keep_columns,
    minus_rows,
    ramp,
    relative_bias,
    row_max,
)


class State(NamedTuple):
    """Online softmax of the queries of a consumer."""

    acc: gl.tensor  # [queries, Dv] sum of exp2(score - top) * v, without the last block
    weights: gl.tensor  # [queries, keys / 2] exp2(score - top) of the last block, packed
    top: gl.tensor  # [queries] largest score
    total: gl.tensor  # [queries] sum of exp2(score - top)


@gluon.jit
def hide(scores, first_pos, start, sizes, RULE: gl.constexpr):
    """-inf where the query at position first_pos + i does not see key start + j."""
    layout: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    pos = first_pos - start + gl.arange(0, scores.shape[0], layout)
    begin = None
    end = gl.full([scores.shape[0]], sizes.k_len - start, gl.int32, layout)
    if RULE.causal:  # no key that a query sees lies past the end
        end = pos + 1
    elif RULE.window > 0:
        end = gl.minimum(pos + RULE.window, end)
    if RULE.window > 0:
        begin = pos - (RULE.window - 1)
    return keep_columns(scores, begin, end, float("-inf"))


@gluon.jit
def weigh_forward(
    scores, top, total, first_pos, start, tile_terms, sizes,
    RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Raw scores of a block -> (weights, top, total, fade): fade is what the sums so far shrink by."""
    if PIPE.negate_scores:  # the maximum is taken of raw scores, so their factor must be positive
        scores = -scores
    scores, factor = cap_scores(scores, sizes.scale, RULE)
    lead2 = None  # what is still to be added to the scores
    if RULE.alibi:
        rows = gl.arange(0, scores.shape[0], gl.SliceLayout(1, scores.type.layout))
        first = start - first_pos - rows  # how far the first key is ahead of each query
        slope = sizes.alibi_slope2 / factor
        if RULE.causal:
            scores, lead = add_ramp(scores, slope, first)
            lead2 = lead * sizes.alibi_slope2
        else:
            scores -= gl.abs(ramp(scores, first, gl.float32)) * slope
    if RULE.decay or tile_terms.terms.relative is not None:  # what is added has no factor
        scores *= factor
        factor = 1.0
    if RULE.decay:  # the gate of a query adds the same to all its scores: see end_rows()
        key = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores -= log2_gate(tile_terms.decay, key, key < sizes.k_len if MASKED else None)[None, :]
    if tile_terms.terms.relative is not None:
        rows = gl.arange(0, scores.shape[0], gl.SliceLayout(1, scores.type.layout))
        distance = 0 - ramp(scores, start - first_pos - rows, gl.int32)
        scores += relative_bias(tile_terms.terms, tile_terms.flat_head % TILE.heads, distance) * LOG2E
    if MASKED:
        scores = hide(scores, first_pos, start, sizes, RULE)
    new_top = gl.maximum(top, row_max(scores, factor, lead2))
    if MASKED:  # a row that has seen no key yet: a finite pivot keeps inf - inf away
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
def pack_kept(weights, first_pos, start, tile_terms, sizes, DTYPE: gl.constexpr, RULE: gl.constexpr):
    """pack() with zeros where dropout drops. `total` has these weights too: dropout acts on normalised ones."""
    pairs = pack(weights, DTYPE)
    if RULE.dropout:
        pairs = drop_pairs(pairs, first_pos - (sizes.k_len - sizes.q_len), start, tile_terms.dropout)
    return pairs


@gluon.jit
def attend_first(
    q, shared, count, first_pos, start, tile_terms, sizes,
    INDEX: gl.constexpr, RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """The State after the first block, of which no query sees more than the first KEYS keys. Numbers: see attend()."""
    state = empty_state(q.dtype, TILE)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    none = gl.full([PER_CONSUMER, KEYS], 0.0, gl.float32, layout)
    k_tile = filled(shared.k, count).slice(0, KEYS).permute((1, 0))
    take_turn(shared.may_issue, count, INDEX, PIPE)
    scores = warpgroup_mma(q, k_tile, none, use_acc=False, is_async=True)  # (1)
    pass_turn(shared.may_issue, INDEX, PIPE)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    release(shared.k, count)
    top, total = gl.convert_layout(state.top, rows), gl.convert_layout(state.total, rows)
    weights, top, total, _ = weigh_forward(
        scores, top, total, first_pos, start, tile_terms, sizes, RULE, TILE, PIPE, MASKED=True
    )
    pairs = pack_kept(weights, first_pos, start, tile_terms, sizes, q.dtype, RULE)
    if KEYS < TILE.block_k:  # (2) multiplies whole blocks: the other half has weight 0
        pairs = gl.join(pairs, gl.zeros_like(pairs)).permute((0, 2, 1)).reshape(state.weights.shape)
        pairs = gl.convert_layout(pairs, state.weights.type.layout, assert_trivial=True)
    top, total = gl.convert_layout(top, state.top.type.layout), gl.convert_layout(total, state.top.type.layout)
    return State(state.acc, pairs, top, total)


@gluon.jit
def attend(
    state, q, shared, count, steps, first_pos, start, tile_terms, sizes,
    INDEX: gl.constexpr, RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Absorb `steps` blocks of keys, from `start` down.

    Two products a block, (1) S = Q K^T and (2) acc += P V. (2) is that of the block before, and runs while the softmax
    turns (1) into weights.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.block_k, 16])
    none = gl.full([PER_CONSUMER, TILE.block_k], 0.0, gl.float32, layout)
    for _ in range(steps):
        k_tile = filled(shared.k, count).permute((1, 0))
        take_turn(shared.may_issue, count, INDEX, PIPE)
        scores = warpgroup_mma(q, k_tile, none, use_acc=False, is_async=True)  # (1)
        v_tile = filled(shared.v, count - 1)
        weights = unpack(state.weights, state.acc, q.dtype)
        acc = warpgroup_mma(weights, v_tile, state.acc, is_async=True)  # (2)
        pass_turn(shared.may_issue, INDEX, PIPE)
        scores = warpgroup_mma_wait(1, deps=(scores,))  # (1) is done
        release(shared.k, count)
        weights, top, total, fade = weigh_forward(
            scores, state.top, state.total, first_pos, start, tile_terms, sizes, RULE, TILE, PIPE, MASKED
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))  # (2) is done
        release(shared.v, count - 1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
        state = State(acc, pack_kept(weights, first_pos, start, tile_terms, sizes, q.dtype, RULE), top, total)
        count += 1
        start -= TILE.block_k
    return state, count, start


@gluon.jit
def end_rows(state, first_pos, flat_head, decay, sink, sizes, RULE: gl.constexpr, TILE: gl.constexpr):
    """The log-sum-exp of a consumer's queries, their largest scores, and the factor of their sums."""
    top = state.top
    if RULE.decay:
        position = first_pos + gl.arange(0, PER_CONSUMER, top.type.layout)
        top += log2_gate(decay, position, (position >= 0) & (position < sizes.k_len))
    logit = None
    if sink is not None:
        logit = gl.load(sink + flat_head % TILE.heads).to(gl.float32) * LOG2E
    lse, factor = end_softmax(top, state.total, logit)
    return lse, top, factor


@gluon.jit
def empty_state(DTYPE: gl.constexpr, TILE: gl.constexpr):
    """The State before the first block."""
    qk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.block_k, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.value_dim, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, qk_layout)
    return State(
        gl.full([PER_CONSUMER, TILE.value_dim], 0.0, gl.float32, out_layout),
        pack(gl.full([PER_CONSUMER, TILE.block_k], 0.0, gl.float32, qk_layout), DTYPE),
        gl.full([PER_CONSUMER], float("-inf"), gl.float32, row_layout),
        gl.full([PER_CONSUMER], 0.0, gl.float32, row_layout),
    )


@gluon.jit
def own_blocks(q_start, sizes, tile_end, RULE: gl.constexpr, TILE: gl.constexpr):
    """blocks() of a consumer, of those of its tile; where it has no queries the last one, so that there is one."""
    begin, full_begin, full_end, end = blocks(q_start, PER_CONSUMER, sizes, RULE, TILE)
    end = gl.minimum(end, tile_end)
    begin = gl.where((q_start >= 0) & (q_start < sizes.q_len), gl.minimum(begin, end - 1), end - 1)
    full_end = gl.maximum(gl.minimum(full_end, end - 1), begin)
    if RULE.window > 0:
        full_begin = gl.maximum(gl.minimum(full_begin, full_end), begin)
    else:
        full_begin = begin
    return begin, full_begin, full_end, end


@gluon.jit
def output_tile(acc, shared, out, INDEX: gl.constexpr):
    """The output of a consumer in its shared memory, where TMA will read it; that of its tile before has left."""
    tma_wait(0)
    partition_barrier()
    shared.out.index(INDEX).store(acc.to(shared.q.tiles.dtype))
    fence_async_shared()
    return shared.out.index(INDEX).reshape(out.block_shape)


@gluon.jit
def consumer(
    INDEX: gl.constexpr, shared, out, lse2, max_logit2, sink, terms, sizes,
    RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr,
):  # fmt: skip
    """Attention of PER_CONSUMER queries of each tile."""
    dtype: gl.constexpr = shared.q.tiles.dtype
    count = 0  # of blocks
    visit = 0
    message = receive(shared.mail, visit)
    while message[1] >= 0:
        tile_start, flat_head = message[0], message[1]
        first, first_key, own, dropout = unpack_message(message, sizes, RULE, PIPE)
        q_start = tile_start + INDEX * PER_CONSUMER
        tile_begin, _, _, tile_end = blocks(tile_start, TILE.block_q, own, RULE, TILE)
        begin, full_begin, full_end, end = own_blocks(q_start, own, tile_end, RULE, TILE)
        next_tile = count + tile_end - tile_begin
        first_pos = q_start + own.k_len - own.q_len  # where its first query stands
        decay = Decay(0, 0.0, 0.0)
        if RULE.decay:
            own_gates = terms.gate + (flat_head.to(gl.int64) * sizes.k_len + first_key)
            decay = decay_from(own_gates, first_pos, own.k_len)
        tile_terms = TileTerms(dropout, decay, terms, flat_head)

        q_number = visit * PIPE.consumers + INDEX
        q = filled(shared.q, q_number)
        count = skip(shared, count, tile_end - end, INDEX, PIPE)
        start = (end - 1) * TILE.block_k
        if RULE.causal and TILE.block_k > PER_CONSUMER and first_pos <= start:  # none sees a key after first_pos + 63
            state = attend_first(
                q, shared, count, first_pos, start, tile_terms, own, INDEX, RULE, TILE, PIPE, KEYS=PER_CONSUMER
            )
        else:
            state = attend_first(
                q, shared, count, first_pos, start, tile_terms, own, INDEX, RULE, TILE, PIPE, KEYS=TILE.block_k
            )
        count += 1
        start -= TILE.block_k
        state, count, start = attend(
            state, q, shared, count, end - 1 - full_end, first_pos, start, tile_terms, own,
            INDEX, RULE, TILE, PIPE, MASKED=True,
        )  # fmt: skip
        state, count, start = attend(
            state, q, shared, count, full_end - full_begin, first_pos, start, tile_terms, own,
            INDEX, RULE, TILE, PIPE, MASKED=False,
        )  # fmt: skip
        if RULE.window > 0:
            state, count, start = attend(
                state, q, shared, count, full_begin - begin, first_pos, start, tile_terms, own,
                INDEX, RULE, TILE, PIPE, MASKED=True,
            )  # fmt: skip
        if not PIPE.out_in_q_memory:
            release(shared.q, q_number)
        v_tile = filled(shared.v, count - 1)
        acc = warpgroup_mma(unpack(state.weights, state.acc, dtype), v_tile, state.acc, is_async=True)  # (2)

        lse, top, factor = end_rows(state, first_pos, flat_head, decay, sink, own, RULE, TILE)
        offset = q_start + gl.arange(0, PER_CONSUMER, lse.type.layout)
        rows = lse2 + (flat_head.to(gl.int64) * sizes.q_len + first)
        is_query = (offset >= 0) & (offset < own.q_len)
        gl.store(rows + offset, lse, is_query)

        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(shared.v, count - 1)
        count = skip(shared, count, next_tile - count, INDEX, PIPE)
        if RULE.dropout:
            factor /= 1 - dropout.probability
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
        out_tile = output_tile(acc, shared, out, INDEX)
        batch = flat_head // TILE.heads
        queries = Extent(batch, batch * sizes.q_len + first + own.q_len, own.q_len)
        tma_store(out, corner(queries, in_or_past(q_start, own.q_len), flat_head % TILE.heads, PIPE.ragged), out_tile)
        if PIPE.out_in_q_memory:
            tma_wait(0)
            release(shared.q, q_number)
        if max_logit2 is not None:  # last, when there are registers for it
            largest = gl.max(gl.where(is_query, top, float("-inf")), 0)
            gl.atomic_max(max_logit2 + flat_head % TILE.heads, largest, sem="relaxed")
        visit += 1
        message = receive(shared.mail, visit)
    tma_wait(0)


@gluon.jit(do_not_specialize=["q_len", "k_len", "n_tiles", "flat_heads"])
def hopper_forward_kernel(
    q, k, v, out, lse2, max_logit2, sink, tile_list, ragged, q_len, k_len, n_tiles, flat_heads, terms,
    RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr,
):  # fmt: skip
    """out = softmax(rule(q k^T)) v and lse2 = log2 sum 2^score, for tiles of queries as long as there are any.

    max_logit2 [H], if not None, is raised to the largest score of each head.
    terms: Terms with a scale of at least 1e-30, and the gate of split_gate().
    tile_list: those of ragged sequences as list_kernel lists them; else a 0, to count n_tiles of each head, which is 0
    again at the end.
    """
    sizes = Sizes(q_len, k_len, terms.scale, terms.dropout)
    # full barriers: the loader, or its TMA, arrives. Empty ones: each consumer; of q the one whose tile it is.
    q_channel = channel(PIPE.consumers * PIPE.q_stages, PER_CONSUMER, TILE.dim, q.dtype, 1)
    mail_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = ForwardMemory(
        q_channel,
        channel(PIPE.stages, TILE.block_k, TILE.dim, q.dtype, PIPE.consumers),
        channel(PIPE.stages, TILE.block_k, TILE.value_dim, q.dtype, PIPE.consumers),
        q_channel.tiles if PIPE.out_in_q_memory else gl.allocate_shared_memory(
            q.dtype, [PIPE.consumers, PER_CONSUMER, TILE.value_dim], q_channel.tiles.layout
        ),
        # may_issue[i]: consumer i - 1 arrives, i waits; unused ones would share their memory with other values
        barriers(PIPE.consumers, 1) if PIPE.ping_pong else 0,
        Channel(
            gl.allocate_shared_memory(gl.int32, [words(RULE, PIPE) * MAILBOX, 1], mail_layout),
            barriers(MAILBOX, 1),
            barriers(MAILBOX, PIPE.consumers),
        ),
    )  # fmt: skip
    if PIPE.ping_pong:  # the first block of the first consumer has no consumer before it
        mbarrier.arrive(shared.may_issue.index(0))
    # registers of each warp; the first consumer gets what maxnreg leaves
    if PIPE.consumers == 2:
        gl.warp_specialize(
            [
                (consumer, (0, shared, out, lse2, max_logit2, sink, terms, sizes, RULE, TILE, PIPE)),
                (consumer, (1, shared, out, lse2, max_logit2, sink, terms, sizes, RULE, TILE, PIPE)),
                (loader, (shared, q, k, v, terms, sizes, n_tiles, flat_heads, tile_list, ragged, RULE, TILE, PIPE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, shared, out, lse2, max_logit2, sink, terms, sizes, RULE, TILE, PIPE)),
                (consumer, (1, shared, out, lse2, max_logit2, sink, terms, sizes, RULE, TILE, PIPE)),
                (consumer, (2, shared, out, lse2, max_logit2, sink, terms, sizes, RULE, TILE, PIPE)),
                (loader, (shared, q, k, v, terms, sizes, n_tiles, flat_heads, tile_list, ragged, RULE, TILE, PIPE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
