"""What the backward kernels share, and their formulas. Weights come from the saved LSE.

With P = 2^(score - lse2), delta_i = sum_d dO_id O_id - dlse_i and slope = d score / d (scale q.k):
    dV = P'^T dO                       (P' = P after dropout)
    dP = drop(dO V^T)
    dS = P * (dP - delta)              (gradient of the score: of bias, and of the gates as dS_ij (gate_i - gate_j))
    dQ = scale (dS slope) K,  dK = scale (dS slope)^T Q
Except for rounding, sum_d dO_id O_id equals sum_j P_ij dP_ij: see gather_mean() in dq.py, and dp_factor() for queries
of a single key.
Each output element is summed by one program in a fixed order: no atomics, so two runs give the same bits.
Source: Dao et al., FlashAttention, algorithm 4, split in two so that dq needs no atomics.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..score import dp_factor, drop, dropout_key, shape_scores
from ..tiles import Lane, dot, fetch_tile, load_rows, load_tile, row_lane, tile_lane


class Queries(NamedTuple):
    """A tile of queries of one head with what the backward knows of them."""

    tile: tl.tensor  # [queries, dim]
    dout: tl.tensor  # [queries, value_dim]
    lse2: tl.tensor  # [queries]
    delta: tl.tensor  # [queries]
    pos: tl.tensor  # [queries], counted in keys
    head: tl.tensor
    philox_key: tl.tensor  # of dropout


class QueryLanes(NamedTuple):
    """Where one head of one sequence has what Queries are loaded from: a Lane each."""

    q: Lane
    dout: Lane
    lse2: Lane
    delta: Lane


class Gradients(NamedTuple):
    """What a kernel sums: of queries (dq, gate) in dq_kernel, of keys (dk, dv, gate) in dkdv_kernel."""

    main: tl.tensor  # dq or dk
    value: tl.tensor  # dv
    gate: tl.tensor  # of the cumulative gates


@triton.jit
def query_lanes(q, dout, lse2, delta, head, seq):
    """Those of one head."""
    return QueryLanes(
        tile_lane(q, seq.batch, head, seq.q_start),
        tile_lane(dout, seq.batch, head, seq.q_start),
        row_lane(lse2, seq.batch, head, seq.q_start),
        row_lane(delta, seq.batch, head, seq.q_start),
    )


@triton.jit
def load_lse(lanes, start, seq, RULE: tl.constexpr, BLOCK: tl.constexpr, CLAMPED: tl.constexpr):
    """lse2 of queries [start, start + BLOCK). CLAMPED=False promises that all exist and see a key.

    +inf where there is none, so that 2^(score - lse2) is 0 for rows that see no key or do not exist.
    """
    lse2 = load_rows(lanes.lse2, start, seq.q_len, float("inf"), BLOCK, CLAMPED)
    if CLAMPED or RULE.hides:
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    return lse2


@triton.jit
def load_queries(lanes, head, start, seq, terms, RULE: tl.constexpr, TILE: tl.constexpr):
    """Queries [start, start + block_q) of a sequence."""
    tile = load_tile(lanes.q, start, 0, seq.q_len, TILE.block_q, TILE.dim, True)  # after dO, sm_100 would spill
    dout_tile = load_tile(lanes.dout, start, 0, seq.q_len, TILE.block_q, TILE.value_dim, True)
    lse2 = load_lse(lanes, start, seq, RULE, TILE.block_q, True)
    delta = load_rows(lanes.delta, start, seq.q_len, 0.0, TILE.block_q, True)
    pos = start + seq.k_len - seq.q_len + tl.arange(0, TILE.block_q)
    return Queries(tile, dout_tile, lse2, delta, pos, head, dropout_key(seq.index, head, terms.seed, RULE))


@triton.jit
def score_gradient(
    weights, dweights, delta, q_pos, k_pos, philox_key, seq, terms, RULE: tl.constexpr, MASKED: tl.constexpr
):
    """dS; dweights is dO.v, the gradient of the weights after dropout."""
    dscores = weights * (
        drop(dweights, philox_key, q_pos, k_pos, seq, terms, RULE) * dp_factor(seq.k_len, RULE) - delta
    )
    if MASKED or RULE.hides:  # an invisible key may hold NaN, and so may delta of a row that sees no key
        dscores = tl.where(weights > 0, dscores, 0.0)
    return dscores


@triton.jit
def gate_zeros(dgate, BLOCK: tl.constexpr):
    """Sums for the gates, in the dtype of dgate, which may be None."""
    if dgate is None:
        sums = tl.full([BLOCK], 0.0, tl.float32)
    else:
        sums = tl.full([BLOCK], 0.0, dgate.ptr.dtype.element_ty)
    return sums


@triton.jit
def meet_keys(queries, keys, start, seq, terms, RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """The key tile at `start`, P and dS [queries, keys], slope."""
    low, high = keys.low, keys.span.hi
    k_pos = start + tl.arange(0, TILE.block_k)
    k_tile = fetch_tile(keys.k, keys.k_tiles, start, low, high, TILE.block_k, TILE.dim, MASKED)
    v_tile = fetch_tile(keys.v, keys.v_tiles, start, low, high, TILE.block_k, TILE.value_dim, MASKED)
    q_pos, k_pos = queries.pos[:, None], k_pos[None, :]
    qk = dot(queries.tile, tl.trans(k_tile), None, TILE)
    scores, slope = shape_scores(qk, q_pos, k_pos, queries.head, seq, terms, RULE, MASKED)
    weights = tl.exp2(scores - queries.lse2[:, None])
    dweights = dot(queries.dout, tl.trans(v_tile), None, TILE)
    dscores = score_gradient(
        weights, dweights, queries.delta[:, None], q_pos, k_pos, queries.philox_key, seq, terms, RULE, MASKED
    )
    return k_tile, weights, dscores, slope
