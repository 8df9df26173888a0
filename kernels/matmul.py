"""Matmuls of bfloat16 whose epilogue overlaps with the next tile, for Hopper GPUs (sm_90), in Gluon.

    "activate":  h = a b^T + bias, and activation(h)
    "slope":     (a b^T) * activation'(h)

cuBLAS and a kernel after it would write a b^T to memory and read it again. Programs are persistent: one warp loads
operands by TMA, and two warpgroups multiply, each the 64 x 256 sums of its half of a tile. A finished tile stays in
registers, as 64 pairs of bfloat16 per thread, and is written in 16 pieces while the tensor cores multiply the next one.

The rows of b reach shared memory permuted, so that a thread's sums are 8 neighbouring columns of the result: it loads
and stores 16 bytes at a time, without shared memory. Of 32 rows of b, 8 j + 2 i + e comes to place 8 i + 2 j + e
(i, j < 4, e < 2), because a thread j of four holds columns 8 i + 2 j + e of a matmul's sums.

Letters: M rows of a, N rows of b, K columns of both.
"""

from typing import NamedTuple

import torch
import triton

from kernels import activation
from kernels.gluon import TensorDescriptor, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from kernels.shared import processors

ROWS = gl.constexpr(64)  # of a warpgroup; a tile has twice as many
COLUMNS = gl.constexpr(256)  # of a tile
DEPTH = gl.constexpr(64)  # columns of a and b in a step
PIECES = gl.constexpr(16)  # of a finished tile
# A piece is 32 rows, r or r + 8 of each 16, by 32 columns, as pairs [32, 16]; a thread has 4 neighbours of one row.
PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )
)
A_LAYOUT = gl.NVMMASharedLayout.get_default_for([ROWS.value, DEPTH.value], gl.bfloat16)
B_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([COLUMNS.value, DEPTH.value], gl.bfloat16))
B_BLOCK = [COLUMNS.value // 32, 4, 4, 2, DEPTH.value]
REGISTERS = 168  # of a thread, as launched; the loading warp then gives most of its own to the others
activate = gluon.jit(activation.activate.fn)
slope = gluon.jit(activation.slope.fn)


class Plan(NamedTuple):
    """Static choices of matmul_kernel: a constexpr argument."""

    epilogue: str  # "activate" or "slope"
    kind: str  # of the activation
    stages: int  # steps of operands in shared memory
    ahead: int  # pieces of `other` loaded before they are needed


AHEAD = {"activate": 0, "slope": 2}  # of a Plan, for each epilogue
STAGES = (4, 3)  # of a Plan: the first that divides the number of steps


class Ring(NamedTuple):
    """Operands in shared memory, and when a slot is full or empty."""

    a: gl.shared_memory_descriptor  # [2 stages, ROWS, DEPTH]
    b: gl.shared_memory_descriptor  # [stages, COLUMNS, DEPTH]
    full: gl.shared_memory_descriptor  # barriers [stages, 1]
    empty: gl.shared_memory_descriptor


class Place(NamedTuple):
    """Where a warpgroup's part of a tile is in the result."""

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
def split_pieces(x):
    """[4, 8, 4, 4, 2, 2, ...] -> the tuple of its pieces; the last dimension is the highest bit of their number."""
    if len(x.shape) > 4:
        first, second = gl.split(x)
        return split_pieces(first) + split_pieces(second)
    else:
        return (gl.convert_layout(x.reshape([32, 16]), PIECE, assert_trivial=True),)


@gluon.jit
def pieces_of(sums):
    """Sums [ROWS, COLUMNS] in float32 -> PIECES tensors of pairs; piece 2 n + h has columns 32 n on."""
    even, odd = gl.split(sums.reshape([ROWS, COLUMNS // 2, 2]))
    # rows 16 r16 + 8 h + r8, pairs 16 n + 4 i + j of permuted columns, and n as three bits
    pairs = pack(even, odd).reshape([4, 2, 8, 2, 2, 2, 4, 4])
    return split_pieces(pairs.permute((0, 2, 7, 6, 1, 5, 4, 3)))


@gluon.jit
def piece_offsets(place, NUMBER: gl.constexpr, PAIRS: gl.constexpr):
    """Offsets of a piece in a result of `PAIRS` pairs a row, and which of its rows exist."""
    r = gl.arange(0, 32, gl.SliceLayout(1, PIECE))
    row = r // 8 * 16 + r % 8
    offset = row[:, None] * PAIRS + gl.arange(0, 16, gl.SliceLayout(0, PIECE))[None, :] + place.first
    exists = (row < place.rows - NUMBER % 2 * 8)[:, None] & gl.full([32, 16], True, gl.int1, PIECE)
    return offset + (NUMBER % 2 * 8 * PAIRS + NUMBER // 2 * 16), exists


@gluon.jit
def load_piece(other, place, NUMBER: gl.constexpr, PAIRS: gl.constexpr):
    offsets, exists = piece_offsets(place, NUMBER, PAIRS)
    return gl.load(other + offsets, exists)


@gluon.jit
def finish_piece(pair, held, out, active, place, NUMBER: gl.constexpr, PAIRS: gl.constexpr, PLAN: gl.constexpr):
    """Write a piece of a tile. held: with "slope", the pieces of h loaded so far."""
    KIND: gl.constexpr = PLAN.kind
    offsets, exists = piece_offsets(place, NUMBER, PAIRS)
    if PLAN.epilogue == "activate":
        result = pack(activate(low(pair), KIND), activate(high(pair), KIND))
        gl.store(active + offsets, result, exists)
    else:
        other = held[NUMBER + 1]
        pair = pack(low(pair) * slope(low(other), KIND), high(pair) * slope(high(other), KIND))
    gl.store(out + offsets, pair, exists)


@gluon.jit
def load_ahead(held, other, place, NUMBER: gl.constexpr, PAIRS: gl.constexpr, PLAN: gl.constexpr):
    """held, and one more piece of `other` if the epilogue has one and there is a piece of this number."""
    if PLAN.ahead > 0 and NUMBER < PIECES:
        held += (load_piece(other, place, NUMBER, PAIRS),)
    return held


@gluon.jit
def load_first(other, place, PAIRS: gl.constexpr, PLAN: gl.constexpr):
    """The first pieces of `other`; 0 comes before them, for an epilogue that has none."""
    AHEAD: gl.constexpr = PLAN.ahead
    held = (0,)
    for number in gl.static_range(AHEAD):
        held = load_ahead(held, other, place, number, PAIRS, PLAN)
    return held


@gluon.jit
def loader(a, b, ring, tiles, PAIRS: gl.constexpr, STEPS: gl.constexpr):
    """Load the operands of all steps of this program's tiles; columns of the result come first, then its rows."""
    STAGES: gl.constexpr = ring.full.shape[0]
    ACROSS: gl.constexpr = 2 * PAIRS // COLUMNS
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // ACROSS * (2 * ROWS)
        block = tile % ACROSS * (COLUMNS // 32)
        for step in range(STEPS):
            slot = count % STAGES
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), count // STAGES & 1 ^ 1)
            mbarrier.expect(full, 2 * a.block_type.nbytes + b.block_type.nbytes)
            for half in gl.static_range(2):
                tma_load(a, [row + half * ROWS, step * DEPTH], full, ring.a.index(2 * slot + half))
            tma_load(b, [block, 0, 0, 0, step * DEPTH], full, ring.b.index(slot).reshape(b.block_shape))
            count += 1


@gluon.jit
def multiply(sums, ring, turn, STEP: gl.constexpr, FIRST: gl.constexpr, HALF: gl.constexpr):
    """sums + a b^T of a step, or a b^T if it is the FIRST, not yet waited for. turn: of the ring, when STEP is 0."""
    STAGES: gl.constexpr = ring.full.shape[0]
    SLOT: gl.constexpr = STEP % STAGES
    mbarrier.wait(ring.full.index(SLOT), turn + STEP // STAGES & 1)
    b = ring.b.index(SLOT).permute((1, 0))
    return warpgroup_mma(ring.a.index(2 * SLOT + HALF), b, sums, use_acc=not FIRST, is_async=True)


@gluon.jit
def release(sums, ring, STEP: gl.constexpr, PENDING: gl.constexpr):
    """Wait for all steps but the last PENDING, and give the slot of a step back to the loader."""
    sums = warpgroup_mma_wait(PENDING, deps=(sums,))
    mbarrier.arrive(ring.empty.index(STEP % ring.full.shape[0]))
    return sums


@gluon.jit
def first_sums(bias, column, LAYOUT: gl.constexpr):
    """The bias of the permuted columns in each row; zeros without one."""
    if bias is None:
        return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    else:
        c = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        column += c // 32 * 32 + c // 2 % 4 * 8 + c // 8 % 4 * 2 + c % 2
        return gl.load(bias + column).to(gl.float32)[None, :].broadcast_to([ROWS, COLUMNS])


@gluon.jit
def consumer(
    HALF: gl.constexpr, ring, bias, other, out, active, rows, tiles,
    PAIRS: gl.constexpr, STEPS: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Multiply one half of each tile, and write the tile before it."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ACROSS: gl.constexpr = 2 * PAIRS // COLUMNS
    STAGES: gl.constexpr = PLAN.stages
    BUSY: gl.constexpr = min(STEPS, PIECES // STAGES * STAGES)  # steps in which pieces are written
    pieces = pieces_of(gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT))
    before = Place(0, 0)  # before the first tile there is nothing to write
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile // ACROSS * (2 * ROWS) + HALF * ROWS
        column = tile % ACROSS * COLUMNS
        held = load_first(other, before, PAIRS, PLAN)
        sums = first_sums(bias, column, LAYOUT)
        for step in gl.static_range(BUSY):
            sums = multiply(sums, ring, turn, step, step == 0 and bias is None, HALF)
            for number in gl.static_range(step * PIECES // BUSY, (step + 1) * PIECES // BUSY):
                held = load_ahead(held, other, before, number + PLAN.ahead, PAIRS, PLAN)
                finish_piece(pieces[number], held, out, active, before, number, PAIRS, PLAN)
            if step > 0:
                sums = release(sums, ring, step - 1, 1)
        turn += BUSY // STAGES
        for _ in range(STEPS // STAGES - BUSY // STAGES):
            for step in gl.static_range(STAGES):
                sums = multiply(sums, ring, turn, step, False, HALF)
                sums = release(sums, ring, step + STAGES - 1, 1)
            turn += 1
        sums = release(sums, ring, STAGES - 1, 0)
        pieces = pieces_of(sums)
        before = Place(row * PAIRS + column // 2, rows - row)
    held = load_first(other, before, PAIRS, PLAN)
    for number in gl.static_range(PIECES):
        held = load_ahead(held, other, before, number + PLAN.ahead, PAIRS, PLAN)
        finish_piece(pieces[number], held, out, active, before, number, PAIRS, PLAN)


@gluon.jit(do_not_specialize=["rows", "tiles"])
def matmul_kernel(
    a, b, bias, other, out, active, rows, tiles, PAIRS: gl.constexpr, STEPS: gl.constexpr, PLAN: gl.constexpr
):
    """Tiles of a b^T, each with its epilogue. a and b are descriptors; other, out and active are pairs of bfloat16."""
    STAGES: gl.constexpr = PLAN.stages
    ring = Ring(
        gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, DEPTH], a.layout),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, DEPTH], B_LAYOUT),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for slot in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(slot), count=1)
        mbarrier.init(ring.empty.index(slot), count=2)
    gl.warp_specialize(
        [
            (consumer, (0, ring, bias, other, out, active, rows, tiles, PAIRS, STEPS, PLAN)),
            (consumer, (1, ring, bias, other, out, active, rows, tiles, PAIRS, STEPS, PLAN)),
            (loader, (a, b, ring, tiles, PAIRS, STEPS)),
        ],
        [4, 1],
        [240, 24],  # registers of each warp; the first partition gets what maxnreg leaves
    )


def stages_of(depth):
    """Stages for K; None if there are none."""
    steps, rest = divmod(depth, DEPTH.value)
    for stages in STAGES:
        if steps > 0 and rest == steps % stages == 0:
            return stages
    return None


def supports(rows, depth, columns):
    """Whether the kernel can multiply [rows, depth] by [columns, depth]^T; its offsets have 32 bits."""
    return columns % COLUMNS.value == 0 and stages_of(depth) is not None and 0 < rows * columns < 2**32


def matmul(a, b, epilogue, *, kind, bias=None, other=None):
    """a b^T in bfloat16 with sums in float32, and an epilogue.

    Args:
        a: [M, K]. b: [N, K] with N a multiple of 256, and K of 256 or 192: see supports(). bias: [N] or None.
        epilogue: "activate", for (h, activation(h)) of the result h; "slope", for its product with activation'(other).
            The result with its bias is rounded before the epilogue.
        kind: of the activation: "gelu", "gelu_tanh" or "relu2". other: [M, N], or None.

    Returns:
        [M, N]; two of them with "activate".
    """
    a, b = a.contiguous(), b.contiguous()
    (rows, depth), columns = a.shape, b.shape[0]
    if not supports(rows, depth, columns) or a.dtype != torch.bfloat16:
        sizes = f"{a.dtype} [{rows}, {depth}] by [{columns}, {depth}]"
        raise ValueError(f"the matmul kernel does not serve {sizes}; ask supports(), and use torch.mm")
    out = a.new_empty(rows, columns)
    active = a.new_empty(rows, columns) if epilogue == "activate" else None
    permuted = [columns // 32, 4, 4, 2, depth], [32 * depth, 2 * depth, 8 * depth, depth, 1]
    plan = Plan(epilogue, kind, stages_of(depth), AHEAD[epilogue])
    tiles = triton.cdiv(rows, 2 * ROWS.value) * (columns // COLUMNS.value)
    with torch.cuda.device_of(a):
        matmul_kernel[(min(tiles, processors(a.device)),)](
            TensorDescriptor(a, [rows, depth], [depth, 1], [ROWS.value, DEPTH.value], A_LAYOUT),
            TensorDescriptor(b, *permuted, B_BLOCK, gl.NVMMASharedLayout(128, 16, 5)),
            bias, None if other is None else pairs(other.contiguous()), pairs(out), pairs(active),
            rows, tiles, columns // 2, depth // DEPTH.value, plan,
            num_warps=4, maxnreg=REGISTERS, enable_fp_fusion=True,
        )  # fmt: skip
    return out if active is None else (out, active)


def pairs(x):
    """Bfloat16 [M, N] as int32 [M, N / 2]; None stays."""
    return None if x is None else x.view(torch.int32)
