"""A call, as kernels take it: what its shapes decide, found once for all calls that are alike, and its tensors."""

from typing import NamedTuple

import torch

from .score import Rule, Terms, terms_of
from .score_mod import function_of
from .table import float32_precision, keys_per_program, launches_for
from .tiles import Ragged, Tile, View, rows_view, view


class Problem(NamedTuple):
    """One pass of a call: its sizes, and the arguments that all kernels share.

    What depends on the shapes of its tensors alone is made for the first of the calls that are alike: see cached() and
    view(), and descriptor() in launcher.py.
    """

    cache: dict  # (function, *arguments) -> what cached() returns
    layouts: dict  # name of a tensor -> what is known of its views and descriptors
    batch: int  # rows
    sequences: int  # rows of the batch, or packed sequences
    q_len: int  # of a row
    k_len: int
    is_ragged: bool  # whether sequences have lengths, or bounds in packed rows
    rule: Rule
    tile: Tile  # but for its blocks
    launches: dict  # kernel -> Launch, of launches_for
    device: torch.device
    ragged: Ragged | None  # these two are of a call; describe() remembers no tensors
    terms: Terms | None

    def cached(self, make, *args):
        """make(self, *args), computed at the first call."""
        key = (make, *args)
        found = self.cache.get(key)
        if found is None:
            found = self.cache[key] = make(self, *args)
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

    def tiles_per_head(self, length, block):
        """How many there are in a row: at most, since of each packed sequence one may not be full."""
        return -(-length // block) if self.ragged.q_starts is None else length // block + self.sequences

    def programs(self, tile, axis="q"):
        """One per tile of queries ("q") or keys ("k") and head."""
        length, block = (self.q_len, tile.block_q) if axis == "q" else (self.k_len, tile.block_k)
        return self.tiles_per_head(length, block) * tile.heads * self.batch


PROBLEMS = {}


def describe(q, k, v, call, *others):
    """Problem of a Call whose q, k and v are aligned; others: all further tensors that kernels read."""
    signatures = [  # what of a tensor decides how a kernel is compiled
        None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)
        for x in (q, k, v, *others, *call.tensors[3:])
    ]
    numbers = (  # Hopper's kernels are compiled for the scale's sign
        call.causal, call.window, call.softcap, call.dropout > 0, call.scale < 0, call.impl, call.kv_heads,
        call.return_max_logit, call.score_mod, *map(specialization, call.score_numbers),
    )  # fmt: skip
    key = (q.device, float32_precision(q.dtype), *signatures, *numbers)
    problem = PROBLEMS.get(key)
    if problem is None:
        if len(PROBLEMS) >= 4096:  # lengths that never repeat
            PROBLEMS.clear()
        PROBLEMS[key] = problem = analyse(q, k, v, call)
    if problem.terms is None or problem.terms.scale != call.scale:
        ragged = Ragged(call.lengths, call.q_starts, call.k_starts, call.prefix_lengths)
        problem = problem._replace(ragged=ragged, terms=terms_of(call))
        if all(x is None for x in call.tensors[3:]) and not call.score_numbers:  # the next call takes it as it is
            PROBLEMS[key] = problem
    return problem


def specialization(number):
    """What Triton compiles a number for."""
    return float if isinstance(number, float) else (number == 1, number % 16 == 0, -(2**31) <= number < 2**31)


def analyse(q, k, v, call):
    """Problem of a call, but for its optional tensors."""
    heads, dim = q.shape[2:]
    kv_heads, value_dim = v.shape[2:]
    widest = max(dim, value_dim)
    q_len, k_len = q.shape[1], k.shape[1]
    # a window over all keys is none, and no other kernel; queries may stand before the first key if there are more
    farthest = k_len if call.causal else max(q_len, k_len)
    window = call.window if call.window is not None and call.window < farthest else 0
    tensors = dict(sink=call.sink, prefix=call.prefix_lengths, alibi=call.alibi_slopes, decay=call.decay)
    given = {name: x is not None for name, x in tensors.items()}
    given["hides"] = call.bias is not None or call.score_mod is not None
    if call.score_mod is not None:
        given |= dict(score_mod=function_of(call.score_mod), score_key=call.score_mod)
    rule = Rule(call.causal, window, call.softcap or 0.0, call.dropout > 0, **given)
    return Problem(
        cache={},
        layouts={},
        batch=q.shape[0],
        sequences=q.shape[0] if call.q_starts is None else call.q_starts.shape[0] - 1,
        q_len=q_len,
        k_len=k_len,
        is_ragged=call.is_ragged,
        rule=rule,
        tile=Tile(0, 0, dim, value_dim, heads, heads // kv_heads, float32_precision(q.dtype)),
        launches=launches_for(widest, keys_per_program(q_len, k_len, rule), q.element_size(), q.device),
        device=q.device,
        ragged=None,
        terms=None,
    )


def empty(like, shape=None, dtype=None):
    """A contiguous tensor, of the shape and dtype of another by default."""
    if shape is None:  # sooner than by its sizes
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return like.new_empty(shape, dtype=dtype or like.dtype)


def gradients(q, k, v, joint, new_q, new_kv):
    """Tensors (dq, dk, dv) for kernels to fill, made by new_q() and new_kv(), and as backward() returns them, by name.

    If joint, they are views of one tensor, which is returned as that of q.
    """
    if not joint:
        found = new_q(q), new_kv(k), new_kv(v)
        return found, dict(zip("qkv", found, strict=True))
    heads = [x.shape[2] for x in (q, k, v)]
    whole = new_kv(q, (*q.shape[:2], sum(heads), q.shape[3]))
    return whole.split(heads, 2), {"q": whole}


def output(problem, like, shape=None, fill=0.0, dtype=None):
    """An empty tensor; filled where the kernels may leave out rows that belong to no sequence."""
    if problem.is_ragged:
        return like.new_full(shape or like.shape, fill, dtype=dtype or like.dtype)
    return empty(like, shape, dtype)
