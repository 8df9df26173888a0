"""Ragged sequences on Hopper: lists of the tiles that there are, and tensors that end for TMA where a sequence ends.

A list costs one small kernel, and nothing is read back to the host: which tiles there are may change from one replay of
a CUDA graph to the next. The kernels see no tile past the end of a sequence, whatever the longest one could be.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..score import behind
from ..tiles import Sequence, sequence
from .gluon import gl, gluon

# Where every sequence ends on the axis of positions, as TMA sees it: see end_strides().
END = tl.constexpr(2**30)
# Sequences that list_kernel looks at together.
CHUNK = tl.constexpr(256)
# Positions that a program of blank_kernel looks at, and elements that it writes at once.
POSITIONS = tl.constexpr(32)
COLUMNS = tl.constexpr(1024)


class Extent(NamedTuple):
    """Where the positions of a sequence lie in [B, T, H, D] tensors."""

    batch: tl.tensor
    end: tl.tensor  # one past its last position, all rows of the batch counted through
    length: tl.tensor


def end_shape(x):
    """Shape of a [B, T, H, D] tensor as corner() takes it."""
    far = 2**31 - 2**16
    return far, far, END.value, *x.shape[2:]


def end_strides(x):
    """Strides of a [B, T, H, D] tensor, whose rows follow each other, as corner() takes it.

    On the axis of positions all sequences end at END, so that what is past the end of one is past the end of the
    tensor: TMA reads zeros there and writes nothing. The two axes before it lead from there to the sequence: the second
    by `end` steps to its end, the first by END steps back. A stride cannot be negative, so the first is 2^34 - step:
    END = 2^30 of these are 2^64 - END * step, which is -END * step in the 64 bits of an address.

    Example: T = 10 and one sequence, at positions 4 to 7. Its end is 8 and its length 4, so corner() sends its position
    p to (END, 8, END - 4 + p). That lies END (2^34 - step) + 8 step + (END - 4 + p) step = 2^64 + (4 + p) step from the
    start of the tensor; in 64 bits (4 + p) step, which is position 4 + p. A tile of 64 positions from p = 0 on has
    coordinates END - 4 to END + 59 on an axis that ends at END - 1. So TMA reads and writes positions 4 to 7 for its
    rows 0 to 3. The others are outside for TMA, though positions 8 and 9 of the tensor follow in memory: these rows are
    read as zeros and not written.
    Source: triton/tools/ragged_tma.py.
    """
    step = x.stride(1)
    return 2**34 - step, step, step, *x.stride()[2:]


@gluon.jit
def extents(seq, q_len, k_len):
    """The Extents of the queries and of the keys of a Sequence; q_len, k_len: of a batch row."""
    queries = Extent(seq.batch, seq.batch * q_len + seq.q_start + seq.q_len, seq.q_len)
    return queries, Extent(seq.batch, seq.batch * k_len + seq.k_start + seq.k_len, seq.k_len)


@gluon.jit
def corner(extent, position, head, RAGGED: gl.constexpr):
    """TMA coordinates of a tile that begins at a position of a sequence."""
    if RAGGED:
        return END, extent.end, END - extent.length + position, head, 0
    else:
        return extent.batch, position, head, 0


@triton.jit
def first_slot(seq, q_len, BLOCK: tl.constexpr):
    """Where the tiles of a sequence's queries begin in a buffer of slots(): those of two sequences never meet."""
    return (seq.batch * q_len + seq.q_start) // BLOCK + seq.index


@triton.jit
def bounds(index, q_len, k_len, ragged, RULE: tl.constexpr):
    """sequence() without the keys that lie before every window: they may hold NaN, and tiles are read whole."""
    seq = sequence(index, q_len, k_len, ragged)
    unseen = 0
    if RULE.window > 0:
        unseen = tl.maximum(seq.k_len - seq.q_len - behind(RULE), 0)
    return Sequence(seq.index, seq.batch, seq.q_start, seq.q_len, seq.k_start + unseen, seq.k_len - unseen)


@triton.jit
def listed(tile_list, entry):
    """Entry of a list -> (tile, sequence index, whether there is such an entry)."""
    exists = entry < tl.load(tile_list + 1)
    return tl.load(tile_list + 3 + 2 * entry, exists, 0), tl.load(tile_list + 2 + 2 * entry, exists, 0), exists


@triton.jit
def enlist(
    tile_list, slots, sequences, q_len, k_len, ragged, RULE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr
):
    """Write a list: see list_kernel. It ends with `slots` tiles, which only starts that decrease could exceed."""
    total = 0
    for first in range(0, sequences, CHUNK):
        index = first + tl.arange(0, CHUNK)
        seq = bounds(tl.minimum(index, sequences - 1), q_len, k_len, ragged, RULE)
        length = seq.q_len
        if KEYS:
            length = seq.k_len
        count = tl.where(index < sequences, tl.cdiv(length, BLOCK), 0)
        entry = total + tl.cumsum(count, 0) - count
        for step in range(tl.max(count, 0)):
            tile = step
            if not KEYS:
                tile = count - 1 - step
            pair = tile_list + 2 + 2 * (entry + step)
            fits = (step < count) & (entry + step < slots)
            tl.store(pair, index, fits)
            tl.store(pair + 1, tile, fits)
        total = tl.minimum(total + tl.sum(count, 0), slots)
    tl.store(tile_list, 0)
    tl.store(tile_list + 1, total)


@triton.jit(do_not_specialize=["q_slots", "k_slots", "sequences", "q_len", "k_len"])
def list_kernel(
    q_list, k_list, q_slots, k_slots, sequences, q_len, k_len, ragged,
    RULE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q_list, k_list: int32 [counter, n, sequence_0, tile_0, sequence_1, ...], the n tiles of queries and of keys.

    Programs count in `counter`, which begins at 0, the tiles that they have taken. A sequence's tiles stand together,
    those first that take longest under a causal mask. The first program lists the queries, the second, if there is
    one, the keys.
    """
    if tl.program_id(0) == 0:
        enlist(q_list, q_slots, sequences, q_len, k_len, ragged, RULE, BLOCK_Q, KEYS=False)
    elif k_list is not None:
        enlist(k_list, k_slots, sequences, q_len, k_len, ragged, RULE, BLOCK_K, KEYS=True)


@triton.jit(do_not_specialize=["offset", "q_len", "k_len"])
def blank_kernel(x, ragged, offset, q_len, k_len, SIZE: tl.constexpr, STEP: tl.constexpr, KEYS: tl.constexpr):
    """Zeros at those positions of a [B, T, H, D] tensor, of queries or of keys, that belong to no sequence.

    They lie before the first sequence of a batch row, which has its number, and behind the last one, batch + offset.
    SIZE: elements of a position. STEP: from one to the next. Filling all of x first would cost as much as short
    documents take.
    """
    length = q_len
    if KEYS:
        length = k_len
    blocks = tl.cdiv(length, POSITIONS)
    batch = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * POSITIONS
    first = sequence(batch, q_len, k_len, ragged)
    last = sequence(batch + offset, q_len, k_len, ragged)
    begin = first.q_start
    end = last.q_start + last.q_len
    if KEYS:
        begin = first.k_start
        end = last.k_start + last.k_len
    stop = tl.minimum(start + POSITIONS, length)
    before = tl.maximum(tl.minimum(begin, stop) - start, 0)  # how many of this program's
    after = tl.maximum(start + before, end)
    base = x + tl.cast(batch, tl.int64) * length * STEP
    column = tl.arange(0, COLUMNS)
    for i in range(before + tl.maximum(stop - after, 0)):
        position = tl.where(i < before, start + i, after + i - before)
        for step in range(0, SIZE, COLUMNS):
            at = base + tl.cast(position, tl.int64) * STEP + (step + column)
            tl.store(at, (column * 0).to(x.dtype.element_ty), step + column < SIZE)
