"""Decay in the Hopper kernels: score ij gets gate_i - gate_j, where gates are decay summed up to and including a key.

decay is the log forget gate of a key, gate its cumulative sum, gate2 the same in base 2.

The forward subtracts gate_j only. gate_i is the same in all scores of a row, and is added to its log-sum-exp.
dgate_t = sum_j dS_tj - sum_i dS_it. Tensor cores compute both sums as products with ones, from the same rounded dS: its
errors, mostly those of delta, must cancel when dgate is added up over the later keys.
"""

from typing import NamedTuple

import triton.language as tl

from ..score import LOG2E, gate_halves, split
from .channel import shared_layout
from .gluon import fence_async_shared, gl, gluon, warpgroup_mma
from .work import accumulator, scores_layout


def split_gate(gate):
    """[B, H, Tk] float64 or None -> split() of each gate in base 2."""
    # LOG2E not in the kernels, which would round the product in one place and not in another
    return None if gate is None else split(gate * LOG2E.value)


class Gates(NamedTuple):
    """Of one head, as the backward needs them for a step. Each gate2 is less that of the program's first key."""

    k_gate2: gl.tensor  # [keys]
    q_gate2: gl.tensor  # of the first query of the tile
    dgate: gl.tensor  # where those of the sequence begin in their gradient


@gluon.jit
def nearest_gate(gates, key, length):
    """The gate of a key, or of the nearest of the `length` that exist; gates: pointer to the first."""
    key = gl.maximum(gl.minimum(key, length - 1), 0)
    return gl.load(gates + key, key < length, 0)


@gluon.jit
def relative_gate2(gates, keys, exist, pivot):
    """gate2 of keys, less that of the gate `pivot`: float32 does not hold the sums. Keys that do not exist have 0."""
    high, low = gate_halves(gl.load(gates + keys, exist, None if exist is None else 0))
    pivot_high, pivot_low = gate_halves(pivot)
    return (high - pivot_high) + (low - pivot_low)


@gluon.jit
def gates_of(head, tile, work, program):
    """The Gates of a program's keys and of a tile of queries; zeros without decay."""
    PLAN: gl.constexpr = program.PLAN
    own = Gates(0.0, 0.0, 0)
    if program.RULE.decay:
        k_len = work.seq.k_len
        first = tl.cast(work.seq.batch * program.heads + head, tl.int64) * program.k_len + work.seq.k_start
        gates = program.terms.gate + first
        pivot = nearest_gate(gates, work.k_start, k_len)
        keys = work.k_start + gl.arange(0, PLAN.block_k, gl.SliceLayout(1, scores_layout(PLAN)))
        query = gl.maximum(tile * PLAN.block_q + work.shift, 0)  # where its first one stands, as in prepare_kernel
        k_gate2 = relative_gate2(gates, keys, keys < k_len, pivot)
        own = Gates(k_gate2, relative_gate2(gates, query, query < k_len, pivot), program.dgate + first)
    return own


@gluon.constexpr_function
def columns(plan, rows):
    """How many equal columns a product with ones [rows, columns] has: the fewest that tensor cores compute."""
    return 8 * (plan.warps // min(plan.warps, rows // 16))


@gluon.jit
def ones(DTYPE: gl.constexpr, PLAN: gl.constexpr):
    """In shared memory, [columns, keys or queries]."""
    shape: gl.constexpr = [16, max(PLAN.block_q, PLAN.block_k)]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [PLAN.warps, 1], [1, 0])
    filled = gl.allocate_shared_memory(DTYPE, shape, shared_layout(shape, DTYPE), gl.full(shape, 1.0, DTYPE, layout))
    fence_async_shared()
    return filled


@gluon.jit
def no_sums(RULE: gl.constexpr, PLAN: gl.constexpr):
    """Zeros for sum_over_queries() to add to, or 0 without gates."""
    if RULE.decay:
        return accumulator(PLAN.block_k, columns(PLAN, PLAN.block_k), PLAN)
    else:
        return 0.0


@gluon.jit
def sum_over_queries(dscores, ones, sums, PLAN: gl.constexpr):
    """dS [keys, queries], a left operand -> its sums, added to each column of `sums` [keys, columns]; asynchronous."""
    right = ones.slice(0, columns(PLAN, PLAN.block_k)).slice(0, PLAN.block_q, 1)
    return warpgroup_mma(dscores, right.permute((1, 0)), sums, is_async=True)


@gluon.jit
def sum_over_keys(dscores, ones, PLAN: gl.constexpr):
    """dS [keys, queries] in shared memory -> its sums in each column of [queries, columns]; asynchronous."""
    COLUMNS: gl.constexpr = columns(PLAN, PLAN.block_q)
    right = ones.slice(0, COLUMNS).slice(0, PLAN.block_k, 1)
    zeros = accumulator(PLAN.block_q, COLUMNS, PLAN)
    return warpgroup_mma(dscores.permute((1, 0)), right.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_column(dgate, start, x, k_len):
    """Add the first column of x to dgate, row r to key `start` + r; keys that do not exist are left out."""
    layout: gl.constexpr = x.type.layout
    key = start + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    exists = (column == 0) & (key >= 0) & (key < k_len)
    gl.atomic_add(dgate + (key + column), x, exists, sem="relaxed")
