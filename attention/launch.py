"""How kernels are launched: one table of tile sizes and warps, the choices made from shapes, and the grids.

Nothing is tuned while training: the table is committed, so a run starts at once and repeats itself.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton

from .backward import Spread, dbias_kernel, delta_kernel, dkdv_kernel, dq_kernel, group_sum_kernel
from .forward import forward_kernel
from .score import LOG2E, Terms
from .tiles import INTERPRETED, Ragged, Tile, aligned, pair_view, rows_view, view


class Launch(NamedTuple):
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# (kernel, bytes per element) -> {largest head dim: settings}. The head dim that counts is the larger of q's and v's,
# rounded up to a power of two. Sizes for sm_90 compile there without register spills (tests/test_compile.py); up to a
# head dim of 128 two programs fit a multiprocessor. None of them is tuned by time yet.
HOPPER = {
    ("forward", 2): {64: Launch(128, 64, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(64, 32, 4, 2)},
    ("dq", 2): {64: Launch(64, 64, 4, 3), 128: Launch(64, 32, 4, 2), 256: Launch(128, 32, 8, 2)},
    ("dkdv", 2): {64: Launch(32, 128, 8, 2), 128: Launch(32, 64, 8, 2), 256: Launch(32, 32, 8, 2)},
    ("forward", 4): {64: Launch(64, 32, 8, 2), 128: Launch(32, 16, 8, 2), 256: Launch(32, 16, 16, 1)},
    ("dq", 4): {64: Launch(32, 32, 8, 2), 128: Launch(32, 16, 4, 2), 256: Launch(32, 16, 8, 1)},
    ("dkdv", 4): {64: Launch(32, 32, 4, 2), 128: Launch(32, 32, 8, 1), 256: Launch(16, 32, 8, 1)},
}
# Any other chip: what fits the 99 KB of shared memory of the smallest of them.
PORTABLE = {
    ("forward", 2): {64: Launch(64, 64, 4, 2), 128: Launch(128, 32, 8, 2), 256: Launch(64, 32, 8, 1)},
    ("dq", 2): {64: Launch(64, 32, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 32, 4, 1)},
    ("dkdv", 2): {64: Launch(32, 64, 4, 2), 128: Launch(32, 64, 4, 1), 256: Launch(32, 32, 8, 1)},
    ("forward", 4): {64: Launch(64, 32, 8, 2), 128: Launch(32, 16, 8, 2), 256: Launch(32, 16, 16, 1)},
    ("dq", 4): {64: Launch(32, 32, 8, 2), 128: Launch(32, 16, 8, 2), 256: Launch(16, 16, 8, 1)},
    ("dkdv", 4): {64: Launch(32, 32, 8, 2), 128: Launch(16, 16, 8, 1), 256: Launch(16, 16, 8, 2)},
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


class Problem(NamedTuple):
    """One call: its sizes, and the arguments that all kernels share."""

    sequences: int  # rows of the batch, or packed sequences
    q_len: int  # longest sequence, in queries and keys
    k_len: int
    ragged: Ragged
    terms: Terms
    tile: Tile  # but for its blocks
    settings: dict  # kernel -> Launch

    def plan(self, kernel, **changes):
        """The Tile of a kernel and its warps and stages."""
        launch = self.settings[kernel]
        tile = self.tile._replace(block_q=launch.block_q, block_k=launch.block_k, **changes)
        return tile, dict(num_warps=launch.num_warps, num_stages=launch.num_stages)

    def grid(self, tile, axis="q"):
        """One program per tile of queries ("q") or keys ("k"), head and sequence."""
        tiles = triton.cdiv(self.q_len, tile.block_q) if axis == "q" else triton.cdiv(self.k_len, tile.block_k)
        return (tiles * tile.heads * self.sequences,)


def describe(q, k, v, options):
    """Problem of a call; options as in ops.forward."""
    heads, dim = q.shape[2:]
    kv_heads, value_dim = v.shape[2:]
    element_size, widest = q.element_size(), max(dim, value_dim)
    packed = options.q_starts is not None
    return Problem(
        sequences=len(options.q_starts) - 1 if packed else q.shape[0],
        q_len=min(options.max_q_len, q.shape[1]) if packed else q.shape[1],
        k_len=min(options.max_k_len, k.shape[1]) if packed else k.shape[1],
        ragged=Ragged(options.lengths, options.q_starts, options.k_starts),
        terms=Terms(options.scale, options.seed, pair_view(options.bias), rows_view(options.gate)),
        tile=Tile(0, 0, dim, value_dim, heads, heads // kv_heads, float32_precision(q.dtype)),
        settings={kernel: launch_for(kernel, widest, element_size, q.device) for kernel in ("forward", "dq", "dkdv")}
        | {"dbias": launch_for("dq", widest, element_size, q.device), "rows": ROWS},
    )


def output(problem, like, *shape, fill=0.0, dtype=None):
    """An empty tensor; filled where the kernels may leave out rows that belong to no sequence."""
    if any(x is not None for x in problem.ragged):
        return like.new_full(shape, fill, dtype=dtype or like.dtype)
    return like.new_empty(shape, dtype=dtype or like.dtype)


def forward(q, k, v, rule, options):
    """Launch the forward. Shapes as in attention(); returns out [B, Tq, H, Dv] and lse2 [B, H, Tq] float32, base 2."""
    q, k, v = map(aligned, (q, k, v))
    problem = describe(q, k, v, options)
    out = output(problem, q, *q.shape[:3], v.shape[-1])
    lse2 = output(problem, q, q.shape[0], q.shape[2], q.shape[1], fill=float("-inf"), dtype=torch.float32)
    sink = None if options.sink is None else options.sink.contiguous()
    if out.numel() > 0:
        tile, settings = problem.plan("forward")
        with torch.cuda.device_of(q):
            forward_kernel[problem.grid(tile)](
                view(q), view(k), view(v), view(out), rows_view(lse2), sink, problem.q_len, problem.k_len,
                problem.ragged, *problem.terms, rule, tile, **settings,
            )  # fmt: skip
    return out, lse2


def backward(q, k, v, out, lse2, dout, dlse, bias_grad, rule, options):
    """Launch the backward; returns dq, dk, dv, dbias, dgate, dsink, with None for those whose input is None.

    dlse [B, H, Tq] float32 is the gradient of the natural-log LSE, or None. dbias is None too unless bias_grad.
    """
    problem = describe(q, k, v, options)
    dq, dk, dv = (output(problem, x, *x.shape) for x in (q, k, v))
    bias, gate, sink = options.bias if bias_grad else None, options.gate, options.sink
    if q.numel() == 0 or k.numel() == 0:
        zeros = [None if x is None else torch.zeros_like(x) for x in (bias, gate, sink)]
        return dq.zero_(), dk.zero_(), dv.zero_(), *zeros
    q, k, v, dout = map(aligned, (q, k, v, dout))
    sizes = (problem.q_len, problem.k_len, problem.ragged)
    delta = output(problem, lse2, *lse2.shape)
    inputs = (view(q), view(k), view(v), view(dout), rows_view(lse2), rows_view(delta))
    # the gate's gradient as a query and as a key, each at its key
    q_gate, k_gate = (None if gate is None else lse2.new_zeros(q.shape[0], q.shape[2], k.shape[1]) for _ in range(2))

    with torch.cuda.device_of(q):
        tile, settings = problem.plan("rows")
        delta_kernel[problem.grid(tile)](
            view(out), view(dout), rows_view(dlse), rows_view(delta), *sizes, tile, **settings
        )
        tile, settings = problem.plan("dq")
        dq_kernel[problem.grid(tile)](
            *inputs, view(dq), rows_view(q_gate), *sizes, *problem.terms, rule, tile, **settings
        )
        launch_dkdv(problem, inputs, dk, dv, k_gate, rule)
        dbias = None if bias is None else launch_dbias(problem, inputs, bias, rule)

    dgate = dsink = None
    if gate is not None:
        dgate = (q_gate + k_gate).to(gate.dtype)
    if sink is not None:  # its weight has no value, so dS = -weight * delta
        weight = torch.exp(sink.float()[:, None] - lse2 / LOG2E.value)
        dsink = -torch.where(lse2 == float("-inf"), 0.0, weight * delta).sum((0, 2), dtype=torch.float64).to(sink.dtype)
    return dq, dk, dv, dbias, dgate, dsink


def launch_dkdv(problem, inputs, dk, dv, k_gate, rule):
    """Fill dk and dv [B, Tk, Hkv, D or Dv], and the key half of dgate [B, H, Tk].

    Grouped queries: either each program loops over the group, or all write float32 partials [B, Tk, H, D + Dv], which
    are added afterwards.
    """
    (batch, k_len, kv_heads, _), heads = dk.shape, problem.tile.heads
    tile, settings = problem.plan("dkdv")
    programs = problem.grid(tile._replace(heads=kv_heads), "k")[0]
    partials = heads != kv_heads and not loops_over_group(programs, dk.device)
    dk_sum, dv_sum = dk, dv
    if partials:
        dk_sum, dv_sum = (output(problem, x, batch, k_len, heads, x.shape[-1], dtype=torch.float32) for x in (dk, dv))
    tile = tile._replace(heads=heads if partials else kv_heads)
    dkdv_kernel[problem.grid(tile, "k")](
        *inputs, view(dk_sum), view(dv_sum), rows_view(k_gate), problem.q_len, problem.k_len, problem.ragged,
        *problem.terms, rule, tile, SPAN=heads // tile.heads, **settings,
    )  # fmt: skip
    if partials:
        for partial, total in ((dk_sum, dk), (dv_sum, dv)):
            tile, settings = problem.plan("rows", dim=total.shape[-1], heads=kv_heads)
            grid = (triton.cdiv(k_len, tile.block_k) * kv_heads * batch,)
            group_sum_kernel[grid](view(partial), view(total), k_len, tile, **settings)


def launch_dbias(problem, inputs, bias, rule):
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
    tile, settings = problem.plan("dbias", heads=bias_heads)
    tiles = 1 if spread.queries else triton.cdiv(problem.q_len, tile.block_q)
    tiles *= 1 if spread.keys else triton.cdiv(problem.k_len, tile.block_k)
    dbias_kernel[(tiles * bias_heads * programs,)](
        *inputs, pair_view(dbias), problem.q_len, problem.k_len, problem.ragged, *problem.terms,
        rule, tile, SPREAD=spread, **settings,
    )  # fmt: skip
    return (dbias.sum(0, keepdim=True) if shared else dbias).to(bias.dtype)
