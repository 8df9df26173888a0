"""How kernels are launched: one table of tile sizes and warps, the choices made from shapes, and the grids.

Nothing is tuned while training: the table is committed, so a run starts at once and repeats itself.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from .backward import Spread, dbias_kernel, delta_kernel, dkdv_kernel, dq_kernel, group_sum_kernel
from .forward import forward_kernel
from .score import LOG2E, Rule, Terms
from .tiles import INTERPRETED, Ragged, Tile, aligned, pair_view, rows_view, view

ANY = 2**31  # any way


class Launch(NamedTuple):
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# (kernel, bytes per element) -> rows (largest head dim, longest way, settings); the first row that holds serves.
# The head dim that counts is the larger of q's and v's; the way is how far a program walks: see way(). Where "dkdv" has
# no row, "dk" and "dv" run one after the other: the registers do not hold both sums. Rows for sm_90 were tuned on an
# H200 (benchmarks/LOG.md); the others are the largest that compile without register spills under Triton 3.9
# (tests/test_compile.py) and were not timed.
HOPPER = {
    ("forward", 2): [
        (64, ANY, Launch(64, 64, 4, 3)),
        (128, 512, Launch(64, 32, 4, 3)),
        (128, ANY, Launch(64, 64, 4, 3)),
        (256, ANY, Launch(128, 64, 8, 2)),
    ],
    ("dq", 2): [
        (64, 512, Launch(64, 32, 4, 3)),
        (64, ANY, Launch(128, 64, 4, 3)),
        (128, 512, Launch(64, 64, 4, 2)),
        (128, ANY, Launch(128, 64, 8, 3)),
        (256, ANY, Launch(128, 32, 8, 3)),
    ],
    ("dkdv", 2): [
        (64, ANY, Launch(32, 64, 4, 3)),
        (128, 1024, Launch(64, 64, 4, 2)),
        (128, ANY, Launch(64, 128, 8, 3)),
    ],
    ("dk", 2): [(256, ANY, Launch(32, 128, 8, 3))],
    ("dv", 2): [(256, ANY, Launch(64, 128, 8, 2))],
    ("forward", 4): [
        (64, ANY, Launch(32, 32, 4, 2)),
        (128, ANY, Launch(32, 16, 8, 2)),
        (256, ANY, Launch(16, 16, 4, 2)),
    ],
    ("dq", 4): [
        (64, ANY, Launch(32, 32, 4, 2)),
        (128, ANY, Launch(32, 16, 4, 2)),
        (256, ANY, Launch(16, 16, 4, 1)),
    ],
    ("dkdv", 4): [
        (64, ANY, Launch(32, 32, 8, 2)),
        (128, ANY, Launch(32, 32, 8, 1)),
        (256, ANY, Launch(16, 16, 4, 1)),
    ],
}
# Any other chip: what fits the 99 KB of shared memory of the smallest of them.
PORTABLE = {
    ("forward", 2): [
        (64, ANY, Launch(64, 64, 4, 2)),
        (128, ANY, Launch(128, 32, 8, 2)),
        (256, ANY, Launch(64, 32, 8, 1)),
    ],
    ("dq", 2): [
        (64, ANY, Launch(64, 32, 4, 2)),
        (128, ANY, Launch(64, 32, 4, 2)),
        (256, ANY, Launch(32, 32, 4, 1)),
    ],
    ("dkdv", 2): [
        (64, ANY, Launch(32, 64, 4, 2)),
        (128, ANY, Launch(32, 64, 4, 1)),
        (256, ANY, Launch(32, 32, 8, 1)),
    ],
    ("forward", 4): [
        (64, ANY, Launch(64, 32, 8, 2)),
        (128, ANY, Launch(32, 16, 8, 2)),
        (256, ANY, Launch(32, 16, 16, 1)),
    ],
    ("dq", 4): [
        (64, ANY, Launch(32, 32, 8, 2)),
        (128, ANY, Launch(32, 16, 8, 2)),
        (256, ANY, Launch(32, 16, 8, 1)),
    ],
    ("dkdv", 4): [
        (64, ANY, Launch(16, 32, 8, 2)),
        (128, ANY, Launch(16, 16, 8, 1)),
        (256, ANY, Launch(16, 16, 8, 1)),
    ],
}
CHIPS = {(9, 0): HOPPER}
# Small and unequal, so that a short sequence in the interpreter meets many tiles and a swapped axis shows.
INTERPRETER = Launch(32, 16, 1, 1)
# Bandwidth-bound kernels: rows per program.
ROWS = Launch(32, 32, 4, 1)


def way(q_len, k_len, rule):
    """How far a program walks: the longest sequence or the window; half of it where a mask leaves a triangle."""
    longest = max(q_len, k_len)
    if rule.window > 0:
        longest = min(longest, rule.window)
    return longest // 2 if rule.causal or rule.window > 0 else longest


@lru_cache(4096)
def launches_for(dim, way, element_size, device):
    """{kernel: Launch} for the larger head dim, the way, bytes per element and device."""
    if INTERPRETED.value:
        return {kernel: INTERPRETER for kernel in ("forward", "dq", "dkdv")}
    chosen = {}
    for (kernel, size), rows in CHIPS.get(torch.cuda.get_device_capability(device), PORTABLE).items():
        holds = [launch for max_dim, max_way, launch in rows if dim <= max_dim and way <= max_way]
        if size == element_size and holds:
            chosen[kernel] = holds[0]
    return chosen


@cache
def processors(device):
    """Multiprocessors of the device; 1 for the interpreter, which runs programs one by one."""
    return 1 if INTERPRETED.value else torch.cuda.get_device_properties(device).multi_processor_count


def loops_over_group(problem, programs, device):
    """Whether dk/dv loops over the query group in each of `programs` programs (no extra memory) or writes partials.

    Looping is right in short sequences, if there are programs enough to keep every multiprocessor busy to the end:
    under a causal mask some take much longer than others. Measured on an H200, see benchmarks/LOG.md.
    """
    enough = 8 if problem.rule.causal else 2
    return max(problem.q_len, problem.k_len) <= 1024 and programs >= enough * processors(device)


def float32_precision(dtype):
    """Precision of matmuls, as torch.set_float32_matmul_precision asks; without effect on 16-bit dtypes."""
    return "ieee" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


class Problem(NamedTuple):
    """One call: its sizes, and the arguments that all kernels share."""

    compiled: dict  # (kernel, Launch, constants) -> compiled kernel
    sequences: int  # rows of the batch, or packed sequences
    q_len: int  # longest sequence, in queries and keys
    k_len: int
    ragged: Ragged
    rule: Rule
    terms: Terms
    tile: Tile  # but for its blocks
    launches: dict  # kernel -> Launch, of launches_for

    def tile_for(self, launch, **changes):
        """The Tile of a kernel."""
        return self.tile._replace(block_q=launch.block_q, block_k=launch.block_k, **changes)

    def programs(self, tile, axis="q"):
        """One per tile of queries ("q") or keys ("k"), head and sequence."""
        tiles = -(-self.q_len // tile.block_q) if axis == "q" else -(-self.k_len // tile.block_k)
        return tiles * tile.heads * self.sequences


BUFFERS_LESS = True  # benchmarks/tune.py turns it off: it wants to know


def start(kernel, programs, problem, launch, args, constants, **options):
    """Run a kernel; from the second call on without Triton's own look-up, which takes longer than a small kernel.

    args, then constants are its parameters in order. What Triton looks at in args must be decided by the problem.
    options are further ones of the compiler, the same whenever launch and constants are.
    """
    if INTERPRETED.value:
        kernel[(programs,)](*args, *constants)
        return
    key = (kernel.__name__, launch, constants)
    compiled = problem.compiled.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*args, *constants)
        return
    for stages in range(launch.num_stages, 0, -1):
        try:
            problem.compiled[key] = kernel[(programs,)](
                *args, *constants, num_warps=launch.num_warps, num_stages=stages,
                enable_fp_fusion=True,  # Triton 3.10 will no longer do so by itself
                **options,
            )  # fmt: skip
            return
        except OutOfResources:  # features take shared memory too: buffer less ahead
            if stages == 1 or not BUFFERS_LESS:
                raise


def signature(x):
    """What of a tensor decides how a kernel is compiled."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


PROBLEMS = {}


def describe(q, k, v, options, *others):
    """Problem of a call; options as in ops.forward, others: all further tensors that kernels read."""
    tensors = map(signature, (q, k, v, *others, *options.tensors))
    key = (q.device, float32_precision(q.dtype), *tensors, *options.numbers)
    problem = PROBLEMS.get(key)
    if problem is None:
        if len(PROBLEMS) >= 4096:  # lengths that never repeat
            PROBLEMS.clear()
        PROBLEMS[key] = problem = analyse(q, k, v, options)
    return problem._replace(
        ragged=Ragged(options.lengths, options.q_starts, options.k_starts),
        terms=Terms(options.scale, options.seed, pair_view(options.bias), rows_view(options.gate)),
    )


def analyse(q, k, v, options):
    """Problem of a call, but for its tensors."""
    heads, dim = q.shape[2:]
    kv_heads, value_dim = v.shape[2:]
    widest = max(dim, value_dim)
    packed = options.q_starts is not None
    q_len, k_len = q.shape[1], k.shape[1]
    if packed:
        q_len, k_len = min(options.max_q_len, q_len), min(options.max_k_len, k_len)
    rule = Rule(options.causal, options.window, options.softcap, options.dropout)
    return Problem(
        compiled={},
        sequences=len(options.q_starts) - 1 if packed else q.shape[0],
        q_len=q_len,
        k_len=k_len,
        ragged=None,
        rule=rule,
        terms=None,
        tile=Tile(0, 0, dim, value_dim, heads, heads // kv_heads, float32_precision(q.dtype)),
        launches=launches_for(widest, way(q_len, k_len, rule), q.element_size(), q.device),
    )


def output(problem, like, *shape, fill=0.0, dtype=None):
    """An empty tensor; filled where the kernels may leave out rows that belong to no sequence."""
    if problem.ragged.lengths is not None or problem.ragged.q_starts is not None:
        return like.new_full(shape, fill, dtype=dtype or like.dtype)
    if shape == like.shape:  # sooner than by its sizes
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return like.new_empty(shape, dtype=dtype or like.dtype)


def forward(q, k, v, options):
    """Launch the forward. Shapes as in attention(); returns out [B, Tq, H, Dv] and lse2 [B, H, Tq] float32, base 2."""
    q, k, v = map(aligned, (q, k, v))
    problem = describe(q, k, v, options)
    out = output(problem, q, *q.shape[:3], v.shape[-1])
    lse2 = output(problem, q, q.shape[0], q.shape[2], q.shape[1], fill=float("-inf"), dtype=torch.float32)
    sink = None if options.sink is None else options.sink.contiguous()
    if out.numel() > 0:
        with torch.cuda.device_of(q):
            launch_forward(problem, q, k, v, out, lse2, sink)
    return out, lse2


def launch_forward(problem, q, k, v, out, lse2, sink):
    """Fill out and lse2."""
    tile = problem.tile_for(launch := problem.launches["forward"])
    args = (
        view(q), view(k), view(v), view(out), rows_view(lse2), sink, problem.q_len, problem.k_len, problem.ragged,
        *problem.terms,
    )  # fmt: skip
    start(forward_kernel, problem.programs(tile), problem, launch, args, (problem.rule, tile))


def backward(q, k, v, out, lse2, dout, dlse, bias_grad, options):
    """Launch the backward; returns dq, dk, dv, dbias, dgate, dsink, with None for those whose input is None.

    dlse [B, H, Tq] float32 is the gradient of the natural-log LSE, or None. dbias is None too unless bias_grad.
    """
    q, k, v, dout = map(aligned, (q, k, v, dout))
    problem = describe(q, k, v, options, out, lse2, dout, dlse)
    dq, dk, dv = (output(problem, x, *x.shape) for x in (q, k, v))
    bias, gate, sink = options.bias if bias_grad else None, options.gate, options.sink
    if q.numel() == 0 or k.numel() == 0:
        zeros = [None if x is None else torch.zeros_like(x) for x in (bias, gate, sink)]
        return dq.zero_(), dk.zero_(), dv.zero_(), *zeros
    delta = output(problem, lse2, *lse2.shape)
    inputs = (view(q), view(k), view(v), view(dout), rows_view(lse2), rows_view(delta))
    # the gate's gradient as a query and as a key, each at its key
    q_gate, k_gate = (None if gate is None else lse2.new_zeros(q.shape[0], q.shape[2], k.shape[1]) for _ in range(2))

    with torch.cuda.device_of(q):
        tile = problem.tile_for(ROWS)
        args = (
            view(out), view(dout), rows_view(dlse), rows_view(delta), problem.q_len, problem.k_len, problem.ragged
        )  # fmt: skip
        start(delta_kernel, problem.programs(tile), problem, ROWS, args, (tile,))
        launch_dq(problem, inputs, dq, q_gate)
        launch_dkdv(problem, inputs, dk, dv, k_gate)
        dbias = None if bias is None else launch_dbias(problem, inputs, bias)

    dgate = None if gate is None else (q_gate + k_gate).to(gate.dtype)
    dsink = None if sink is None else sink_gradient(sink, lse2, delta)
    return dq, dk, dv, dbias, dgate, dsink


def sink_gradient(sink, lse2, delta):
    """Of sink [H], from lse2 and delta [B, H, Tq]: its weight has no value, so dS = -weight * delta."""
    weight = torch.exp2(sink.double()[:, None] * LOG2E.value - lse2)
    return -torch.where(lse2 == float("-inf"), 0.0, weight * delta).sum((0, 2)).to(sink.dtype)


def launch_dq(problem, inputs, dq, q_gate):
    """Fill dq [B, Tq, H, D] and the query half of dgate [B, H, Tk]."""
    tile = problem.tile_for(launch := problem.launches["dq"])
    args = (*inputs, view(dq), rows_view(q_gate), problem.q_len, problem.k_len, problem.ragged, *problem.terms)
    start(dq_kernel, problem.programs(tile), problem, launch, args, (problem.rule, tile))


def launch_dkdv(problem, inputs, dk, dv, k_gate):
    """Fill dk and dv [B, Tk, Hkv, D or Dv], and the key half of dgate [B, H, Tk].

    Grouped queries: either each program loops over the group, or all write float32 partials [B, Tk, H, D + Dv], which
    are added afterwards.
    """
    (batch, k_len, kv_heads, _), heads = dk.shape, problem.tile.heads
    parts = ("dkdv",) if "dkdv" in problem.launches else [x for x in ("dk", "dv") if x in problem.launches]
    partials = False
    if heads != kv_heads:
        tile = problem.tile_for(problem.launches[parts[0]], heads=kv_heads)
        partials = not loops_over_group(problem, problem.programs(tile, "k"), dk.device)
    dk_sum, dv_sum = dk, dv
    if partials:
        dk_sum, dv_sum = (output(problem, x, batch, k_len, heads, x.shape[-1], dtype=torch.float32) for x in (dk, dv))
    for outputs in parts:
        tile = problem.tile_for(launch := problem.launches[outputs], heads=heads if partials else kv_heads)
        args = (
            *inputs, view(dk_sum), view(dv_sum), rows_view(k_gate), problem.q_len, problem.k_len, problem.ragged,
            *problem.terms,
        )  # fmt: skip
        constants = (problem.rule, tile, heads // tile.heads, outputs)
        start(dkdv_kernel, problem.programs(tile, "k"), problem, launch, args, constants)
    if partials:
        launch_group_sum(problem, dk_sum, dk)
        launch_group_sum(problem, dv_sum, dv)


def launch_group_sum(problem, partial, total):
    """Fill total [B, Tk, Hkv, D] with the sums over groups of partial [B, Tk, H, D] float32."""
    batch, k_len, kv_heads, dim = total.shape
    tile = problem.tile_for(ROWS, dim=dim, heads=kv_heads)
    programs = triton.cdiv(k_len, tile.block_k) * kv_heads * batch
    start(group_sum_kernel, programs, problem, ROWS, (view(partial), view(total), k_len), (tile,))


def launch_dbias(problem, inputs, bias):
    """The gradient of bias, in its own broadcast shape."""
    rows, bias_heads, q_len, k_len = bias.shape
    packed = problem.ragged.q_starts is not None
    spread = Spread(
        batches=problem.sequences // rows if not packed else 1,
        heads=problem.tile.heads // bias_heads,
        queries=q_len == 1,
        keys=k_len == 1,
    )
    programs = problem.sequences if packed else rows
    # Packed sequences share an element only if it is broadcast over both axes: then each has its own, added below.
    shared = packed and spread.queries and spread.keys
    dbias = bias.new_zeros(programs if shared else rows, bias_heads, q_len, k_len, dtype=torch.float32)
    tile = problem.tile_for(launch := problem.launches["dq"], heads=bias_heads)
    tiles = 1 if spread.queries else triton.cdiv(problem.q_len, tile.block_q)
    tiles *= 1 if spread.keys else triton.cdiv(problem.k_len, tile.block_k)
    args = (*inputs, pair_view(dbias), problem.q_len, problem.k_len, problem.ragged, *problem.terms)
    start(dbias_kernel, tiles * bias_heads * programs, problem, launch, args, (problem.rule, tile, spread))
    return (dbias.sum(0, keepdim=True) if shared else dbias).to(bias.dtype)
