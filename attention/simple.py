"""Attention for training in one file: forward and backward, causal or full, grouped queries, O(T) memory.

It needs only PyTorch and Triton, so you can copy it. docs/attention.md explains it formula by formula. Without a GPU it
runs in Triton's interpreter: set TRITON_INTERPRET=1 before Triton is imported.

For each head, with query i and key j:

    scores_ij   = q_i . k_j / sqrt(D)              -inf if query i does not see key j
    lse_i       = log sum_j exp(scores_ij)         the log-sum-exp, saved for the backward pass
    weights_ij  = exp(scores_ij - lse_i)           the softmax of row i
    out_i       = sum_j weights_ij v_j

and with dout, the gradient of out:

    delta_i     = dout_i . out_i
    dweights_ij = dout_i . v_j
    dscores_ij  = weights_ij (dweights_ij - delta_i)
    dq_i        = sum_j dscores_ij k_j / sqrt(D)
    dk_j        = sum_i dscores_ij q_i / sqrt(D)   these two are summed over the query heads too
    dv_j        = sum_i weights_ij dout_i          that share a key head (grouped queries)

Scores and weights are never stored. Each program computes them on chip, one tile of BLOCK_Q x BLOCK_K at a time.
Letters: B batch, T sequence, H query heads, H_KV key/value heads, D head dim; group = H / H_KV.

Source: Dao et al., FlashAttention (2022); Dao, FlashAttention-2 (2023); Ainslie et al., GQA (2023).
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

BLOCK_Q = tl.constexpr(32)  # with these sizes every kernel fits into 99 KB of shared memory, in float32 too
BLOCK_K = tl.constexpr(32)
LAUNCH = dict(num_warps=4, num_stages=2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def row_numbers(batch, pos, head, T, H):
    """Rows of positions of one head in a [B, T, H, D] tensor, seen as [B T H, D]; 64 bits, as B T H D may pass 2^31."""
    return (batch.to(tl.int64) * T + pos) * H + head


@triton.jit
def load_tile(x, rows, exists, D: tl.constexpr):
    """[rows, D], with zeros for rows that do not exist."""
    return tl.load(x + rows[:, None] * D + tl.arange(0, D)[None, :], exists[:, None], 0.0)


@triton.jit
def store_tile(x, tile, rows, exists, D: tl.constexpr):
    tl.store(x + rows[:, None] * D + tl.arange(0, D)[None, :], tile.to(x.dtype.element_ty), exists[:, None])


@triton.jit
def dot(a, b):
    """a @ b, summed in float32; a is first rounded to the dtype of b, for the tensor cores."""
    if INTERPRETED:  # NumPy multiplies, which has no bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    else:
        a = a.to(b.dtype)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def masked_scores(q_tile, k_tile, q_pos, k_pos, T, D: tl.constexpr, CAUSAL: tl.constexpr):
    """scores [queries, keys] of one tile."""
    visible = k_pos[None, :] < T
    if CAUSAL:
        visible = visible & (k_pos[None, :] <= q_pos[:, None])
    return tl.where(visible, dot(q_tile, tl.trans(k_tile)) * D**-0.5, float("-inf"))


@triton.jit
def forward_kernel(q, k, v, out, lse, T, H, group, D: tl.constexpr, CAUSAL: tl.constexpr):
    """out and lse for one tile of queries of one head: a loop over the keys, with the online softmax."""
    q_start = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1)
    batch = tl.program_id(2)
    q_pos = q_start + tl.arange(0, BLOCK_Q)
    q_rows = row_numbers(batch, q_pos, head, T, H)
    q_tile = load_tile(q, q_rows, q_pos < T, D)

    k_end = T
    if CAUSAL:  # later keys are not visible
        k_end = tl.minimum(q_start + BLOCK_Q, T)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)  # sum of exp(score - top) v over the keys so far
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # the largest score so far
    total = tl.zeros([BLOCK_Q], tl.float32)  # sum of exp(score - top)
    for k_start in range(0, k_end, BLOCK_K):
        k_pos = k_start + tl.arange(0, BLOCK_K)
        k_rows = row_numbers(batch, k_pos, head // group, T, H // group)
        k_tile = load_tile(k, k_rows, k_pos < T, D)
        v_tile = load_tile(v, k_rows, k_pos < T, D)

        scores = masked_scores(q_tile, k_tile, q_pos, k_pos, T, D, CAUSAL)
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: the first tile has key 0, which every query sees
        weights = tl.exp(scores - new_top[:, None])
        fade = tl.exp(top - new_top)  # rescales the sums so far to the new maximum
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + dot(weights, v_tile)
        top = new_top

    store_tile(out, acc / total[:, None], q_rows, q_pos < T, D)
    tl.store(lse + q_rows, top + tl.log(total), q_pos < T)


@triton.jit
def dq_kernel(q, k, v, dout, lse, delta, dq, T, H, group, D: tl.constexpr, CAUSAL: tl.constexpr):
    """dq for one tile of queries of one head: a loop over the keys."""
    q_start = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1)
    batch = tl.program_id(2)
    q_pos = q_start + tl.arange(0, BLOCK_Q)
    q_rows = row_numbers(batch, q_pos, head, T, H)
    q_tile = load_tile(q, q_rows, q_pos < T, D)
    dout_tile = load_tile(dout, q_rows, q_pos < T, D)
    lse_tile = tl.load(lse + q_rows, q_pos < T, 0.0)
    delta_tile = tl.load(delta + q_rows, q_pos < T, 0.0)

    k_end = T
    if CAUSAL:  # later keys are not visible
        k_end = tl.minimum(q_start + BLOCK_Q, T)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    for k_start in range(0, k_end, BLOCK_K):
        k_pos = k_start + tl.arange(0, BLOCK_K)
        k_rows = row_numbers(batch, k_pos, head // group, T, H // group)
        k_tile = load_tile(k, k_rows, k_pos < T, D)
        v_tile = load_tile(v, k_rows, k_pos < T, D)

        scores = masked_scores(q_tile, k_tile, q_pos, k_pos, T, D, CAUSAL)
        weights = tl.exp(scores - lse_tile[:, None])
        dweights = dot(dout_tile, tl.trans(v_tile))
        dscores = weights * (dweights - delta_tile[:, None])
        acc += dot(dscores, k_tile)

    store_tile(dq, acc * D**-0.5, q_rows, q_pos < T, D)


@triton.jit
def dkdv_kernel(q, k, v, dout, lse, delta, dk, dv, T, H, group, D: tl.constexpr, CAUSAL: tl.constexpr):
    """dk and dv for one tile of keys of one key head: a loop over the queries of every head that uses it."""
    k_start = tl.program_id(0) * BLOCK_K
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    k_pos = k_start + tl.arange(0, BLOCK_K)
    k_rows = row_numbers(batch, k_pos, kv_head, T, H // group)
    k_tile = load_tile(k, k_rows, k_pos < T, D)
    v_tile = load_tile(v, k_rows, k_pos < T, D)

    q_begin = 0
    if CAUSAL:  # earlier queries do not see these keys
        q_begin = k_start // BLOCK_Q * BLOCK_Q
    dk_acc = tl.zeros([BLOCK_K, D], tl.float32)
    dv_acc = tl.zeros([BLOCK_K, D], tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        for q_start in range(q_begin, T, BLOCK_Q):
            q_pos = q_start + tl.arange(0, BLOCK_Q)
            q_rows = row_numbers(batch, q_pos, head, T, H)
            q_tile = load_tile(q, q_rows, q_pos < T, D)  # past the end q, dout and delta are 0, and add nothing
            dout_tile = load_tile(dout, q_rows, q_pos < T, D)
            lse_tile = tl.load(lse + q_rows, q_pos < T, 0.0)
            delta_tile = tl.load(delta + q_rows, q_pos < T, 0.0)

            scores = masked_scores(q_tile, k_tile, q_pos, k_pos, T, D, CAUSAL)
            weights = tl.exp(scores - lse_tile[:, None])
            dweights = dot(dout_tile, tl.trans(v_tile))
            dscores = weights * (dweights - delta_tile[:, None])
            dv_acc += dot(tl.trans(weights), dout_tile)
            dk_acc += dot(tl.trans(dscores), q_tile)

    store_tile(dk, dk_acc * D**-0.5, k_rows, k_pos < T, D)
    store_tile(dv, dv_acc, k_rows, k_pos < T, D)


class SimpleAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        B, T, H, D = q.shape
        out = torch.empty_like(q)
        lse = q.new_empty(B, T, H, dtype=torch.float32)
        grid = triton.cdiv(T, BLOCK_Q.value), H, B
        forward_kernel[grid](q, k, v, out, lse, T, H, H // k.shape[2], D, causal, **LAUNCH)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        B, T, H, D = q.shape
        H_KV = k.shape[2]
        dout = dout.contiguous()
        delta = (dout.float() * out.float()).sum(-1)  # [B, T, H]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        inputs = q, k, v, dout, lse, delta
        sizes = T, H, H // H_KV, D, ctx.causal
        dq_kernel[triton.cdiv(T, BLOCK_Q.value), H, B](*inputs, dq, *sizes, **LAUNCH)
        dkdv_kernel[triton.cdiv(T, BLOCK_K.value), H_KV, B](*inputs, dk, dv, *sizes, **LAUNCH)
        return dq, dk, dv, None


def simple_attention(q, k, v, causal=True):
    """softmax(q k^T / sqrt(D)) v for each head; differentiable.

    Args:
        q: [B, T, H, D] float16, bfloat16 or float32, on the current GPU; D is 16, 32, 64 or 128.
        k, v: [B, T, H_KV, D], where H is a multiple of H_KV: query head h uses key head h // (H / H_KV).
        causal: whether a query sees only the keys up to its own position.

    Returns:
        [B, T, H, D] in the dtype of q.

    Raises:
        ValueError: the shapes do not fit.
    """
    B, T, H, D = q.shape
    H_KV = k.shape[2]
    if k.shape != (B, T, H_KV, D) or v.shape != k.shape or H % H_KV or D not in (16, 32, 64, 128):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit; see the docstring")
    return SimpleAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), causal)
