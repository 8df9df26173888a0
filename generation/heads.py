"""From the queries, keys and values of one token to attention: QK-norm and rotary positions, and the keys and values
into the cache, in one kernel.

Letters: B rows, S slots of the cache, H query heads, G key/value heads, D head dim.
"""

import triton
import triton.language as tl

from attention.launcher import wait_for_inputs
from attention.tiles import INTERPRETED
from generation.launch import launch


def store_heads(qkv, k, v, slots, rotary=None, qk_norm=False):
    """Write a token's keys and values to k[b, slots[b]] and v[b, slots[b]]; returns its queries.

    Args:
        qkv: [B, (H + 2 G) D] on a GPU: the heads of q, k and v, one after the other.
        k, v: [B, S, G, D], the last dimension contiguous.
        slots: [B] int64, also the tokens' positions. rotary: cos and sin [S, 1, D / 2] float32, or None.
        qk_norm: divide queries and keys by their RMS over D.

    Returns:
        q [B, 1, H, D].
    """
    qkv, batch, dim = qkv.contiguous(), len(qkv), k.shape[-1]
    kv_heads = k.shape[2]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(batch, 1, heads, dim)
    cos, sin = rotary or (None, None)
    launch(
        heads_kernel, (batch, heads + 2 * kv_heads), qkv, q, k, v, slots, cos, sin, k.stride(), v.stride(), heads,
        kv_heads, qk_norm, dim // 2, triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def rounded(x, like):
    """x as the dtype of `like` holds it, in float32."""
    if INTERPRETED:  # its cast truncates where the hardware rounds
        return x
    else:
        return x.to(like.dtype).to(tl.float32)


@triton.jit
def place(row, slot, head, strides):
    return row.to(tl.int64) * strides[0] + slot * strides[1] + head * strides[2]


@triton.jit
def heads_kernel(
    qkv, q, k, v, slots, cos, sin, k_strides, v_strides, heads, kv_heads,
    QK_NORM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row and head of q, k and v; a pair (x_i, x_{i + D/2}) is in one lane."""
    wait_for_inputs(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    source = qkv + (row * tl.num_programs(1) + head) * 2 * HALF + lane
    raw = tl.load(source, inside, 0.0)
    a = raw.to(tl.float32)
    b = tl.load(source + HALF, inside, 0.0).to(tl.float32)
    slot = tl.load(slots + row)
    if head < heads + kv_heads:
        if QK_NORM:
            mean = tl.sum(a * a + b * b, 0) / (2 * HALF)
            scale = tl.rsqrt(mean + 1.1920928955078125e-07)  # float32's epsilon, as in F.rms_norm
            a = rounded(a * scale, raw)
            b = rounded(b * scale, raw)
        if cos is not None:
            c = tl.load(cos + slot * HALF + lane, inside, 0.0)
            s = tl.load(sin + slot * HALF + lane, inside, 0.0)
            turned = a * c - b * s
            b = b * c + a * s
            a = turned
    target = q + (row * heads + head) * 2 * HALF
    if head >= heads + kv_heads:
        target = v + place(row, slot, head - heads - kv_heads, v_strides)
    elif head >= heads:
        target = k + place(row, slot, head - heads, k_strides)
    tl.store(target + lane, a.to(raw.dtype), inside)
    tl.store(target + HALF + lane, b.to(raw.dtype), inside)
