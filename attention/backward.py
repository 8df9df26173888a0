"""Backward kernels: dq and delta, dk/dv, dbias and the sum over a query group. Weights come from the saved LSE.

With P = 2^(score - lse2), delta_i = sum_d dO_id O_id - dlse_i and slope = d score / d (scale q.k):
    dV = P'^T dO                       (P' = P after dropout)
    dP = drop(dO V^T)
    dS = P * (dP - delta)              (gradient of the score: of bias, and of the gates as dS_ij (gate_i - gate_j))
    dQ = scale (dS slope) K,  dK = scale (dS slope)^T Q
sum_d dO_id O_id is also sum_j P_ij dP_ij, but for rounding: see find_delta(), and choice() for queries of a single key.
Each output element is summed by one program in a fixed order: no atomics, so two runs give the same bits.
Source: Dao et al., FlashAttention, algorithm 4, split in two so that dq needs no atomics.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .score import LOG2E, Terms, ahead, behind, choice, drop, dropout_key, shape_scores
from .tiles import (
    Lane,
    Ragged,
    dot,
    fetch_tile,
    first_step,
    last_step,
    load_rows,
    load_tile,
    locate,
    locate_query_tile,
    meeting_range,
    narrow,
    pair_pointers,
    position,
    row_lane,
    sequence,
    step_size,
    store_rows,
    store_tile,
    tile_lane,
    zeros,
)


class Queries(NamedTuple):
    """A tile of queries of one head with what the backward knows of them."""

    tile: tl.tensor  # [queries, dim]
    dout: tl.tensor  # [queries, value_dim]
    lse2: tl.tensor  # [queries]
    delta: tl.tensor  # [queries]
    pos: tl.tensor  # [queries], counted in keys
    head: tl.tensor
    key: tl.tensor  # of dropout


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


class Mean(NamedTuple):
    """Of dP in a row, with weights P."""

    total: tl.tensor  # [queries] sum of P dP
    weight: tl.tensor  # [queries] sum of P


@triton.jit
def query_lanes(q, dout, lse2, delta, head, seq):
    """Those of one head."""
    return QueryLanes(
        tile_lane(q, seq.row, head, seq.q_start),
        tile_lane(dout, seq.row, head, seq.q_start),
        row_lane(lse2, seq.row, head, seq.q_start),
        row_lane(delta, seq.row, head, seq.q_start),
    )


@triton.jit
def load_lse(lanes, start, seq, terms, BLOCK: tl.constexpr, BOUNDED: tl.constexpr):
    """lse2 of queries [start, start + BLOCK). BOUNDED=False promises that all exist and see a key.

    +inf where there is none, so that 2^(score - lse2) is 0 for rows that see no key or do not exist.
    """
    lse2 = load_rows(lanes.lse2, start, seq.q_len, float("inf"), BLOCK, BOUNDED)
    if BOUNDED or terms.bias is not None:
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    return lse2


@triton.jit
def load_queries(lanes, head, start, seq, terms, RULE: tl.constexpr, TILE: tl.constexpr, DELTA: tl.constexpr):
    """Queries [start, start + block_q) of a sequence; DELTA=False: before their delta is there to be loaded."""
    tile = load_tile(lanes.q, start, 0, seq.q_len, TILE.block_q, TILE.dim, True)  # after dO, sm_100 would spill
    dout_tile = load_tile(lanes.dout, start, 0, seq.q_len, TILE.block_q, TILE.value_dim, True)
    lse2 = load_lse(lanes, start, seq, terms, TILE.block_q, True)
    if DELTA:
        delta = load_rows(lanes.delta, start, seq.q_len, 0.0, TILE.block_q, True)
    else:
        delta = tl.full([TILE.block_q], 0.0, tl.float32)
    return Queries(
        tile,
        dout_tile,
        lse2,
        delta,
        start + seq.k_len - seq.q_len + tl.arange(0, TILE.block_q),
        head,
        dropout_key(seq, head, terms, RULE),
    )


@triton.jit
def score_gradient(weights, dweights, delta, q_pos, k_pos, key, seq, terms, RULE: tl.constexpr, MASKED: tl.constexpr):
    """dS; dweights is dO.v, the gradient of the weights after dropout."""
    dscores = weights * (drop(dweights, key, q_pos, k_pos, RULE) * choice(seq.k_len, RULE) - delta)
    if MASKED or terms.bias is not None:  # an invisible key may hold NaN, and so may delta of a row that sees no key
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
def meet_keys(
    queries, k, v, k_tiles, v_tiles, start, low, high, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The key tile at `start`, P and dS [queries, keys], slope; low and high bound the keys that queries can see."""
    k_pos = start + tl.arange(0, TILE.block_k)
    k_tile = fetch_tile(k, k_tiles, start, low, high, TILE.block_k, TILE.dim, MASKED)
    v_tile = fetch_tile(v, v_tiles, start, low, high, TILE.block_k, TILE.value_dim, MASKED)
    q_pos, k_pos = queries.pos[:, None], k_pos[None, :]
    qk = dot(queries.tile, tl.trans(k_tile), None, TILE)
    scores, slope = shape_scores(qk, q_pos, k_pos, queries.head, seq, terms, RULE, MASKED)
    weights = tl.exp2(scores - queries.lse2[:, None])
    dweights = dot(queries.dout, tl.trans(v_tile), None, TILE)
    dscores = score_gradient(
        weights, dweights, queries.delta[:, None], q_pos, k_pos, queries.key, seq, terms, RULE, MASKED
    )
    return k_tile, weights, dscores, slope


@triton.jit
def gather_mean(
    mean, queries, k, v, k_tiles, v_tiles, low, span, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add P dP and P over the keys of a span: its interior, or (MASKED) its edges."""
    for step in range(first_step(span, MASKED), last_step(span, MASKED), TILE.block_k):
        start = position(step, span, MASKED)
        _k_tile, weights, weighted, _slope = meet_keys(  # with a delta of 0 dS is P dP
            queries, k, v, k_tiles, v_tiles, start, low, span.hi, seq, terms, RULE, TILE, MASKED
        )
        mean = Mean(mean.total + tl.sum(weighted, 1), mean.weight + tl.sum(weights, 1))
    return mean


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
        mean = Mean(tl.full([TILE.block_q], 0.0, tl.float32), tl.full([TILE.block_q], 0.0, tl.float32))
        mean = gather_mean(mean, queries, k, v, k_tiles, v_tiles, low, span, seq, terms, RULE, TILE, MASKED=False)
        mean = gather_mean(mean, queries, k, v, k_tiles, v_tiles, low, span, seq, terms, RULE, TILE, MASKED=True)
        weight = mean.weight
        if RULE.sink:
            weight += tl.exp2(tl.load(sink + queries.head).to(tl.float32) * LOG2E - queries.lse2)
        delta = mean.total / tl.where(weight > 0, weight, 1.0)
    else:
        out = tile_lane(out, seq.row, queries.head, seq.q_start)
        out_tile = load_tile(out, start, 0, seq.q_len, TILE.block_q, TILE.value_dim, True)
        delta = tl.sum(out_tile.to(tl.float32) * queries.dout.to(tl.float32), 1) * choice(seq.k_len, RULE)
    if dlse is not None:
        dlse = row_lane(dlse, seq.row, queries.head, seq.q_start)
        delta -= load_rows(dlse, start, seq.q_len, 0.0, TILE.block_q, True)
    return delta


@triton.jit
def gather_dq(
    sums, queries, k, v, k_tiles, v_tiles, low, span, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS K over the keys of a span: its interior, or (MASKED) its edges."""
    for step in range(first_step(span, MASKED), last_step(span, MASKED), TILE.block_k):
        start = position(step, span, MASKED)
        k_tile, _weights, dscores, slope = meet_keys(
            queries, k, v, k_tiles, v_tiles, start, low, span.hi, seq, terms, RULE, TILE, MASKED
        )
        if terms.bias is not None:  # and 0 * NaN is NaN
            k_tile = tl.where(tl.max(tl.abs(dscores), 0)[:, None] > 0, k_tile, 0.0).to(k_tile.dtype)
        gate = sums.gate
        if terms.gate is not None:
            gate += tl.sum(dscores.to(gate.dtype), 1)
        sums = Gradients(dot(narrow(dscores * slope, k_tile), k_tile, sums.main, TILE), sums.value, gate)
    return sums


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dq_kernel(
    q, k, v, dout, lse2, delta, k_tiles, v_tiles, out, dlse, sink, dq, dgate,
    q_len, k_len, ragged, scale, seed, bias, gate, RULE: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """dQ = scale dS K and the query half of dgate [B, H, Tk], for one tile of queries; walks the keys.

    OUTPUTS = "both" writes delta too, which it finds from `out`; "delta" writes that alone, found by a walk over the
    keys, and "dq" reads it. In one kernel these two walks would spill at head dim 256.
    """
    tile, head, index = locate_query_tile(tl.cdiv(q_len, TILE.block_q), k_len, RULE, TILE)
    seq = sequence(index, q_len, k_len, ragged)
    terms = Terms(scale, seed, bias, gate)
    q_start = tile * TILE.block_q
    count = seq.q_len - q_start
    if count <= 0:
        return
    first = q_start + seq.k_len - seq.q_len
    last = first + tl.minimum(TILE.block_q, count) - 1
    span = meeting_range(first, last, behind(RULE), ahead(RULE), seq.k_len, TILE.block_k, TILE.block_k)
    low = first - behind(RULE)
    lanes = query_lanes(q, dout, lse2, delta, head, seq)
    queries = load_queries(lanes, head, q_start, seq, terms, RULE, TILE, DELTA=OUTPUTS == "dq")
    k = tile_lane(k, seq.row, head // TILE.group, seq.k_start)
    v = tile_lane(v, seq.row, head // TILE.group, seq.k_start)
    if OUTPUTS != "dq":
        rows = find_delta(
            queries, None if OUTPUTS == "delta" else out, dlse, sink, k, v, k_tiles, v_tiles, q_start, low, span, seq,
            terms, RULE, TILE,
        )  # fmt: skip
        store_rows(delta, rows, seq.row, head, seq.q_start + q_start, 0, count, TILE.block_q)
    if OUTPUTS == "delta":
        return
    if OUTPUTS == "both":
        queries = Queries(queries.tile, queries.dout, queries.lse2, rows, queries.pos, queries.head, queries.key)
    sums = Gradients(zeros(TILE.block_q, TILE.dim), 0.0, gate_zeros(dgate, TILE.block_q))
    sums = gather_dq(sums, queries, k, v, k_tiles, v_tiles, low, span, seq, terms, RULE, TILE, MASKED=False)
    sums = gather_dq(sums, queries, k, v, k_tiles, v_tiles, low, span, seq, terms, RULE, TILE, MASKED=True)
    dq = tile_lane(dq, seq.row, head, seq.q_start)
    store_tile(dq, sums.main * terms.scale, q_start, seq.q_len, TILE.block_q, TILE.dim)
    if dgate is not None:
        # at the keys where the queries stand; one before the first key has seen none
        store_rows(dgate, sums.gate, seq.row, head, seq.k_start + first, -first, count, TILE.block_q)


@triton.jit
def gather_dkdv(
    sums, k_tile, v_tile, k_pos, lanes, q_tiles, dout_tiles, head, span, seq, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P'^T dO over the queries of a span: its interior, or (MASKED) its edges.

    Tiles are [keys, queries]: P'^T and dS^T are born so.
    """
    key = dropout_key(seq, head, terms, RULE)
    BLOCK: tl.constexpr = step_size(TILE.block_q, MASKED and OUTPUTS == "dkdv")
    for step in range(first_step(span, MASKED), last_step(span, MASKED), BLOCK):
        start = position(step, span, MASKED)
        q_pos = (start + seq.k_len - seq.q_len + tl.arange(0, BLOCK))[None, :]
        q_tile = fetch_tile(lanes.q, q_tiles, start, 0, seq.q_len, BLOCK, TILE.dim, MASKED)
        dout_tile = fetch_tile(lanes.dout, dout_tiles, start, 0, seq.q_len, BLOCK, TILE.value_dim, MASKED)
        qk = dot(k_tile, tl.trans(q_tile), None, TILE)
        scores, slope = shape_scores(qk, q_pos, k_pos, head, seq, terms, RULE, MASKED)
        weights = tl.exp2(scores - load_lse(lanes, start, seq, terms, BLOCK, MASKED)[None, :])
        main, value, gate = sums.main, sums.value, sums.gate
        if OUTPUTS != "dk":
            kept = drop(weights, key, q_pos, k_pos, RULE)
            value = dot(narrow(kept, dout_tile), dout_tile, value, TILE)
        if OUTPUTS != "dv":
            dweights = dot(v_tile, tl.trans(dout_tile), None, TILE)
            delta = load_rows(lanes.delta, start, seq.q_len, 0.0, BLOCK, MASKED)
            dscores = score_gradient(weights, dweights, delta[None, :], q_pos, k_pos, key, seq, terms, RULE, MASKED)
            main = dot(narrow(dscores * slope, q_tile), q_tile, main, TILE)
            if terms.gate is not None:
                gate -= tl.sum(dscores.to(gate.dtype), 1)
        sums = Gradients(main, value, gate)
    return sums


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dkdv_kernel(
    q, k, v, dout, lse2, delta, q_tiles, dout_tiles, dk, dv, dgate, q_len, k_len, ragged, scale, seed, bias, gate,
    RULE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """dK, dV and the key half of dgate for one tile of keys, summed over SPAN query heads (dgate: for each of them).

    SPAN = group: the program walks the whole query group of its key head and writes the final gradient.
    SPAN = 1: one program per query head; with grouped queries it writes float32 partials for group_sum_kernel.
    OUTPUTS = "dkdv", or "dk" (with dgate) or "dv": at a large head dim the sums of both do not fit the registers.
    """
    tile, slot, index = locate(tl.cdiv(k_len, TILE.block_k), TILE.heads)
    seq = sequence(index, q_len, k_len, ragged)
    terms = Terms(scale, seed, bias, gate)
    k_start = tile * TILE.block_k
    count = seq.k_len - k_start
    if count <= 0:
        return
    at = seq.k_start + k_start
    kv_head = slot * SPAN // TILE.group
    shift = seq.k_len - seq.q_len
    k_pos = (k_start + tl.arange(0, TILE.block_k))[:, None]
    low = tl.minimum(shift - behind(RULE), seq.k_len - 1)  # keys before it are seen by no query
    k = tile_lane(k, seq.row, kv_head, seq.k_start)
    v = tile_lane(v, seq.row, kv_head, seq.k_start)
    k_tile = load_tile(k, k_start, low, seq.k_len, TILE.block_k, TILE.dim, True)
    v_tile = load_tile(v, k_start, low, seq.k_len, TILE.block_k, TILE.value_dim, True)

    # in query indices a key meets [k - shift - ahead, k - shift + behind]
    first = k_start - shift
    last = first + tl.minimum(TILE.block_k, count) - 1
    EDGE: tl.constexpr = step_size(TILE.block_q, OUTPUTS == "dkdv")
    span = meeting_range(first, last, ahead(RULE), behind(RULE), seq.q_len, TILE.block_q, EDGE)
    sums = Gradients(
        zeros(TILE.block_k, TILE.dim if OUTPUTS != "dv" else 1),
        zeros(TILE.block_k, TILE.value_dim if OUTPUTS != "dk" else 1),
        gate_zeros(dgate, TILE.block_k),
    )
    for member in range(SPAN):
        head = slot * SPAN + member
        lanes = query_lanes(q, dout, lse2, delta, head, seq)
        sums = gather_dkdv(
            sums, k_tile, v_tile, k_pos, lanes, q_tiles, dout_tiles, head, span, seq, terms, RULE, TILE, OUTPUTS,
            MASKED=False,
        )  # fmt: skip
        sums = gather_dkdv(
            sums, k_tile, v_tile, k_pos, lanes, q_tiles, dout_tiles, head, span, seq, terms, RULE, TILE, OUTPUTS,
            MASKED=True,
        )  # fmt: skip
        if dgate is not None and OUTPUTS != "dv":
            store_rows(dgate, sums.gate, seq.row, head, at, 0, count, TILE.block_k)
            sums = Gradients(sums.main, sums.value, sums.gate * 0.0)
    if OUTPUTS != "dv":
        dk = tile_lane(dk, seq.row, slot, seq.k_start)
        store_tile(dk, sums.main * terms.scale, k_start, seq.k_len, TILE.block_k, TILE.dim)
    if OUTPUTS != "dk":
        dv = tile_lane(dv, seq.row, slot, seq.k_start)
        store_tile(dv, sums.value, k_start, seq.k_len, TILE.block_k, TILE.value_dim)


@triton.jit(do_not_specialize=["k_len"])
def group_sum_kernel(partial, total, k_len, TILE: tl.constexpr):
    """total[b, t, g] = sum over the heads of group g of partial[b, t, h], in the order of the heads.

    TILE.heads counts key heads here; TILE.dim is the dim of the summed tensor.
    """
    tile, kv_head, row = locate(tl.cdiv(k_len, TILE.block_k), TILE.heads)
    start = tile * TILE.block_k
    acc = zeros(TILE.block_k, TILE.dim)
    for member in range(TILE.group):
        head = kv_head * TILE.group + member
        lane = tile_lane(partial, row, head, 0)
        acc += load_tile(lane, start, 0, k_len, TILE.block_k, TILE.dim, True)
    store_tile(tile_lane(total, row, kv_head, 0), acc, start, k_len, TILE.block_k, TILE.dim)


class Spread(NamedTuple):
    """Over what one element of a bias was broadcast: a constexpr argument of dbias_kernel."""

    batches: int  # 1, or all rows of the batch
    heads: int  # 1, or all heads
    queries: bool
    keys: bool


@triton.jit(do_not_specialize=["q_len", "k_len"])
def dbias_kernel(
    q, k, v, dout, lse2, delta, dbias, q_len, k_len, ragged, scale, seed, bias, gate,
    RULE: tl.constexpr, TILE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """dS of one [queries, keys] tile of the bias, summed over all that it was broadcast over.

    The scores are computed once more: cheaper than keeping dS, which would take O(B H Tq Tk) memory. TILE.heads counts
    heads of the bias; a sequence or row of the batch is a program of its own unless SPREAD says otherwise.
    """
    terms = Terms(scale, seed, bias, gate)
    q_tiles = 1 if SPREAD.queries else tl.cdiv(q_len, TILE.block_q)
    k_tiles = 1 if SPREAD.keys else tl.cdiv(k_len, TILE.block_k)
    tile, bias_head, bias_row = locate(q_tiles * k_tiles, TILE.heads)
    q_lo = tile // k_tiles * TILE.block_q
    k_lo = tile % k_tiles * TILE.block_k
    acc = tl.full([TILE.block_q, TILE.block_k], 0.0, tl.float32)
    for batch in range(SPREAD.batches):
        seq = sequence(bias_row + batch, q_len, k_len, ragged)
        q_hi = seq.q_len if SPREAD.queries else tl.minimum(q_lo + TILE.block_q, seq.q_len)
        k_hi = seq.k_len if SPREAD.keys else tl.minimum(k_lo + TILE.block_k, seq.k_len)
        for member in range(SPREAD.heads):
            head = bias_head + member
            lanes = query_lanes(q, dout, lse2, delta, head, seq)
            k_lane = tile_lane(k, seq.row, head // TILE.group, seq.k_start)
            v_lane = tile_lane(v, seq.row, head // TILE.group, seq.k_start)
            for q_start in range(q_lo, q_hi, TILE.block_q):
                queries = load_queries(lanes, head, q_start, seq, terms, RULE, TILE, DELTA=True)
                first = q_start + seq.k_len - seq.q_len
                last = first + TILE.block_q - 1
                span = meeting_range(first, last, behind(RULE), ahead(RULE), seq.k_len, TILE.block_k, TILE.block_k)
                low = first - behind(RULE)
                for start in range(tl.maximum(span.lo, k_lo), tl.minimum(span.hi, k_hi), TILE.block_k):
                    _k_tile, _weights, dscores, _slope = meet_keys(
                        queries, k_lane, v_lane, None, None, start, low, span.hi, seq, terms, RULE, TILE, MASKED=True
                    )
                    acc += dscores

    # a row's length bounds what was summed, not the bias, which other rows may share
    seq = sequence(bias_row, q_len, k_len, Ragged(None, ragged.q_starts, ragged.k_starts))
    q_offset = q_lo + tl.arange(0, TILE.block_q)[:, None]
    k_offset = k_lo + tl.arange(0, TILE.block_k)[None, :]
    if SPREAD.queries:
        acc = tl.sum(acc, 0, keep_dims=True)
        q_offset = tl.full([1, 1], 0, tl.int32)
    if SPREAD.keys:
        acc = tl.sum(acc, 1, keep_dims=True)
        k_offset = tl.full([1, 1], 0, tl.int32)
    pointers = pair_pointers(dbias, bias_row, bias_head, seq.q_start + q_offset, seq.k_start + k_offset)
    tl.store(pointers, acc, (q_offset < seq.q_len) & (k_offset < seq.k_len))
