"""Backward kernels: delta, dq, dk/dv and the sum over a query group. Weights are recomputed from the saved LSE.

With P = 2^(score - lse2), delta_i = sum_d dO_id O_id - dlse_i and slope = d score / d (scale q.k):
    dV = P'^T dO                       (P' = P after dropout)
    dP = drop(dO V^T)
    dS = P * (dP - delta) * slope
    dQ = scale dS K,  dK = scale dS^T Q
Each output element is summed by one program in a fixed order: no atomics, so two runs give the same bits.
Source: Dao et al., FlashAttention, algorithm 4, split in two so that dq needs no atomics.
"""

import triton
import triton.language as tl

from .score import ahead, behind, drop, dropout_key, shape_scores
from .tiles import (
    dot,
    load_rows,
    load_tile,
    locate,
    meeting_range,
    narrow,
    sequence,
    store_rows,
    store_tile,
    zeros,
)


@triton.jit(do_not_specialize=["q_len", "k_len"])
def delta_kernel(out, dout, dlse, delta, q_len, k_len, TILE: tl.constexpr):
    """delta_i = sum_d dO_id O_id - dlse_i for one tile of queries of one head; dlse may be None."""
    tile, head, index = locate(tl.cdiv(q_len, TILE.block_q), TILE.heads, False)
    seq = sequence(index, q_len, k_len)
    q_start = tile * TILE.block_q
    at = seq.q_start + q_start
    count = seq.q_len - q_start
    out_tile = load_tile(out, seq.row, head, at, count, TILE.block_q, TILE.value_dim, True)
    dout_tile = load_tile(dout, seq.row, head, at, count, TILE.block_q, TILE.value_dim, True)
    rows = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if dlse is not None:
        rows -= load_rows(dlse, seq.row, head, at, count, 0.0, TILE.block_q)
    store_rows(delta, rows, seq.row, head, at, count, TILE.block_q)


@triton.jit
def load_lse2(lse2, row, head, start, count, BLOCK: tl.constexpr):
    """lse2 with +inf where there is none, so that 2^(score - lse2) is 0 for rows that see no key or do not exist."""
    rows = load_rows(lse2, row, head, start, count, float("inf"), BLOCK)
    return tl.where(rows == float("-inf"), float("inf"), rows)


@triton.jit
def weight_gradients(
    qk, dweights, lse2, delta, q_pos, k_pos, k_len, key, scale, RULE: tl.constexpr, MASKED: tl.constexpr
):
    """Weights after dropout, and dS, in the orientation of qk; dweights is dO.v, the gradient after dropout."""
    scores, slope = shape_scores(qk, q_pos, k_pos, k_len, scale, RULE, MASKED)
    weights = tl.exp2(scores - lse2)
    dropped = weights
    if RULE.dropout > 0:
        dropped = drop(weights, key, q_pos, k_pos, RULE)
        dweights = drop(dweights, key, q_pos, k_pos, RULE)
    return dropped, weights * (dweights - delta) * slope


@triton.jit
def gather_dq(
    dq, q_tile, dout_tile, lse2, delta, k, v, head, q_pos, seq, key, scale, lo, hi,
    RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS K over the keys in [lo, hi)."""
    for start in range(lo, hi, TILE.block_k):
        k_pos = start + tl.arange(0, TILE.block_k)
        at = seq.k_start + start
        count = seq.k_len - start
        k_tile = load_tile(k, seq.row, head, at, count, TILE.block_k, TILE.dim, MASKED)
        v_tile = load_tile(v, seq.row, head, at, count, TILE.block_k, TILE.value_dim, MASKED)
        qk = dot(q_tile, tl.trans(k_tile), None, TILE)
        dweights = dot(dout_tile, tl.trans(v_tile), None, TILE)
        _, dscores = weight_gradients(
            qk,
            dweights,
            lse2[:, None],
            delta[:, None],
            q_pos[:, None],
            k_pos[None, :],
            seq.k_len,
            key,
            scale,
            RULE,
            MASKED,
        )
        dq = dot(narrow(dscores, k_tile), k_tile, dq, TILE)
    return dq


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dq_kernel(q, k, v, dout, lse2, delta, dq, seed, q_len, k_len, scale, RULE: tl.constexpr, TILE: tl.constexpr):
    """dQ = scale dS K for one tile of queries of one head; a walk over the keys, as in the forward."""
    tile, head, index = locate(tl.cdiv(q_len, TILE.block_q), TILE.heads, RULE.causal)
    seq = sequence(index, q_len, k_len)
    q_start = tile * TILE.block_q
    at = seq.q_start + q_start
    count = seq.q_len - q_start
    shift = seq.k_len - seq.q_len
    q_pos = q_start + shift + tl.arange(0, TILE.block_q)
    q_tile = load_tile(q, seq.row, head, at, count, TILE.block_q, TILE.dim, True)
    dout_tile = load_tile(dout, seq.row, head, at, count, TILE.block_q, TILE.value_dim, True)
    lse2_rows = load_lse2(lse2, seq.row, head, at, count, TILE.block_q)
    delta_rows = load_rows(delta, seq.row, head, at, count, 0.0, TILE.block_q)
    key = 0
    if RULE.dropout > 0:
        key = dropout_key(seed, index, head)

    first = q_start + shift
    last = tl.minimum(q_start + TILE.block_q, seq.q_len) - 1 + shift
    lo, full_lo, full_hi, hi = meeting_range(first, last, behind(RULE), ahead(RULE), seq.k_len, TILE.block_k)
    kv_head = head // TILE.group
    acc = zeros(TILE.block_q, TILE.dim)
    if RULE.window > 0:
        acc = gather_dq(
            acc, q_tile, dout_tile, lse2_rows, delta_rows, k, v, kv_head, q_pos, seq, key, scale, lo,
            tl.minimum(full_lo, hi), RULE, TILE, MASKED=True,
        )  # fmt: skip
    acc = gather_dq(
        acc, q_tile, dout_tile, lse2_rows, delta_rows, k, v, kv_head, q_pos, seq, key, scale, full_lo, full_hi,
        RULE, TILE, MASKED=False,
    )  # fmt: skip
    acc = gather_dq(
        acc, q_tile, dout_tile, lse2_rows, delta_rows, k, v, kv_head, q_pos, seq, key, scale, full_hi, hi,
        RULE, TILE, MASKED=True,
    )  # fmt: skip
    store_tile(dq, acc * scale, seq.row, head, at, count, TILE.block_q, TILE.dim)


@triton.jit
def gather_dkdv(
    dk, dv, k_tile, v_tile, q, dout, lse2, delta, head, k_pos, seq, key, scale, lo, hi,
    RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P'^T dO over the queries in [lo, hi). Tiles are [keys, queries]: P'^T and dS^T are born so."""
    for start in range(lo, hi, TILE.block_q):
        at = seq.q_start + start
        count = seq.q_len - start
        q_pos = start + seq.k_len - seq.q_len + tl.arange(0, TILE.block_q)
        q_tile = load_tile(q, seq.row, head, at, count, TILE.block_q, TILE.dim, True)
        dout_tile = load_tile(dout, seq.row, head, at, count, TILE.block_q, TILE.value_dim, True)
        lse2_rows = load_lse2(lse2, seq.row, head, at, count, TILE.block_q)
        delta_rows = load_rows(delta, seq.row, head, at, count, 0.0, TILE.block_q)
        qk = dot(k_tile, tl.trans(q_tile), None, TILE)
        dweights = dot(v_tile, tl.trans(dout_tile), None, TILE)
        weights, dscores = weight_gradients(
            qk, dweights, lse2_rows[None, :], delta_rows[None, :], q_pos[None, :], k_pos[:, None], seq.k_len, key,
            scale, RULE, MASKED,
        )  # fmt: skip
        dv = dot(narrow(weights, dout_tile), dout_tile, dv, TILE)
        dk = dot(narrow(dscores, q_tile), q_tile, dk, TILE)
    return dk, dv


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dkdv_kernel(
    q, k, v, dout, lse2, delta, dk, dv, seed, q_len, k_len, scale,
    RULE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over SPAN query heads.

    SPAN = group: the program walks the whole query group of its key head and writes the final gradient.
    SPAN = 1: one program per query head; with grouped queries it writes float32 partials for group_sum_kernel.
    """
    tile, slot, index = locate(tl.cdiv(k_len, TILE.block_k), TILE.heads, False)
    seq = sequence(index, q_len, k_len)
    k_start = tile * TILE.block_k
    at = seq.k_start + k_start
    count = seq.k_len - k_start
    kv_head = slot * SPAN // TILE.group
    shift = seq.k_len - seq.q_len
    k_pos = k_start + tl.arange(0, TILE.block_k)
    k_tile = load_tile(k, seq.row, kv_head, at, count, TILE.block_k, TILE.dim, True)
    v_tile = load_tile(v, seq.row, kv_head, at, count, TILE.block_k, TILE.value_dim, True)

    # In query indices a key meets [k - shift - ahead, k - shift + behind]. Rows past q_len load as lse2 = +inf and add
    # nothing, so the last tile counts as whole.
    first = k_start - shift
    last = tl.minimum(k_start + TILE.block_k, seq.k_len) - 1 - shift
    whole = tl.cdiv(seq.q_len, TILE.block_q) * TILE.block_q
    lo, full_lo, full_hi, hi = meeting_range(first, last, ahead(RULE), behind(RULE), whole, TILE.block_q)
    dk_acc = zeros(TILE.block_k, TILE.dim)
    dv_acc = zeros(TILE.block_k, TILE.value_dim)
    for member in range(SPAN):
        head = slot * SPAN + member
        key = 0
        if RULE.dropout > 0:
            key = dropout_key(seed, index, head)
        if RULE.causal or RULE.window > 0:
            dk_acc, dv_acc = gather_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, head, k_pos, seq, key, scale, lo,
                tl.minimum(full_lo, hi), RULE, TILE, MASKED=True,
            )  # fmt: skip
        dk_acc, dv_acc = gather_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, head, k_pos, seq, key, scale, full_lo, full_hi,
            RULE, TILE, MASKED=False,
        )  # fmt: skip
        if RULE.window > 0:
            dk_acc, dv_acc = gather_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse2, delta, head, k_pos, seq, key, scale, full_hi, hi,
                RULE, TILE, MASKED=True,
            )  # fmt: skip
    store_tile(dk, dk_acc * scale, seq.row, slot, at, count, TILE.block_k, TILE.dim)
    store_tile(dv, dv_acc, seq.row, slot, at, count, TILE.block_k, TILE.value_dim)


@triton.jit(do_not_specialize=["k_len"])
def group_sum_kernel(partial, total, k_len, TILE: tl.constexpr):
    """total[b, t, g] = sum over the heads of group g of partial[b, t, h], in the order of the heads.

    TILE.heads counts key heads here; TILE.dim is the dim of the summed tensor.
    """
    tile, kv_head, row = locate(tl.cdiv(k_len, TILE.block_k), TILE.heads, False)
    start = tile * TILE.block_k
    acc = zeros(TILE.block_k, TILE.dim)
    for member in range(TILE.group):
        head = kv_head * TILE.group + member
        acc += load_tile(partial, row, head, start, k_len - start, TILE.block_k, TILE.dim, True)
    store_tile(total, acc, row, kv_head, start, k_len - start, TILE.block_k, TILE.dim)
