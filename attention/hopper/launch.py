"""Hopper kernels (sm_90): their settings, TMA descriptors and launches. The same results as portable/launch.py, sooner.

Dense batches take their tiles by number, ragged ones (lengths, packed sequences) from lists that a kernel makes of what
is there: ragged.py. What they do not serve goes to the portable kernels: see call_problem() in choose.py.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial

import torch

from .. import tiles
from ..gpu import processors
from ..launcher import Step, start
from ..portable import launch as portable
from ..problem import apart, at_16_bytes, empty, gradients, output, outputs, place, ragged_of
from ..score import terms_of
from ..table import settings_dim
from ..tiles import rows_view, view
from .backward import backward_kernel
from .decay import split_gate
from .forward import hopper_forward_kernel
from .gluon import TensorDescriptor, gl
from .pipeline import PER_CONSUMER, Pipeline
from .prepare import WIDTH, finish_kernel, prepare_kernel
from .ragged import POSITIONS, blank_kernel, end_shape, end_strides, list_kernel
from .work import Plan

# Head dims of keys and values, as tiles hold them -> settings. All but those of 256 and 128 were tuned on an H200
# (benchmarks/LOG.md). REGISTERS are of a thread, as launched; the partitions of a program then trade them.
REGISTERS = {(64, 64): 128, (128, 128): 168, (256, 256): 168, (256, 128): 168}
FORWARD = {  # keys of a block first
    (64, 64): (128, Pipeline(consumers=3, stages=3, q_stages=2, ping_pong=True)),
    (128, 128): (128, Pipeline(consumers=2, stages=2, q_stages=2, ping_pong=True)),
    (256, 256): (64, Pipeline(consumers=2, stages=2, out_in_q_memory=True)),
    (256, 128): (64, Pipeline(consumers=2, stages=2)),
}
# three consumers with 128 keys would spill
FORWARD_WITH_MANY_REGISTERS = FORWARD | {(64, 64): (64, Pipeline(consumers=3, stages=4, q_stages=2, ping_pong=True))}
BACKWARD = {
    (64, 64): Plan(64, 64, 64, 64, warps=4, stages=2, dq_stages=1, mask_edges_only=True, kv_in_registers=True),
    (128, 128): Plan(64, 128, 128, 128, warps=8, stages=2, dq_stages=2, mask_edges_only=True, dk_before_dq=True),
    (256, 256): Plan(64, 64, 256, 256, warps=8, stages=2, dq_stages=0),
    (256, 128): Plan(64, 64, 256, 128, warps=8, stages=2, dq_stages=1),
}


def tile_dims(problem):
    """Head dims of keys and values as tiles hold them."""
    return settings_dim(problem.tile.dim), settings_dim(problem.tile.value_dim)


def fits(x, is_ragged):
    """Whether TMA can read a [B, T, H, D] tensor, with these strides: not if it is broadcast.

    Nor if sequences are ragged and the rows of the batch do not follow each other: see end_strides().
    """
    follow = not is_ragged or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return tiles.fits(x) and 0 not in x.stride() and follow


@cache
def tma_layout(block, dtype):
    """Layout of a block in shared memory."""
    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))


def described(x, block, shape=None, strides=None):
    """TMA descriptor of a tensor in blocks; past its end they hold zeros, and are not written."""
    shape, strides, layout = list(shape or x.shape), list(strides or x.stride()), tma_layout(block, x.dtype)
    made = object.__new__(TensorDescriptor)  # its constructor checks what fits() ensures: 2 us of each new length
    vars(made).update(base=x, shape=shape, strides=strides, block_shape=list(block), layout=layout)
    return made


def tiled(problem, x, rows):
    """TMA descriptor of a [B, T, H, D] tensor in tiles of `rows` positions of one head, at corner()."""
    block = (1, rows, 1, settings_dim(x.shape[-1]))
    return described(x, (1, *block), end_shape(x), end_strides(x)) if problem.is_ragged else described(x, block)


def slots(problem, length, block):
    """How many tiles there can be in rows of a length: of each ragged sequence at most one is not full."""
    if problem.is_ragged:
        return problem.batch * length // block + problem.sequences
    return -(-length // block) * problem.batch


def new_list(q, size):
    """Memory for list_kernel, for so many tiles."""
    return q.new_empty(2 + 2 * size, dtype=torch.int32)


def list_tiles(problem, call, lists, blocks):
    """Fill lists of new_list(): that of queries and, if it is not None, that of keys."""
    sizes = [0 if x is None else x.shape[0] // 2 - 1 for x in lists]
    args = *lists, *sizes, problem.sequences, problem.q_len, problem.k_len, ragged_of(call)
    return Step(list_kernel, 1 if lists[1] is None else 2, args, (problem.rule, *blocks))


def blank(problem, call, x, keys=False):
    """Zero those positions of an output or a gradient that the other kernels leave out: of no sequence."""
    batch, length, heads, dim = x.shape
    args = x, ragged_of(call), problem.sequences - problem.batch, problem.q_len, problem.k_len
    constants = heads * dim, x.stride(1), keys
    return Step(blank_kernel, -(-length // POSITIONS.value) * batch, args, constants)


@lru_cache(1024)
def counter_of(device, stream):
    """Memory with zeros for counter(), made by another thread: what this one allocates may belong to a CUDA graph."""

    def zeros():
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
            return torch.zeros(1, dtype=torch.int32, device=device)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(zeros).result()


def counter(q):
    """A 0, in which the programs of a forward count their tiles. They leave a 0 there, for the next one of the stream.

    A CUDA graph has its own, since its replays may run beside the stream that recorded it.
    """
    if q.is_cuda and not torch.cuda.is_current_stream_capturing():
        return counter_of(q.device, torch._C._cuda_getCurrentRawStream(q.device.index))
    return q.new_zeros(1, dtype=torch.int32)


def forward(call, problem=None):
    """As forward() of portable/launch.py."""
    call, problem = place(call, problem)
    made = outputs(problem, call, empty)
    if problem.is_ragged:
        size, _, _ = problem.cached(forward_settings, call.relative_bias is not None)
        tile_list = new_list(call.q, size)
    else:
        tile_list = counter(call.q)
    start(problem, forward_steps, call, (*made, tile_list, split_gate(call.decay)))
    return made[: 2 + call.return_max_logit]


def forward_settings(problem, is_relative):
    """(tiles of queries of a head in all sequences together, Tile, Pipeline); is_relative: with a relative_bias."""
    dims, rule = tile_dims(problem), problem.rule
    large = rule.dropout or rule.decay or is_relative or rule.score_mod is not None
    block_k, pipe = (FORWARD_WITH_MANY_REGISTERS if large else FORWARD)[dims]
    block_q = PER_CONSUMER.value * pipe.consumers
    tile = problem.tile._replace(block_q=block_q, block_k=block_k, dim=dims[0], value_dim=dims[1])
    return slots(problem, problem.q_len, block_q), tile, pipe._replace(ragged=problem.is_ragged)


def forward_steps(problem, call, tensors):
    out, lse2, max_logit2, tile_list, gate = tensors
    size, tile, pipe = problem.cached(forward_settings, call.relative_bias is not None)
    (q, k, v), rows = call.split(), PER_CONSUMER.value
    scale = max(abs(call.scale), 1e-30)  # 0 would turn the -inf of a hidden key into NaN
    args = (
        tiled(problem, q, rows), tiled(problem, k, tile.block_k), tiled(problem, v, tile.block_k),
        tiled(problem, out, rows), lse2, max_logit2, call.sink, tile_list, ragged_of(call), problem.q_len,
        problem.k_len, problem.batch,
        terms_of(call)._replace(scale=scale, gate=gate),
    )  # fmt: skip
    constants = problem.rule, tile, pipe._replace(negate_scores=call.scale < 0)
    programs, registers = min(size * tile.heads, processors(problem.device)), REGISTERS[tile.dim, tile.value_dim]
    multiply = Step(hopper_forward_kernel, programs, args, constants, registers=registers)
    if not problem.is_ragged:
        return [multiply]
    blocks = tile.block_q, None
    return [list_tiles(problem, call, (tile_list, None), blocks), blank(problem, call, out), multiply]


def backward_settings(problem):
    """(Plan, tiles of queries and of keys of a head in all sequences together, query heads of a program)."""
    plan = BACKWARD[tile_dims(problem)]._replace(ragged=problem.is_ragged)
    if problem.rule.score_mod is not None:  # which needs the registers
        plan = plan._replace(kv_in_registers=False)
    heads, group = problem.tile.heads, problem.tile.group
    programs = -(-problem.k_len // plan.block_k) * problem.batch * (heads // group)
    # the group in one program if that leaves two programs per multiprocessor, else each query head in its own
    members = group if programs >= 2 * processors(problem.device) else 1
    return plan, slots(problem, problem.q_len, plan.block_q), slots(problem, problem.k_len, plan.block_k), members


def backward(call, out, lse2, dout, dlse, wanted, problem=None):
    """As backward() of portable/launch.py. One kernel computes all gradients, wanted or not.

    dQ and the gradient of gates are added in any order.
    """
    call, problem = place(call, problem)
    out, dout, lse2, dlse = problem.placed(out), problem.placed(dout), at_16_bytes(lse2), at_16_bytes(dlse)
    plan, q_slots, k_slots, members = problem.cached(backward_settings)
    q, gate, heads, lists, parts = call.q, call.decay, problem.tile.heads, (None, None), (None, None)

    # keys before every window are left out too (bounds() in ragged.py): only then is all filled with zeros
    new = partial(output, problem) if problem.rule.window else empty
    grads = gradients(call, empty, new)
    delta = output(problem, lse2) if wanted["relative_bias"] else None
    dsink = None
    if wanted["sink"]:  # of each tile; where none is, 0
        dsink = (q.new_zeros if problem.is_ragged else q.new_empty)((heads, q_slots), dtype=torch.float32)
    dgate = None if gate is None else empty(gate, dtype=torch.float32).zero_()
    if members < problem.tile.group:
        shape = problem.batch, problem.k_len, heads
        parts = [new(q, (*shape, width), dtype=torch.float32) for width in (plan.dim, plan.value_dim)]
    if problem.is_ragged:
        lists = new_list(q, q_slots), new_list(q, k_slots)
    sums = q.new_empty(q_slots * heads * plan.block_q * (2 + plan.dim), dtype=torch.float32)  # stats and dq_sum
    inputs = dout, lse2, delta
    tensors = *inputs, out, dlse, dsink, dgate, split_gate(gate), sums, *lists, *parts, *grads.values()
    start(problem, backward_steps, call, tensors)
    grads |= portable.distance_gradients(problem, call, inputs, wanted)
    if gate is not None:
        grads["decay"] = dgate.to(gate.dtype)
    if dsink is not None:
        grads["sink"] = dsink.sum(1).to(call.sink.dtype)
    return grads


def backward_steps(problem, call, tensors):
    dout, lse2, delta, out, dlse, dsink, dgate, gate, sums, q_list, k_list, dk_part, dv_part, *dqkv = tensors
    plan, q_slots, k_slots, members = problem.cached(backward_settings)
    (q, k, v), (dq, dk, dv) = call.split(), apart(call, dqkv)
    rule, heads, block_q, block_k = problem.rule, problem.tile.heads, plan.block_q, plan.block_k
    stats, dq_sum = sums.split((q_slots * heads * block_q * 2, q_slots * heads * block_q * plan.dim))
    dq_sum = dq_sum.view(-1, WIDTH.value)
    summed = described(dq_sum, (block_q * plan.dim // WIDTH.value, WIDTH.value)) if plan.dq_stages > 0 else dq_sum
    ragged, terms, sizes = ragged_of(call), terms_of(call), (problem.q_len, problem.k_len)
    where = q_list, ragged, q_slots, *sizes
    tile = problem.tile._replace(block_q=block_q, block_k=block_q)
    before = (
        view(out), view(dout), rows_view(lse2), rows_view(dlse), stats, dq_sum, rows_view(delta), rows_view(call.decay),
        call.sink, dsink, *where, terms.dropout,
    )  # fmt: skip
    args = (
        tiled(problem, q, block_q), tiled(problem, k, block_k), tiled(problem, v, block_k),
        tiled(problem, dout, block_q), described(stats, (block_q,)), summed, tiled(problem, dk, block_k),
        tiled(problem, dv, block_k), dk_part, dv_part, *sizes, problem.batch, heads, problem.tile.group, members,
        terms._replace(gate=gate), dgate, k_list, ragged, q_slots,
    )  # fmt: skip
    constants = rule, plan, problem.is_ragged or problem.k_len % block_k != 0
    settings = dict(warps=plan.warps, registers=REGISTERS[plan.dim, plan.value_dim])
    steps = [
        Step(prepare_kernel, q_slots * heads, before, (rule, tile)),
        Step(backward_kernel, k_slots * heads // members, args, constants, **settings),
        Step(finish_kernel, q_slots * heads, (dq_sum, view(dq), *where, call.scale), (tile,)),
    ]
    if dk_part is not None:
        pairs = (dk_part, dk), (dv_part, dv)
        steps += [portable.group_sum(problem, part[..., : total.shape[3]], total) for part, total in pairs]
    if problem.is_ragged:
        steps = [list_tiles(problem, call, (q_list, k_list), (block_q, block_k)), *steps, blank(problem, call, dq)]
    if problem.is_ragged and not rule.window:
        steps += [blank(problem, call, x, keys=True) for x in (dk, dv)]
    return steps
