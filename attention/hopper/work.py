"""What each program of the backward does: its keys, its query heads, the queries that see the keys; and its layouts."""

from typing import NamedTuple

from ..score import Terms, ahead, behind
from ..tiles import Ragged, Sequence, meeting_range
from .channel import Channel
from .gluon import aggregate, gl, gluon
from .ragged import bounds, first_slot, listed

# Bytes of queries, dO and dQ sums of the teams that take turns, counting one query head of each. From T 1024 on these
# have 128 programs at head dim 128 and 256, and 512 at 64: as many as an H200 runs at a time, or twice that.
TURN_BYTES = gl.constexpr(16 * 2**20)


class Plan(NamedTuple):
    """Static choices of backward_kernel: a constexpr argument."""

    block_q: int  # queries per step
    block_k: int  # keys per program
    dim: int  # head dim of q and k, padded to a power of two
    value_dim: int  # of v, likewise
    warps: int  # that multiply: 4 or 8
    stages: int  # tiles of queries, and of dO, in shared memory
    dq_stages: int  # tiles of dQ on their way to the sum; 0 = added from registers
    mask_edges_only: bool = False  # mask only where something may be hidden, not everywhere
    kv_in_registers: bool = False  # K and V in registers, not shared memory, as left operands
    dk_before_dq: bool = False  # multiply dK while warps wait for each other before dQ; else while dQ is stored
    ragged: bool = False  # whether sequences have lengths of their own, and tiles come from lists


@gluon.constexpr_function
def staged(plan):
    """Whether P and dS reach their matmuls through shared memory: a warp holds too few of their columns."""
    return plan.block_k < plan.warps * 16


@gluon.constexpr_function
def mma_layout(warps, rows, columns):
    """Of a matmul's result: 16 rows a warp, in groups of four warps; groups that this leaves over share the columns.

    With 64 rows and 8 warps, as at head dim 256, each group has half of the columns. The numbers are wgmma's version,
    warps along rows and columns, and rows, columns and depth of one instruction.
    """
    down = min(warps, rows // 16)
    across = warps // down
    return gl.NVMMADistributedLayout([3, 0], [down, across], [16, columns // across, 16])


@gluon.constexpr_function
def scores_layout(plan):
    """Of [keys, queries]."""
    return mma_layout(plan.warps, plan.block_k, plan.block_q)


@gluon.constexpr_function
def operand_layout(plan, dim):
    """Of P^T and dS^T, the left operands of dV and dK [keys, dim]."""
    return gl.DotOperandLayout(0, mma_layout(plan.warps, plan.block_k, dim), 2)


@gluon.jit
def accumulator(ROWS: gl.constexpr, COLUMNS: gl.constexpr, PLAN: gl.constexpr):
    """A float32 accumulator of a matmul."""
    return gl.full([ROWS, COLUMNS], 0.0, gl.float32, mma_layout(PLAN.warps, ROWS, COLUMNS))


@aggregate
class BackwardProgram:
    """What all warps of a program know: the arguments of backward_kernel, and shared memory."""

    q: gl.tensor  # like k, v, dout, stats, dk and dv: TMA descriptors
    k: gl.tensor
    v: gl.tensor
    dout: gl.tensor
    stats: gl.tensor
    dq_sum: gl.tensor  # TMA descriptor, or a pointer if dQ is added from registers
    dk: gl.tensor
    dv: gl.tensor
    dk_part: gl.tensor  # pointers, or None
    dv_part: gl.tensor
    dgate: gl.tensor  # pointer, or None
    terms: Terms
    q_len: gl.tensor  # queries and keys of a batch row
    k_len: gl.tensor
    batches: gl.tensor
    heads: gl.tensor  # of queries
    group: gl.tensor  # query heads that share a key head
    members: gl.tensor  # of these, that this program does
    k_list: gl.tensor  # as list_kernel lists tiles of keys, or None
    ragged: Ragged
    q_slots: gl.tensor  # tiles of queries of a head in stats and dq_sum, if sequences are ragged
    k_tile: gl.shared_memory_descriptor  # [keys, D]
    v_tile: gl.shared_memory_descriptor
    kv_loaded: gl.shared_memory_descriptor  # barrier: TMA of both arrives once, multiplying warps wait
    q_tiles: Channel  # with lse2, from the loading to the multiplying warps
    dout_tiles: Channel  # with delta, likewise; its slots are released with those of q_tiles
    dq_tiles: Channel  # from the multiplying to the adding warps, if it has slots
    weights: gl.shared_memory_descriptor  # [keys, queries], if staged()
    dscores: gl.shared_memory_descriptor  # [keys, queries]
    ones: gl.shared_memory_descriptor  # as decay.ones(), if there are gates
    RULE: gl.constexpr
    PLAN: gl.constexpr
    TAIL: gl.constexpr  # whether a tile of keys may reach past the last one


class Work(NamedTuple):
    """What a program does: its keys, its query heads, and the tiles of queries that meet the keys."""

    seq: Sequence
    kv_head: gl.tensor
    head: gl.tensor  # first of its query heads
    k_start: gl.tensor
    shift: gl.tensor  # query i stands at key i + shift
    first_tile: gl.tensor  # number of the first tile of `head`, counted over all heads and sequences
    q_tiles: gl.tensor  # from one head to the next
    lo: gl.tensor  # tiles lo..hi-1 meet the keys, full_lo..full_hi-1 all of them
    full_lo: gl.tensor
    full_hi: gl.tensor
    hi: gl.tensor
    start: gl.tensor  # the tile to begin with
    steps: gl.tensor  # tiles over all heads


@gluon.jit
def number_of(tile, head, work):
    """Number of a tile of queries, counted over all heads and sequences: its place in stats and the dQ sum."""
    return work.first_tile + (head - work.head) * work.q_tiles + tile


@gluon.constexpr_function
def has_mask(rule):
    """Whether a query may be unable to see a key."""
    return rule.causal or rule.window > 0


@gluon.jit
def advance(tile, head, work):
    """The tile after this one: of the same head, round and round from work.start, then of the next head."""
    tile += 1
    tile = gl.where(tile == work.hi, work.lo, tile)
    return tile, head + gl.where(tile == work.start, 1, 0)


@gluon.jit
def locate_keys(q_len, k_len, batches, teams, RULE: gl.constexpr, PLAN: gl.constexpr):
    """Program id -> (tile of keys, team of query heads, batch), tile by tile of a team.

    Under a causal mask without a window the first tiles take longest and come first; as many teams take turns as have
    TURN_BYTES of queries, dO and dQ together, but two at least.
    """
    tiles_k = gl.cdiv(k_len, PLAN.block_k)
    program = gl.program_id(0)
    tile = program % tiles_k
    team = program // tiles_k
    if RULE.causal and RULE.window == 0:
        fit = gl.maximum(TURN_BYTES // (PLAN.dim * 6 + PLAN.value_dim * 2) // gl.maximum(q_len, 1024), 2)
        turn = team // fit
        size = gl.minimum(fit, teams * batches - turn * fit)
        rest = program - turn * fit * tiles_k
        tile = rest // size
        team = turn * fit + rest % size
    return tile, team % teams, team // teams


@gluon.jit
def plan_work(program):
    """The Work of a program."""
    RULE: gl.constexpr = program.RULE
    PLAN: gl.constexpr = program.PLAN
    BLOCK: gl.constexpr = PLAN.block_q
    heads, members = program.heads, program.members
    teams = heads // members
    if PLAN.ragged:  # all heads of a tile, then the next one
        tile, index, _ = listed(program.k_list, gl.program_id(0) // teams)
        seq = bounds(index, program.q_len, program.k_len, program.ragged, RULE)
        head = gl.program_id(0) % teams * members
        q_tiles = program.q_slots
        first_tile = head * q_tiles + first_slot(seq, program.q_len, BLOCK)
    else:
        tile, team, batch = locate_keys(program.q_len, program.k_len, program.batches, teams, RULE, PLAN)
        seq = Sequence(batch, batch, 0, program.q_len, 0, program.k_len)
        head = team * members
        q_tiles = gl.cdiv(seq.q_len, BLOCK)
        first_tile = (batch * heads + head) * q_tiles
    k_start = tile * PLAN.block_k
    shift = seq.k_len - seq.q_len
    last = gl.minimum(k_start + PLAN.block_k, seq.k_len) - 1
    # in query indices a key meets [k - shift - ahead, k - shift + behind]
    meets = meeting_range(k_start - shift, last - shift, ahead(RULE), behind(RULE), seq.q_len, BLOCK, BLOCK)
    lo = meets.lo // BLOCK
    hi = gl.maximum(gl.cdiv(meets.hi, BLOCK), lo)
    full_lo = meets.full_lo // BLOCK
    full_hi = hi  # past the last query lse2 is +inf, by prepare_kernel, and all weights are 0
    if RULE.window > 0:
        full_hi = meets.full_hi // BLOCK
    full_lo = gl.where(k_start + PLAN.block_k > seq.k_len, hi, full_lo)
    # Programs of one head add to dQ at the same time: let them begin apart. Masks have them do so anyway.
    start = lo
    if not has_mask(RULE):
        start = lo + tile * (hi - lo) // gl.cdiv(seq.k_len, PLAN.block_k)
    return Work(
        seq, head // program.group, head, k_start, shift, first_tile, q_tiles, lo, full_lo, full_hi, hi, start,
        (hi - lo) * members,
    )  # fmt: skip
