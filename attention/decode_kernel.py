"""The kernels of decode(): each program absorbs a share of the keys, and a second kernel merges the shares."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from . import tiles
from .gpu import can_overlap, processors, shared_memory
from .launcher import wait_for_inputs
from .portable.forward import Softmax, no_keys
from .score import LOG2E, Rule, behind, end_softmax, shape_scores, slot, terms_of
from .table import float32_precision

# Not tuned; they compile without register spills for all chips of tests/test_compile.py.
BLOCK_K = 64  # most keys per step
TILE_BYTES = 2**14  # of a tile of keys; a half or a quarter for a single query, which keeps all of it in registers
THREE_STAGES = 160 * 2**10  # bytes of shared memory that three stages of these tiles need; else there are two
MOST_ROWS = 64  # most queries of a key head in one program; half as many if the head dim is above 128
# Whether the queries of a group share a program -> (programs per multiprocessor to split the keys into, most shares);
# tuned on an H200 (benchmarks/LOG.md).
SPLITS_PER_SM = {False: (4, 256), True: (2, 128)}
MERGED = tl.constexpr(32)  # most shares that the merge kernel loads at once


class QueryRows(NamedTuple):
    """Queries of one key head in a program: new tokens x heads of its group, padded to a power of two."""

    token: tl.tensor  # [rows]
    head: tl.tensor  # [rows]
    exist: tl.tensor  # [rows]
    pos: tl.tensor  # [rows], counted in keys


@triton.jit
def row_pointers(x, batch, rows, DIM: tl.constexpr):
    """Pointers to x[batch, tokens, heads] of a [B, T, H, D] View: [rows, D padded]."""
    steps = tl.cast(batch, tl.int64) * x.batch + tl.cast(rows.head, tl.int64) * x.head
    start = steps * tiles.STRIDE_UNIT + tl.cast(rows.token, tl.int64) * x.seq
    return x.ptr + start[:, None] + tl.arange(0, tiles.padded(DIM))[None, :]


@triton.jit
def absorb(state, q_tile, rows, k, v, start, end, seq, terms, RULE: tl.constexpr, TILE: tl.constexpr):
    """The Softmax after the keys start .. start + BLOCK - 1 that are before `end`.

    A single query has no use for tensor cores, and its Softmax has one row per key of a tile instead of one per query:
    so a step sums over the head dim only, and merge_rows() sums over the keys after the last step.
    """
    k_pos = start + tl.arange(0, TILE.block_k)
    slots = slot(tl.minimum(k_pos, end - 1), RULE)  # past the end the last key repeats: slots there may hold NaN
    k_tile = tiles.load_at(k, slots, TILE.dim)
    v_tile = tiles.load_at(v, slots, TILE.value_dim)
    if TILE.block_q == 1:
        qk = tl.sum(k_tile.to(tl.float32) * q_tile.to(tl.float32), 1)
        scores, _ = shape_scores(qk, rows.pos, k_pos, rows.head, seq, terms, RULE, True)
        scores = tl.where(k_pos < end, scores, float("-inf"))
        top = tl.maximum(state.top, scores)
    else:
        qk = tiles.dot(q_tile, tl.trans(k_tile), None, TILE)
        scores, _ = shape_scores(qk, rows.pos[:, None], k_pos[None, :], rows.head[:, None], seq, terms, RULE, True)
        scores = tl.where((k_pos < end)[None, :], scores, float("-inf"))
        top = tl.maximum(state.top, tl.max(scores, 1))
    pivot = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    fade = tl.exp2(state.top - pivot)
    if TILE.block_q == 1:
        weights = tl.exp2(scores - pivot)
        total = state.total * fade + weights
        acc = state.acc * fade[:, None] + weights[:, None] * v_tile.to(tl.float32)
    else:
        weights = tl.exp2(scores - pivot[:, None])
        total = state.total * fade + tl.sum(weights, 1)
        acc = tiles.dot(tiles.narrow(weights, v_tile), v_tile, state.acc * fade[:, None], TILE)
    return Softmax(acc, top, total)


@triton.jit
def merge_rows(state):
    """One row from all rows of a Softmax."""
    top = tl.max(state.top[None, :], 1)
    fade = tl.exp2(state.top - tl.where(top == float("-inf"), 0.0, top))
    acc = tl.sum(state.acc * fade[:, None], 0)
    return Softmax(acc[None, :], top, tl.sum((state.total * fade)[None, :], 1))


@triton.jit(do_not_specialize=["q_len", "slots"])
def decode_kernel(
    q, k, v, out, lse2, lengths, sink, terms, q_len, slots,
    RULE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = softmax(rule(q k^T)) v and lse2 = log2 sum 2^score over one of SPLITS shares of the keys.

    One program per tile of the queries with a key head, key head, and share; the first may exceed 65,535, the limit of
    the other axes of a grid. Share s of batch row b goes to out[s B + b]. The sink belongs to the first share. lse2 is
    None if there is one share. STAGES are given to the loop, because Triton pipelines a loop without a dot only then.
    With OVERLAP, the kernel may start before the one in front of it has ended (programmatic dependent launch).
    """
    wait_for_inputs(OVERLAP)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    count = q_len * TILE.group
    q_tiles = tl.cdiv(count, TILE.block_q)
    batch, tile = tl.program_id(0) // q_tiles, tl.program_id(0) % q_tiles
    out_row = split * (tl.num_programs(0) // q_tiles) + batch
    length = tl.load(lengths + batch)
    if RULE.ring == 0:
        length = tl.minimum(length, slots)
    number = tile * TILE.block_q + tl.arange(0, TILE.block_q)
    exist = number < count
    number = tl.minimum(number, count - 1)  # padding repeats the last query
    token = number // TILE.group
    rows = QueryRows(token, kv_head * TILE.group + number % TILE.group, exist, length - q_len + token)
    seq = tiles.Sequence(batch, batch, 0, q_len, 0, length)

    low = tl.maximum(length - q_len - behind(RULE), 0)  # the first key that a query sees
    share = tl.cdiv(tl.cdiv(length - low, SPLITS), TILE.block_k) * TILE.block_k
    start = low + split * share
    end = tl.minimum(start + share, length)
    column = tl.arange(0, tiles.padded(TILE.dim))
    ROWS: tl.constexpr = TILE.block_k if TILE.block_q == 1 else TILE.block_q
    pointers = row_pointers(q, batch, rows, TILE.dim)
    if TILE.block_q == 1 and TILE.dim > 64:
        # Repeat the query for each key. Else Triton would give a thread one of its channels, spread keys over threads
        # in the same way, and sum each score over all warps.
        pointers = tl.broadcast_to(pointers, [ROWS, tiles.padded(TILE.dim)])
    q_tile = tl.load(pointers, column[None, :] < TILE.dim, 0.0)
    state = no_keys(ROWS, TILE)
    k = tiles.tile_lane(k, batch, kv_head, 0)
    v = tiles.tile_lane(v, batch, kv_head, 0)
    for at in tl.range(start, end, TILE.block_k, num_stages=STAGES):
        state = absorb(state, q_tile, rows, k, v, at, end, seq, terms, RULE, TILE)
    if OVERLAP:
        gdc_launch_dependents()
    if TILE.block_q == 1:
        state = merge_rows(state)

    logit = None
    if sink is not None:
        logit = tl.where(split == 0, tl.load(sink + rows.head).to(tl.float32) * LOG2E, float("-inf"))
    lse, factor = end_softmax(state.top, state.total, logit)
    result = state.acc * factor[:, None]
    column = tl.arange(0, tiles.padded(TILE.value_dim))
    pointers = row_pointers(out, out_row, rows, TILE.value_dim)
    tl.store(pointers, result.to(out.ptr.dtype.element_ty), exist[:, None] & (column[None, :] < TILE.value_dim))
    if lse2 is not None:
        tl.store(tiles.address(lse2, out_row, rows.head, rows.token), lse, exist)


@triton.jit
def merge_kernel(parts, lse2, out, TILE: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr):
    """out = the mean of SPLITS shares, weighted by 2^lse2, for one query: parts[s B + b] -> out[b]."""
    wait_for_inputs(OVERLAP)
    batch, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    BLOCK: tl.constexpr = SPLITS if SPLITS < MERGED else MERGED
    column = tl.arange(0, tiles.padded(TILE.value_dim))
    inside = column < TILE.value_dim
    part = tiles.tile_lane(parts, batch, head, token)
    every = tl.arange(0, SPLITS) * tl.num_programs(0) + batch
    top = tl.max(tl.load(tiles.address(lse2, every, head, token)), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([tiles.padded(TILE.value_dim)], tl.float32)
    total = 0.0
    for start in range(0, SPLITS, BLOCK):
        step = (start + tl.arange(0, BLOCK)) * tl.num_programs(0)
        weights = tl.exp2(tl.load(tiles.address(lse2, step + batch, head, token)) - top)
        offset = tl.cast(step, tl.int64) * parts.batch * tiles.STRIDE_UNIT
        values = tl.load(part.ptr + offset[:, None] + column[None, :], inside[None, :], 0.0)
        acc += tl.sum(values * weights[:, None], 0)
        total += tl.sum(weights, 0)
    if OVERLAP:
        gdc_launch_dependents()
    result = acc / tl.where(total == 0, 1.0, total)
    tl.store(tiles.tile_lane(out, batch, head, token).ptr + column, result.to(out.ptr.dtype.element_ty), inside)


def splits_for(programs, keys, grouped, device):
    """Number of shares of at most `keys` keys, a power of two: see SPLITS_PER_SM."""
    waves, most = SPLITS_PER_SM[grouped]
    wanted = min(waves * processors(device) // programs, keys // (2 * BLOCK_K), most)
    return triton.next_power_of_2(wanted + 1) // 2 if wanted > 1 else 1


def launch_decode(call, ring):
    """out [B, Tq, H, Dv] of decode(), which has checked the arguments."""
    (q, k, v), window = map(tiles.aligned, call[:3]), call.window or 0
    (batch, q_len, heads, dim), (slots, kv_heads, value_dim) = q.shape, v.shape[1:]
    out = q.new_empty(batch, q_len, heads, value_dim)
    if out.numel() == 0 or slots == 0:
        return out.zero_()
    group, widest = heads // kv_heads, triton.next_power_of_2(max(dim, value_dim))
    count = q_len * group
    block_q = min(triton.next_power_of_2(count), MOST_ROWS // 2 if widest > 128 else MOST_ROWS)
    block_q = block_q if block_q == 1 else max(block_q, 16)  # rows that tensor cores need
    part = 1 if block_q > 1 else 2 if widest <= 64 else 4
    block_k = min(BLOCK_K, TILE_BYTES // (part * widest * k.element_size()))
    q_tiles = triton.cdiv(count, block_q)
    rule = Rule(True, window, call.softcap or 0.0, False, call.sink is not None, slots if ring else 0)
    tile = tiles.Tile(block_q, block_k, dim, value_dim, heads, group, float32_precision(q.dtype))
    most = min(slots, window + q_len - 1) if window else slots
    splits = splits_for(kv_heads * q_tiles * batch, most, block_q > 1, q.device)
    sink = None if call.sink is None else call.sink.contiguous()
    terms = terms_of(call._replace(decay=None if call.decay is None else call.decay.transpose(1, 2)))
    stages = 3 if block_q == 1 or shared_memory(q.device) >= THREE_STAGES else 2
    overlap = can_overlap(q.device)
    parts, lse2 = out, None
    if splits > 1:
        parts = q.new_empty(splits * batch, q_len, heads, value_dim, dtype=torch.float32)
        lse2 = q.new_empty(splits * batch, heads, q_len, dtype=torch.float32)
    with torch.cuda.device_of(q):
        decode_kernel[(q_tiles * batch, kv_heads, splits)](
            *map(tiles.view, (q, k, v, parts)), tiles.rows_view(lse2), call.lengths, sink, terms, q_len, slots,
            rule, tile, splits, stages, overlap,
            num_warps=4, launch_pdl=overlap, enable_fp_fusion=True,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(batch, heads, q_len)](
                tiles.view(parts), tiles.rows_view(lse2), tiles.view(out), tile, splits, overlap,
                num_warps=4, launch_pdl=overlap, enable_fp_fusion=True,
            )  # fmt: skip
    return out
