"""A call, as kernels take it: what its shapes decide, found once for all calls that are alike, and its tensors."""

from typing import NamedTuple

import torch

from .reference import drop_probability
from .score import Rule, Terms
from .table import float32_precision, launches_for, way
from .tiles import Ragged, Tile, View, pair_view, per_head_view, rows_view, view


class Problem(NamedTuple):
    """One pass of a call: its sizes, and the arguments that all kernels share.

    What depends on the shapes of its tensors alone is made for the first of the calls that are alike: see once() and
    view(), and descriptor() in launcher.py.
    """

    made: dict  # (function, *arguments) -> what once() has made
    layouts: dict  # name of a tensor -> what is known of its views and descriptors
    batch: int  # rows
    sequences: int  # rows of the batch, or packed sequences
    q_len: int  # longest sequence, in queries and keys
    k_len: int
    bounded: bool  # whether sequences have lengths, or bounds in packed rows
    rule: Rule
    tile: Tile  # but for its blocks
    launches: dict  # kernel -> Launch, of launches_for
    device: torch.device
    ragged: Ragged | None  # of a call with optional tensors, describe() does not remember these two
    terms: Terms | None

    def once(self, make, *args):
        """make(self, *args), made once."""
        key = (make, *args)
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = make(self, *args)
        return found

    def view(self, name, x):
        """View of a [B, T, H, D] or [B, H, T] tensor; None stays None. A name has the same strides in all calls."""
        if x is None:
            return None
        strides = self.layouts.get(name)
        if strides is None:
            strides = self.layouts[name] = (view if x.dim() == 4 else rows_view)(x)[1:]
        return View(x, *strides)

    def tile_for(self, launch, **changes):
        """The Tile of a kernel."""
        return self.tile._replace(block_q=launch.block_q, block_k=launch.block_k, **changes)

    def programs(self, tile, axis="q"):
        """One per tile of queries ("q") or keys ("k"), head and sequence."""
        tiles = -(-self.q_len // tile.block_q) if axis == "q" else -(-self.k_len // tile.block_k)
        return tiles * tile.heads * self.sequences


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
        ragged=Ragged(options.lengths, options.q_starts, options.k_starts, options.prefix_lengths),
        terms=Terms(
            options.scale,
            dropout,
            options.seed,
            pair_view(options.bias),
            rows_view(options.gate),
            per_head_view(options.alibi_slopes),
        ),
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
    tensors = dict(prefix=options.prefix_lengths, alibi=options.alibi_slopes, decay=options.gate)
    given = {name: x is not None for name, x in tensors.items()}
    rule = Rule(options.causal, window, options.softcap, options.dropout > 0, options.sink is not None, **given)
    without = all(x is None for x in options.tensors)
    return Problem(
        made={},
        layouts={},
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


def gradients(q, k, v, joint, new_q, new_kv):
    """Tensors (dq, dk, dv) for kernels to fill, made by new_q() and new_kv(), and how backward() returns them.

    If joint, they are views of one tensor, and returned as (this tensor, None, None).
    """
    if not joint:
        found = new_q(q), new_kv(k), new_kv(v)
        return found, found
    heads = [x.shape[2] for x in (q, k, v)]
    whole = new_kv(q, (*q.shape[:2], sum(heads), q.shape[3]))
    return whole.split(heads, 2), (whole, None, None)


def output(problem, like, shape=None, fill=0.0, dtype=None):
    """An empty tensor; filled where the kernels may leave out rows that belong to no sequence."""
    if problem.bounded:
        return like.new_full(shape or like.shape, fill, dtype=dtype or like.dtype)
    return empty(like, shape, dtype)
