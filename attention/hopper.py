"""Hopper kernels (sm_90): their settings, TMA descriptors and launches. The same results as launch.py, sooner.

Dense batches take their tiles by number, ragged ones (lengths, packed sequences) from lists that a kernel makes of what
is there: hopper_ragged.py. What they do not serve goes to the portable kernels: see hopper_lacks() in api.py.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton

from . import launch
from .gluon import TensorDescriptor, gl
from .hopper_backward import WIDTH, Plan, backward_kernel, finish_kernel, prepare_kernel
from .hopper_forward import ROWS, Pipeline, hopper_forward_kernel
from .hopper_ragged import POSITIONS, blank_kernel, end_shape, end_strides, list_kernel, slots
from .launch import Launch, describe, output, processors, start
from .tiles import aligned, rows_view, view


class Forward(NamedTuple):
    """Settings of the forward."""

    block_k: int  # keys of a block
    pipe: Pipeline
    registers: int  # of a thread, as launched; the partitions of a program then trade them


class Backward(NamedTuple):
    """Settings of the backward."""

    plan: Plan
    registers: int


# Head dim as tiles hold it -> settings, tuned on an H200 (benchmarks/LOG.md).
FORWARD = {
    64: Forward(128, Pipeline(consumers=3, stages=3, turns=True, reuse=False, flip=False), 128),
    128: Forward(128, Pipeline(consumers=2, stages=2, turns=True, reuse=False, flip=False), 168),
    256: Forward(64, Pipeline(consumers=2, stages=2, turns=False, reuse=True, flip=False), 168),
}
BACKWARD = {
    64: Backward(Plan(64, 64, 64, warps=4, stages=2, dq_stages=1, branch=True, ahead=True), 128),
    128: Backward(Plan(64, 128, 128, warps=8, stages=2, dq_stages=2, branch=True, ahead=False), 168),
    256: Backward(Plan(64, 64, 256, warps=8, stages=2, dq_stages=0, branch=False, ahead=False), 168),
}


def padded(dim):
    """Head dim as tiles hold it."""
    return max(64, triton.next_power_of_2(dim))


def reachable(x, ragged):
    """[B, T, H, D] tensor as TMA can read it: copied if it is not aligned, or if it is broadcast.

    Also if sequences are ragged and the rows of the batch do not follow each other: see end_strides().
    """
    apart = ragged and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)
    return x.clone(memory_format=torch.contiguous_format) if 0 in x.stride() or apart else aligned(x)


@lru_cache(None)
def shared_layout(block, dtype):
    """Of such a block in shared memory."""
    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])


def descriptor(x, block, shape=None, strides=None):
    """TMA descriptor of a tensor in blocks; past its end they hold zeros, and are not written."""
    shape, strides = shape or x.shape, strides or x.stride()
    return TensorDescriptor(x, list(shape), list(strides), list(block), shared_layout(block, x.dtype))


def tiles_of(x, rows, ragged):
    """Descriptor of a [B, T, H, D] tensor in tiles of `rows` positions of one head, at corner()."""
    block = (1, rows, 1, padded(x.shape[-1]))
    return descriptor(x, (1, *block), end_shape(x), end_strides(x)) if ragged else descriptor(x, block)


def bounded(options):
    """Whether sequences are ragged: have lengths, or bounds in packed rows."""
    return options.lengths is not None or options.q_starts is not None


def list_tiles(problem, q, k, block_q, block_k=None):
    """Lists of the tiles of queries and, if block_k, of keys, and how many tiles each can hold."""
    sizes = [slots(x, block, problem.sequences) for x, block in ((q, block_q), (k, block_k)) if block]
    lists = [q.new_empty(2 + 2 * size, dtype=torch.int32) for size in sizes]
    args = (*lists, *[None] * (2 - len(lists)), problem.sequences, q.shape[1], k.shape[1], problem.ragged)
    start(list_kernel, len(lists), problem, launch.ROWS, args, (problem.rule, block_q, block_k))
    return lists, sizes


def blank(problem, x, q, k, keys=False):
    """Zero those positions of an output or a gradient that the other kernels leave out: of no sequence."""
    batch, length, heads, dim = x.shape
    args = (x, problem.ragged, problem.sequences - batch, q.shape[1], k.shape[1])
    programs = -(-length // POSITIONS.value) * batch
    start(blank_kernel, programs, problem, launch.ROWS, args, (heads * dim, keys))


def forward(q, k, v, options):
    """As launch.forward()."""
    ragged = bounded(options)
    q, k, v = (reachable(x, ragged) for x in (q, k, v))
    problem = describe(q, k, v, options)
    (batch, q_len, heads, dim), k_len = q.shape, k.shape[1]
    out = q.new_empty(q.shape)
    lse2 = output(problem, q, batch, heads, q_len, fill=float("-inf"), dtype=torch.float32)
    block_k, pipe, registers = FORWARD[padded(dim)]
    pipe = pipe._replace(flip=options.scale < 0, ragged=ragged)
    rows = ROWS.value
    tile = problem.tile._replace(block_q=rows * pipe.consumers, block_k=block_k, dim=padded(dim), value_dim=padded(dim))
    n_tiles = -(-q_len // tile.block_q)
    settings = Launch(tile.block_q, block_k, 4, 1)
    with torch.cuda.device_of(q):
        if ragged:
            (tiles,), (count,) = list_tiles(problem, q, k, tile.block_q)
            blank(problem, out, q, k)
        else:
            tiles, count = q.new_zeros(1, dtype=torch.int32), n_tiles * batch
        args = (
            tiles_of(q, rows, ragged), tiles_of(k, block_k, ragged), tiles_of(v, block_k, ragged),
            tiles_of(out, rows, ragged), lse2, None if options.sink is None else options.sink.contiguous(),
            tiles, problem.ragged, q_len, k_len, n_tiles, heads * batch,
            max(abs(options.scale), 1e-30),  # 0 would turn the -inf of a hidden key into NaN
        )  # fmt: skip
        programs = min(count * heads, processors(q.device))
        start(hopper_forward_kernel, programs, problem, settings, args, (problem.rule, tile, pipe), maxnreg=registers)
    return out, lse2


def backward(q, k, v, out, lse2, dout, dlse, bias_grad, options):
    """As launch.backward(), but that dQ is added in any order; where torch is to be deterministic, that one serves."""
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(hopper=False)  # what is compiled for it is not for the kernels here
        return launch.backward(q, k, v, out, lse2, dout, dlse, bias_grad, options)
    ragged = bounded(options)
    q, k, v, out, dout = (reachable(x, ragged) for x in (q, k, v, out, dout))
    problem = describe(q, k, v, options, out, lse2, dout, dlse)
    (batch, q_len, heads, dim), (_, k_len, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    plan, registers = BACKWARD[padded(dim)]
    plan = plan._replace(ragged=ragged)
    block_q, block_k = plan.block_q, plan.block_k
    q_tiles = k_tiles = None
    q_slots, k_slots = -(-q_len // block_q) * batch, -(-k_len // block_k) * batch
    # the group in one program if that leaves two programs per multiprocessor, else each query head in its own
    span = group if k_slots * kv_heads >= 2 * processors(q.device) else 1

    # keys before every window are left out too (bounds() in hopper_ragged.py): only then is all filled with zeros
    empty = partial(output, problem) if options.window else torch.Tensor.new_empty
    dq, dk, dv = q.new_empty(q.shape), empty(k, *k.shape), empty(v, *v.shape)
    delta = None if options.sink is None else output(problem, lse2, *lse2.shape)
    parts = [None, None]
    if span < group:
        parts = [empty(k, batch, k_len, heads, plan.dim, dtype=torch.float32) for _ in parts]
    tile = problem.tile._replace(block_q=block_q, block_k=block_q)
    settings = Launch(block_q, block_k, plan.warps, 1)
    with torch.cuda.device_of(q):
        if ragged:
            (q_tiles, k_tiles), (q_slots, k_slots) = list_tiles(problem, q, k, block_q, block_k)
        size = block_q * plan.dim // WIDTH.value  # rows of the sum that a tile of dQ takes
        rows = q.new_empty(q_slots * heads * 2 * block_q, dtype=torch.float32)
        dq_sum = q.new_empty(q_slots * heads * size, WIDTH.value, dtype=torch.float32)
        sums = descriptor(dq_sum, (size, WIDTH.value)) if plan.dq_stages > 0 else dq_sum
        where = (q_tiles, problem.ragged, q_slots, q_len, k_len)
        args = (view(out), view(dout), rows_view(lse2), rows_view(dlse), rows, dq_sum, rows_view(delta), *where)
        start(prepare_kernel, q_slots * heads, problem, launch.ROWS, args, (tile,))
        args = (
            tiles_of(q, block_q, ragged), tiles_of(k, block_k, ragged), tiles_of(v, block_k, ragged),
            tiles_of(dout, block_q, ragged), descriptor(rows, (block_q,)), sums, tiles_of(dk, block_k, ragged),
            tiles_of(dv, block_k, ragged), *parts, q_len, k_len, batch, heads, group, span, options.scale,
            k_tiles, problem.ragged, q_slots,
        )  # fmt: skip
        constants = (problem.rule, plan, ragged or k_len % block_k != 0)
        start(backward_kernel, k_slots * heads // span, problem, settings, args, constants, maxnreg=registers)
        args = (dq_sum, view(dq), *where, options.scale)
        start(finish_kernel, q_slots * heads, problem, launch.ROWS, args, (tile,))
        if span < group:
            for part, total in zip(parts, (dk, dv), strict=True):
                launch.launch_group_sum(problem, part[..., :dim], total)
        if ragged:
            blank(problem, dq, q, k)
        if ragged and not options.window:
            blank(problem, dk, q, k, keys=True)
            blank(problem, dv, q, k, keys=True)
    dsink = None if options.sink is None else launch.sink_gradient(options.sink, lse2, delta)
    return dq, dk, dv, None, None, dsink
