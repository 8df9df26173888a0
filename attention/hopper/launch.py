"""Hopper kernels (sm_90): their settings, TMA descriptors and launches. The same results as portable/launch.py, sooner.

Dense batches take their tiles by number, ragged ones (lengths, packed sequences) from lists that a kernel makes of what
is there: ragged.py. What they do not serve goes to the portable kernels: see call_problem() in choose.py.
"""

from functools import lru_cache, partial

import torch

from .. import table
from ..gpu import processors
from ..launcher import Launcher, descriptor
from ..portable import launch as portable
from ..problem import describe, empty, gradients, output
from ..table import Launch, settings_dim
from ..tiles import aligned
from .backward import backward_kernel
from .decay import split_gate
from .forward import hopper_forward_kernel
from .gluon import TensorDescriptor, gl
from .pipeline import PER_CONSUMER, Pipeline
from .ragged import POSITIONS, blank_kernel, end_shape, end_strides, list_kernel
from .rows import WIDTH, finish_kernel, prepare_kernel
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


def reachable(x, ragged):
    """[B, T, H, D] tensor as TMA can read it: copied if it is not aligned, or if it is broadcast.

    Also if sequences are ragged and the rows of the batch do not follow each other: see end_strides().
    """
    apart = ragged and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)
    return x.clone(memory_format=torch.contiguous_format) if 0 in x.stride() or apart else aligned(x)


@lru_cache(None)
def tma_layout(block, dtype):
    """Layout of a block in shared memory."""
    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])


def described(x, block, shape=None, strides=None):
    """TMA descriptor of a tensor in blocks; past its end they hold zeros, and are not written."""
    shape, strides = shape or x.shape, strides or x.stride()
    return TensorDescriptor(x, list(shape), list(strides), list(block), tma_layout(block, x.dtype))


def described_tiles(x, rows, ragged):
    """The same of a [B, T, H, D] tensor in tiles of `rows` positions of one head, at corner()."""
    block = (1, rows, 1, settings_dim(x.shape[-1]))
    return described(x, (1, *block), end_shape(x), end_strides(x)) if ragged else described(x, block)


def tiled(problem, name, x, rows):
    """TMA descriptor of a [B, T, H, D] tensor in tiles of `rows` positions of one head."""
    return descriptor(problem, name, x, described_tiles, rows, problem.is_ragged)


def slots(problem, length, block):
    """How many tiles there can be in rows of a length: of each ragged sequence at most one is not full."""
    if problem.is_ragged:
        return problem.batch * length // block + problem.sequences
    return -(-length // block) * problem.batch


def list_tiles(problem, q, block_q, block_k=None):
    """Lists of the tiles of queries and, if block_k, of keys, int32 [2 + 2 slots]: see list_kernel."""
    axes = (problem.q_len, block_q), (problem.k_len, block_k)
    sizes = [slots(problem, length, block) if block else 0 for length, block in axes]
    lists = [q.new_empty(2 + 2 * size, dtype=torch.int32) if size else None for size in sizes]
    problem.cached(list_launcher, block_q, block_k).start(
        *lists, *sizes, problem.sequences, problem.q_len, problem.k_len, problem.ragged
    )
    return lists


def list_launcher(problem, block_q, block_k):
    return Launcher(list_kernel, 1 if block_k is None else 2, table.STREAMING, (problem.rule, block_q, block_k))


def blank(problem, x, keys=False):
    """Zero those positions of an output or a gradient that the other kernels leave out: of no sequence."""
    problem.cached(blank_launcher, x.shape, x.stride(1), keys).start(
        x, problem.ragged, problem.sequences - problem.batch, problem.q_len, problem.k_len
    )


def blank_launcher(problem, shape, step, keys):
    batch, length, heads, dim = shape
    return Launcher(blank_kernel, -(-length // POSITIONS.value) * batch, table.STREAMING, (heads * dim, step, keys))


def forward(call):
    """As forward() of portable/launch.py."""
    q, k, v = (reachable(x, call.is_ragged) for x in call.split())
    problem = describe(q, k, v, call)
    launcher = problem.cached(forward_launcher)
    _, tile, _ = launcher.constants
    rows, block_k, n_tiles = PER_CONSUMER.value, tile.block_k, -(-problem.q_len // tile.block_q)
    out = empty(q, None if q.shape[3] == v.shape[3] else (*q.shape[:3], v.shape[3]))
    lse2 = output(problem, q, (problem.batch, tile.heads, problem.q_len), fill=float("-inf"), dtype=torch.float32)
    max_logit2 = q.new_full((tile.heads,), float("-inf"), dtype=torch.float32) if call.return_max_logit else None
    scale = max(abs(call.scale), 1e-30)  # 0 would turn the -inf of a hidden key into NaN
    with torch.cuda.device_of(q):
        if problem.is_ragged:
            tile_list, _ = list_tiles(problem, q, tile.block_q)
            blank(problem, out)
        else:
            tile_list = q.new_zeros(1, dtype=torch.int32)
        launcher.start(
            tiled(problem, "q", q, rows), tiled(problem, "k", k, block_k), tiled(problem, "v", v, block_k),
            tiled(problem, "out", out, rows), lse2, max_logit2, call.sink, tile_list, problem.ragged,
            problem.q_len, problem.k_len, n_tiles, tile.heads * problem.batch,
            problem.terms._replace(scale=scale, gate=split_gate(call.decay)),
        )  # fmt: skip
    return (out, lse2, max_logit2)[: 2 + call.return_max_logit]


def forward_launcher(problem):
    dims, rule = tile_dims(problem), problem.rule
    large = rule.dropout or rule.decay or problem.terms.relative is not None
    block_k, pipe = (FORWARD_WITH_MANY_REGISTERS if large else FORWARD)[dims]
    pipe = pipe._replace(negate_scores=problem.terms.scale < 0, ragged=problem.is_ragged)
    block_q = PER_CONSUMER.value * pipe.consumers
    tile = problem.tile._replace(block_q=block_q, block_k=block_k, dim=dims[0], value_dim=dims[1])
    programs = min(slots(problem, problem.q_len, block_q) * tile.heads, processors(problem.device))
    launch = Launch(block_q, block_k, 4, 1)
    return Launcher(hopper_forward_kernel, programs, launch, (rule, tile, pipe), REGISTERS[dims])


def backward_launchers(problem):
    """(Plan, tiles of queries of a head in all sequences together, query heads of a program, three Launchers)."""
    dims, rule = tile_dims(problem), problem.rule
    plan = BACKWARD[dims]._replace(ragged=problem.is_ragged)
    heads, group = problem.tile.heads, problem.tile.group
    programs = -(-problem.k_len // plan.block_k) * problem.batch * (heads // group)
    # the group in one program if that leaves two programs per multiprocessor, else each query head in its own
    members = group if programs >= 2 * processors(problem.device) else 1
    q_slots, k_slots = slots(problem, problem.q_len, plan.block_q), slots(problem, problem.k_len, plan.block_k)
    tile = problem.tile._replace(block_q=plan.block_q, block_k=plan.block_q)
    prepare = Launcher(prepare_kernel, q_slots * heads, table.STREAMING, (rule, tile))
    finish = Launcher(finish_kernel, q_slots * heads, table.STREAMING, (tile,))
    constants = (rule, plan, problem.is_ragged or problem.k_len % plan.block_k != 0)
    launch = Launch(plan.block_q, plan.block_k, plan.warps, 1)
    multiply = Launcher(backward_kernel, k_slots * heads // members, launch, constants, REGISTERS[dims])
    return plan, q_slots, members, prepare, multiply, finish


def backward(call, out, lse2, dout, dlse, wanted, deterministic=None):
    """As backward() of portable/launch.py, which serves if deterministic (None: as torch is set).

    Here dQ and the gradient of gates are added in any order. One kernel computes all gradients, wanted or not.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic:
        call = call._replace(impl="triton")  # what is compiled for it is not for the kernels here
        return portable.backward(call, out, lse2, dout, dlse, wanted)
    q, k, v, out, dout = (reachable(x, call.is_ragged) for x in (*call.split(), out, dout))
    problem = describe(q, k, v, call, out, lse2, dout, dlse)
    view, batch, q_len, k_len = problem.view, problem.batch, problem.q_len, problem.k_len
    heads, group = problem.tile.heads, problem.tile.group
    plan, q_slots, members, prepare, multiply, finish = problem.cached(backward_launchers)
    block_q, block_k = plan.block_q, plan.block_k
    q_list = k_list = None

    # keys before every window are left out too (bounds() in ragged.py): only then is all filled with zeros
    new = partial(output, problem) if problem.rule.window else empty
    (dq, dk, dv), found = gradients(q, k, v, call.kv_heads > 0, empty, new)
    # with a relative_bias even if nobody asks for its gradient: a Launcher stays with a delta that is None, or is not
    delta = None if call.sink is None and call.relative_bias is None else output(problem, lse2)
    gate = call.decay
    dgate = None if gate is None else empty(gate, dtype=torch.float32).zero_()
    parts = [None, None]
    if members < group:
        widths = plan.dim, plan.value_dim
        parts = [new(k, (batch, k_len, heads, width), dtype=torch.float32) for width in widths]
    with torch.cuda.device_of(q):
        if problem.is_ragged:
            q_list, k_list = list_tiles(problem, q, block_q, block_k)
        size = block_q * plan.dim // WIDTH.value  # rows of the sum that a tile of dQ takes
        rows = empty(q, (q_slots * heads * 2 * block_q,), dtype=torch.float32)
        dq_sum = empty(q, (q_slots * heads * size, WIDTH.value), dtype=torch.float32)
        sums = descriptor(problem, "dq_sum", dq_sum, described, (size, WIDTH.value)) if plan.dq_stages > 0 else dq_sum
        where = (q_list, problem.ragged, q_slots, q_len, k_len)
        prepare.start(
            view("out", out), view("dout", dout), view("lse2", lse2), view("dlse", dlse), rows, dq_sum,
            view("delta", delta), view("gate", gate), *where, problem.terms.dropout,
        )  # fmt: skip
        multiply.start(
            tiled(problem, "q", q, block_q), tiled(problem, "k", k, block_k), tiled(problem, "v", v, block_k),
            tiled(problem, "dout", dout, block_q), descriptor(problem, "rows", rows, described, (block_q,)), sums,
            tiled(problem, "dk", dk, block_k), tiled(problem, "dv", dv, block_k), *parts,
            q_len, k_len, batch, heads, group, members, problem.terms._replace(gate=split_gate(gate)), dgate, k_list,
            problem.ragged, q_slots,
        )  # fmt: skip
        finish.start(dq_sum, view("dq", dq), *where, call.scale)
        if call.relative_bias is not None:
            inputs = [view(name, x) for name, x in dict(q=q, k=k, v=v, dout=dout, lse2=lse2, delta=delta).items()]
            found |= portable.launch_distances(problem, inputs, call, wanted)
        if members < group:
            for part, total in zip(parts, (dk, dv), strict=True):
                portable.launch_group_sum(problem, part[..., : total.shape[3]], total)
        if problem.is_ragged:
            blank(problem, dq)
        if problem.is_ragged and not problem.rule.window:
            blank(problem, dk, keys=True)
            blank(problem, dv, keys=True)
    if gate is not None:
        found["decay"] = dgate.to(gate.dtype)
    if call.sink is not None:
        found["sink"] = portable.sink_gradient(call.sink, lse2, delta)
    return found
