"""Backward kernel that walks the keys: dq, delta and the query half of the gates' gradient.

Formulas and shared parts are in backward.py.
"""

import triton
import triton.language as tl

from .. import tiles
from ..score import LOG2E, output_products
from .backward import Gradients, Queries, gate_zeros, load_queries, meet_keys, query_lanes
from .forward import Keys, key_lanes, keys_seen, locate_queries


@triton.jit
def gather_mean(total, weight, queries, keys, seq, terms, RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Add P dP to total and P to weight [queries], over the keys of a span: its interior, or (MASKED) its edges."""
    for step in range(tiles.first_step(keys.span, MASKED), tiles.last_step(keys.span, MASKED), TILE.block_k):
        start = tiles.position(step, keys.span, MASKED)
        # with a delta of 0 dS is P dP
        _k_tile, weights, weighted, _slope = meet_keys(queries, keys, start, seq, terms, RULE, TILE, MASKED)
        total += tl.sum(weighted, 1)
        weight += tl.sum(weights, 1)
    return total, weight


@triton.jit
def gather_dq(sums, queries, keys, seq, terms, RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Add dS K over the keys of a span: its interior, or (MASKED) its edges."""
    for step in range(tiles.first_step(keys.span, MASKED), tiles.last_step(keys.span, MASKED), TILE.block_k):
        start = tiles.position(step, keys.span, MASKED)
        k_tile, _weights, dscores, slope = meet_keys(queries, keys, start, seq, terms, RULE, TILE, MASKED)
        if RULE.hides:  # and 0 * NaN is NaN
            k_tile = tl.where(tl.max(tl.abs(dscores), 0)[:, None] > 0, k_tile, 0.0).to(k_tile.dtype)
        gate = sums.gate
        if terms.gate is not None:
            gate += tl.sum(dscores.to(gate.dtype), 1)
        sums = Gradients(tiles.dot(tiles.narrow(dscores * slope, k_tile), k_tile, sums.main, TILE), sums.value, gate)
    return sums


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dq_kernel(
    q, k, v, dout, lse2, delta, k_tiles, v_tiles, out, dlse, sink, dq, dgate, q_len, k_len, ragged, terms,
    RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ = scale (dS slope) K and the query half of dgate [B, H, Tk], for one tile of queries; walks the keys.

    With `out` it first fills delta, and without dq it ends there. In float32 both at once would spill at head dim 256.

    Without both, delta, which holds zeros, is filled from the mean of dP, which but for rounding is sum_d dO_d O_d: of
    the very dP that it is taken from, over what the recomputed P and the sink's add up to.
    """
    start, count, head, seq = locate_queries(q_len, k_len, ragged, RULE, TILE)
    if count <= 0:
        return
    lanes = query_lanes(q, dout, lse2, delta, head, seq)
    queries = load_queries(lanes, head, start, seq, terms, RULE, TILE)
    span, low = keys_seen(start, count, seq, RULE, TILE, TILE.block_k)
    k, v = key_lanes(k, v, head, seq, TILE)
    keys = Keys(k, v, k_tiles, v_tiles, span, low)
    if out is not None:
        out = tiles.tile_lane(out, seq.batch, head, seq.q_start)
        out_tile = tiles.load_tile(out, start, 0, seq.q_len, TILE.block_q, TILE.value_dim, True)
        rows = output_products(out_tile, queries.dout, seq.k_len, RULE)
    elif dq is None:
        rows = tl.full([TILE.block_q], 0.0, tl.float32)
        weight = rows
        if sink is not None:
            weight = tl.exp2(tl.load(sink + head).to(tl.float32) * LOG2E - queries.lse2)
        rows, weight = gather_mean(rows, weight, queries, keys, seq, terms, RULE, TILE, MASKED=False)
        rows, weight = gather_mean(rows, weight, queries, keys, seq, terms, RULE, TILE, MASKED=True)
        rows /= tl.where(weight > 0, weight, 1.0)
    if out is not None or dq is None:
        if dlse is not None:
            dlse = tiles.row_lane(dlse, seq.batch, head, seq.q_start)
            rows -= tiles.load_rows(dlse, start, seq.q_len, 0.0, TILE.block_q, True)
        tiles.store_rows(delta, rows, seq.batch, head, seq.q_start + start, 0, count, TILE.block_q)
        queries = Queries(queries.tile, queries.dout, queries.lse2, rows, queries.pos, queries.head, queries.philox_key)
    if dq is not None:
        sums = Gradients(tiles.zeros(TILE.block_q, TILE.dim), 0.0, gate_zeros(dgate, TILE.block_q))
        sums = gather_dq(sums, queries, keys, seq, terms, RULE, TILE, MASKED=False)
        sums = gather_dq(sums, queries, keys, seq, terms, RULE, TILE, MASKED=True)
        dq = tiles.tile_lane(dq, seq.batch, head, seq.q_start)
        tiles.store_tile(dq, sums.main * terms.scale, start, seq.q_len, TILE.block_q, TILE.dim)
        if dgate is not None:
            # at the keys where the queries stand; one before the first key has seen none
            first = start + seq.k_len - seq.q_len
            tiles.store_rows(dgate, sums.gate, seq.batch, head, seq.k_start + first, -first, count, TILE.block_q)
