"""Backward kernels that walk the queries: dk, dv and the key half of the gates' gradient; and sums over a query group.

Formulas and shared parts are in backward.py.
"""

import triton
import triton.language as tl

from .. import tiles
from ..score import ahead, behind, drop, dropout_key, shape_scores
from .backward import Gradients, gate_zeros, load_lse, query_lanes, score_gradient


@triton.jit
def gather_dkdv(
    sums, k_tile, v_tile, k_pos, lanes, q_tiles, dout_tiles, dgate, head, span, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P'^T dO over the queries of a span: its interior, or (MASKED) its edges.

    Tiles are [keys, queries]: P'^T and dS^T are born so.
    """
    philox_key = dropout_key(seq.index, head, terms.seed, RULE)
    BLOCK: tl.constexpr = tiles.step_size(TILE.block_q, MASKED and OUTPUTS == "dkdv")
    for step in range(tiles.first_step(span, MASKED), tiles.last_step(span, MASKED), BLOCK):
        start = tiles.position(step, span, MASKED)
        q_pos = (start + seq.k_len - seq.q_len + tl.arange(0, BLOCK))[None, :]
        q_tile = tiles.fetch_tile(lanes.q, q_tiles, start, 0, seq.q_len, BLOCK, TILE.dim, MASKED)
        dout_tile = tiles.fetch_tile(lanes.dout, dout_tiles, start, 0, seq.q_len, BLOCK, TILE.value_dim, MASKED)
        qk = tiles.dot(k_tile, tl.trans(q_tile), None, TILE)
        scores, slope = shape_scores(qk, q_pos, k_pos, head, seq, terms, RULE, MASKED)
        weights = tl.exp2(scores - load_lse(lanes, start, seq, RULE, BLOCK, MASKED)[None, :])
        main, value, gate = sums.main, sums.value, sums.gate
        if OUTPUTS != "dk":
            kept = drop(weights, philox_key, q_pos, k_pos, seq, terms, RULE)
            value = tiles.dot(tiles.narrow(kept, dout_tile), dout_tile, value, TILE)
        if OUTPUTS != "dv":
            dweights = tiles.dot(v_tile, tl.trans(dout_tile), None, TILE)
            delta = tiles.load_rows(lanes.delta, start, seq.q_len, 0.0, BLOCK, MASKED)
            dscores = score_gradient(
                weights, dweights, delta[None, :], q_pos, k_pos, philox_key, seq, terms, RULE, MASKED
            )
            main = tiles.dot(tiles.narrow(dscores * slope, q_tile), q_tile, main, TILE)
            if dgate is not None:
                gate -= tl.sum(dscores.to(gate.dtype), 1)
        sums = Gradients(main, value, gate)
    return sums


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dkdv_kernel(
    q, k, v, dout, lse2, delta, q_tiles, dout_tiles, dk, dv, dgate, q_len, k_len, ragged, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """dK, dV and the key half of dgate for one tile of keys, summed over MEMBERS query heads (dgate: for each of them).

    Less that half is also the gradient of a bias that is broadcast over queries.
    MEMBERS = group: the program walks the whole query group of its key head and writes the final gradient.
    MEMBERS = 1: one program per query head; with grouped queries it writes float32 partials for group_sum_kernel.
    OUTPUTS = "dkdv", or "dk" (with dgate) or "dv": at a large head dim the sums of both do not fit the registers.
    """
    n_tiles = tiles.count_tiles(k_len, ragged.k_starts, TILE.block_k, TILE.heads)
    tile, out_head, index = tiles.locate(n_tiles, TILE.heads)
    tile, index = tiles.find_tile(tile, index, n_tiles, k_len, ragged.k_starts, TILE.block_k)
    seq = tiles.sequence(index, q_len, k_len, ragged)
    k_start = tile * TILE.block_k
    count = seq.k_len - k_start
    if count <= 0:
        return
    at = seq.k_start + k_start
    kv_head = out_head * MEMBERS // TILE.group
    shift = seq.k_len - seq.q_len
    k_pos = (k_start + tl.arange(0, TILE.block_k))[:, None]
    low = tl.minimum(shift - behind(RULE), seq.k_len - 1)  # keys before it are seen by no query
    k = tiles.tile_lane(k, seq.batch, kv_head, seq.k_start)
    v = tiles.tile_lane(v, seq.batch, kv_head, seq.k_start)
    k_tile = tiles.load_tile(k, k_start, low, seq.k_len, TILE.block_k, TILE.dim, True)
    v_tile = tiles.load_tile(v, k_start, low, seq.k_len, TILE.block_k, TILE.value_dim, True)

    # in query indices a key meets [k - shift - ahead, k - shift + behind]
    first = k_start - shift
    last = first + tl.minimum(TILE.block_k, count) - 1
    if RULE.prefix:  # whose keys meet all queries
        first = tl.where(first + shift < seq.prefix, 0, first)
        last = tl.where(last + shift < seq.prefix, 0, last)
    EDGE: tl.constexpr = tiles.step_size(TILE.block_q, OUTPUTS == "dkdv")
    span = tiles.meeting_range(first, last, ahead(RULE), behind(RULE), seq.q_len, TILE.block_q, EDGE)
    sums = Gradients(
        tiles.zeros(TILE.block_k, TILE.dim if OUTPUTS != "dv" else 1),
        tiles.zeros(TILE.block_k, TILE.value_dim if OUTPUTS != "dk" else 1),
        gate_zeros(dgate, TILE.block_k),
    )
    for member in range(MEMBERS):
        head = out_head * MEMBERS + member
        lanes = query_lanes(q, dout, lse2, delta, head, seq)
        args = k_tile, v_tile, k_pos, lanes, q_tiles, dout_tiles, dgate, head, span, seq, terms
        sums = gather_dkdv(sums, *args, RULE, TILE, OUTPUTS, MASKED=False)
        sums = gather_dkdv(sums, *args, RULE, TILE, OUTPUTS, MASKED=True)
        if dgate is not None and OUTPUTS != "dv":
            tiles.store_rows(dgate, sums.gate, seq.batch, head, at, 0, count, TILE.block_k)
            sums = Gradients(sums.main, sums.value, sums.gate * 0.0)
    if OUTPUTS != "dv":
        dk = tiles.tile_lane(dk, seq.batch, out_head, seq.k_start)
        tiles.store_tile(dk, sums.main * terms.scale, k_start, seq.k_len, TILE.block_k, TILE.dim)
    if OUTPUTS != "dk":
        dv = tiles.tile_lane(dv, seq.batch, out_head, seq.k_start)
        tiles.store_tile(dv, sums.value, k_start, seq.k_len, TILE.block_k, TILE.value_dim)


@triton.jit(do_not_specialize=["k_len"])
def group_sum_kernel(partial, total, k_len, TILE: tl.constexpr):
    """total[b, t, g] = sum over the heads of group g of partial[b, t, h], in the order of the heads.

    TILE.heads counts key heads here; TILE.dim is the dim of the summed tensor.
    """
    tile, kv_head, batch = tiles.locate(tl.cdiv(k_len, TILE.block_k), TILE.heads)
    start = tile * TILE.block_k
    acc = tiles.zeros(TILE.block_k, TILE.dim)
    for member in range(TILE.group):
        head = kv_head * TILE.group + member
        lane = tiles.tile_lane(partial, batch, head, 0)
        acc += tiles.load_tile(lane, start, 0, k_len, TILE.block_k, TILE.dim, True)
    tiles.store_tile(tiles.tile_lane(total, batch, kv_head, 0), acc, start, k_len, TILE.block_k, TILE.dim)
