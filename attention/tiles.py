"""How kernels see tensors: views with strides, sequence bounds, tile loads and stores, and which tiles meet.

Letters: B batch, T sequence, H heads, D head dim. A tile is a block of consecutive positions of one head.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import gpu

INTERPRETED = tl.constexpr(gpu.INTERPRETED)
# Stands for "no limit" in position arithmetic; a quarter of the int32 range, so that sums of two still fit.
FAR = tl.constexpr(2**29)
# Elements that strides of [B, T, H, D] tensors are multiples of. Kernels know it, so they load 16 bytes at a time.
STRIDE_UNIT = tl.constexpr(8)

# Elements of keys and values of the heads that take turns: 16 MiB in 16 bits, about a quarter of an H200's L2 cache.
TURN_ELEMENTS = tl.constexpr(2**23)
# Tiles that keep every multiprocessor busy: about two for each of an H200's 132.
MIN_TILES_PER_TURN = tl.constexpr(256)
# Sequences that a step of find_tile() looks at; the interpreter's are few, so that short rows take several steps.
WAYS = tl.constexpr(2 if INTERPRETED.value else 128)


class View(NamedTuple):
    """A [B, T, H, D] tensor as kernels take it, D contiguous, or [B, T, H].

    A sequence stride known at compile time makes the addresses of a tile one register and constants.
    """

    ptr: torch.Tensor
    batch: int  # batch and head strides of [B, T, H, D] are in STRIDE_UNITs, of [B, T, H] in elements
    head: int
    seq: int  # in elements; constexpr for [B, T, H, D]
    wide: bool  # constexpr: whether a position times its stride may pass 2^31


class Lane(NamedTuple):
    """One head of one sequence, where all that a loop visits lies."""

    ptr: tl.tensor  # to its first position
    stride: tl.tensor  # elements from one position to the next; int64 if a product with it may pass 2^31
    batch: tl.tensor  # batch, head and start: where it lies in the whole tensor, for TMA
    head: tl.tensor
    start: tl.tensor


class PairView(NamedTuple):
    """A [B, H, Tq, Tk] tensor; strides are 0 where it is broadcast."""

    ptr: torch.Tensor
    batch: int
    head: int
    query: int
    key: int


constant = lru_cache(None, typed=True)(tl.constexpr)  # typed, since 1 == True


def fits(x, is_ragged=False):
    """Whether the strides of a [B, T, H, D] tensor are whole STRIDE_UNITs."""
    batch, seq, head, dim = x.stride()
    return (batch | seq | head) % STRIDE_UNIT.value == 0 and dim == 1


def aligned(x):
    """[B, T, H, D] tensor, copied if it does not fit(), or does not start at 16 bytes."""
    return x if fits(x) and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def view(x):
    """aligned() [B, T, H, D] tensor -> View."""
    batch, seq, head, _ = x.stride()
    wide = constant(x.shape[1] * seq >= 2**31)
    return View(x, batch // STRIDE_UNIT.value, head // STRIDE_UNIT.value, constant(seq), wide)


def rows_view(x):
    """[B, H, T] tensor -> View; None stays None."""
    return None if x is None else View(x, *x.stride(), constant(x.shape[2] * x.stride(2) >= 2**31))


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
    prefixes: torch.Tensor | None = None  # [B], whose keys all queries see


class Span(NamedTuple):
    """A range of positions that meet a tile: all of it meets [full_lo, full_hi), some of it the edges around that.

    full_lo and full_hi are multiples of the block size, lo of what a loop takes at the edges; lo <= full_lo <= full_hi,
    and the interior may be empty.
    """

    lo: tl.tensor
    full_lo: tl.tensor
    full_hi: tl.tensor
    hi: tl.tensor


class Sequence(NamedTuple):
    """Where one sequence lies: its number, its batch row, first query and key in that row, and how many of each."""

    index: tl.tensor
    batch: tl.tensor
    q_start: tl.tensor
    q_len: tl.tensor
    k_start: tl.tensor
    k_len: tl.tensor
    prefix: tl.tensor = 0  # how many keys all queries see


@triton.jit
def sequence(index, q_len, k_len, ragged):
    """Bounds of sequence `index`. A dense batch holds one sequence per row, a packed one holds all in row 0.

    With lengths, queries and keys past the length do not exist: both counts shrink by as much, so that query i still
    stands at key i + Tk - Tq. What lies past the end of a row does not exist either.
    """
    batch = index
    q_start = 0
    k_start = 0
    if ragged.q_starts is not None:
        batch = 0
        q_start, q_len = packed_bounds(ragged.q_starts + index, q_len)
        k_start, k_len = packed_bounds(ragged.k_starts + index, k_len)
    if ragged.lengths is not None:
        length = tl.minimum(tl.load(ragged.lengths + index), k_len)
        q_len = tl.maximum(q_len - (k_len - length), 0)
        k_len = length
    prefix = 0
    if ragged.prefixes is not None:
        prefix = tl.load(ragged.prefixes + index)
    return Sequence(index, batch, q_start, q_len, k_start, k_len, prefix)


@triton.jit
def packed_bounds(starts, length):
    """(start, length) of a packed sequence, given a pointer to its start, in a row of `length` positions."""
    start = tl.minimum(tl.maximum(tl.load(starts), 0), length)
    end = tl.minimum(tl.load(starts + 1), length)
    return start, tl.maximum(end - start, 0)


@triton.jit
def count_tiles(length, starts, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """How many tiles a row of the batch has of each head: with packed sequences as in Problem.programs()."""
    if starts is None:
        return tl.cdiv(length, BLOCK)
    else:
        return tl.num_programs(0) // HEADS


@triton.jit
def find_tile(tile, index, n_tiles, length, starts, BLOCK: tl.constexpr):
    """Number among the n_tiles of a row -> (tile, sequence index): of packed sequences, else as given.

    The tiles of sequence n begin at number starts[n] // BLOCK + n, so those of two sequences never meet, and a row has
    length // BLOCK + N of them. Numbers in between are tiles past the end of a sequence.
    """
    if starts is not None:
        number = tile
        end = n_tiles - length // BLOCK
        while end - index > 1:  # the sequence is one of index .. end - 1, from the 0 that locate() gives on
            step = tl.cdiv(end - index, WAYS)
            candidates = index + step * tl.arange(0, WAYS)
            exist = candidates < end
            first = tl.load(starts + candidates, exist, 0) // BLOCK + candidates
            begun = tl.maximum(tl.sum((exist & (first <= number)).to(tl.int32), 0), 1)
            end = tl.minimum(index + step * begun, end)
            index += step * (begun - 1)
        start, _ = packed_bounds(starts + index, length)
        tile = number - (start // BLOCK + index)
        tile = tl.where(tile < 0, n_tiles, tile)  # before the first sequence, if that does not begin at 0
    return tile, index


@triton.jit
def locate(n_tiles, HEADS: tl.constexpr):
    """Program id -> (tile, head, sequence index), tile by tile of a head."""
    program = tl.program_id(0)
    return program % n_tiles, program // n_tiles % HEADS, program // n_tiles // HEADS


@triton.jit
def query_tile(number, count, n_tiles, k_len, RULE: tl.constexpr, TILE: tl.constexpr):
    """Number of `count` tiles in all -> (tile, head, sequence index), in the order in which they should start.

    Under a causal mask the last tiles take longest and come first, so that short ones fill the end. Heads go in sets,
    one set after the other; those of a set take turns. A set has TURN_ELEMENTS of keys and values, which then stay in
    the L2 cache, and MIN_TILES_PER_TURN tiles at least. Heads with the same keys and values are in one set.
    """
    tile = number % n_tiles
    head = number // n_tiles
    if RULE.causal:  # no products of lengths, which could pass 2^31
        fit = TURN_ELEMENTS // (TILE.dim + TILE.value_dim) // tl.maximum(k_len, 1024)
        fit = tl.maximum(fit, tl.cdiv(MIN_TILES_PER_TURN, n_tiles)) * TILE.group
        turn = head // fit
        size = tl.minimum(fit, count // n_tiles - turn * fit)
        rest = number - turn * fit * n_tiles
        tile = n_tiles - 1 - rest // size
        head = turn * fit + rest % size
    return tile, head % TILE.heads, head // TILE.heads


@triton.jit
def address(x, batch, head, position):
    """Pointer to x[batch, position, head] of a [B, T, H] tensor; widened before a product that could overflow."""
    start = x.ptr + tl.cast(batch, tl.int64) * x.batch + tl.cast(position, tl.int64) * x.seq
    return start + tl.cast(head, tl.int64) * x.head


@triton.constexpr_function
def index_type(wide):
    """Of positions times strides."""
    return tl.int64 if wide else tl.int32


@triton.jit
def tile_lane(x, batch, head, start):
    """The Lane of x[batch, start:, head] of a [B, T, H, D] tensor."""
    steps = tl.cast(batch, tl.int64) * x.batch + tl.cast(head, tl.int64) * x.head
    ptr = x.ptr + steps * STRIDE_UNIT + tl.cast(start, tl.int64) * x.seq
    return Lane(ptr, tl.cast(x.seq, index_type(x.wide)), batch, head, start)


@triton.jit
def row_lane(x, batch, head, start):
    """The Lane of x[batch, start:, head] of a [B, T, H] tensor."""
    return Lane(address(x, batch, head, start), tl.cast(x.seq, index_type(x.wide)), batch, head, start)


@triton.jit
def tile_pointers(x, positions, DIM: tl.constexpr):
    """Pointers to [positions, D padded to a power of two] of a Lane."""
    return x.ptr + (positions * x.stride)[:, None] + tl.arange(0, padded(DIM))[None, :]


@triton.jit
def load_tile(x, start, low, high, BLOCK: tl.constexpr, DIM: tl.constexpr, CLAMPED: tl.constexpr):
    """Positions [start, start + BLOCK) of a Lane as [BLOCK, DIM padded to a power of two].

    Outside positions [low, high), which must not be empty, the nearest one inside repeats; columns past DIM are 0.
    CLAMPED=False promises that all BLOCK positions count.
    """
    positions = start + tl.arange(0, BLOCK)
    if CLAMPED:
        positions = tl.maximum(tl.minimum(positions, high - 1), low)
    return load_at(x, positions, DIM)


@triton.jit
def load_at(x, positions, DIM: tl.constexpr):
    """Positions of a Lane as [positions, DIM padded to a power of two]; columns past DIM are 0."""
    pointers = tile_pointers(x, positions, DIM)
    if DIM != padded(DIM):
        tile = tl.load(pointers, tl.arange(0, padded(DIM))[None, :] < DIM, 0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def fetch_tile(x, tiles, start, low, high, BLOCK: tl.constexpr, DIM: tl.constexpr, CLAMPED: tl.constexpr):
    """load_tile(), by TMA if all positions count and `tiles` describes the tensor: so no thread computes addresses."""
    if CLAMPED or tiles is None:
        tile = load_tile(x, start, low, high, BLOCK, DIM, CLAMPED)
    else:
        tile = tiles.load([x.batch, x.start + start, x.head, 0]).reshape(BLOCK, padded(DIM))
    return tile


@triton.jit
def store_tile(x, tile, start, high, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Write a tile to positions [start, min(start + BLOCK, high)) of a Lane, DIM columns of it."""
    offset = start + tl.arange(0, BLOCK)
    column = tl.arange(0, padded(DIM))
    pointers = tile_pointers(x, offset, DIM)
    tl.store(pointers, tile.to(x.ptr.dtype.element_ty), (offset[:, None] < high) & (column[None, :] < DIM))


@triton.jit
def load_rows(x, start, high, other, BLOCK: tl.constexpr, CLAMPED: tl.constexpr):
    """Positions [start, start + BLOCK) of a Lane of numbers; `other` from `high` on, if CLAMPED."""
    offset = start + tl.arange(0, BLOCK)
    if CLAMPED:
        rows = tl.load(x.ptr + offset * x.stride, offset < high, other)
    else:
        rows = tl.load(x.ptr + offset * x.stride)
    return rows


@triton.jit
def store_rows(x, values, batch, head, start, low, high, BLOCK: tl.constexpr):
    """Write values[low:high] to x[batch, start + low : start + high, head] of a [B, T, H] tensor."""
    offset = tl.arange(0, BLOCK)
    tl.store(address(x, batch, head, start) + offset * x.seq, values, (offset >= low) & (offset < high))


@triton.jit
def pair_pointers(x, batch, head, q_index, k_index):
    """Pointers to x[batch, head, q_index, k_index] of a [B, H, Tq, Tk] tensor; the indices broadcast."""
    base = x.ptr + tl.cast(batch, tl.int64) * x.batch + tl.cast(head, tl.int64) * x.head
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
def meeting_range(first, last, behind, ahead, length, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """The Span that positions first..last of one axis meet of the other, if p meets [p - behind, p + ahead].

    A loop takes BLOCK positions at a time in the interior, EDGE at the edges, of which BLOCK is a multiple.
    """
    lo = tl.maximum(first - behind, 0) // EDGE * EDGE
    hi = tl.minimum(last + ahead + 1, length)
    full_lo = tl.cdiv(tl.maximum(last - behind, 0), BLOCK) * BLOCK
    full_hi = tl.maximum(tl.minimum(first + ahead + 1, length), 0) // BLOCK * BLOCK
    return Span(lo, full_lo, tl.maximum(full_lo, full_hi), hi)


@triton.constexpr_function
def step_size(block, edges):
    """Positions that a loop takes at a time: at the edges of a Span half a large block, since masks take registers."""
    return block // 2 if edges and (block > 32 or INTERPRETED.value) else block  # the interpreter's are small


@triton.jit
def first_step(span, EDGES: tl.constexpr):
    """Where a loop over the interior of a Span begins, or over its edges: see position()."""
    return span.lo if EDGES else span.full_lo


@triton.jit
def last_step(span, EDGES: tl.constexpr):
    """Where it ends."""
    return span.hi - (span.full_hi - span.full_lo) if EDGES else span.full_hi


@triton.jit
def position(step, span, EDGES: tl.constexpr):
    """Where it stands: one loop serves both edges, by stepping over the interior."""
    if EDGES:
        step += tl.where(step < span.full_lo, 0, span.full_hi - span.full_lo)
    return step
