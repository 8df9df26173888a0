"""The k-th largest logit of each row, exactly, in two kernels; torch.topk takes seventeen.

The logits are cut into chunks. Let t be the k-th largest of the chunks' maxima. Fewer than k chunks have a maximum
above t, and they hold all logits above t. At least k chunks have a maximum of t or more, so the k-th largest logit is t
or more. It is therefore t, or the k-th largest logit of those few chunks if that is larger.

Letters: B rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from attention.launcher import wait_for_inputs
from attention.tiles import INTERPRETED
from generation.launch import launch

CHUNK = tl.constexpr(64)
MOST = 256  # largest k: k chunks are held in registers
LOWEST = tl.constexpr(-(2**31))


def best_and_kth(logits, k):
    """The largest and the k-th largest of each row of logits [B, V] float32 on a GPU: [B, 1] each; NaN is the largest.

    k: int, at most V and MOST. The last dimension is contiguous.
    """
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK.value)
    maxima, best, kth = (logits.new_empty(rows, n) for n in (chunks, 1, 1))
    selected = logits.new_empty(rows, k, dtype=torch.int32)
    grid = rows, triton.cdiv(chunks, 32)
    launch(maxima_kernel, grid, logits, maxima, logits.stride(0), vocabulary, chunks, 32, num_warps=4)
    launch(
        kth_kernel, (rows,), logits, maxima, selected, best, kth, logits.stride(0), vocabulary, chunks, k,
        triton.next_power_of_2(chunks), triton.next_power_of_2(k), num_warps=16,
    )  # fmt: skip
    return best, kth


@triton.jit
def maxima_kernel(logits, maxima, stride, vocabulary, chunks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The largest logit of each of BLOCK chunks."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(logits + row * stride + token, token < vocabulary, float("-inf"))
    keys = ordered(tl.where(values != values, float("nan"), values).to(tl.int32, bitcast=True))  # NaN without a sign
    tops = ordered(tl.max(keys, 1)).to(tl.float32, bitcast=True)
    tl.store(maxima + row * chunks + chunk, tops, chunk < chunks)


@triton.jit
def ordered(bits):
    """The bits of float32 numbers as int32 numbers of the same order, NaN last; also the way back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def kth_largest(keys, k):
    """The k-th largest of int32 keys, its sign first and then bit by bit; LOWEST if there are fewer keys."""
    found = tl.where(tl.sum((keys >= 0).to(tl.int32)) >= k, 0, LOWEST)
    for bit in range(31):
        higher = found | (1 << (30 - bit))
        found = tl.where(tl.sum((keys >= higher).to(tl.int32)) >= k, higher, found)
    return found


@triton.jit(do_not_specialize=["k"])
def kth_kernel(
    logits, maxima, selected, best, kth, stride, vocabulary, chunks, k, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row; selected holds the chunks above t for other threads of the program to read."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(maxima + row * chunks + chunk, chunk < chunks, float("-inf"))
    keys = ordered(tops.to(tl.int32, bitcast=True))
    tl.store(best + row, ordered(tl.max(keys)).to(tl.float32, bitcast=True))
    t = kth_largest(keys, k)
    above = keys > t
    place = tl.cumsum(above.to(tl.int32), 0) - 1
    tl.store(selected + row * k + place, chunk, above)
    if not INTERPRETED:
        tl.debug_barrier()
    number = tl.arange(0, BLOCK)
    mine = number < tl.sum(above.to(tl.int32))
    token = tl.load(selected + row * k + number, mine, 0)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(logits + row * stride + token, mine[:, None] & (token < vocabulary), float("-inf"))
    keys = ordered(values.to(tl.int32, bitcast=True))
    found = tl.maximum(t, kth_largest(keys, k))
    tl.store(kth + row, ordered(found).to(tl.float32, bitcast=True))
