"""The Triton kernel of loss.py: cross-entropy of rows of logits and, in their place, its gradient."""

import torch
import triton
import triton.language as tl


@triton.jit
def cap(z, softcap):
    """softcap * tanh(z / softcap), and its slope."""
    # tanh by a logistic: its error is absolute, and logits are summed with others of their size
    t = 2 * tl.sigmoid(z * (2 / softcap)) - 1
    return softcap * t, 1 - t * t


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, stride, vocabulary, columns, softcap,
    CAPPED: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """losses[row] = log sum exp(z) - z[target]; with GRADIENTS logits[row] <- d loss / d logit. 0 where target < 0.

    One program per row, which passes over it twice: the second time it comes from the L2 cache. Columns from
    `vocabulary` on pad the matmuls: they do not count, and their gradient is 0.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    target = tl.load(targets + row)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, column < vocabulary, float("-inf")).to(tl.float32)
        if CAPPED:
            z = tl.where(column < vocabulary, cap(z, softcap)[0], float("-inf"))
        higher = tl.maximum(top, z)
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - pivot) + tl.exp(z - pivot)
        top = higher
    highest = tl.max(top, 0)
    denominator = tl.sum(total * tl.exp(top - highest), 0)
    counts = target >= 0
    chosen = tl.load(logits + target, counts & (target < vocabulary), float("nan")).to(tl.float32)
    if CAPPED:
        chosen, _ = cap(chosen, softcap)
    tl.store(losses + row, tl.where(counts, tl.log(denominator) + (highest - chosen), 0.0))
    if GRADIENTS:
        tl.debug_barrier()  # no thread may write before all have read the target's logit
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = tl.load(logits + column, column < vocabulary, float("-inf")).to(tl.float32)
            slope = 1.0
            if CAPPED:
                z, slope = cap(z, softcap)
            gradient = (tl.exp(z - highest) / denominator - tl.where(column == target, 1.0, 0.0)) * slope
            gradient = tl.where(counts & (column < vocabulary), gradient, 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), column < columns)


def launch_cross_entropy(logits, targets, losses, vocabulary, softcap, gradients):
    """Fill losses [N] float32 and, if asked, replace logits [N, columns] by their gradient."""
    rows, columns = logits.shape
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(rows,)](
            logits, targets, losses, logits.stride(0), vocabulary, columns, softcap,
            CAPPED=softcap > 0, GRADIENTS=gradients, BLOCK=min(4096, triton.next_power_of_2(columns)), num_warps=8,
        )  # fmt: skip
