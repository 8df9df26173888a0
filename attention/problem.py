"""A call, as kernels take it: what its shapes decide, found once for all calls that are alike, and its tensors.

start() runs a kernel for it.
"""

from typing import NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from .reference import drop_probability
from .score import Rule, Terms
from .table import Launch, float32_precision, launches_for, way
from .tiles import INTERPRETED, Ragged, Tile, View, padded, pair_view, rows_view, view


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
    dropout = drop_probability(options.dropout)
    return dict(
        ragged=Ragged(options.lengths, options.q_starts, options.k_starts),
        terms=Terms(options.scale, dropout, options.seed, pair_view(options.bias), rows_view(options.gate)),
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
    # a window over all keys is none, and no other kernel; queries may stand before the first key if there are more
    farthest = k_len if options.causal else max(q_len, k_len)
    window = options.window if options.window < farthest else 0
    rule = Rule(options.causal, window, options.softcap, options.dropout > 0, options.sink is not None)
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
