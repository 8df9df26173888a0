"""Functions for score_mod, three as docs/attention.md shows them, each with its twin in PyTorch."""

import torch
import triton
import triton.language as tl


@triton.jit
def gaussian(score, q_pos, k_pos, head, sequence, width):
    distance = (q_pos - k_pos) / width
    return score - distance * distance / 2, 1.0


@triton.jit
def soft_cap(score, q_pos, k_pos, head, sequence, limit):
    shrink = 1 / (1 + tl.abs(score) / limit)
    return score * shrink, shrink * shrink


@triton.jit
def alibi(score, q_pos, k_pos, head, sequence, slopes):
    return score - tl.load(slopes + head) * tl.abs(q_pos - k_pos), 1.0


@triton.jit
def dilated(score, q_pos, k_pos, head, sequence, step):
    return tl.where((q_pos - k_pos) % step == 0, score, float("-inf")), 1.0


soft_cap.eager = lambda score, q_pos, k_pos, head, sequence, limit: score / (1 + score.abs() / limit)
alibi.eager = lambda score, q_pos, k_pos, head, sequence, slopes: score - slopes[head] * (q_pos - k_pos).abs()
gaussian.eager = lambda score, q_pos, k_pos, head, sequence, width: score - ((q_pos - k_pos) / width) ** 2 / 2
dilated.eager = lambda score, q_pos, k_pos, head, sequence, step: score.masked_fill(
    (q_pos - k_pos) % step != 0, float("-inf")
)
SCORE_MODS = {"soft_cap": (soft_cap, 1.5), "alibi": (alibi, None), "gaussian": (gaussian, 9.0), "dilated": (dilated, 3)}


def example(name, heads, device):
    """Arguments of attention() for one of them."""
    function, number = SCORE_MODS[name]
    return dict(score_mod=function, score_args=(torch.rand(heads, device=device) if number is None else number,))
