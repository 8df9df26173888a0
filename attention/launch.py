"""How kernels are launched: one table of tile sizes and warps, the choices made from shapes, and the grids.

Nothing is tuned while training: the table is committed, so a run starts at once and repeats itself.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from .backward import Spread, dbias_kernel, delta_kernel, dkdv_kernel, dq_kernel, group_sum_kernel
from .forward import forward_kernel
from .score import LOG2E, Rule, Terms
from .tiles import INTERPRETED, Ragged, Tile, View, aligned, padded, pair_view, rows_view, view

ANY = 2**31  # any way


class Launch(NamedTuple):
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False  # whether whole tiles of what a loop walks over come by TMA, of Hopper GPUs and later


# (kernel, bytes per element) -> rows (largest head dim, longest way, settings); the first row that holds serves.
# The head dim that counts is the larger of q's and v's; the way is how far a program walks: see way(). Where "dkdv" has
# no row, "dk" and "dv" run one after the other: the registers do not hold both sums. Rows for sm_90 were tuned on an
# H200 (benchmarks/LOG.md); the others are the largest that compile without register spills under Triton 3.9
# (tests/test_compile.py) and were not timed.
HOPPER = {
    ("forward", 2): [
        (64, ANY, Launch(64, 64, 4, 3)),
        (128, 256, Launch(64, 32, 4, 3, tma=True)),
        (128, ANY, Launch(64, 64, 4, 3, tma=True)),
        (256, ANY, Launch(128, 64, 8, 2, tma=True)),
    ],
    ("dq", 2): [
        (64, 512, Launch(64, 32, 4, 3)),
        (64, ANY, Launch(128, 64, 4, 3)),
        (128, 512, Launch(64, 64, 4, 2, tma=True)),
        (128, ANY, Launch(128, 64, 8, 3, tma=True)),
        (256, ANY, Launch(128, 32, 8, 3)),
    ],
    ("dkdv", 2): [
        (64, ANY, Launch(64, 64, 4, 3)),
        (128, ANY, Launch(64, 64, 4, 2, tma=True)),
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
        (128, ANY, Launch(32, 16, 4, 1)),
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
        (64, ANY, Launch(64, 32, 4, 3)),
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
        (256, ANY, Launch(32, 16, 8, 1)),
    ],
    ("dq", 4): [
        (64, ANY, Launch(32, 32, 8, 2)),
        (128, ANY, Launch(32, 16, 8, 2)),
        (256, ANY, Launch(32, 16, 8, 1)),
    ],
    ("dkdv", 4): [
        (64, ANY, Launch(16, 32, 8, 2)),
        (128, ANY, Launch(16, 16, 8, 1)),
        (256, ANY, Launch(16, 16, 4, 1)),
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
        launch = INTERPRETER._replace(tma=dim <= 16)  # both ways of loading
        return {"forward": launch, "dq": launch, "dkdv": launch}
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
    """Precision of matmuls, as PyTorch is set, by either of its APIs; without effect on 16-bit dtypes."""
    if dtype != torch.float32:
        return "tf32"
    # the older torch.get_float32_matmul_precision() raises where the newer API was used
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


class Settings(NamedTuple):
    """How a problem starts a kernel: what the functions named *_settings return."""

    kernel: triton.JITFunction
    programs: int
    launch: Launch
    constants: tuple  # its last parameters
    registers: int | None = None  # at most so many of a thread


class Problem(NamedTuple):
    """One call: its sizes, and the arguments that all kernels share.

    What does not depend on the tensors of a call but on their shapes alone is made once, and kept in `made`.
    """

    made: dict
    batch: int  # rows
    sequences: int  # rows of the batch, or packed sequences
    q_len: int  # longest sequence, in queries and keys
    k_len: int
    bounded: bool  # whether sequences have lengths, or bounds in packed rows
    rule: Rule
    tile: Tile  # but for its blocks
    launches: dict  # kernel -> Launch, of launches_for
    device: torch.device
    ragged: Ragged | None  # None as remembered, if it holds tensors
    terms: Terms | None

    def once(self, make, *args):
        """make(self, *args), made once for the problem."""
        key = (make, *args)
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = make(self, *args)
        return found

    def view(self, name, x):
        """View of a [B, T, H, D] or [B, H, T] tensor; None stays None.

        Its strides are looked at once: the tensors of a name have the same in all calls of the problem.
        """
        if x is None:
            return None
        strides = self.made.get(name)
        if strides is None:
            strides = self.made[name] = (view if x.dim() == 4 else rows_view)(x)[1:]
        return View(x, *strides)

    def tile_for(self, launch, **changes):
        """The Tile of a kernel."""
        return self.tile._replace(block_q=launch.block_q, block_k=launch.block_k, **changes)

    def programs(self, tile, axis="q"):
        """One per tile of queries ("q") or keys ("k"), head and sequence."""
        tiles = -(-self.q_len // tile.block_q) if axis == "q" else -(-self.k_len // tile.block_k)
        return tiles * tile.heads * self.sequences


def tma_tiles(x, rows):
    """TMA descriptor of an aligned() [B, T, H, D] tensor in tiles of `rows` positions of a head; past its end are 0."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, padded(x.shape[-1])])


def descriptor(problem, name, x, make, *args):
    """TMA descriptor of a tensor, as make(x, *args) makes it.

    It is made and checked, which takes as long as a launch, for the first tensor of a name: the others of the problem
    differ from that in where they begin.
    """
    known = problem.made.get((name, make))
    if known is None:
        made = make(x, *args)
        known = problem.made[name, make] = type(made), vars(made) | dict(base=None)
    kind, fields = known
    found = object.__new__(kind)
    vars(found).update(fields, base=x)
    return found


def tiles_for(problem, kernel, *tensors):
    """TMA descriptors of the two tensors over which a kernel walks; None and None if it loads by pointers."""
    launch = problem.launches[kernel]
    if not launch.tma or any(0 in x.shape + x.stride() for x in tensors):  # empty, or expanded
        return None, None
    rows = launch.block_k if kernel in ("forward", "dq") else launch.block_q
    return [descriptor(problem, (kernel, i), x, tma_tiles, rows) for i, x in enumerate(tensors)]


BUFFERS_LESS = True  # benchmarks/tune.py turns it off: it wants to know


def start(make_settings, problem, args, *choices):
    """Run a kernel by make_settings(problem, *choices); args, then the constants of these are its parameters in order.

    From the second call on without Triton's own look-up, which takes longer than a small kernel, and its profiler's
    hooks: what Triton looks at in args must be decided by the problem and the choices.
    """
    key = (start, make_settings, *choices)
    started = problem.made.get(key)
    if started is not None:
        compiled, programs, constants = started
        stream = triton.runtime.driver.active.get_current_stream(problem.device.index)
        no_hooks = None, None, None  # nor what they would be told
        compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *no_hooks, *args, *constants)
        return
    kernel, programs, launch, constants, registers = problem.once(make_settings, *choices)
    if INTERPRETED.value:
        kernel[(programs,)](*args, *constants)
        return
    for stages in range(launch.num_stages, 0, -1):
        try:
            compiled = kernel[(programs,)](
                *args, *constants, num_warps=launch.num_warps, num_stages=stages,
                enable_fp_fusion=True,  # Triton 3.10 will no longer do so by itself
                **({} if registers is None else dict(maxnreg=registers)),  # which is NVIDIA's alone
            )  # fmt: skip
            problem.made[key] = compiled, programs, constants
            return
        except OutOfResources:  # features take shared memory too: buffer less ahead
            if stages == 1 or not BUFFERS_LESS:
                raise


PROBLEMS = {}


def describe(q, k, v, options, *others):
    """Problem of a call; options as in ops.forward, others: all further tensors that kernels read."""
    signatures = [  # what of a tensor decides how a kernel is compiled
        None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)
        for x in (q, k, v, *others, *options.tensors)
    ]
    key = (q.device, float32_precision(q.dtype), *signatures, *options.numbers)
    problem = PROBLEMS.get(key)
    if problem is None:
        if len(PROBLEMS) >= 4096:  # lengths that never repeat
            PROBLEMS.clear()
        PROBLEMS[key] = problem = analyse(q, k, v, options)
    if problem.terms is not None:
        return problem
    return problem._replace(**of_tensors(options))


def of_tensors(options):
    """The fields of a Problem that hold the optional tensors of a call."""
    return dict(
        ragged=Ragged(options.lengths, options.q_starts, options.k_starts),
        terms=Terms(options.scale, options.seed, pair_view(options.bias), rows_view(options.gate)),
    )


def analyse(q, k, v, options):
    """Problem of a call, but for its optional tensors."""
    heads, dim = q.shape[2:]
    kv_heads, value_dim = v.shape[2:]
    widest = max(dim, value_dim)
    packed = options.q_starts is not None
    q_len, k_len = q.shape[1], k.shape[1]
    if packed:
        q_len, k_len = min(options.max_q_len, q_len), min(options.max_k_len, k_len)
    rule = Rule(options.causal, options.window, options.softcap, options.dropout)
    without = all(x is None for x in options.tensors)
    return Problem(
        made={},
        batch=q.shape[0],
        sequences=len(options.q_starts) - 1 if packed else q.shape[0],
        q_len=q_len,
        k_len=k_len,
        bounded=options.bounded,
        rule=rule,
        tile=Tile(0, 0, dim, value_dim, heads, heads // kv_heads, float32_precision(q.dtype)),
        launches=launches_for(widest, way(q_len, k_len, rule), q.element_size(), q.device),
        device=q.device,
        **(of_tensors(options) if without else dict(ragged=None, terms=None)),
    )


def empty(like, shape=None, dtype=None):
    """A contiguous tensor, of the shape and dtype of another by default."""
    if shape is None:  # sooner than by its sizes
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return like.new_empty(shape, dtype=dtype or like.dtype)


def output(problem, like, shape=None, fill=0.0, dtype=None):
    """An empty tensor; filled where the kernels may leave out rows that belong to no sequence."""
    if problem.bounded:
        return like.new_full(shape or like.shape, fill, dtype=dtype or like.dtype)
    return empty(like, shape, dtype)


def forward(q, k, v, options):
    """Launch the forward. Shapes as in attention(); returns out [B, Tq, H, Dv] and lse2 [B, H, Tq] float32, base 2."""
    q, k, v = map(aligned, (q, k, v))
    problem = describe(q, k, v, options)
    batch, q_len, heads, dim = q.shape
    value_dim = problem.tile.value_dim
    out = output(problem, q, None if value_dim == dim else (batch, q_len, heads, value_dim))
    lse2 = output(problem, q, (batch, heads, q_len), fill=float("-inf"), dtype=torch.float32)
    sink = None if options.sink is None else options.sink.contiguous()
    if out.numel() > 0:
        with torch.cuda.device_of(q):
            launch_forward(problem, q, k, v, out, lse2, sink)
    return out, lse2


def launch_forward(problem, q, k, v, out, lse2, sink):
    """Fill out and lse2."""
    view = problem.view
    args = (
        view("q", q), view("k", k), view("v", v), *tiles_for(problem, "forward", k, v), view("out", out),
        view("lse2", lse2), sink, problem.q_len, problem.k_len, problem.ragged, *problem.terms,
    )  # fmt: skip
    start(forward_settings, problem, args)


def forward_settings(problem):
    tile = problem.tile_for(launch := problem.launches["forward"])
    return Settings(forward_kernel, problem.programs(tile), launch, (problem.rule, tile))


def backward(q, k, v, out, lse2, dout, dlse, bias_grad, options):
    """Launch the backward; returns dq, dk, dv, dbias, dgate, dsink, with None for those whose input is None.

    dlse [B, H, Tq] float32 is the gradient of the natural-log LSE, or None. dbias is None too unless bias_grad.
    """
    q, k, v, dout = map(aligned, (q, k, v, dout))
    problem = describe(q, k, v, options, out, lse2, dout, dlse)
    view = problem.view
    dq, dk, dv = (output(problem, x) for x in (q, k, v))
    bias, gate, sink = options.bias if bias_grad else None, options.gate, options.sink
    if q.numel() == 0 or k.numel() == 0:
        zeros = [None if x is None else torch.zeros_like(x) for x in (bias, gate, sink)]
        return dq.zero_(), dk.zero_(), dv.zero_(), *zeros
    delta = output(problem, lse2)
    inputs = (
        view("q", q), view("k", k), view("v", v), view("dout", dout), view("lse2", lse2), view("delta", delta)
    )  # fmt: skip
    # The gate's gradient as a query and as a key, each at its key. All gates before the keys of a row learn what these
    # two sums of dS differ by: often that is 0, and then what rounding leaves of it adds up. 16-bit inputs err more.
    sum_type = torch.float64 if q.element_size() > 2 else torch.float32
    q_gate, k_gate = (None if gate is None else empty(gate, dtype=sum_type).zero_() for _ in range(2))

    with torch.cuda.device_of(q):
        launch_dq(problem, inputs, view("out", out), view("dlse", dlse), dq, q_gate)
        launch_dkdv(problem, inputs, dk, dv, k_gate)
        dbias = None if bias is None else launch_dbias(problem, inputs, bias)

    dgate = None if gate is None else (q_gate + k_gate).to(gate.dtype)
    dsink = None if sink is None else sink_gradient(sink, lse2, delta)
    return dq, dk, dv, dbias, dgate, dsink


def sink_gradient(sink, lse2, delta):
    """Of sink [H], from lse2 and delta [B, H, Tq]: its weight has no value, so dS = -weight * delta."""
    weight = torch.exp2(sink.double()[:, None] * LOG2E.value - lse2)
    return -torch.where(lse2 == float("-inf"), 0.0, weight * delta).sum((0, 2)).to(sink.dtype)


def launch_dq(problem, inputs, out, dlse, dq, q_gate):
    """Fill dq [B, Tq, H, D], delta [B, H, Tq], which is among the inputs, and the query half of dgate [B, H, Tk]."""
    _, k, v, dout, _, delta = inputs
    if dq.element_size() > 2:  # in float32 a program for dq has no registers left for delta
        start(delta_settings, problem, (out, dout, dlse, delta, problem.q_len, problem.k_len, problem.ragged))
        out = dlse = None
    args = (
        *inputs, *tiles_for(problem, "dq", k.ptr, v.ptr), out, dlse, problem.view("dq", dq),
        problem.view("q_gate", q_gate), problem.q_len, problem.k_len, problem.ragged, *problem.terms,
    )  # fmt: skip
    start(dq_settings, problem, args)


def delta_settings(problem):
    tile = problem.tile_for(ROWS)
    return Settings(delta_kernel, problem.programs(tile), ROWS, (tile,))


def dq_settings(problem):
    tile = problem.tile_for(launch := problem.launches["dq"])
    return Settings(dq_kernel, problem.programs(tile), launch, (problem.rule, tile))


def launch_dkdv(problem, inputs, dk, dv, k_gate):
    """Fill dk and dv [B, Tk, Hkv, D or Dv], and the key half of dgate [B, H, Tk].

    Grouped queries: either each program loops over the group, or all write float32 partials [B, Tk, H, D + Dv], which
    are added afterwards.
    """
    (batch, k_len, kv_heads, _), heads = dk.shape, problem.tile.heads
    parts = ("dkdv",) if "dkdv" in problem.launches else [x for x in ("dk", "dv") if x in problem.launches]
    partials = False
    if heads != kv_heads:
        programs = problem.once(dkdv_settings, parts[0], kv_heads).programs
        partials = not loops_over_group(problem, programs, problem.device)
    dk_sum, dv_sum = dk, dv
    if partials:
        kv_heads = heads
        dk_sum, dv_sum = (output(problem, x, (batch, k_len, heads, x.shape[-1]), dtype=torch.float32) for x in (dk, dv))
    args = (
        problem.view(("dk", partials), dk_sum), problem.view(("dv", partials), dv_sum),
        problem.view("k_gate", k_gate), problem.q_len, problem.k_len, problem.ragged, *problem.terms,
    )  # fmt: skip
    q, _, _, dout, *_ = inputs
    for outputs in parts:
        tiles = tiles_for(problem, outputs, q.ptr, dout.ptr)
        start(dkdv_settings, problem, (*inputs, *tiles, *args), outputs, kv_heads)
    if partials:
        launch_group_sum(problem, dk_sum, dk)
        launch_group_sum(problem, dv_sum, dv)


def dkdv_settings(problem, outputs, heads):
    """outputs: of dkdv_kernel; heads: over which programs are spread."""
    tile = problem.tile_for(launch := problem.launches[outputs], heads=heads)
    constants = (problem.rule, tile, problem.tile.heads // heads, outputs)
    return Settings(dkdv_kernel, problem.programs(tile, "k"), launch, constants)


def launch_group_sum(problem, partial, total):
    """Fill total [B, Tk, Hkv, D] with the sums over groups of partial [B, Tk, H, D] float32."""
    start(group_sum_settings, problem, (view(partial), view(total), total.shape[1]), total.shape)


def group_sum_settings(problem, shape):
    batch, k_len, kv_heads, dim = shape
    tile = problem.tile_for(ROWS, dim=dim, heads=kv_heads)
    return Settings(group_sum_kernel, triton.cdiv(k_len, tile.block_k) * kv_heads * batch, ROWS, (tile,))


def launch_dbias(problem, inputs, bias):
    """The gradient of bias, in its own broadcast shape."""
    rows, bias_heads, q_len, k_len = bias.shape
    # Packed sequences share an element only if it is broadcast over both axes: then each has its own, added below.
    shared = problem.ragged.q_starts is not None and q_len == 1 and k_len == 1
    dbias = bias.new_zeros(problem.sequences if shared else rows, bias_heads, q_len, k_len, dtype=torch.float32)
    args = (*inputs, pair_view(dbias), problem.q_len, problem.k_len, problem.ragged, *problem.terms)
    start(dbias_settings, problem, args, bias.shape)
    return (dbias.sum(0, keepdim=True) if shared else dbias).to(bias.dtype)


def dbias_settings(problem, shape):
    """shape: of the bias."""
    rows, bias_heads, q_len, k_len = shape
    packed = problem.ragged.q_starts is not None
    spread = Spread(
        batches=problem.sequences // rows if not packed else 1,
        heads=problem.tile.heads // bias_heads,
        queries=q_len == 1,
        keys=k_len == 1,
    )
    tile = problem.tile_for(launch := problem.launches["dq"], heads=bias_heads)
    tiles = 1 if spread.queries else triton.cdiv(problem.q_len, tile.block_q)
    tiles *= 1 if spread.keys else triton.cdiv(problem.k_len, tile.block_k)
    programs = tiles * bias_heads * (problem.sequences if packed else rows)
    return Settings(dbias_kernel, programs, launch, (problem.rule, tile, spread))
