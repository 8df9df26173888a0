"""The score rule: scale, softcap, decay, ALiBi, bias, mask and dropout. The Hopper kernels share parts of it.

Functions here are elementwise and free of orientation: the caller passes positions that broadcast to its tile, so the
same formula serves [queries, keys] and [keys, queries]. Positions of queries are counted in keys: query i of Tq stands
at key i + Tk - Tq, which aligns causal masks and windows to the last key.
decay: log forget gate of a key. gate: its cumulative sum. gate2: the same in base 2.
"""

from collections import namedtuple
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from .reference import drop_probability
from .score_mod import join_args
from .tiles import FAR, PairView, View, pair_pointers, pair_view, row_lane, rows_view

LOG2E = tl.constexpr(1.4426950408889634)
PHILOX_MULTIPLIER = tl.constexpr(0xD256D193)
PHILOX_WEYL = tl.constexpr(0x9E3779B9)


class Rule(NamedTuple):
    """What scores and their softmax depend on, known at compile time: a constexpr argument."""

    causal: bool
    window: int  # keys a query sees to one side, itself included; 0 = no limit
    softcap: float  # 0 = none
    dropout: bool  # whether weights are dropped
    sink: bool  # whether the softmax has a sink
    ring: int = 0  # slots of a ring cache, in which position p is in slot p % ring; 0 = each position has its own
    prefix: bool = False  # whether all queries see the first keys of a sequence
    alibi: bool = False  # whether scores fall with the distance
    decay: bool = False  # whether they have gates
    hides: bool = False  # whether a bias or score_mod may hide keys, so that a row may see none of a tile
    score_mod: object = None  # a user's Triton function
    score_label: str = ""  # of score_mod and its source: Triton's caches look at how this record is printed


class Terms(NamedTuple):
    """What a score depends on at run time: an argument of the kernels; None where a call does without.

    With score_args these follow as further fields: see terms_type().
    The fields of its views stand in a row, because Triton 3.6 mixes up the constants of tuples inside a tuple.
    """

    scale: float
    dropout: float  # probability of dropping a weight, as reference.drop_probability() rounds it
    seed: torch.Tensor | None  # int64 [1], of dropout
    bias: torch.Tensor | None  # [B, H, Tq, Tk]; this and the next are the fields of a PairView
    bias_batch: int | None
    bias_head: int | None
    bias_query: int | None
    bias_key: int | None
    gate: torch.Tensor | None  # [B, H, Tk], as split() divides it, or not; fields of a View
    gate_batch: int | None
    gate_head: int | None
    gate_seq: int | None
    gate_wide: bool | None
    slopes: torch.Tensor | None  # [sequences, H] float32, of ALiBi
    slopes_sequence: int | None
    slopes_head: int | None
    relative: torch.Tensor | None  # [1 or 2, H, R] contiguous, of relative_bias
    relative_size: int | None  # R
    relative_ahead: int | None  # from one table to the other, if there are two


TERMS = tl.constexpr(len(Terms._fields))


@lru_cache(None)
def terms_type(count):
    """Terms with so many further fields, for score_args."""
    return namedtuple("Terms", (*Terms._fields, *(f"arg{i}" for i in range(count)))) if count else Terms


def terms_of(call):
    """Terms of a Call, as the ops take it."""
    args = join_args(call)
    slopes, tables = call.alibi_slopes, call.relative_bias
    if tables is not None:
        sides, heads, size = tables.shape
    return terms_type(len(args))(
        call.scale, drop_probability(call.dropout), call.seed,
        *(pair_view(call.bias) or [None] * 5),
        *(rows_view(call.decay) or [None] * 5),
        *([None] * 3 if slopes is None else [slopes, *slopes.stride()]),
        *([None] * 3 if tables is None else [tables, size, heads * size if sides == 2 else None]),
        *args,
    )  # fmt: skip


def split(gate):
    """float64 -> two float32 that add up to it (to 48 bits), in an int64: most GPUs are slow in float64."""
    high = gate.float()
    return torch.stack((high, (gate - high).float()), -1).view(torch.int64).squeeze(-1)


def split_decay(call):
    """The Call with its gate, which the ops take as decay, as two numbers."""
    return call if call.decay is None else call._replace(decay=split(call.decay))


@triton.jit
def gate_halves(gate):
    """What split() divided -> two float32."""
    return gate.to(tl.int32).to(tl.float32, bitcast=True), (gate >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_gate(gate, position, exists):
    """The gate at positions of a Lane, as two float32 whose sum it is; 0 if it does not exist."""
    value = tl.load(gate.ptr + position * gate.stride, exists, 0)
    if value.dtype == tl.int64:
        return gate_halves(value)
    else:  # float64, as decode() and distance_kernel get it
        high = value.to(tl.float32)
        return high, (value.to(tl.float64) - high.to(tl.float64)).to(tl.float32)


@triton.jit
def bias_view(terms):
    return PairView(terms.bias, terms.bias_batch, terms.bias_head, terms.bias_query, terms.bias_key)


@triton.jit
def gate_view(terms):
    return View(terms.gate, terms.gate_batch, terms.gate_head, terms.gate_seq, terms.gate_wide)


@triton.constexpr_function
def behind(rule):
    """How many keys before its own position a query sees."""
    return rule.window - 1 if rule.window > 0 else FAR.value


@triton.constexpr_function
def ahead(rule):
    """How many keys after its own position a query sees."""
    return 0 if rule.causal else rule.window - 1 if rule.window > 0 else FAR.value


@triton.jit
def reach(positions, seq, RULE: tl.constexpr):
    """Where queries would stand that see as far under a causal mask alone: the prefix is visible to all."""
    if RULE.prefix:
        positions = tl.maximum(positions, seq.prefix - 1)
    return positions


@triton.jit
def slot(positions, RULE: tl.constexpr):
    """Where the keys of positions lie in memory."""
    if RULE.ring > 0:
        positions = positions % RULE.ring
    return positions


@triton.jit
def dp_factor(k_len, RULE: tl.constexpr):
    """Factor of dP and of dO.O: 0.0 if a query sees at most one key: its weight is 1, so dS is 0; else 1.0.

    The two would cancel but for rounding, whose error is more than eager PyTorch's, which is 0.
    """
    if RULE.sink:
        factor = 1.0
    elif RULE.window == 1:
        factor = 0.0
    else:
        factor = tl.where(k_len > 1, 1.0, 0.0)
    return factor


@triton.jit
def output_products(out, dout, k_len, RULE: tl.constexpr):
    """dp_factor() sum_d dO_id O_id of each row."""
    products = out.to(tl.float32) * dout.to(tl.float32)
    if RULE.sink:  # whose gradient gets delta of rows without keys too: their output is 0, its gradient may be NaN
        products = tl.where(out == 0, 0.0, products)
    return tl.sum(products, 1) * dp_factor(k_len, RULE)


@triton.jit
def end_softmax(top, total, logit):
    """What an online softmax ends with: (lse2, what its sum of weighted values is to be multiplied by).

    logit: the sink's in base 2, or None. A row without keys has a sum of 0, and as lse2 the sink or, without, -inf.
    """
    fade = 1.0
    if logit is not None:  # one more key, which has no value
        pivot = tl.maximum(top, logit)
        pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
        fade = tl.exp2(top - pivot)
        total = total * fade + tl.exp2(logit - pivot)
        top = pivot
    dead = total == 0
    total = tl.where(dead, 1.0, total)
    return tl.where(dead, float("-inf"), top + tl.log2(total)), fade / total


@triton.jit
def tanh(x):
    """By 2^x where that is accurate; near 0, where the difference would cancel, by its series."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.04, series, 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))


@triton.jit
def cap_scores(qk, scale, RULE: tl.constexpr):
    """Raw q.k -> (x, factor): x * factor is the score in base 2, soft-capped; its slope is then 1 - x * x, else 1."""
    factor = scale * LOG2E
    if RULE.softcap > 0:
        qk = tanh(qk * (scale / RULE.softcap))
        factor = RULE.softcap * LOG2E
    return qk, factor


@triton.jit
def alibi_slope2(terms, head, seq):
    """ALiBi's slope of a head, in base 2; 0 without slopes."""
    slope2 = 0.0
    if terms.slopes is not None:
        sequence = tl.cast(seq.index, tl.int64) * terms.slopes_sequence
        slope2 = tl.load(terms.slopes + sequence + tl.cast(head, tl.int64) * terms.slopes_head) * LOG2E
    return slope2


@triton.jit
def relative_bias(terms, head, distance):
    """Of a head at distances q_pos - k_pos."""
    pointers = terms.relative + tl.cast(head, tl.int64) * terms.relative_size
    pointers += tl.minimum(tl.abs(distance), terms.relative_size - 1)
    if terms.relative_ahead is not None:
        pointers += tl.where(distance < 0, terms.relative_ahead, 0)
    return tl.load(pointers).to(tl.float32)


@triton.jit
def modify(scores, q_pos, k_pos, head, seq, terms, RULE: tl.constexpr):
    """The user's score_mod, in natural units: (new scores, derivative). Where a key gets hidden the derivative is 0.

    The function may load from tensors at the positions, so those past an end are replaced by the last.
    """
    q_pos = tl.maximum(tl.minimum(q_pos, seq.k_len - 1), seq.k_len - seq.q_len)
    k_pos = tl.minimum(k_pos, seq.k_len - 1)
    new, slope = RULE.score_mod(scores, q_pos, k_pos, head, seq.index, *terms[TERMS:])
    new = (tl.zeros_like(scores) + new).to(tl.float32)  # which may be a number, or float64
    return new, tl.where(new * LOG2E == float("-inf"), 0.0, slope).to(tl.float32)


@triton.jit
def score_mod_kernel(scores, new, slope, args, length, SCORE_MOD: tl.constexpr):
    """new, slope = SCORE_MOD(scores), all [sequences, H, length, length] float32."""
    sequence, head = tl.program_id(2), tl.program_id(1)
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    inside = at < length * length
    at = tl.minimum(at, length * length - 1)
    place = (sequence * tl.num_programs(1) + head) * length * length + at
    score = tl.load(scores + place)
    value, derivative = SCORE_MOD(score, at // length, at % length, head, sequence, *args)
    tl.store(new + place, value, inside)
    tl.store(slope + place, derivative, inside)


def evaluate_score_mod(score_mod, scores, score_args):
    """New scores and derivatives of scores [sequences, H, length, length]."""
    sequences, heads, length, _ = scores.shape
    new, slope = torch.empty_like(scores), torch.empty_like(scores)
    grid = (triton.cdiv(length * length, 256), heads, sequences)
    with torch.cuda.device_of(scores):
        try:
            score_mod_kernel[grid](scores, new, slope, tuple(score_args), length, score_mod)
        except TritonError as error:
            cause = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise ValueError(
                f"score_mod {score_mod.fn.__qualname__} does not run ({str(cause).splitlines()[-1].strip()}): it takes "
                "(score, q_pos, k_pos, head, sequence, *score_args), and must return the new score and its derivative"
            ) from error
    return new, slope


@triton.jit
def shape_scores(qk, q_pos, k_pos, head, seq, terms, RULE: tl.constexpr, MASKED: tl.constexpr):
    """Raw q.k -> (base-2 score, d score / d (scale * q.k) up to log2 e). MASKED=False promises that all is visible.

    tl.fma makes dq and dk/dv round a score identically.
    """
    slope = 1.0
    q_exists = (q_pos >= seq.k_len - seq.q_len) & (q_pos < seq.k_len)
    k_exists = k_pos < seq.k_len
    if terms.bias is not None:
        q_index = seq.q_start + q_pos - (seq.k_len - seq.q_len)
        pointers = pair_pointers(bias_view(terms), seq.batch, head, q_index, seq.k_start + k_pos)
        bias = tl.load(pointers, q_exists & k_exists, float("-inf")).to(tl.float32)
        # what is -inf in base 2, if only there, hides a key, which may hold NaN
        qk = tl.where(bias * LOG2E == float("-inf"), 0.0, qk)
    qk, factor = cap_scores(qk, terms.scale, RULE)
    if RULE.softcap > 0:
        slope = 1 - qk * qk
    if RULE.score_mod is None:
        scores = qk * factor
    else:
        scores, derivative = modify(qk * (factor / LOG2E), q_pos, k_pos, head, seq, terms, RULE)
        scores *= LOG2E
        slope *= derivative
    if terms.gate is not None:
        # a single float32, of a sum over a long row, has lost what neighbours differ by
        gate = row_lane(gate_view(terms), seq.batch, head, seq.k_start)
        q_high, q_low = load_gate(gate, slot(q_pos, RULE), q_exists & (q_pos >= 0))
        k_high, k_low = load_gate(gate, slot(k_pos, RULE), k_exists)
        scores = tl.fma((q_high - k_high) + (q_low - k_low), LOG2E, scores)
    if terms.slopes is not None:
        if RULE.ring > 0:  # positions have no limit
            distance = tl.abs(q_pos - k_pos).to(tl.float32)
        else:
            distance = tl.abs(q_pos.to(tl.float32) - k_pos.to(tl.float32))  # exact up to MAX_ALIBI_LENGTH
        scores = tl.fma(distance, -alibi_slope2(terms, head, seq), scores)
    if terms.relative is not None:
        scores = tl.fma(relative_bias(terms, head, q_pos - k_pos), LOG2E, scores)
    if terms.bias is not None:
        scores = tl.fma(bias, LOG2E, scores)
    if MASKED:
        visible = k_exists
        if RULE.causal:
            visible = visible & (k_pos <= reach(q_pos, seq, RULE))
        elif RULE.window > 0:
            visible = visible & (k_pos - q_pos < RULE.window)
        if RULE.window > 0:
            visible = visible & (q_pos - k_pos < RULE.window)
        scores = tl.where(visible, scores, float("-inf"))
        if RULE.softcap > 0 or RULE.score_mod is not None:  # a hidden key may hold NaN
            slope = tl.where(visible, slope, 0.0)
    return scores, slope


@triton.jit
def philox(low, high, key):
    """Philox2x32-7 (Salmon et al. 2011): a 64-bit counter and a 32-bit key -> 64 random bits, as two uint32."""
    for _ in tl.static_range(7):
        product = low.to(tl.uint64) * PHILOX_MULTIPLIER  # one instruction; its two halves apart would be two
        low, high = (product >> 32).to(tl.uint32) ^ key ^ high, product.to(tl.uint32)
        key += PHILOX_WEYL
    return low, high


@triton.jit
def dropout_key(sequence, head, seed, RULE: tl.constexpr):
    """Philox key of one head of a sequence, given by its number, under the 64-bit seed [1]."""
    philox_key = 0
    if RULE.dropout:
        value = tl.load(seed).to(tl.uint64, bitcast=True)
        low, high = philox(tl.cast(sequence, tl.uint32), tl.cast(head, tl.uint32), value.to(tl.uint32))
        philox_key, _ = philox(low, high, (value >> 32).to(tl.uint32))
    return philox_key


@triton.jit
def drop(weights, philox_key, q_pos, k_pos, seq, terms, RULE: tl.constexpr):
    """Zero each weight with probability terms.dropout and scale the others up.

    A weight's fate depends on the seed, its sequence and head, and on which query and key of the sequence it is of. The
    eight weights of queries i and i + 8, keys j, j + 1, j + 8 and j + 9 of blocks of 16, with an even j, have a byte
    each of one philox(). In matmuls of tensor cores one thread holds them all; of the transpose, where these are rows,
    two threads do. Here each weight computes its own.
    """
    if RULE.dropout:
        query = q_pos - (seq.k_len - seq.q_len)
        low, high = philox((query & ~8).to(tl.uint32), (k_pos & ~9).to(tl.uint32), philox_key)
        word = tl.where(((query ^ k_pos) & 1) == 0, low, high)
        byte = word >> ((query & 8) + 2 * (k_pos & 8)).to(tl.uint32) & 0xFF
        weights = tl.where(byte >= terms.dropout * 256, weights * (1 / (1 - terms.dropout)), 0.0)
    return weights
