"""Matmuls of bfloat16 or FP8 whose epilogue overlaps with the next tile, for Hopper GPUs (sm_90), in Gluon.

    "activate":  h = a b^T + bias, and activation(h)
    "slope":     (a b^T) * activation'(h)

Operands in FP8 (e4m3) have "activate" only. h gets their scales, and its activation is also written in FP8.

cuBLAS and a kernel after it would write a b^T to memory and read it again. Programs are persistent: one warp loads
operands by TMA, and two warpgroups multiply, each the 64 x 256 sums of its half of a tile. A finished tile stays in
registers, as 64 pairs of bfloat16 per thread, and is written in 16 pieces while the tensor cores multiply the next one.
Both warpgroups are one partition with the same code, because the code of two would not fit the instruction cache.

The rows of b reach shared memory permuted, so that a thread's sums are 8 neighbouring columns of the result: it loads
and stores 16 bytes at a time, without shared memory. Of 32 rows of b, 8 j + 2 i + e comes to place 8 i + 2 j + e
(i, j < 4, e < 2), because a thread j of four holds columns 8 i + 2 j + e of a matmul's sums.

Letters: M rows of a, N rows of b, K columns of both.
"""

from typing import NamedTuple

import torch
import triton

from attention.gpu import processors
from attention.hopper.channel import Channel, acquire, barriers, release
from attention.hopper.gluon import TensorDescriptor, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from attention.ops import refuse_unseen
from kernels import activation

ROWS = gl.constexpr(128)  # of a tile: 64 for each of two warpgroups
COLUMNS = gl.constexpr(256)  # of a tile
BYTES = gl.constexpr(128)  # of each row of a and b in a step
PIECES = gl.constexpr(16)  # of a finished tile
AHEAD = gl.constexpr(2)  # pieces of `other` loaded before they are needed
STREAM = gl.constexpr(".cs")  # results are larger than the L2 cache, which is to keep operands
# A piece is 64 rows, r or r + 8 of each 16, by 32 columns, as pairs [64, 16]; a thread has 4 neighbours of one row.
PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0]], [], [64, 16]
    )
)
REGISTERS = 168  # of a thread, as launched; the loading warp then gives most of its own to the others
activate = gluon.jit(activation.activate_tile.fn)
slope = gluon.jit(activation.slope_tile.fn)


class Plan(NamedTuple):
    """Static choices of matmul_kernel: a constexpr argument."""

    epilogue: str  # "activate" or "slope"
    kind: str  # of the activation
    stages: int  # steps of operands in shared memory
    fp8: bool  # operands are in FP8


class Operands(NamedTuple):
    """Of each step, from the loader to the consumer; both have the same barriers."""

    a: Channel  # [stages, ROWS, DEPTH]
    b: Channel  # [stages, COLUMNS, DEPTH]


class Outputs(NamedTuple):
    """Pointers; None is not written."""

    out: gl.tensor  # pairs of bfloat16, as is `active`
    active: gl.tensor
    active_fp8: gl.tensor  # pairs of e4m3
    largest: gl.tensor  # float32 as int32: the largest absolute value of `active`


class Place(NamedTuple):
    """Where a tile is in the result."""

    first: gl.tensor  # pair, counted from the start of the result
    rows: gl.tensor  # from here to the end of the result


@gluon.jit
def pack(low, high):
    """Two float32 -> a pair of bfloat16 in an int32: as 16-bit values each would take a register of its own."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1)


@gluon.jit
def low(pair):
    return (pair << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high(pair):
    return (pair & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def pack_fp8(low, high):
    """Two float32 -> a pair of e4m3 in an int16; values beyond its range become its largest."""
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], gl.int16, True, 1
    )


@gluon.jit
def larger(largest, pair, exists):
    """The larger absolute values of pairs of bfloat16, whose bits are ordered like integers; a NaN is the largest."""
    pair = gl.where(exists, pair & 0x7FFF7FFF, 0)
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [largest, pair], gl.int32, True, 1)


@gluon.jit
def split_pieces(x):
    """[8, 8, 4, 4, 2, 2, ...] -> the tuple of its pieces; the last dimension is the highest bit of their number."""
    if len(x.shape) > 4:
        first, second = gl.split(x)
        return split_pieces(first) + split_pieces(second)
    else:
        return (gl.convert_layout(x.reshape([64, 16]), PIECE, assert_trivial=True),)


@gluon.jit
def pieces_of(sums, scale):
    """scale * sums [ROWS, COLUMNS] in float32 -> PIECES tensors of pairs; piece 2 n + h has columns 32 n on."""
    if scale is not None:
        sums *= scale
    even, odd = gl.split(sums.reshape([ROWS, COLUMNS // 2, 2]))
    # rows 16 r16 + 8 h + r8, pairs 16 n + 4 i + j of permuted columns, and n as three bits
    pairs = pack(even, odd).reshape([8, 2, 8, 2, 2, 2, 4, 4])
    return split_pieces(pairs.permute((0, 2, 7, 6, 1, 5, 4, 3)))


@gluon.jit
def piece_offsets(place, NUMBER: gl.constexpr, PAIRS: gl.constexpr):
    """Offsets of a piece in a result of `PAIRS` pairs a row, and which of its rows exist."""
    r = gl.arange(0, 64, gl.SliceLayout(1, PIECE))
    row = r // 8 * 16 + r % 8
    offset = row[:, None] * PAIRS + gl.arange(0, 16, gl.SliceLayout(0, PIECE))[None, :] + place.first
    exists = (row < place.rows - NUMBER % 2 * 8)[:, None] & gl.full([64, 16], True, gl.int1, PIECE)
    return offset + (NUMBER % 2 * 8 * PAIRS + NUMBER // 2 * 16), exists


@gluon.jit
def finish_piece(
    pair, held, outputs, factor, largest, place, NUMBER: gl.constexpr, PAIRS: gl.constexpr, PLAN: gl.constexpr
):
    """Write a piece of a tile. held: with "slope", the pieces of h loaded so far. Returns the new `largest`.

    With FP8, factor: 1 / scale of the activation; largest: pairs of its largest absolute values so far.
    """
    KIND: gl.constexpr = PLAN.kind
    offsets, exists = piece_offsets(place, NUMBER, PAIRS)
    if PLAN.epilogue == "activate":
        result = pack(activate(low(pair), KIND), activate(high(pair), KIND))
        gl.store(outputs.active + offsets, result, exists, cache_modifier=STREAM)
        if PLAN.fp8:
            copy = pack_fp8(low(result) * factor, high(result) * factor)
            gl.store(outputs.active_fp8 + offsets, copy, exists, cache_modifier=STREAM)
            largest = larger(largest, result, exists)
    else:
        other = held[NUMBER + 1]
        pair = pack(low(pair) * slope(low(other), KIND), high(pair) * slope(high(other), KIND))
    gl.store(outputs.out + offsets, pair, exists, cache_modifier=STREAM)
    return largest


@gluon.jit
def load_ahead(held, other, place, NUMBER: gl.constexpr, PAIRS: gl.constexpr):
    """held, and one more piece of `other` if that is given and there is a piece of this number."""
    if other is not None and NUMBER < PIECES:
        offsets, exists = piece_offsets(place, NUMBER, PAIRS)
        held += (gl.load(other + offsets, exists),)
    return held


@gluon.jit
def load_first(other, place, PAIRS: gl.constexpr):
    """The first pieces of `other`; 0 comes before them, for an epilogue without it."""
    held = (0,)
    for number in gl.static_range(AHEAD):
        held = load_ahead(held, other, place, number, PAIRS)
    return held


@gluon.jit
def loader(a, b, operands, tiles, PAIRS: gl.constexpr, STEPS: gl.constexpr):
    """Load the operands of all steps of this program's tiles; columns of the result come first, then its rows."""
    ACROSS: gl.constexpr = 2 * PAIRS // COLUMNS
    DEPTH: gl.constexpr = a.block_shape[1]
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // ACROSS * ROWS
        block = tile % ACROSS * (COLUMNS // 32)
        for step in range(STEPS):
            slot = acquire(operands.a, count)
            full = operands.a.full.index(slot)
            mbarrier.expect(full, a.block_type.nbytes + b.block_type.nbytes)
            tma_load(a, [row, step * DEPTH], full, operands.a.tiles.index(slot))
            tma_load(b, [block, 0, 0, 0, step * DEPTH], full, operands.b.tiles.index(slot).reshape(b.block_shape))
            count += 1


@gluon.jit
def multiply(sums, operands, turn, STEP: gl.constexpr, FIRST: gl.constexpr):
    """sums + a b^T of a step, or a b^T if it is the FIRST, not yet waited for. turn: of the slots, when STEP is 0."""
    STAGES: gl.constexpr = operands.a.full.shape[0]
    SLOT: gl.constexpr = STEP % STAGES
    mbarrier.wait(operands.a.full.index(SLOT), turn + STEP // STAGES & 1)
    b = operands.b.tiles.index(SLOT).permute((1, 0))
    return warpgroup_mma(operands.a.tiles.index(SLOT), b, sums, use_acc=not FIRST, is_async=True)


@gluon.jit
def finish_steps(sums, operands, STEP: gl.constexpr, PENDING: gl.constexpr):
    """Wait for all steps but the last PENDING, and give the slot of a step back to the loader."""
    sums = warpgroup_mma_wait(PENDING, deps=(sums,))
    release(operands.a, STEP)
    return sums


@gluon.jit
def first_sums(bias, column, scale, LAYOUT: gl.constexpr):
    """The bias of the permuted columns in each row, divided by the scale of sums; zeros without one."""
    if bias is None:
        return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    else:
        c = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        column += c // 32 * 32 + c // 2 % 4 * 8 + c // 8 % 4 * 2 + c % 2
        bias = gl.load(bias + column).to(gl.float32)
        if scale is not None:
            bias /= scale
        return bias[None, :].broadcast_to([ROWS, COLUMNS])


@gluon.jit
def consumer(
    operands, bias, other, scales, outputs, rows, tiles, PAIRS: gl.constexpr, STEPS: gl.constexpr, PLAN: gl.constexpr
):
    """Multiply each tile, and write the tile before it."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 256, 32 if PLAN.fp8 else 16])
    ACROSS: gl.constexpr = 2 * PAIRS // COLUMNS
    STAGES: gl.constexpr = PLAN.stages
    BUSY: gl.constexpr = min(STEPS, PIECES // STAGES * STAGES)  # steps in which pieces are written
    scale, factor, largest = None, None, 0
    if PLAN.fp8:
        a_scale, b_scale, active_scale = scales
        scale, factor = gl.load(a_scale) * gl.load(b_scale), 1 / gl.load(active_scale)
        largest = gl.zeros([64, 16], gl.int32, PIECE)
    pieces = pieces_of(gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT), None)
    before = Place(0, 0)  # before the first tile there is nothing to write
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // ACROSS * ROWS
        column = tile % ACROSS * COLUMNS
        held = load_first(other, before, PAIRS)
        sums = first_sums(bias, column, scale, LAYOUT)
        for step in gl.static_range(BUSY):
            sums = multiply(sums, operands, turn, step, step == 0 and bias is None)
            for number in gl.static_range(step * PIECES // BUSY, (step + 1) * PIECES // BUSY):
                held = load_ahead(held, other, before, number + AHEAD, PAIRS)
                largest = finish_piece(pieces[number], held, outputs, factor, largest, before, number, PAIRS, PLAN)
            if step > 0:
                sums = finish_steps(sums, operands, step - 1, 1)
        turn += BUSY // STAGES
        for _ in range(STEPS // STAGES - BUSY // STAGES):
            for step in gl.static_range(STAGES):
                sums = multiply(sums, operands, turn, step, False)
                sums = finish_steps(sums, operands, step + STAGES - 1, 1)
            turn += 1
        sums = finish_steps(sums, operands, STAGES - 1, 0)
        pieces = pieces_of(sums, scale)
        before = Place(row * PAIRS + column // 2, rows - row)
    held = load_first(other, before, PAIRS)
    for number in gl.static_range(PIECES):
        held = load_ahead(held, other, before, number + AHEAD, PAIRS)
        largest = finish_piece(pieces[number], held, outputs, factor, largest, before, number, PAIRS, PLAN)
    if PLAN.fp8:
        found = gl.max(gl.max(gl.maximum(largest & 0xFFFF, largest >> 16), axis=1), axis=0)
        gl.atomic_max(outputs.largest, found << 16)  # as float32


@gluon.jit(do_not_specialize=["rows", "tiles"])
def matmul_kernel(
    a, b, bias, other, scales, outputs, rows, tiles, PAIRS: gl.constexpr, STEPS: gl.constexpr, PLAN: gl.constexpr
):
    """Tiles of a b^T, each with its epilogue.

    a and b are descriptors; other: pairs of bfloat16; scales: with FP8, pointers to those of a, b and the activation.
    """
    STAGES: gl.constexpr = PLAN.stages
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, a.block_shape[1]], a.layout)
    b_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, COLUMNS, a.block_shape[1]], a.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 1)
    operands = Operands(Channel(a_tiles, full, empty), Channel(b_tiles, full, empty))
    gl.warp_specialize(
        [
            (consumer, (operands, bias, other, scales, outputs, rows, tiles, PAIRS, STEPS, PLAN)),
            (loader, (a, b, operands, tiles, PAIRS, STEPS)),
        ],
        [1],
        [24],  # registers of each warp; the first partition gets what maxnreg leaves
    )


def divide(depth, dtype):
    """(Steps, stages) of K columns of a dtype, or None: the steps must be whole, and a multiple of the stages."""
    steps, rest = divmod(depth * dtype.itemsize, BYTES.value)
    return next(((steps, stages) for stages in (4, 3) if steps > 0 and not rest and steps % stages == 0), None)


def supports(rows, depth, columns, dtype=torch.bfloat16):
    """Whether the kernel can multiply [rows, depth] by [columns, depth]^T; its offsets have 32 bits."""
    return columns % COLUMNS.value == 0 and divide(depth, dtype) is not None and 0 < rows * columns < 2**32


def matmul(a, b, epilogue, *, kind, bias=None, other=None, scales=None):
    """a b^T in bfloat16 with sums in float32, and an epilogue.

    Args:
        a: [M, K]. b: [N, K] with N a multiple of 256, and rows of whole multiples of 512 or 384 bytes: see supports().
            Both bfloat16, or float8_e4m3fn with "activate" only.
        epilogue: "activate" or "slope", as at the top of this file; a b^T with its bias is rounded before it.
        kind: of the activation, a name in ACTIVATIONS. bias: [N] or None. other: with "slope" h [M, N], else None.
        scales: with FP8, a tuple of those of a, b and activation(h): [] float32 on the device.

    Returns:
        [M, N]; two of them with "activate". With FP8 also activation(h) / its scale in float8_e4m3fn [M, N], and the
        largest |activation(h)|, [] float32.
    """
    refuse_unseen("matmul", a, b, bias, other)
    a, b, fp8 = a.contiguous(), b.contiguous(), a.dtype == torch.float8_e4m3fn
    (rows, depth), columns = a.shape, b.shape[0]
    assert supports(rows, depth, columns, a.dtype), f"no kernel for [{rows}, {depth}] by [{columns}, {depth}]^T"
    out = a.new_empty(rows, columns, dtype=torch.bfloat16)
    active, active_fp8, largest = torch.empty_like(out) if epilogue == "activate" else None, None, None
    if fp8:
        active_fp8, largest = torch.empty_like(out, dtype=a.dtype), out.new_zeros((), dtype=torch.float32)
    (steps, stages), step = divide(depth, a.dtype), BYTES.value // a.itemsize
    plan = Plan(epilogue, kind, stages, fp8)
    layout = gl.NVMMASharedLayout(BYTES.value, 8 * a.itemsize, 2)
    permuted = [columns // 32, 4, 4, 2, depth], [32 * depth, 2 * depth, 8 * depth, depth, 1]
    block = [COLUMNS.value // 32, 4, 4, 2, step]
    outputs = Outputs(pairs(out), pairs(active), pairs(active_fp8, torch.int16), pairs(largest))
    tiles = triton.cdiv(rows, ROWS.value) * (columns // COLUMNS.value)
    with torch.cuda.device_of(a):
        matmul_kernel[(min(tiles, processors(a.device)),)](
            TensorDescriptor(a, [rows, depth], [depth, 1], [ROWS.value, step], layout),
            TensorDescriptor(b, *permuted, block, gl.NVMMASharedLayout(BYTES.value, 8 * a.itemsize, 5)),
            bias, None if other is None else pairs(other.contiguous()), scales, outputs,
            rows, tiles, columns // 2, steps, plan, num_warps=8, maxnreg=REGISTERS, enable_fp_fusion=True,
        )  # fmt: skip
    return tuple(x for x in (out, active, active_fp8, largest) if x is not None) if active is not None else out


def pairs(x, dtype=torch.int32):
    """x with its numbers taken by pairs, or a float32 as it is, for kernels; None stays."""
    return None if x is None else x.view(dtype)
