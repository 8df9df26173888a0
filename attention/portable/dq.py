"""Backward kernel that walks the keys: dq, delta and the query half of the gates' gradient.

Formulas and shared parts are in backward.py.
"""

import triton
import triton.language as tl

from .. import tiles
from ..score import LOG2E, behind, output_products
from .backward import Gradients, Queries, gate_zeros, load_queries, meet_keys, query_lanes
from .forward import keys_seen, locate_queries


@triton.jit
def gather_mean(
    total, weight, queries, k, v, k_tiles, v_tiles, low, span, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add P dP to total and P to weight [queries], over the keys of a span: its interior, or (MASKED) its edges."""
    for step in range(tiles.first_step(span, MASKED), tiles.last_step(span, MASKED), TILE.block_k):
        start = tiles.position(step, span, MASKED)
        _k_tile, weights, weighted, _slope = meet_keys(  # with a delta of 0 dS is P dP
            queries, k, v, k_tiles, v_tiles, start, low, span.hi, seq, terms, RULE, TILE, MASKED
        )
        total += tl.sum(weighted, 1)
        weight += tl.sum(weights, 1)
    return total, weight


@triton.jit
def find_delta(
    queries, out, dlse, sink, k, v, k_tiles, v_tiles, start, low, span, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """delta of the queries at `start`, from `out` or, if that is None, by a walk over the keys; dlse, sink may be None.

    sum_d dO_d O_d and the mean of dP are one number but for rounding. The mean is of the very dP that it is taken from,
    over what the recomputed P do add up to, so that sums of dS over a row err no more than eager PyTorch's.
    """
    if out is None:
        total = tl.full([TILE.block_q], 0.0, tl.float32)
        weight = total
        args = queries, k, v, k_tiles, v_tiles, low, span, seq, terms
        total, weight = gather_mean(total, weight, *args, RULE, TILE, MASKED=False)
        total, weight = gather_mean(total, weight, *args, RULE, TILE, MASKED=True)
        if RULE.sink:
            weight += tl.exp2(tl.load(sink + queries.head).to(tl.float32) * LOG2E - queries.lse2)
        delta = total / tl.where(weight > 0, weight, 1.0)
    else:
        out = tiles.tile_lane(out, seq.batch, queries.head, seq.q_start)
        out_tile = tiles.load_tile(out, start, 0, seq.q_len, TILE.block_q, TILE.value_dim, True)
        delta = output_products(out_tile, queries.dout, seq.k_len, RULE)
    if dlse is not None:
        dlse = tiles.row_lane(dlse, seq.batch, queries.head, seq.q_start)
        delta -= tiles.load_rows(dlse, start, seq.q_len, 0.0, TILE.block_q, True)
    return delta


@triton.jit
def gather_dq(
    sums, queries, k, v, k_tiles, v_tiles, low, span, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS K over the keys of a span: its interior, or (MASKED) its edges."""
    for step in range(tiles.first_step(span, MASKED), tiles.last_step(span, MASKED), TILE.block_k):
        start = tiles.position(step, span, MASKED)
        k_tile, _weights, dscores, slope = meet_keys(
            queries, k, v, k_tiles, v_tiles, start, low, span.hi, seq, terms, RULE, TILE, MASKED
        )
        if RULE.hides:  # and 0 * NaN is NaN
            k_tile = tl.where(tl.max(tl.abs(dscores), 0)[:, None] > 0, k_tile, 0.0).to(k_tile.dtype)
        gate = sums.gate
        if terms.gate is not None:
            gate += tl.sum(dscores.to(gate.dtype), 1)
        sums = Gradients(tiles.dot(tiles.narrow(dscores * slope, k_tile), k_tile, sums.main, TILE), sums.value, gate)
    return sums


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dq_kernel(
    q, k, v, dout, lse2, delta, k_tiles, v_tiles, out, dlse, sink, dq, dgate,
    q_len, k_len, ragged, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """dQ = scale (dS slope) K and the query half of dgate [B, H, Tk], for one tile of queries; walks the keys.

    OUTPUTS = "both" writes delta too, "delta" writes that alone, and "dq" reads it. If `out` is None, delta is found by
    a walk over the keys. In one kernel these two walks would spill at head dim 256.
    """
    q_start, count, head, seq = locate_queries(q_len, k_len, ragged, RULE, TILE)
    if count <= 0:
        return
    first = q_start + seq.k_len - seq.q_len
    last = first + tl.minimum(TILE.block_q, count) - 1
    span = keys_seen(first, last, seq, RULE, TILE.block_k, TILE.block_k)
    low = first - behind(RULE)
    lanes = query_lanes(q, dout, lse2, delta, head, seq)
    queries = load_queries(lanes, head, q_start, seq, terms, RULE, TILE, DELTA=OUTPUTS == "dq")
    k = tiles.tile_lane(k, seq.batch, head // TILE.group, seq.k_start)
    v = tiles.tile_lane(v, seq.batch, head // TILE.group, seq.k_start)
    if OUTPUTS != "dq":
        rows = find_delta(
            queries, out, dlse, sink, k, v, k_tiles, v_tiles, q_start, low, span, seq,
            terms, RULE, TILE,
        )  # fmt: skip
        tiles.store_rows(delta, rows, seq.batch, head, seq.q_start + q_start, 0, count, TILE.block_q)
    if OUTPUTS == "delta":
        return
    if OUTPUTS == "both":
        queries = Queries(queries.tile, queries.dout, queries.lse2, rows, queries.pos, queries.head, queries.philox_key)
    sums = Gradients(tiles.zeros(TILE.block_q, TILE.dim), 0.0, gate_zeros(dgate, TILE.block_q))
    sums = gather_dq(sums, queries, k, v, k_tiles, v_tiles, low, span, seq, terms, RULE, TILE, MASKED=False)
    sums = gather_dq(sums, queries, k, v, k_tiles, v_tiles, low, span, seq, terms, RULE, TILE, MASKED=True)
    dq = tiles.tile_lane(dq, seq.batch, head, seq.q_start)
    tiles.store_tile(dq, sums.main * terms.scale, q_start, seq.q_len, TILE.block_q, TILE.dim)
    if dgate is not None:
        # at the keys where the queries stand; one before the first key has seen none
        tiles.store_rows(dgate, sums.gate, seq.batch, head, seq.k_start + first, -first, count, TILE.block_q)
