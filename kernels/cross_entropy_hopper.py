"""The cross-entropy kernel for Hopper GPUs (sm_90), in Gluon: it reads the logits from memory once.

A program holds its row in shared memory, 100 KB of GPT-2's, so that two programs share a multiprocessor: one loads
while the other computes and stores.
"""

import torch

from attention.hopper.gluon import TensorDescriptor, gl, gluon, mbarrier, tma_load

SIDE = gl.constexpr(64)
PART = gl.constexpr(SIDE * SIDE)  # logits of a part, which shared memory holds as SIDE x SIDE
MOST_PARTS = 27  # that fit in a multiprocessor's shared memory
MOST_CAP = 60  # 110,592 times e^60 is below the largest float32
WARPS = 8
REGISTERS = 2**16 // (2 * 32 * WARPS)  # of a thread: half of a multiprocessor's
LAYOUT = gl.NVMMASharedLayout.get_default_for([1, SIDE.value, SIDE.value], gl.bfloat16)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def capped(z, softcap):
    """(Logits in base 2, capped unless softcap is None; the slope of the cap)."""
    slope = 1.0
    if softcap is not None:
        t = 1 - 2 / (gl.exp2(z * (2 * LOG2E / softcap)) + 1)  # tanh
        z, slope = softcap * t, 1 - t * t
    return z * LOG2E, slope


@gluon.jit
def read_part(parts, number, softcap, VOCABULARY: gl.constexpr, MASKED: gl.constexpr, TILE: gl.constexpr):
    """(capped() of a part, float32 [SIDE, SIDE], its columns). MASKED: logits are -inf from column VOCABULARY on."""
    z, slope = capped(parts.index(number).load(TILE).to(gl.float32), softcap)
    lines = gl.arange(0, SIDE, gl.SliceLayout(1, TILE))[:, None] * SIDE
    column = lines + gl.arange(0, SIDE, gl.SliceLayout(0, TILE))[None, :] + number * PART
    if MASKED:
        z = gl.where(column < VOCABULARY, z, float("-inf"))
    return z, slope, column


@gluon.jit
def find_highest(highest, parts, full, number, VOCABULARY: gl.constexpr, MASKED: gl.constexpr):
    """highest and the logits of a part, which have no cap, whichever are higher."""
    mbarrier.wait(full.index(number), 0)
    TILE: gl.constexpr = highest.type.layout
    z, _, _ = read_part(parts, number, None, VOCABULARY, MASKED, TILE)
    return gl.maximum(highest, z)


@gluon.jit
def add_exponentials(total, top, parts, full, number, softcap, VOCABULARY: gl.constexpr, MASKED: gl.constexpr):
    if softcap is not None:  # else find_highest() has waited
        mbarrier.wait(full.index(number), 0)
    TILE: gl.constexpr = total.type.layout
    z, _, _ = read_part(parts, number, softcap, VOCABULARY, MASKED, TILE)
    return total + gl.exp2(z - top)


@gluon.jit
def store_gradient(
    logits, target, lse2, parts, number, softcap,
    VOCABULARY: gl.constexpr, COLUMNS: gl.constexpr, MASKED: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    z, slope, column = read_part(parts, number, softcap, VOCABULARY, MASKED, TILE)
    gradient = (gl.exp2(z - lse2) - gl.where(column == target, 1.0, 0.0)) * slope
    gradient = gl.where(target < 0, 0.0, gradient)  # also where a logit is no number
    if MASKED:
        gl.store(logits + column, gradient.to(gl.bfloat16), column < COLUMNS)
    else:
        gl.store(logits + column, gradient.to(gl.bfloat16))


@gluon.jit
def cross_entropy_hopper_kernel(
    loads, logits, targets, losses, softcap, VOCABULARY: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr
):
    """losses[row] = log sum exp(z) - z[target], and logits[row] <- d loss / d logit; both 0 where target < 0.

    loads: descriptor of the logits as [rows, lines, SIDE], in blocks of one part.
    """
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    PARTS: gl.constexpr = (COLUMNS + PART - 1) // PART
    WHOLE: gl.constexpr = VOCABULARY // PART  # parts that need no mask
    row = gl.program_id(0)
    parts = gl.allocate_shared_memory(gl.bfloat16, [PARTS, SIDE, SIDE], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(PARTS):
        mbarrier.init(full.index(number), count=1)
    for number in gl.static_range(PARTS):
        mbarrier.expect(full.index(number), loads.block_type.nbytes)
        slot = parts.index(number).reshape([1, SIDE, SIDE])
        tma_load(loads, [row, number * SIDE, 0], full.index(number), slot)
    logits += row.to(gl.int64) * COLUMNS
    target = gl.load(targets + row)
    chosen = gl.load(logits + target, (target >= 0) & (target < VOCABULARY), float("nan")).to(gl.float32)
    chosen2, _ = capped(chosen, softcap)

    top = 0.0  # enough if capped: see MOST_CAP
    if softcap is None:
        highest = gl.full([SIDE, SIDE], float("-inf"), gl.float32, TILE)
        for number in range(WHOLE):
            highest = find_highest(highest, parts, full, number, VOCABULARY, False)
        for number in range(WHOLE, PARTS):
            highest = find_highest(highest, parts, full, number, VOCABULARY, True)
        top = gl.max(gl.max(highest, 1), 0)
    total = gl.zeros([SIDE, SIDE], gl.float32, TILE)
    for number in range(WHOLE):
        total = add_exponentials(total, top, parts, full, number, softcap, VOCABULARY, False)
    for number in range(WHOLE, PARTS):
        total = add_exponentials(total, top, parts, full, number, softcap, VOCABULARY, True)
    lse2 = top + gl.log2(gl.sum(gl.sum(total, 1), 0))
    gl.store(losses + row, gl.where(target < 0, 0.0, (lse2 - chosen2) / LOG2E))

    for number in range(WHOLE):
        store_gradient(logits, target, lse2, parts, number, softcap, VOCABULARY, COLUMNS, False, TILE)
    for number in range(WHOLE, PARTS):
        store_gradient(logits, target, lse2, parts, number, softcap, VOCABULARY, COLUMNS, True, TILE)
    # Until here the barriers are in use. Otherwise the compiler puts the maxima and sums above into their memory, and
    # in some rows these come out wrong or NaN.
    for number in gl.static_range(PARTS):
        mbarrier.invalidate(full.index(number))


def supports(logits, softcap):
    """Whether the kernel computes the gradient of logits [N, columns]."""
    return logits.dtype == torch.bfloat16 and (softcap or 0) <= MOST_CAP and logits.shape[1] <= MOST_PARTS * PART.value


def cross_entropy(logits, targets, losses, vocabulary, softcap):
    """As cross_entropy_kernel with gradients: logits [N, columns] bfloat16, columns a multiple of SIDE."""
    rows, columns = logits.shape
    lines = columns // SIDE.value
    loads = TensorDescriptor(
        logits, [rows, lines, SIDE.value], [columns, SIDE.value, 1], [1, SIDE.value, SIDE.value], LAYOUT
    )
    with torch.cuda.device_of(logits):
        cross_entropy_hopper_kernel[(rows,)](
            loads, logits, targets, losses, softcap, vocabulary, columns, WARPS,
            num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=True,
        )  # fmt: skip
