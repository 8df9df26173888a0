"""Backward kernel for a bias of each query and key, summed over the heads and rows that it was broadcast over.

Formulas and shared parts are in backward.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..tiles import Ragged, find_tile, locate, pair_pointers, sequence
from .backward import load_queries, meet_keys, query_lanes
from .forward import Keys, key_lanes, keys_seen


class Spread(NamedTuple):
    """Over what one element of a bias was broadcast: a constexpr argument of dbias_kernel."""

    batches: int  # 1, or all rows of the batch
    heads: int  # 1, or all heads
    parts: int  # programs that share the sum of a tile of the bias


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dbias_kernel(
    q, k, v, dout, lse2, delta, dbias, q_len, k_len, ragged, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """dS of one [queries, keys] tile of the bias, summed over one of SPREAD.parts of all that it was broadcast over.

    The scores are computed once more: cheaper than keeping dS, which would take O(B H Tq Tk) memory. TILE.heads counts
    heads of the bias; a sequence or row of the batch is a program of its own unless SPREAD says otherwise. dbias, which
    holds zeros before, has a row for each part and row of the bias. A part is a range of heads and rows.
    """
    across = tl.cdiv(k_len, TILE.block_k)
    down = tl.cdiv(q_len, TILE.block_q)
    if ragged.q_starts is not None:
        down = tl.num_programs(0) // (TILE.heads * SPREAD.parts) // across
    tile, bias_head, row_and_part = locate(down * across, TILE.heads)
    index, part = row_and_part // SPREAD.parts, row_and_part % SPREAD.parts
    q_tile, index = find_tile(tile // across, index, down, q_len, ragged.q_starts, TILE.block_q)
    q_lo, k_lo = q_tile * TILE.block_q, tile % across * TILE.block_k
    # a row's length bounds what is summed, not the bias, which other rows may share
    own = sequence(index, q_len, k_len, Ragged(None, ragged.q_starts, ragged.k_starts))
    if q_lo >= own.q_len or k_lo >= own.k_len:
        return
    acc = tl.full([TILE.block_q, TILE.block_k], 0.0, tl.float32)
    share = tl.cdiv(SPREAD.batches * SPREAD.heads, SPREAD.parts)
    for step in range(part * share, tl.minimum((part + 1) * share, SPREAD.batches * SPREAD.heads)):
        head = bias_head + step % SPREAD.heads
        seq = sequence(index + step // SPREAD.heads, q_len, k_len, ragged)
        span, low = keys_seen(q_lo, seq.q_len - q_lo, seq, RULE, TILE, TILE.block_k)
        if (q_lo < seq.q_len) & (k_lo >= span.lo) & (k_lo < span.hi):
            lanes = query_lanes(q, dout, lse2, delta, head, seq)
            queries = load_queries(lanes, head, q_lo, seq, terms, RULE, TILE)
            k_lane, v_lane = key_lanes(k, v, head, seq, TILE)
            keys = Keys(k_lane, v_lane, None, None, span, low)
            _k_tile, _weights, dscores, _slope = meet_keys(queries, keys, k_lo, seq, terms, RULE, TILE, MASKED=True)
            acc += dscores

    q_offset = q_lo + tl.arange(0, TILE.block_q)[:, None]
    k_offset = k_lo + tl.arange(0, TILE.block_k)[None, :]
    pointers = pair_pointers(dbias, row_and_part, bias_head, own.q_start + q_offset, own.k_start + k_offset)
    tl.store(pointers, acc, (q_offset < own.q_len) & (k_offset < own.k_len))
