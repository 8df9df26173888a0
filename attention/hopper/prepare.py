"""Kernels before and after the backward: stats, which are lse2 and delta of queries, and the float32 sum of dQ."""

import triton
import triton.language as tl

from ..score import LOG2E, output_products
from ..tiles import load_rows, load_tile, locate, padded, row_lane, sequence, store_rows, store_tile, tile_lane
from .ragged import first_slot, listed

# Floats in a row of the dQ sum: 128 bytes, one pass over the banks of shared memory.
WIDTH = tl.constexpr(32)


@triton.jit
def locate_rows(q_list, ragged, q_slots, q_len, k_len, TILE: tl.constexpr):
    """Program id -> (first query, how many from there on, head, Sequence, number of the tile in stats and dq_sum)."""
    program = tl.program_id(0)
    if q_list is None:
        tile, head, index = locate(tl.cdiv(q_len, TILE.block_q), TILE.heads)
        start = tile * TILE.block_q
        return start, q_len - start, head, sequence(index, q_len, k_len, ragged), program
    else:
        tile, index, exists = listed(q_list, program // TILE.heads)
        head = program % TILE.heads
        start = tile * TILE.block_q
        seq = sequence(index, q_len, k_len, ragged)
        number = head * q_slots + first_slot(seq, q_len, TILE.block_q) + tile
        return start, tl.where(exists, seq.q_len - start, 0), head, seq, number


@triton.jit(do_not_specialize=["q_slots", "q_len", "k_len"])
def prepare_kernel(
    out, dout, lse2, dlse, stats, dq_sum, delta, gate, sink, dsink, q_list, ragged, q_slots, q_len, k_len, dropout,
    RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Before backward_kernel, for one tile of queries of one head: stats = [lse2, delta], and a dQ sum of zeros.

    delta_i = output_products() - dlse_i; dlse may be None. lse2 is +inf, which makes all weights 0, and delta 0 for
    rows that see no key or lie past the last query. With delta [B, H, Tq] not None that is filled too.

    With dsink [H, q_slots] not None, it gets what this tile adds to the gradient of the sink, which has no value: its
    dS is its weight times -delta.

    With gate [B, H, Tk], lse2 in stats is reduced by each query's gate less that of the tile's first query, in base 2.
    With dropout, the stats make the weights 1 / (1 - dropout) times as large, and delta smaller by as much.
    """
    start, count, head, seq, number = locate_rows(q_list, ragged, q_slots, q_len, k_len, TILE)
    if q_list is not None and count <= 0:
        return
    first = seq.q_start
    dim: tl.constexpr = TILE.value_dim
    out_tile = load_tile(tile_lane(out, seq.batch, head, first), start, 0, seq.q_len, TILE.block_q, dim, True)
    dout_tile = load_tile(tile_lane(dout, seq.batch, head, first), start, 0, seq.q_len, TILE.block_q, dim, True)
    lse = load_rows(row_lane(lse2, seq.batch, head, first), start, seq.q_len, float("inf"), TILE.block_q, True)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    sums = output_products(out_tile, dout_tile, seq.k_len, RULE)
    if dlse is not None:
        sums -= load_rows(row_lane(dlse, seq.batch, head, first), start, seq.q_len, 0.0, TILE.block_q, True)
    sums = tl.where(lse == float("inf"), 0.0, sums)
    if dsink is not None:
        if q_list is None:
            slot = seq.index * tl.cdiv(q_len, TILE.block_q) + start // TILE.block_q
        else:
            slot = number - head * q_slots
        weights = tl.exp2(tl.load(sink + head).to(tl.float32) * LOG2E - lse)
        tl.store(dsink + head * q_slots + slot, -tl.sum(weights * sums, 0))
    if gate is not None:
        gates = row_lane(gate, seq.batch, head, seq.k_start)
        shift = start + seq.k_len - seq.q_len  # where the first query stands
        position = shift + tl.arange(0, TILE.block_q)
        own = tl.load(gates.ptr + position * gates.stride, (position >= 0) & (position < seq.k_len), 0.0)
        lead = tl.maximum(shift, 0)
        lead_gate = tl.load(gates.ptr + lead * gates.stride, lead < seq.k_len, 0.0)
        lse -= (own - lead_gate).to(tl.float32) * LOG2E
    if delta is not None:
        store_rows(delta, sums, seq.batch, head, first + start, 0, count, TILE.block_q)
    if RULE.dropout:
        lse += tl.log2(1 - dropout)
        sums *= 1 - dropout
    row = tl.arange(0, TILE.block_q)
    stats += tl.cast(number, tl.int64) * (2 * TILE.block_q)
    tl.store(stats + row, lse)
    tl.store(stats + TILE.block_q + row, sums)
    SIZE: tl.constexpr = TILE.block_q * padded(TILE.dim)
    index = tl.arange(0, SIZE)
    tl.store(dq_sum + tl.cast(number, tl.int64) * SIZE + index, index.to(tl.float32) * 0.0)


@triton.jit(do_not_specialize=["q_slots", "q_len", "k_len"])
def finish_kernel(dq_sum, dq, q_list, ragged, q_slots, q_len, k_len, scale, TILE: tl.constexpr):
    """After backward_kernel: dq = scale times the sum for one tile of queries of one head, in the order of dq again."""
    start, count, head, seq, number = locate_rows(q_list, ragged, q_slots, q_len, k_len, TILE)
    if q_list is not None and count <= 0:
        return
    SIZE: tl.constexpr = TILE.block_q * padded(TILE.dim)
    total = tl.load(dq_sum + tl.cast(number, tl.int64) * SIZE + tl.arange(0, SIZE))
    total = total.reshape(TILE.block_q // 16, padded(TILE.dim) // 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5)
    total = total.reshape(TILE.block_q, padded(TILE.dim))
    lane = tile_lane(dq, seq.batch, head, seq.q_start)
    store_tile(lane, total * scale, start, seq.q_len, TILE.block_q, TILE.dim)
