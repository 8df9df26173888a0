"""A call, as kernels take it: what its shapes and options decide, found once for all calls that are alike."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .features import OP_ARGUMENTS, TENSORS
from .ops import backend
from .score import Rule
from .score_mod import function_of
from .table import Launch, float32_precision, keys_per_program, launches_for
from .tiles import Ragged, Tile


class Problem(NamedTuple):
    """Calls that are alike: they differ only in where their tensors lie, and in what these hold."""

    cache: dict  # what was made for these calls, by cached() and by start() of launcher.py
    fits: Callable  # fits(tensor, is_ragged) of a [B, T, H, D] tensor: whether kernels take its strides
    all_fit: bool  # q, k and v do
    batch: int  # rows
    sequences: int  # rows of the batch, or packed sequences
    q_len: int  # of a row
    k_len: int
    is_ragged: bool  # whether sequences have lengths, or bounds in packed rows
    is_packed: bool
    rule: Rule
    tile: Tile  # but for its blocks
    launches: dict[str, Launch]  # kernel -> Launch, of launches_for
    device: torch.device

    def cached(self, make, *args):
        """make(self, *args), computed at the first call."""
        made = self.cache.get((make, *args))
        if made is None:
            made = self.cache[make, *args] = make(self, *args)
        return made

    def tile_for(self, launch, **changes):
        """The Tile of a kernel."""
        return self.tile._replace(block_q=launch.block_q, block_k=launch.block_k, **changes)

    def tiles_per_head(self, length, block):
        """How many there are in a row: at most, since of each packed sequence one may not be full."""
        return length // block + self.sequences if self.is_packed else -(-length // block)

    def programs(self, tile, axis="q"):
        """One per tile of queries ("q") or keys ("k") and head."""
        length, block = (self.q_len, tile.block_q) if axis == "q" else (self.k_len, tile.block_k)
        return self.tiles_per_head(length, block) * tile.heads * self.batch

    def placed(self, x):
        """A [B, T, H, D] tensor or None as kernels take it, copied if its strides do not fit, or not its address."""
        if x is None or (x.data_ptr() % 16 == 0 and self.fits(x, self.is_ragged)):
            return x
        return x.clone(memory_format=torch.contiguous_format)


PROBLEMS = {}


def problem_of(call):
    """The Problem of a Call, as the ops take it. attention() keeps what it finds here."""
    tensors = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call.tensors]
    others = *call.score_numbers, *call[TENSORS + 2 : OP_ARGUMENTS]
    signature = float32_precision(call.q.dtype), *tensors, *others, *map(type, others)  # since True == 1
    problem = PROBLEMS.get(signature)
    if problem is None:
        if len(PROBLEMS) >= 512:  # lengths that never repeat
            PROBLEMS.clear()
        PROBLEMS[signature] = problem = analyse(call, backend(call.impl).fits)
    return problem


def analyse(call, fits):
    """The Problem of a Call that is the first of its kind."""
    q, k, v = call.split()
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
        given |= dict(score_mod=function_of(call.score_mod), score_label=call.score_mod)
    rule = Rule(call.causal, window, call.softcap or 0.0, call.dropout > 0, **given)
    return Problem(
        cache={},
        fits=fits,
        all_fit=all(x is None or fits(x, call.is_ragged) for x in call[:3]),
        batch=q.shape[0],
        sequences=q.shape[0] if call.q_starts is None else call.q_starts.shape[0] - 1,
        q_len=q_len,
        k_len=k_len,
        is_ragged=call.is_ragged,
        is_packed=call.q_starts is not None,
        rule=rule,
        tile=Tile(0, 0, dim, value_dim, heads, heads // kv_heads, float32_precision(q.dtype)),
        launches=launches_for(widest, keys_per_program(q_len, k_len, rule), q.element_size(), q.device),
        device=q.device,
    )


def place(call, problem):
    """A Call and its Problem (None: not yet known), with copies of tensors that do not lie as kernels take them."""
    problem, tensors = problem or problem_of(call), call.tensors
    if problem.all_fit and not any([x is not None and x.data_ptr() % 16 for x in tensors]):
        return call, problem
    call = call.with_tensors([*map(problem.placed, tensors[:3]), *map(at_16_bytes, tensors[3:])])
    return call, problem_of(call)


def at_16_bytes(x):
    """Any tensor or None, copied if it does not start at a multiple of 16 bytes."""
    return x if x is None or x.data_ptr() % 16 == 0 else x.clone()


def ragged_of(call):
    return Ragged(call.lengths, call.q_starts, call.k_starts, call.prefix_lengths)


def empty(like, shape=None, dtype=None):
    """A contiguous tensor, of the shape and dtype of another by default."""
    if shape is None:  # sooner than by its sizes
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return like.new_empty(shape, dtype=dtype or like.dtype)


def output(problem, like, shape=None, fill=0.0, dtype=None):
    """An empty tensor; filled where the kernels may leave out rows that belong to no sequence."""
    if problem.is_ragged:
        return like.new_full(shape or like.shape, fill, dtype=dtype or like.dtype)
    return empty(like, shape, dtype)


def outputs(problem, call, new_out):
    """out, made by new_out(), and lse2 and max_logit2 or None, for a forward kernel to fill."""
    q, tile = call.q, problem.tile
    is_like_q = call.kv_heads == 0 and tile.value_dim == tile.dim
    out = new_out(q, None if is_like_q else (problem.batch, problem.q_len, tile.heads, tile.value_dim))
    lowest = dict(fill=float("-inf"), dtype=torch.float32)
    lse2 = output(problem, q, (problem.batch, tile.heads, problem.q_len), **lowest)
    max_logit2 = q.new_full((tile.heads,), float("-inf"), dtype=torch.float32) if call.return_max_logit else None
    return out, lse2, max_logit2


def gradients(call, new_q, new_kv):
    """{name: gradient} of q, k and v, for kernels to fill, made by new_q() and new_kv(); one of all if q holds all."""
    if call.kv_heads > 0:
        return {"q": new_kv(call.q)}
    return {"q": new_q(call.q), "k": new_kv(call.k), "v": new_kv(call.v)}


def apart(call, gradients):
    """dq, dk and dv of what gradients() made."""
    return gradients if call.kv_heads == 0 else call._replace(q=gradients[0]).split()
