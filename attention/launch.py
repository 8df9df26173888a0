"""How kernels are launched: one table of tile sizes and warps, the choices made from shapes, and the grids.

Nothing is tuned while training: the table is committed, so a run starts at once and repeats itself.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton

from . import backward as backward_kernels
from .forward import forward_kernel
from .tiles import INTERPRETED, Tile, view


class Launch(NamedTuple):
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# (kernel, bytes per element) -> {largest head dim: settings}. The head dim that counts is the larger of q's and v's,
# rounded up to a power of two. Sizes for sm_90 compile there without register spills (tests/test_compile.py); up to a
# head dim of 128 two programs fit a multiprocessor. None of them is tuned by time yet.
HOPPER = {
    ("forward", 2): {64: Launch(128, 64, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(128, 32, 8, 2)},
    ("dq", 2): {64: Launch(64, 64, 4, 3), 128: Launch(64, 32, 4, 2), 256: Launch(128, 32, 8, 2)},
    ("dkdv", 2): {64: Launch(32, 128, 8, 2), 128: Launch(32, 128, 8, 2), 256: Launch(32, 32, 8, 2)},
    ("forward", 4): {64: Launch(64, 32, 8, 2), 128: Launch(32, 16, 4, 2), 256: Launch(32, 16, 8, 1)},
    ("dq", 4): {64: Launch(32, 32, 8, 2), 128: Launch(32, 16, 4, 2), 256: Launch(32, 16, 8, 1)},
    ("dkdv", 4): {64: Launch(32, 32, 4, 2), 128: Launch(32, 32, 8, 1), 256: Launch(16, 32, 8, 1)},
}
# Any other chip: what fits the 99 KB of shared memory of the smallest of them.
PORTABLE = HOPPER | {
    ("forward", 2): {64: Launch(64, 64, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(64, 32, 8, 1)},
    ("dq", 2): {64: Launch(64, 32, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 32, 4, 1)},
    ("dkdv", 2): {64: Launch(32, 64, 4, 2), 128: Launch(32, 64, 4, 1), 256: Launch(32, 32, 8, 1)},
    ("dkdv", 4): {64: Launch(32, 32, 4, 2), 128: Launch(32, 32, 8, 1), 256: Launch(16, 16, 8, 1)},
}
CHIPS = {(9, 0): HOPPER}
# Small and unequal, so that a short sequence in the interpreter meets many tiles and a swapped axis shows.
INTERPRETER = Launch(32, 16, 1, 1)
# Bandwidth-bound kernels: rows per program.
ROWS = Launch(32, 32, 4, 1)


@cache
def launch_for(kernel, dim, element_size, device):
    """Settings of one kernel for the larger head dim, bytes per element and device."""
    if INTERPRETED.value:
        return INTERPRETER
    table = CHIPS.get(torch.cuda.get_device_capability(device), PORTABLE)[kernel, element_size]
    return table[max(64, triton.next_power_of_2(dim))]


@cache
def processors(device):
    """Multiprocessors of the device; 1 for the interpreter, which runs programs one by one."""
    return 1 if INTERPRETED.value else torch.cuda.get_device_properties(device).multi_processor_count


def loops_over_group(programs, device):
    """Whether dk/dv loops over the query group in each of `programs` programs (no extra memory) or writes partials.

    Looping is right once there are two programs per multiprocessor to keep them all busy.
    """
    return programs >= 2 * processors(device)


def float32_precision(dtype):
    """Precision of matmuls, as torch.set_float32_matmul_precision asks; without effect on 16-bit dtypes."""
    return "ieee" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def rows_view(x):
    """View of a [B, H, T] tensor, in the (batch, sequence, head) order that kernels use."""
    return view(x.transpose(1, 2))


def forward(q, k, v, seed, scale, rule):
    """Launch the forward. Shapes as in attention(); returns out [B, Tq, H, Dv] and lse2 [B, H, Tq] float32, base 2."""
    batch, q_len, heads, dim = q.shape
    k_len, kv_heads, value_dim = v.shape[1:]
    out = q.new_empty(batch, q_len, heads, value_dim)
    lse2 = q.new_empty(batch, heads, q_len, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse2
    settings = launch_for("forward", max(dim, value_dim), q.element_size(), q.device)
    tile = Tile(
        settings.block_q,
        settings.block_k,
        dim,
        value_dim,
        heads,
        heads // kv_heads,
        float32_precision(q.dtype),
    )
    grid = (triton.cdiv(q_len, tile.block_q) * heads * batch,)
    with device_of(q):
        forward_kernel[grid](
            view(q), view(k), view(v), view(out), rows_view(lse2), seed, q_len, k_len, scale, rule, tile,
            num_warps=settings.num_warps, num_stages=settings.num_stages,
        )  # fmt: skip
    return out, lse2


def backward(q, k, v, out, lse2, dout, dlse, seed, scale, rule, loop_group=None):
    """Launch the backward; returns dq, dk, dv in the dtype and shape of q, k, v.

    dlse [B, H, Tq] float32 is the gradient of the natural-log LSE, or None. loop_group forces one of the strategies for
    grouped queries: True loops, False writes float32 partials of shape [B, Tk, H, D + Dv] and adds them.
    """
    batch, q_len, heads, dim = q.shape
    k_len, kv_heads, value_dim = v.shape[1:]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if dout.stride(-1) != 1:  # the gradient of a sum is an expanded scalar
        dout = dout.contiguous()
    widest = max(dim, value_dim)
    tile = Tile(ROWS.block_q, ROWS.block_k, dim, value_dim, heads, heads // kv_heads, float32_precision(q.dtype))
    delta = torch.empty_like(lse2)

    with device_of(q):
        backward_kernels.delta_kernel[(triton.cdiv(q_len, tile.block_q) * heads * batch,)](
            view(out), view(dout), None if dlse is None else rows_view(dlse), rows_view(delta), q_len, k_len, tile,
            num_warps=ROWS.num_warps,
        )  # fmt: skip

        settings = launch_for("dq", widest, q.element_size(), q.device)
        tile = tile._replace(block_q=settings.block_q, block_k=settings.block_k)
        backward_kernels.dq_kernel[(triton.cdiv(q_len, tile.block_q) * heads * batch,)](
            view(q), view(k), view(v), view(dout), rows_view(lse2), rows_view(delta), view(dq), seed, q_len, k_len,
            scale, rule, tile, num_warps=settings.num_warps, num_stages=settings.num_stages,
        )  # fmt: skip

        settings = launch_for("dkdv", widest, q.element_size(), q.device)
        k_tiles = triton.cdiv(k_len, settings.block_k)
        if loop_group is None:
            loop_group = loops_over_group(k_tiles * kv_heads * batch, q.device)
        partials = heads != kv_heads and not loop_group
        slots = heads if partials else kv_heads
        tile = tile._replace(block_q=settings.block_q, block_k=settings.block_k, heads=slots)
        dk_sum, dv_sum = dk, dv
        if partials:
            dk_sum = k.new_empty(batch, k_len, heads, dim, dtype=torch.float32)
            dv_sum = v.new_empty(batch, k_len, heads, value_dim, dtype=torch.float32)
        backward_kernels.dkdv_kernel[(k_tiles * slots * batch,)](
            view(q), view(k), view(v), view(dout), rows_view(lse2), rows_view(delta), view(dk_sum), view(dv_sum), seed,
            q_len, k_len, scale, rule, tile, SPAN=heads // slots,
            num_warps=settings.num_warps, num_stages=settings.num_stages,
        )  # fmt: skip
        if partials:
            for partial, total in ((dk_sum, dk), (dv_sum, dv)):
                tile = tile._replace(block_k=ROWS.block_k, dim=total.shape[-1], heads=kv_heads)
                backward_kernels.group_sum_kernel[(triton.cdiv(k_len, tile.block_k) * kv_heads * batch,)](
                    view(partial), view(total), k_len, tile, num_warps=ROWS.num_warps
                )
    return dq, dk, dv


def device_of(x):
    """Triton launches on the current device; make that the tensor's own."""
    return torch.cuda.device_of(x)
