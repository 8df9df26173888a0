"""Forward kernel: attention with the online softmax, in base 2, saving the log-sum-exp for the backward."""

from typing import NamedTuple

import triton
import triton.language as tl

from .. import tiles
from ..score import LOG2E, ahead, behind, drop, dropout_key, end_softmax, reach, shape_scores


class Softmax(NamedTuple):
    """Online softmax of a tile of queries: what has been absorbed so far of their keys."""

    acc: tl.tensor  # [queries, value_dim] sum of exp2(score - top) * v
    top: tl.tensor  # [queries] largest score
    total: tl.tensor  # [queries] sum of exp2(score - top)


@triton.jit
def no_keys(ROWS: tl.constexpr, TILE: tl.constexpr):
    """The Softmax of ROWS queries before the first key."""
    total = tl.full([ROWS], 0.0, tl.float32)
    return Softmax(tiles.zeros(ROWS, TILE.value_dim), tl.full([ROWS], float("-inf"), tl.float32), total)


class QueryTile(NamedTuple):
    """A tile of queries of one head."""

    tile: tl.tensor  # [queries, dim]
    pos: tl.tensor  # [queries], counted in keys
    head: tl.tensor
    philox_key: tl.tensor  # of dropout


class Keys(NamedTuple):
    """What a tile of queries walks over: the keys and values of its head in one sequence."""

    k: tiles.Lane
    v: tiles.Lane
    k_tiles: tl.tensor_descriptor | None  # TMA descriptors
    v_tiles: tl.tensor_descriptor | None
    span: tiles.Span  # of the keys that any of the queries sees
    low: tl.tensor  # the first key that one of them can see, not rounded as span.lo is


@triton.jit
def locate_queries(q_len, k_len, ragged, RULE: tl.constexpr, TILE: tl.constexpr):
    """Program id -> (first query, how many from there on, head, Sequence), for kernels that walk the keys."""
    n_tiles = tiles.count_tiles(q_len, ragged.q_starts, TILE.block_q, TILE.heads)
    tile, head, index = tiles.query_tile(tl.program_id(0), tl.num_programs(0), n_tiles, k_len, RULE, TILE)
    tile, index = tiles.find_tile(tile, index, n_tiles, q_len, ragged.q_starts, TILE.block_q)
    seq = tiles.sequence(index, q_len, k_len, ragged)
    start = tile * TILE.block_q
    return start, seq.q_len - start, head, seq


@triton.jit
def keys_seen(start, count, seq, RULE: tl.constexpr, TILE: tl.constexpr, EDGE: tl.constexpr):
    """Of Keys the span and low, for a tile of queries from `start` on, of which `count` exist.

    EDGE: as in meeting_range().
    """
    first = start + seq.k_len - seq.q_len  # query i stands at key i + k_len - q_len
    last = reach(first + tl.minimum(TILE.block_q, count) - 1, seq, RULE)
    low = first - behind(RULE)
    first = reach(first, seq, RULE)
    return tiles.meeting_range(first, last, behind(RULE), ahead(RULE), seq.k_len, TILE.block_k, EDGE), low


@triton.jit
def key_lanes(k, v, head, seq, TILE: tl.constexpr):
    """Those of the keys and of the values of a query head."""
    k = tiles.tile_lane(k, seq.batch, head // TILE.group, seq.k_start)
    return k, tiles.tile_lane(v, seq.batch, head // TILE.group, seq.k_start)


@triton.jit
def attend(state, queries, keys, seq, terms, RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Absorb the keys that queries see: the interior of their span, or (MASKED) its edges."""
    span = keys.span
    BLOCK: tl.constexpr = tiles.step_size(TILE.block_k, MASKED)
    # the edge of full attention is less than a block: too little to load ahead (but in float32 registers spill so)
    FULL: tl.constexpr = not RULE.causal and RULE.window == 0
    STAGES: tl.constexpr = 1 if MASKED and FULL and queries.tile.dtype.primitive_bitwidth == 16 else None
    for step in tl.range(tiles.first_step(span, MASKED), tiles.last_step(span, MASKED), BLOCK, num_stages=STAGES):
        start = tiles.position(step, span, MASKED)
        k_pos = start + tl.arange(0, BLOCK)
        k_tile = tiles.fetch_tile(keys.k, keys.k_tiles, start, keys.low, span.hi, BLOCK, TILE.dim, MASKED)
        qk = tiles.dot(queries.tile, tl.trans(k_tile), None, TILE)
        scores, _ = shape_scores(qk, queries.pos[:, None], k_pos[None, :], queries.head, seq, terms, RULE, MASKED)

        top = tl.maximum(state.top, tl.max(scores, 1))
        if MASKED or RULE.hides:  # a row that has seen no key yet: a finite pivot keeps inf - inf away
            pivot = tl.where(top == float("-inf"), 0.0, top)
        else:
            pivot = top
        weights = tl.exp2(scores - pivot[:, None])
        fade = tl.exp2(state.top - pivot)
        total = state.total * fade + tl.sum(weights, 1)
        # after the sum: dropout acts on normalised weights
        weights = drop(weights, queries.philox_key, queries.pos[:, None], k_pos[None, :], seq, terms, RULE)
        v_tile = tiles.fetch_tile(keys.v, keys.v_tiles, start, keys.low, span.hi, BLOCK, TILE.value_dim, MASKED)
        if RULE.hides:  # a value hidden by -inf may hold NaN, and 0 * NaN is NaN
            v_tile = tl.where(tl.max(scores, 0)[:, None] == float("-inf"), 0.0, v_tile).to(v_tile.dtype)
        acc = tiles.dot(tiles.narrow(weights, v_tile), v_tile, state.acc * fade[:, None], TILE)
        state = Softmax(acc, top, total)
    return state


@triton.jit(do_not_specialize=["q_len", "k_len"])
def forward_kernel(
    q, k, v, k_tiles, v_tiles, out, lse2, max_logit2, sink, q_len, k_len, ragged, terms,
    RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = softmax(rule(q k^T)) v and lse2 = log2 sum 2^score, for one tile of queries of one head.

    max_logit2 [H], if not None, is raised to the largest score.
    On chip: the query tile, the key and value tiles in use and those loaded ahead, and the Softmax state in registers.
    Source: Dao, FlashAttention-2, algorithm 1; scores in base 2.
    """
    q_start, count, head, seq = locate_queries(q_len, k_len, ragged, RULE, TILE)
    if count <= 0:
        return
    span, low = keys_seen(q_start, count, seq, RULE, TILE, tiles.step_size(TILE.block_k, True))
    k, v = key_lanes(k, v, head, seq, TILE)
    keys = Keys(k, v, k_tiles, v_tiles, span, low)
    q = tiles.tile_lane(q, seq.batch, head, seq.q_start)
    out = tiles.tile_lane(out, seq.batch, head, seq.q_start)
    tile = tiles.load_tile(q, q_start, 0, seq.q_len, TILE.block_q, TILE.dim, True)
    pos = q_start + seq.k_len - seq.q_len + tl.arange(0, TILE.block_q)
    queries = QueryTile(tile, pos, head, dropout_key(seq.index, head, terms.seed, RULE))
    state = no_keys(TILE.block_q, TILE)
    state = attend(state, queries, keys, seq, terms, RULE, TILE, MASKED=False)
    state = attend(state, queries, keys, seq, terms, RULE, TILE, MASKED=True)

    logit = None
    if sink is not None:
        logit = tl.load(sink + head).to(tl.float32) * LOG2E
    row_lse2, factor = end_softmax(state.top, state.total, logit)
    tiles.store_tile(out, state.acc * factor[:, None], q_start, seq.q_len, TILE.block_q, TILE.value_dim)
    if max_logit2 is not None:
        top = tl.where(tl.arange(0, TILE.block_q) < count, state.top, float("-inf"))
        tl.atomic_max(max_logit2 + head, tl.max(top, 0), sem="relaxed")
    tiles.store_rows(lse2, row_lse2, seq.batch, head, seq.q_start + q_start, 0, count, TILE.block_q)
