"""What each program of the backward does: its keys, its query heads, the queries that see the keys; and its layouts."""

from typing import NamedTuple

import triton.language as tl

from ..score import ahead, behind
from ..tiles import Sequence
from .gluon import gl, gluon
from .ragged import Extent, extents, first_slot
from .scores import bounds, listed, meeting_range

# Bytes of queries, dO and dQ sums of the teams that take turns, counting one query head of each. From T 1024 on these
# have 128 programs at head dim 128 and 256, and 512 at 64: as many as an H200 runs at a time, or twice that.
TURN_BYTES = tl.constexpr(16 * 2**20)


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
    """Of a matmul's result: 16 rows a warp, in groups of four warps; groups that this leaves over share the columns."""
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


class Work(NamedTuple):
    """What a program does: its keys, its query heads, and the tiles of queries that meet the keys."""

    index: gl.tensor  # of the sequence
    queries: Extent
    keys: Extent
    k_tokens: gl.tensor  # keys of a batch row
    kv_head: gl.tensor
    head: gl.tensor  # first of `members` query heads
    members: gl.tensor
    heads: gl.tensor  # query heads of the call
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


@gluon.constexpr_function
def has_mask(rule):
    """Whether a query may be unable to see a key."""
    return rule.causal or rule.window > 0


@gluon.jit
def advance(tile, member, work):
    """The tile after this one: of the same head, round and round from work.start, then of the group's next member."""
    tile += 1
    tile = gl.where(tile == work.hi, work.lo, tile)
    return tile, member + gl.where(tile == work.start, 1, 0)


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
def plan_work(
    q_tokens, k_tokens, batches, heads, group, members, k_list, ragged, q_slots, RULE: gl.constexpr, PLAN: gl.constexpr
):
    """The Work of this program. q_tokens, k_tokens: queries and keys of a batch row, as the tensors hold them."""
    teams = heads // members
    if PLAN.ragged:  # all heads of a tile, then the next one
        tile, index, _ = listed(k_list, gl.program_id(0) // teams)
        seq = bounds(index, q_tokens, k_tokens, ragged, RULE)
        q_len, k_len = seq.q_len, seq.k_len
        team = gl.program_id(0) % teams
        head = team * members
        q_tiles = q_slots
        first_tile = head * q_slots + first_slot(seq, q_tokens, PLAN.block_q)
    else:
        tile, team, batch = locate_keys(q_tokens, k_tokens, batches, teams, RULE, PLAN)
        seq = Sequence(batch, batch, 0, q_tokens, 0, k_tokens)
        q_len, k_len = q_tokens, k_tokens
        head = team * members
        q_tiles = gl.cdiv(q_tokens, PLAN.block_q)
        first_tile = (batch * heads + head) * q_tiles
    k_start = tile * PLAN.block_k
    shift = k_len - q_len
    last = gl.minimum(k_start + PLAN.block_k, k_len) - 1
    # in query indices a key meets [k - shift - ahead, k - shift + behind]
    BLOCK: gl.constexpr = PLAN.block_q
    meets = meeting_range(k_start - shift, last - shift, ahead(RULE), behind(RULE), q_len, BLOCK, BLOCK)
    lo = meets.lo // PLAN.block_q
    hi = gl.maximum(gl.cdiv(meets.hi, PLAN.block_q), lo)
    full_lo = meets.full_lo // PLAN.block_q
    full_hi = hi  # beyond the last query lse2 hides all
    if RULE.window > 0:
        full_hi = meets.full_hi // PLAN.block_q
    full_lo = gl.where(k_start + PLAN.block_k > k_len, hi, full_lo)
    # Programs of one head add to dQ at the same time: let them begin apart. Masks have them do so anyway.
    start = lo
    if not has_mask(RULE):
        start = lo + tile * (hi - lo) // gl.cdiv(k_len, PLAN.block_k)
    queries, keys = extents(seq, q_tokens, k_tokens)
    return Work(
        seq.index, queries, keys, k_tokens, head // group, head, members, heads, k_start, shift, first_tile, q_tiles,
        lo, full_lo, full_hi, hi, start, (hi - lo) * members,
    )  # fmt: skip
