"""The kernel of check_score_mod()."""

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(256)


@triton.jit
def score_mod_kernel(scores, new, slope, args, length, SCORE_MOD: tl.constexpr):
    """new, slope = SCORE_MOD(scores), all [sequences, H, length, length] float32."""
    sequence, head = tl.program_id(2), tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length * length
    at = tl.minimum(at, length * length - 1)
    place = (sequence * tl.num_programs(1) + head) * length * length + at
    score = tl.load(scores + place)
    found, derivative = SCORE_MOD(score, at // length, at % length, head, sequence, *args)
    tl.store(new + place, found, inside)
    tl.store(slope + place, derivative, inside)


def evaluate(score_mod, scores, score_args):
    """New scores and derivatives of scores [sequences, H, length, length]."""
    sequences, heads, length, _ = scores.shape
    new, slope = torch.empty_like(scores), torch.empty_like(scores)
    grid = (triton.cdiv(length * length, BLOCK.value), heads, sequences)
    with torch.cuda.device_of(scores):
        score_mod_kernel[grid](scores, new, slope, tuple(score_args), length, score_mod)
    return new, slope
