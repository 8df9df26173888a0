"""Hopper kernels (sm_90): their settings, TMA descriptors and launches. The same results as launch.py, sooner.

What they do not serve goes to the portable kernels: see hopper_lacks() in api.py.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from . import launch
from .gluon import TensorDescriptor, gl
from .hopper_backward import WIDTH, Plan, backward_kernel, finish_kernel, prepare_kernel
from .hopper_forward import ROWS, Pipeline, hopper_forward_kernel
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


def reachable(x):
    """[B, T, H, D] tensor as TMA can read it: copied if it is not aligned, or if it is broadcast."""
    return x.clone(memory_format=torch.contiguous_format) if 0 in x.stride() else aligned(x)


@lru_cache(None)
def shared_layout(block, dtype):
    """Of such a block in shared memory."""
    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])


def descriptor(x, block):
    """TMA descriptor of a tensor in blocks; past its end they hold zeros, and are not written."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), shared_layout(block, x.dtype))


def tiles_of(x, rows):
    """Descriptor of a [B, T, H, D] tensor in tiles of `rows` positions of one head."""
    return descriptor(x, (1, rows, 1, padded(x.shape[-1])))


def forward(q, k, v, options):
    """As launch.forward()."""
    q, k, v = map(reachable, (q, k, v))
    problem = describe(q, k, v, options)
    (batch, q_len, heads, dim), k_len = q.shape, k.shape[1]
    out, lse2 = output(problem, q, *q.shape), output(problem, q, batch, heads, q_len, dtype=torch.float32)
    block_k, pipe, registers = FORWARD[padded(dim)]
    pipe = pipe._replace(flip=options.scale < 0)
    rows = ROWS.value
    tile = problem.tile._replace(block_q=rows * pipe.consumers, block_k=block_k, dim=padded(dim), value_dim=padded(dim))
    n_tiles = -(-q_len // tile.block_q)
    args = (
        tiles_of(q, rows), tiles_of(k, block_k), tiles_of(v, block_k), tiles_of(out, rows), lse2,
        None if options.sink is None else options.sink.contiguous(),
        q.new_zeros(1, dtype=torch.int32), q_len, k_len, n_tiles, heads * batch,
        max(abs(options.scale), 1e-30),  # 0 would turn the -inf of a hidden key into NaN
    )  # fmt: skip
    programs = min(n_tiles * heads * batch, processors(q.device))
    settings = Launch(tile.block_q, block_k, 4, 1)
    with torch.cuda.device_of(q):
        start(hopper_forward_kernel, programs, problem, settings, args, (problem.rule, tile, pipe), maxnreg=registers)
    return out, lse2


def backward(q, k, v, out, lse2, dout, dlse, bias_grad, options):
    """As launch.backward(), but that dQ is added in any order; where torch is to be deterministic, that one serves."""
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(hopper=False)  # what is compiled for it is not for the kernels here
        return launch.backward(q, k, v, out, lse2, dout, dlse, bias_grad, options)
    q, k, v, out, dout = map(reachable, (q, k, v, out, dout))
    problem = describe(q, k, v, options, out, lse2, dout, dlse)
    (batch, q_len, heads, dim), (_, k_len, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    plan, registers = BACKWARD[padded(dim)]
    block_q, block_k = plan.block_q, plan.block_k
    q_programs = -(-q_len // block_q) * heads * batch
    k_programs = -(-k_len // block_k) * kv_heads * batch
    # the group in one program if that leaves two programs per multiprocessor, else each query head in its own
    span = group if k_programs >= 2 * processors(q.device) else 1
    k_programs *= group // span

    dq, dk, dv = (output(problem, x, *x.shape) for x in (q, k, v))
    parts = [None, None]
    if span < group:
        parts = [output(problem, k, batch, k_len, heads, plan.dim, dtype=torch.float32) for _ in parts]
    size = block_q * plan.dim // WIDTH.value  # rows of the sum that a tile of dQ takes
    rows = output(problem, q, q_programs * 2 * block_q, dtype=torch.float32)
    dq_sum = output(problem, q, q_programs * size, WIDTH.value, dtype=torch.float32)
    sums = descriptor(dq_sum, (size, WIDTH.value)) if plan.dq_stages > 0 else dq_sum
    tile = problem.tile._replace(block_q=block_q, block_k=block_q)
    settings = Launch(block_q, block_k, plan.warps, 1)
    with torch.cuda.device_of(q):
        args = (view(out), view(dout), rows_view(lse2), rows_view(dlse), rows, dq_sum, q_len)
        start(prepare_kernel, q_programs, problem, launch.ROWS, args, (tile,))
        args = (
            tiles_of(q, block_q), tiles_of(k, block_k), tiles_of(v, block_k), tiles_of(dout, block_q),
            descriptor(rows, (block_q,)), sums, tiles_of(dk, block_k), tiles_of(dv, block_k), *parts,
            q_len, k_len, batch, heads, group, span, options.scale,
        )  # fmt: skip
        constants = (problem.rule, plan, k_len % block_k != 0)
        start(backward_kernel, k_programs, problem, settings, args, constants, maxnreg=registers)
        start(finish_kernel, q_programs, problem, launch.ROWS, (dq_sum, view(dq), q_len, options.scale), (tile,))
        if span < group:
            for partial, total in zip(parts, (dk, dv), strict=True):
                launch.launch_group_sum(problem, partial[..., :dim], total)
    dsink = None
    if options.sink is not None:
        delta = rows.view(batch, heads, -1, 2, block_q)[:, :, :, 1].reshape(batch, heads, -1)[:, :, :q_len]
        dsink = launch.sink_gradient(options.sink, lse2, delta)
    return dq, dk, dv, None, None, dsink
