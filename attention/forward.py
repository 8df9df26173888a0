"""Forward kernel: attention with the online softmax, in base 2, saving the log-sum-exp for the backward."""

from typing import NamedTuple

import triton
import triton.language as tl

from .score import ahead, behind, drop, dropout_key, shape_scores
from .tiles import dot, load_tile, locate, meeting_range, narrow, sequence, store_rows, store_tile, zeros


class Softmax(NamedTuple):
    """Online softmax of a tile of queries: what has been absorbed so far of their keys."""

    acc: tl.tensor  # [queries, value_dim] sum of exp2(score - top) * v
    top: tl.tensor  # [queries] largest score
    total: tl.tensor  # [queries] sum of exp2(score - top)


@triton.jit
def attend(
    state,
    q_tile,
    k,
    v,
    head,
    q_pos,
    seq,
    key,
    scale,
    lo,
    hi,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Absorb the keys in [lo, hi). Addresses are made anew in each step: carried pointers would spill registers."""
    for start in range(lo, hi, TILE.block_k):
        k_pos = start + tl.arange(0, TILE.block_k)
        k_tile = load_tile(k, seq.row, head, seq.k_start + start, seq.k_len - start, TILE.block_k, TILE.dim, MASKED)
        qk = dot(q_tile, tl.trans(k_tile), None, TILE)
        scores, _ = shape_scores(qk, q_pos[:, None], k_pos[None, :], seq.k_len, scale, RULE, MASKED)

        top = tl.maximum(state.top, tl.max(scores, 1))
        if MASKED:  # a row that has seen no key yet: any finite pivot keeps inf - inf away
            pivot = tl.where(top == float("-inf"), 0.0, top)
        else:
            pivot = top
        weights = tl.exp2(scores - pivot[:, None])
        fade = tl.exp2(state.top - pivot)
        total = state.total * fade + tl.sum(weights, 1)
        if RULE.dropout > 0:  # after the sum: dropout acts on normalised weights
            weights = drop(weights, key, q_pos[:, None], k_pos[None, :], RULE)
        v_tile = load_tile(
            v, seq.row, head, seq.k_start + start, seq.k_len - start, TILE.block_k, TILE.value_dim, MASKED
        )
        acc = dot(narrow(weights, v_tile), v_tile, state.acc * fade[:, None], TILE)
        state = Softmax(acc, top, total)
    return state


@triton.jit(do_not_specialize=["q_len", "k_len"])
def forward_kernel(q, k, v, out, lse2, seed, q_len, k_len, scale, RULE: tl.constexpr, TILE: tl.constexpr):
    """out = softmax(rule(q k^T)) v and lse2 = log2 sum 2^score, for one tile of queries of one head.

    On chip: the query tile, one key and one value tile (double-buffered), and the Softmax state in registers.
    Source: Dao, FlashAttention-2, algorithm 1; scores in base 2.
    """
    tile, head, index = locate(tl.cdiv(q_len, TILE.block_q), TILE.heads, RULE.causal)
    seq = sequence(index, q_len, k_len)
    q_start = tile * TILE.block_q
    shift = seq.k_len - seq.q_len  # query i stands at key i + shift
    q_pos = q_start + shift + tl.arange(0, TILE.block_q)
    q_tile = load_tile(q, seq.row, head, seq.q_start + q_start, seq.q_len - q_start, TILE.block_q, TILE.dim, True)
    key = 0
    if RULE.dropout > 0:
        key = dropout_key(seed, index, head)

    state = Softmax(
        zeros(TILE.block_q, TILE.value_dim),
        tl.full([TILE.block_q], float("-inf"), tl.float32),
        tl.full([TILE.block_q], 0.0, tl.float32),
    )
    first = q_start + shift
    last = tl.minimum(q_start + TILE.block_q, seq.q_len) - 1 + shift
    lo, full_lo, full_hi, hi = meeting_range(first, last, behind(RULE), ahead(RULE), seq.k_len, TILE.block_k)
    kv_head = head // TILE.group
    if RULE.window > 0:
        state = attend(
            state,
            q_tile,
            k,
            v,
            kv_head,
            q_pos,
            seq,
            key,
            scale,
            lo,
            tl.minimum(full_lo, hi),
            RULE,
            TILE,
            MASKED=True,
        )
    state = attend(state, q_tile, k, v, kv_head, q_pos, seq, key, scale, full_lo, full_hi, RULE, TILE, MASKED=False)
    state = attend(state, q_tile, k, v, kv_head, q_pos, seq, key, scale, full_hi, hi, RULE, TILE, MASKED=True)

    total = tl.where(state.total == 0, 1.0, state.total)  # a row that sees no key outputs zero, not NaN
    count = seq.q_len - q_start
    store_tile(
        out,
        state.acc / total[:, None],
        seq.row,
        head,
        seq.q_start + q_start,
        count,
        TILE.block_q,
        TILE.value_dim,
    )
    store_rows(lse2, state.top + tl.log2(total), seq.row, head, seq.q_start + q_start, count, TILE.block_q)
