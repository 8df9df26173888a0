"""How kernels see tensors: views with strides, sequence bounds, tile loads and stores, and which tiles meet.

Letters: B batch, T sequence, H heads, D head dim. A tile is a block of consecutive positions of one head.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Stands for "no limit" in position arithmetic; a quarter of the int32 range, so that sums of two still fit.
FAR = tl.constexpr(2**29)
# Elements that strides of [B, T, H, D] tensors are multiples of. Kernels know it, so they load 16 bytes at a time.
STEP = tl.constexpr(8)


class View(NamedTuple):
    """A [B, T, H, D] tensor as kernels take it, with strides in STEPs and D contiguous, or [B, T, H], in elements."""

    ptr: torch.Tensor
    batch: int
    seq: int
    head: int


class PairView(NamedTuple):
    """A [B, H, Tq, Tk] tensor; strides are 0 where it is broadcast."""

    ptr: torch.Tensor
    batch: int
    head: int
    query: int
    key: int


def aligned(x):
    """[B, T, H, D] tensor, copied if its strides are not whole STEPs or it does not start at 16 bytes."""
    if any(stride % STEP.value for stride in x.stride()[:3]) or x.stride(3) != 1 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def view(x):
    """aligned() [B, T, H, D] tensor -> View."""
    return View(x, *(stride // STEP.value for stride in x.stride()[:3]))


def rows_view(x):
    """[B, H, T] tensor -> View, in the (batch, sequence, head) order that kernels use; None stays None."""
    return None if x is None else View(x, x.stride(0), x.stride(2), x.stride(1))


def pair_view(x):
    """[B, H, Tq, Tk] tensor, with ones where it is broadcast -> PairView; None stays None."""
    return None if x is None else PairView(x, *(s if n > 1 else 0 for s, n in zip(x.stride(), x.shape, strict=True)))


class Tile(NamedTuple):
    """Static sizes of a kernel: a constexpr argument."""

    block_q: int  # queries per tile
    block_k: int  # keys per tile
    dim: int  # head dim of q and k
    value_dim: int  # head dim of v
    heads: int  # heads this kernel's programs are spread over
    group: int  # query heads per key/value head
    precision: str  # of float32 matmuls: "ieee" or "tf32"


class Ragged(NamedTuple):
    """What bounds sequences at run time: lengths [B], or cumulative starts [N + 1] of packed queries and keys."""

    lengths: torch.Tensor | None
    q_starts: torch.Tensor | None
    k_starts: torch.Tensor | None


class Sequence(NamedTuple):
    """Where one sequence lies: its number, batch row, first query and key in that row, and how many of each."""

    index: tl.tensor
    row: tl.tensor
    q_start: tl.tensor
    q_len: tl.tensor
    k_start: tl.tensor
    k_len: tl.tensor


@triton.jit
def sequence(index, q_len, k_len, ragged):
    """Bounds of sequence `index`. A dense batch holds one sequence per row, a packed one holds all in row 0.

    With lengths, queries and keys past the length do not exist: both counts shrink by as much, so that query i still
    stands at key i + Tk - Tq.
    """
    row = index
    q_start = 0
    k_start = 0
    if ragged.q_starts is not None:
        row = 0
        q_start = tl.load(ragged.q_starts + index)
        k_start = tl.load(ragged.k_starts + index)
        q_len = tl.load(ragged.q_starts + index + 1) - q_start
        k_len = tl.load(ragged.k_starts + index + 1) - k_start
    if ragged.lengths is not None:
        length = tl.minimum(tl.load(ragged.lengths + index), k_len)
        q_len = tl.maximum(q_len - (k_len - length), 0)
        k_len = length
    return Sequence(index, row, q_start, q_len, k_start, k_len)


@triton.jit
def locate(n_tiles, HEADS: tl.constexpr, REVERSED: tl.constexpr):
    """Program id -> (tile, head, sequence index); REVERSED starts each head with its last tile."""
    program = tl.program_id(0)
    tile = program % n_tiles
    if REVERSED:
        tile = n_tiles - 1 - tile
    return tile, program // n_tiles % HEADS, program // n_tiles // HEADS


@triton.jit
def address(x, row, head, position):
    """Pointer to x[row, position, head] of a [B, T, H] tensor; widened before multiplying, where it could overflow."""
    return (
        x.ptr
        + tl.cast(row, tl.int64) * x.batch
        + tl.cast(position, tl.int64) * x.seq
        + tl.cast(head, tl.int64) * x.head
    )


@triton.jit
def tile_pointers(x, row, head, start, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Pointers to x[row, start : start + BLOCK, head] of a [B, T, H, D] tensor, D padded to a power of two."""
    steps = tl.cast(row, tl.int64) * x.batch + tl.cast(start, tl.int64) * x.seq + tl.cast(head, tl.int64) * x.head
    offset = tl.arange(0, BLOCK)[:, None] * (x.seq * STEP) + tl.arange(0, padded(DIM))[None, :]
    return x.ptr + steps * STEP + offset


@triton.jit
def load_tile(x, row, head, start, low, high, BLOCK: tl.constexpr, DIM: tl.constexpr, BOUNDED: tl.constexpr):
    """x[row, start : start + BLOCK, head] as [BLOCK, DIM padded to a power of two].

    Zeros outside rows [low, high) of the tile, and past DIM. BOUNDED=False promises that all BLOCK rows count.
    """
    offset = tl.arange(0, BLOCK)
    column = tl.arange(0, padded(DIM))
    pointers = tile_pointers(x, row, head, start, BLOCK, DIM)
    if BOUNDED:
        wanted = (offset[:, None] >= low) & (offset[:, None] < high)
        if DIM != padded(DIM):
            wanted = wanted & (column[None, :] < DIM)
        tile = tl.load(pointers, wanted, 0.0)
    elif DIM != padded(DIM):
        tile = tl.load(pointers, column[None, :] < DIM, 0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(x, tile, row, head, start, count, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Write the first `count` rows and DIM columns of a tile to x[row, start : start + count, head]."""
    offset = tl.arange(0, BLOCK)
    column = tl.arange(0, padded(DIM))
    pointers = tile_pointers(x, row, head, start, BLOCK, DIM)
    tl.store(pointers, tile.to(x.ptr.dtype.element_ty), (offset[:, None] < count) & (column[None, :] < DIM))


@triton.jit
def load_rows(x, row, head, start, count, other, BLOCK: tl.constexpr):
    """x[row, start : start + BLOCK, head] of a [B, T, H] tensor; `other` past `count`."""
    offset = tl.arange(0, BLOCK)
    return tl.load(address(x, row, head, start) + offset * x.seq, offset < count, other)


@triton.jit
def store_rows(x, values, row, head, start, low, high, BLOCK: tl.constexpr):
    """Write values[low:high] to x[row, start + low : start + high, head] of a [B, T, H] tensor."""
    offset = tl.arange(0, BLOCK)
    tl.store(address(x, row, head, start) + offset * x.seq, values, (offset >= low) & (offset < high))


@triton.jit
def pair_pointers(x, row, head, q_index, k_index):
    """Pointers to x[row, head, q_index, k_index] of a [B, H, Tq, Tk] tensor; the indices broadcast."""
    base = x.ptr + tl.cast(row, tl.int64) * x.batch + tl.cast(head, tl.int64) * x.head
    return base + tl.cast(q_index, tl.int64) * x.query + tl.cast(k_index, tl.int64) * x.key


@triton.constexpr_function
def padded(dim):
    """Head dim as tiles hold it: a power of two, at least the 16 that tensor cores need."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def zeros(ROWS: tl.constexpr, DIM: tl.constexpr):
    """A float32 accumulator [ROWS, DIM padded]."""
    return tl.zeros([ROWS, padded(DIM)], tl.float32)


@triton.jit
def dot(a, b, acc, TILE: tl.constexpr):
    """a @ b (+ acc unless None) in float32; operands are narrowed to the smaller dtype by the caller."""
    if INTERPRETED:  # NumPy has no bfloat16: the interpreter would multiply its bit patterns
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=TILE.precision)


@triton.jit
def narrow(x, like):
    """Cast a float32 tile to the dtype of `like`, for the tensor cores."""
    if INTERPRETED:  # its cast truncates where the hardware rounds
        return x
    else:
        return x.to(like.dtype)


@triton.jit
def meeting_range(first, last, behind, ahead, length, BLOCK: tl.constexpr):
    """Which tiles of the other axis meet positions first..last, each of which meets [p - behind, p + ahead].

    Returns lo, full_lo, full_hi, hi: every position meets all of [full_lo, full_hi); the rest of [lo, hi) needs a mask.
    All but hi are multiples of BLOCK; lo <= full_lo <= full_hi, and the interior may be empty.
    """
    lo = tl.maximum(first - behind, 0) // BLOCK * BLOCK
    hi = tl.minimum(last + ahead + 1, length)
    full_lo = tl.cdiv(tl.maximum(last - behind, 0), BLOCK) * BLOCK
    full_hi = tl.maximum(tl.minimum(first + ahead + 1, length), 0) // BLOCK * BLOCK
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi
