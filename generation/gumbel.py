"""Random scores of tokens, the largest of which is a sample (the Gumbel-max trick), in one kernel.

Letters: B rows, V vocabulary.
"""

import triton
import triton.language as tl

from attention.launcher import wait_for_inputs
from generation.launch import launch

BLOCK = 1024


def gumbel_scores(logits, best, least, keys, positions, temperature, log_min_p):
    """(logits - best) / temperature - log(E) with exponential variables E, as choose() of generation/choose.py defines
    them: [B, V + 1] float32.

    Tokens below `least`, or with a first term below log_min_p, score -inf. The last column is -inf, but where `best` is
    NaN or -inf, it is the largest of its row.

    Args:
        logits: [B, V] float32 on a GPU, the last dimension contiguous. best, least: [B, 1] float32; least may be None.
        keys, positions: [B] int64. temperature, log_min_p: float, the second -inf for no limit.
    """
    rows, vocabulary = logits.shape
    scores = logits.new_empty(rows, vocabulary + 1)
    launch(
        gumbel_kernel, (rows, triton.cdiv(vocabulary + 1, BLOCK)), logits, best.contiguous(),
        None if least is None else least.contiguous(), keys, positions, scores, logits.stride(0), vocabulary,
        1 / temperature, log_min_p, BLOCK, num_warps=4,
    )  # fmt: skip
    return scores


@triton.jit
def high_mix(x):
    """SplitMix64's finaliser (Steele et al. 2014) of uint64 without its last line."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    return (x ^ (x >> 27)) * 0x94D049BB133111EB


@triton.jit
def gumbel_kernel(
    logits, best, least, keys, positions, scores, stride, vocabulary, inverse_temperature, log_min_p,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logit = tl.load(logits + row * stride + token, inside, float("-inf"))
    top = tl.load(best + row)
    score = (logit - top) * inverse_temperature
    score = tl.where(score < log_min_p, float("-inf"), score)
    if least is not None:
        score = tl.where(logit < tl.load(least + row), float("-inf"), score)
    key = high_mix((tl.load(keys + row) + tl.load(positions + row)).to(tl.uint64, bitcast=True))
    key = key ^ (key >> 31)
    bits = high_mix(key + token.to(tl.uint64)) >> 33
    u = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    u = tl.minimum(u, 1 - 5.9604644775390625e-08)  # never 1
    w = 1 - u
    exponential = tl.where(w == 1, u, -tl.log(w) * (u / (1 - w)))  # -log(1 - u), exact for small u too (Kahan)
    known = top > float("-inf")
    score = tl.where(token < tl.where(known, vocabulary, 0), score - tl.log(exponential), float("-inf"))
    score = tl.where(inside, score, tl.where(known, float("-inf"), 0.0))
    tl.store(scores + row * (vocabulary + 1) + token, score, token <= vocabulary)
