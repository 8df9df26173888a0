"""Backward kernel for features by distance (relative_bias): dS summed along diagonals, in O(T) memory, without atomics.

Formulas and shared parts are in backward.py.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..tiles import Span, sequence
from .backward import load_queries, meet_keys, query_lanes
from .forward import Keys, key_lanes


@triton.jit(do_not_specialize=["q_len", "k_len", "sequences"])
def distance_kernel(
    q, k, v, dout, lse2, delta, sums, reaches, order, sequences, q_len, k_len, ragged, terms,
    RULE: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, DIAGONALS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """sums [PARTS, H, DIAGONALS, 3, block]: dS added up for each distance q_pos - k_pos, over one of PARTS of the rows.

    A program visits the tiles along one diagonal: pairs of a tile of queries and a tile of keys, both of `block`
    positions, that are equally far apart. Query i and key c of such a pair have the distance
    block (FIRST + diagonal) + rest + i - c; rest, from 0 to block - 1, depends on the lengths of the sequence. So the
    distances of a diagonal lie in three blocks, of which sums[..., 0, :] is the lowest.

    reaches, order: of by_reach(), else None. A program visits only the sequences that reach its diagonal, so that all
    programs of a head visit O(T / block + N) of them.
    """
    BLOCK: tl.constexpr = TILE.block_q
    program = tl.program_id(0)
    diagonal = FIRST + program % DIAGONALS
    head = program // DIAGONALS % TILE.heads
    part = program // DIAGONALS // TILE.heads
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    lowest = tl.full([BLOCK], 0.0, tl.float32)
    middle = lowest
    highest = lowest
    first = 0
    if reaches is not None:
        # block (diagonal + 2) is more than each distance of the diagonal, and block (diagonal - 1) less
        first = count_up_to(tl.maximum(tl.maximum(diagonal - 1, -diagonal - 2), 0) * BLOCK, reaches, sequences)
    for number in range(first + part, sequences, PARTS):
        index = number
        if order is not None:
            index = tl.load(order + number).to(tl.int32)
        seq = sequence(index, q_len, k_len, ragged)
        shift = seq.k_len - seq.q_len
        rest = (shift % BLOCK + BLOCK) % BLOCK
        offset = (shift - rest) // BLOCK - diagonal  # the tile of keys that meets tile 0 of queries
        q_lane = query_lanes(q, dout, lse2, delta, head, seq)
        k_lane, v_lane = key_lanes(k, v, head, seq, TILE)
        keys = Keys(k_lane, v_lane, None, None, Span(0, 0, 0, seq.k_len), 0)
        end = tl.minimum(tl.cdiv(seq.q_len, BLOCK), tl.cdiv(seq.k_len, BLOCK) - offset)
        # element [i, b] is from the key whose distance to query i has the remainder b modulo BLOCK
        key = (rest + row + BLOCK - column) % BLOCK
        block = (rest + row - key + BLOCK) // BLOCK
        for tile in range(tl.maximum(-offset, 0), end):
            queries = load_queries(q_lane, head, tile * BLOCK, seq, terms, RULE, TILE)
            start = (tile + offset) * BLOCK
            _k_tile, _weights, dscores, _slope = meet_keys(queries, keys, start, seq, terms, RULE, TILE, MASKED=True)
            sheared = tl.gather(dscores, key, 1)
            lowest += tl.sum(tl.where(block == 0, sheared, 0.0), 0)
            middle += tl.sum(tl.where(block == 1, sheared, 0.0), 0)
            highest += tl.sum(tl.where(block == 2, sheared, 0.0), 0)
    out = sums + tl.cast(program, tl.int64) * 3 * BLOCK
    tl.store(out + tl.arange(0, BLOCK), lowest)
    tl.store(out + BLOCK + tl.arange(0, BLOCK), middle)
    tl.store(out + 2 * BLOCK + tl.arange(0, BLOCK), highest)


@triton.jit
def count_up_to(value, numbers, count):
    """How many of `count` sorted numbers are at most a value."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        fits = tl.load(numbers + middle) <= value
        low = tl.where(fits, middle + 1, low)
        high = tl.where(fits, high, middle)
    return low


def by_reach(ragged):
    """(largest distances between positions of packed sequences, plus 1, in ascending order; the sequences' numbers)."""
    reaches, order = torch.maximum(ragged.q_starts.diff(), ragged.k_starts.diff()).sort(stable=True)
    return reaches, order


def distances_of(problem, block):
    """(FIRST, DIAGONALS) that cover all distances at which a query of a problem may see a key."""
    rule, behind, ahead = problem.rule, problem.k_len, problem.q_len
    if rule.window > 0:
        behind, ahead = min(behind, rule.window), min(ahead, rule.window)
    if rule.causal and not rule.prefix:
        ahead = 0
    first = -ahead // block - 1
    return first, -(-behind // block) + 1 - first


def of_diagonals(sums, first):
    """sums [H, DIAGONALS, 3, block] -> two sums [H, distances from 0 on]: of keys at and before a query, and after."""
    block = sums.shape[-1]
    # three rows of the distances from (first - 1) * block on, each shifted by a block
    padded = sum(F.pad(sums[:, :, i].flatten(1), (i * block, (2 - i) * block)) for i in range(3))
    zero = (1 - first) * block  # where the distance is 0
    return padded[:, zero:], F.pad(padded[:, :zero].flip(1), (1, 0))
