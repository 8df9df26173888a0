"""The control: FlashAttention without features, with as few functions as possible.

benchmarks/attention.py compares it with attention/, at the same tile sizes, to measure what the features cost a call
that uses none of them. Only dense batches, 16 bits, T a multiple of 128, one key head per query head, and contiguous
[B, T, H, D].
"""

import torch
import triton
import triton.language as tl

from attention.launcher import tma_tiles
from attention.score import Rule
from attention.table import launches_for, way
from attention.tiles import Tile, locate_query_tile, step_size

LOG2E = 1.4426950408889634


@triton.jit
def tile(x, start, stride, ROWS: tl.constexpr, D: tl.constexpr):
    return x + (start + tl.arange(0, ROWS))[:, None] * stride + tl.arange(0, D)[None, :]


@triton.jit
def fetch(x, tiles, row, head, start, stride, ROWS: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr):
    if tiles is None or MASK:
        found = tl.load(tile(x, start, stride, ROWS, D))
    else:
        found = tiles.load([row, start, head, 0]).reshape(ROWS, D)
    return found


@triton.jit
def absorb(
    acc, top, total, q, q_pos, k, v, k_tiles, v_tiles, row, head, lo, hi, stride, factor,
    D: tl.constexpr, BK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BK):
        scores = tl.dot(q, tl.trans(fetch(k, k_tiles, row, head, start, stride, BK, D, MASK))) * factor
        if MASK:
            k_pos = start + tl.arange(0, BK)
            scores = tl.where(k_pos[None, :] <= q_pos[:, None], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), fetch(v, v_tiles, row, head, start, stride, BK, D, MASK), acc * fade[:, None])
        top = new
    return acc, top, total


@triton.jit
def forward_kernel(
    Q, K, V, K_TILES, V_TILES, O, L, T, H, factor, D: tl.constexpr, CAUSAL: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index, head, row = locate_query_tile(T // BQ, T, RULE, TILE)  # the order of programs is not a feature
    base = row.to(tl.int64) * T * H * D + head * D
    stride = H * D
    q_pos = index * BQ + tl.arange(0, BQ)
    q = tl.load(tile(Q + base, index * BQ, stride, BQ, D))
    acc = tl.zeros([BQ, D], tl.float32)
    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    k, v = K + base, V + base
    full = index * BQ // BK * BK if CAUSAL else T
    acc, top, total = absorb(
        acc, top, total, q, q_pos, k, v, K_TILES, V_TILES, row, head, 0, full, stride, factor, D, BK, False
    )
    if CAUSAL:
        acc, top, total = absorb(
            acc, top, total, q, q_pos, k, v, K_TILES, V_TILES, row, head, full, (index + 1) * BQ, stride, factor, D,
            step_size(BK, True), True,
        )  # fmt: skip
    tl.store(tile(O + base, index * BQ, stride, BQ, D), (acc / total[:, None]).to(O.dtype.element_ty))
    tl.store(L + (row * H + head) * T + q_pos, top + tl.log2(total))


@triton.jit
def add_dq(
    dq, q, dout, lse, delta, q_pos, k, v, k_tiles, v_tiles, row, head, lo, hi, stride, factor,
    D: tl.constexpr, BK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BK):
        k_tile = fetch(k, k_tiles, row, head, start, stride, BK, D, MASK)
        scores = tl.dot(q, tl.trans(k_tile)) * factor
        if MASK:
            k_pos = start + tl.arange(0, BK)
            scores = tl.where(k_pos[None, :] <= q_pos[:, None], scores, float("-inf"))
        dweights = tl.dot(dout, tl.trans(fetch(v, v_tiles, row, head, start, stride, BK, D, MASK)))
        dscores = tl.exp2(scores - lse[:, None]) * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(q.dtype), k_tile, dq)
    return dq


@triton.jit
def dq_kernel(
    Q, K, V, DO, L, DELTA, K_TILES, V_TILES, O, DQ, T, H, factor, scale, D: tl.constexpr, CAUSAL: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index, head, row = locate_query_tile(T // BQ, T, RULE, TILE)
    base = row.to(tl.int64) * T * H * D + head * D
    stride = H * D
    q_pos = index * BQ + tl.arange(0, BQ)
    q = tl.load(tile(Q + base, index * BQ, stride, BQ, D))
    dout = tl.load(tile(DO + base, index * BQ, stride, BQ, D))
    lse = tl.load(L + (row * H + head) * T + q_pos)
    out = tl.load(tile(O + base, index * BQ, stride, BQ, D)).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    tl.store(DELTA + (row * H + head) * T + q_pos, delta)
    dq = tl.zeros([BQ, D], tl.float32)
    k, v = K + base, V + base
    full = index * BQ // BK * BK if CAUSAL else T
    dq = add_dq(
        dq, q, dout, lse, delta, q_pos, k, v, K_TILES, V_TILES, row, head, 0, full, stride, factor, D, BK, False
    )
    if CAUSAL:
        dq = add_dq(
            dq, q, dout, lse, delta, q_pos, k, v, K_TILES, V_TILES, row, head, full, (index + 1) * BQ, stride, factor,
            D, BK, True,
        )  # fmt: skip
    tl.store(tile(DQ + base, index * BQ, stride, BQ, D), (dq * scale).to(DQ.dtype.element_ty))


@triton.jit
def add_dkdv(
    dk, dv, k, v, k_pos, q, dout, q_tiles, dout_tiles, row, head, lse, delta, lo, hi, stride, factor,
    D: tl.constexpr, BQ: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for start in range(lo, hi, BQ):
        q_pos = start + tl.arange(0, BQ)
        q_tile = fetch(q, q_tiles, row, head, start, stride, BQ, D, MASK)
        dout_tile = fetch(dout, dout_tiles, row, head, start, stride, BQ, D, MASK)
        scores = tl.dot(k, tl.trans(q_tile)) * factor
        if MASK:
            scores = tl.where(k_pos[:, None] <= q_pos[None, :], scores, float("-inf"))
        weights = tl.exp2(scores - tl.load(lse + q_pos)[None, :])
        dv = tl.dot(weights.to(k.dtype), dout_tile, dv)
        dweights = tl.dot(v, tl.trans(dout_tile))
        dscores = weights * (dweights - tl.load(delta + q_pos)[None, :])
        dk = tl.dot(dscores.to(k.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    Q, K, V, DO, L, DELTA, Q_TILES, DO_TILES, DK, DV, T, H, factor, scale, D: tl.constexpr, CAUSAL: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles = T // BK
    index, head, row = tl.program_id(0) % tiles, tl.program_id(0) // tiles % H, tl.program_id(0) // tiles // H
    base = row.to(tl.int64) * T * H * D + head * D
    stride = H * D
    k_pos = index * BK + tl.arange(0, BK)
    k = tl.load(tile(K + base, index * BK, stride, BK, D))
    v = tl.load(tile(V + base, index * BK, stride, BK, D))
    dk = tl.zeros([BK, D], tl.float32)
    dv = tl.zeros([BK, D], tl.float32)
    q, dout, lse, delta = Q + base, DO + base, L + (row * H + head) * T, DELTA + (row * H + head) * T
    full = 0
    if CAUSAL:
        first = index * BK // BQ * BQ
        full = tl.cdiv((index + 1) * BK, BQ) * BQ
        BLOCK: tl.constexpr = step_size(BQ, True)
        dk, dv = add_dkdv(
            dk, dv, k, v, k_pos, q, dout, Q_TILES, DO_TILES, row, head, lse, delta, first, full, stride, factor, D,
            BLOCK, True,
        )  # fmt: skip
    dk, dv = add_dkdv(
        dk, dv, k, v, k_pos, q, dout, Q_TILES, DO_TILES, row, head, lse, delta, full, T, stride, factor, D, BQ, False
    )
    tl.store(tile(DK + base, index * BK, stride, BK, D), (dk * scale).to(DK.dtype.element_ty))
    tl.store(tile(DV + base, index * BK, stride, BK, D), dv.to(DV.dtype.element_ty))


def settings(kernel, q, causal):
    """The launch settings of attention/ for a kernel, and the constants that set the order of its programs."""
    _, length, heads, dim = q.shape
    rule = Rule(causal, 0, 0.0, False, False)
    launch = launches_for(dim, way(length, length, rule), 2, q.device)[kernel]
    return launch, rule, Tile(launch.block_q, launch.block_k, dim, dim, heads, 1, "tf32")


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        batch, length, heads, dim = q.shape
        out, lse = torch.empty_like(q), q.new_empty(batch, heads, length, dtype=torch.float32)
        launch, *order = settings("forward", q, causal)
        grid = (length // launch.block_q * heads * batch,)
        factor = dim**-0.5 * LOG2E
        tiles = [tma_tiles(x, launch.block_k) if launch.tma else None for x in (k, v)]
        forward_kernel[grid](
            q, k, v, *tiles, out, lse, length, heads, factor, dim, causal, launch.block_q, launch.block_k, *order,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        batch, length, heads, dim = q.shape
        delta, dq, dk, dv = torch.empty_like(lse), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scale = dim**-0.5
        for kernel, outputs, name in ((dq_kernel, (out, dq), "dq"), (dkdv_kernel, (dk, dv), "dkdv")):
            launch, *order = settings(name, q, ctx.causal)
            own, other = (launch.block_q, launch.block_k) if name == "dq" else (launch.block_k, launch.block_q)
            walked = [tma_tiles(x, other) if launch.tma else None for x in ((k, v) if name == "dq" else (q, dout))]
            # dk/dv at head dim 64: two stages are best for attention/, three for this control (H200)
            stages = 3 if name == "dkdv" and dim == 64 else launch.num_stages
            kernel[(length // own * heads * batch,)](
                q, k, v, dout, lse, delta, *walked, *outputs, length, heads, scale * LOG2E, scale, dim, ctx.causal,
                launch.block_q, launch.block_k, *(order if name == "dq" else ()), num_warps=launch.num_warps,
                num_stages=stages,
            )  # fmt: skip
        return dq, dk, dv, None


def flat_attention(q, k, v, causal):
    """softmax(q k^T / sqrt(D)) v of contiguous [B, T, H, D], and its gradients."""
    return Flat.apply(q, k, v, causal)
