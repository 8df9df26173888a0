"""From the queries, keys and values of one token to attention: value residual, QK-norm and rotary positions, and the
keys and values into the cache, in one kernel.

Letters: B rows, S slots of the cache, H query heads, G key/value heads, D head dim.
"""

import triton
import triton.language as tl

from attention.launcher import wait_for_inputs
from attention.tiles import INTERPRETED
from generation.launch import launch


def store_heads(qkv, k, v, slots, rotary=None, eps=None, first=None, mix=None, key_offset=False):
    """Write a token's keys and values to k[b, slots[b]] and v[b, slots[b]]; returns its queries.

    Args:
        qkv: [B, (H + 2 G) D] on a GPU: the heads of q, k and v, one after the other.
        k, v: [B, S, G, D], the last dimension contiguous.
        slots: [B] int64, also the tokens' positions. rotary: cos and sin [S, 1, R / 2] float32, or None.
        eps: divide queries and keys by their RMS over D, with this epsilon; None does not.
        first, mix: qkv of the first block, and [1]; its values get the share 1/2 + mix, or with mix=None none.
        key_offset: as in GPTConfig. Half of the key goes to the next slot, and only at slot 0 also to its own.

    Returns:
        q [B, 1, H, D].
    """
    qkv, batch, dim = qkv.contiguous(), len(qkv), k.shape[-1]
    kv_heads = k.shape[2]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(batch, 1, heads, dim)
    cos, sin = rotary or (None, None)
    launch(
        heads_kernel, (batch, heads + 2 * kv_heads), qkv, q, k, v, slots, cos, sin, first, mix, k.stride(), v.stride(),
        heads, kv_heads, eps, key_offset, dim, triton.next_power_of_2(dim), dim // (4 if key_offset else 2),
        num_warps=1,
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
    qkv, q, k, v, slots, cos, sin, first, mix, k_strides, v_strides, heads, kv_heads, eps,
    KEY_OFFSET: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row and head of q, k and v. Of R = 2 TURNS channels, the pairs (x_i, x_{i + TURNS}) are rotated;
    a lane has one of a pair and loads the other one too."""
    wait_for_inputs(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < DIM
    start = (row * tl.num_programs(1) + head) * DIM
    raw = tl.load(qkv + start + lane, inside, 0.0)
    x = raw.to(tl.float32)
    slot = tl.load(slots + row)
    is_value = head >= heads + kv_heads
    if is_value:
        if mix is not None:
            share = 0.5 + tl.load(mix).to(tl.float32)
            x += (tl.load(first + start + lane, inside, 0.0).to(tl.float32) - x) * share
    else:
        scale = 1.0
        if eps is not None:
            scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
            x = rounded(x * scale, raw)
        if cos is not None:
            turned, is_a, pair = lane < 2 * TURNS, lane < TURNS, lane % TURNS
            c = tl.load(cos + slot * TURNS + pair, turned, 1.0)
            s = tl.load(sin + slot * TURNS + pair, turned, 0.0)
            other = tl.load(qkv + start + tl.where(is_a, lane + TURNS, lane - TURNS), turned, 0.0).to(tl.float32)
            other = rounded(other * scale, raw)
            x = x * c + tl.where(is_a, -other, other) * s
    target = q + (row * heads + head) * DIM
    if is_value:
        target = v + place(row, slot, head - heads - kv_heads, v_strides)
    elif head >= heads:
        target = k + place(row, slot, head - heads, k_strides)
        if KEY_OFFSET:
            tl.store(target + k_strides[1] + lane, x.to(raw.dtype), inside & (lane >= DIM // 2))
            inside = lane < tl.where(slot == 0, DIM, DIM // 2)
    tl.store(target + lane, x.to(raw.dtype), inside)
