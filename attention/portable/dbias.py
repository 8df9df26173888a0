"""Backward kernel for the bias, summed over all that it was broadcast over.

Formulas and shared parts are in backward.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..score import behind
from ..tiles import Ragged, find_tile, locate, pair_pointers, sequence, tile_lane
from .backward import load_queries, meet_keys, query_lanes
from .forward import keys_seen


class Spread(NamedTuple):
    """Over what one element of a bias was broadcast: a constexpr argument of dbias_kernel."""

    batches: int  # 1, or all rows of the batch
    heads: int  # 1, or all heads
    queries: bool
    keys: bool
    parts: int  # programs that share the sum of a tile of the bias


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dbias_kernel(
    q, k, v, dout, lse2, delta, dbias, q_len, k_len, ragged, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """dS of one [queries, keys] tile of the bias, summed over one of SPREAD.parts of all that it was broadcast over.

    The scores are computed once more: cheaper than keeping dS, which would take O(B H Tq Tk) memory. TILE.heads counts
    heads of the bias; a sequence or row of the batch is a program of its own unless SPREAD says otherwise. dbias, which
    holds zeros before, has a row for each part and row of the bias; packed sequences have their own elements in one
    row, or share one element, and then have a row each. A part is a range of steps: tiles of queries of each head of
    each row.
    """
    down = 1 if SPREAD.queries else tl.cdiv(q_len, TILE.block_q)
    across = 1 if SPREAD.keys else tl.cdiv(k_len, TILE.block_k)
    PACKED: tl.constexpr = ragged.q_starts is not None and not (SPREAD.queries and SPREAD.keys)
    if PACKED and SPREAD.queries:  # along one axis those of all sequences
        across = tl.num_programs(0) // (TILE.heads * SPREAD.parts)
    elif PACKED:
        down = tl.num_programs(0) // (TILE.heads * SPREAD.parts) // across
    tile, bias_head, row_and_part = locate(down * across, TILE.heads)
    index, part = row_and_part // SPREAD.parts, row_and_part % SPREAD.parts
    q_tile, k_tile = tile // across, tile % across
    if PACKED and SPREAD.queries:
        k_tile, index = find_tile(k_tile, index, across, k_len, ragged.k_starts, TILE.block_k)
    elif PACKED:
        q_tile, index = find_tile(q_tile, index, down, q_len, ragged.q_starts, TILE.block_q)
    q_lo, k_lo = q_tile * TILE.block_q, k_tile * TILE.block_k
    # a row's length bounds what is summed, not the bias, which other rows may share
    own = sequence(index, q_len, k_len, Ragged(None, ragged.q_starts, ragged.k_starts))
    if q_lo >= own.q_len or k_lo >= own.k_len:
        return
    acc = tl.full([TILE.block_q, TILE.block_k], 0.0, tl.float32)
    of_head = tl.cdiv(own.q_len, TILE.block_q) if SPREAD.queries else 1  # steps
    steps = SPREAD.batches * SPREAD.heads * of_head
    share = tl.cdiv(steps, SPREAD.parts)
    for step in range(part * share, tl.minimum((part + 1) * share, steps)):
        member = step // of_head
        head = bias_head + member % SPREAD.heads
        seq = sequence(index + member // SPREAD.heads, q_len, k_len, ragged)
        q_start = q_lo + step % of_head * TILE.block_q
        lanes = query_lanes(q, dout, lse2, delta, head, seq)
        k_lane = tile_lane(k, seq.batch, head // TILE.group, seq.k_start)
        v_lane = tile_lane(v, seq.batch, head // TILE.group, seq.k_start)
        queries = load_queries(lanes, head, q_start, seq, terms, RULE, TILE, DELTA=True)
        first = q_start + seq.k_len - seq.q_len
        last = first + TILE.block_q - 1
        span = keys_seen(first, last, seq, RULE, TILE.block_k, TILE.block_k)
        low = first - behind(RULE)
        k_hi = seq.k_len if SPREAD.keys else tl.minimum(k_lo + TILE.block_k, seq.k_len)
        end = tl.where(q_start < seq.q_len, tl.minimum(span.hi, k_hi), 0)
        for start in range(tl.maximum(span.lo, k_lo), end, TILE.block_k):
            _k_tile, _weights, dscores, _slope = meet_keys(
                queries, k_lane, v_lane, None, None, start, low, span.hi, seq, terms, RULE, TILE, MASKED=True
            )
            acc += dscores

    q_offset = q_lo + tl.arange(0, TILE.block_q)[:, None]
    k_offset = k_lo + tl.arange(0, TILE.block_k)[None, :]
    if SPREAD.queries:
        acc = tl.sum(acc, 0, keep_dims=True)
        q_offset = tl.full([1, 1], 0, tl.int32)
    if SPREAD.keys:
        acc = tl.sum(acc, 1, keep_dims=True)
        k_offset = tl.full([1, 1], 0, tl.int32)
    pointers = pair_pointers(dbias, row_and_part, bias_head, own.q_start + q_offset, own.k_start + k_offset)
    tl.store(pointers, acc, (q_offset < own.q_len) & (k_offset < own.k_len))
