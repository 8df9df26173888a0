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
def load_capped(logits, column, vocabulary, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Capped logits of some columns in float32, -inf from `vocabulary` on, and the slopes of the cap there."""
    if MASKED:
        z = tl.load(logits + column, column < vocabulary, float("-inf")).to(tl.float32)
    else:
        z = tl.load(logits + column).to(tl.float32)
    slope = tl.full(z.shape, 1.0, tl.float32)
    if CAPPED:
        z, slope = cap(z, softcap)
        if MASKED:
            z = tl.where(column < vocabulary, z, float("-inf"))
    return z, slope


@triton.jit
def add_up(logits, column, vocabulary, top, total, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """The largest logit so far, one number so that a logit costs one exponential, and the sums relative to it."""
    z, _ = load_capped(logits, column, vocabulary, softcap, CAPPED, MASKED)
    higher = tl.maximum(top, tl.max(z, 0))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - pivot) + tl.exp(z - pivot)


@triton.jit
def put_gradient(logits, column, vocabulary, columns, top, share, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """logits <- share * exp(logit - top) * slope: the softmax, times the slope of the cap."""
    z, slope = load_capped(logits, column, vocabulary, softcap, CAPPED, MASKED)
    gradient = (tl.exp(z - top) * share * slope).to(logits.dtype.element_ty)
    if MASKED:
        tl.store(logits + column, gradient, column < columns)
    else:
        tl.store(logits + column, gradient)


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
    lane = tl.arange(0, BLOCK)
    if target < 0:
        tl.store(losses + row, 0.0)
        if GRADIENTS:
            for start in range(0, columns, BLOCK):
                tl.store(logits + start + lane, tl.zeros([BLOCK], logits.dtype.element_ty), start + lane < columns)
        return
    whole = vocabulary // BLOCK * BLOCK  # columns in blocks that need no mask
    top = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, BLOCK):
        top, total = add_up(logits, start + lane, vocabulary, top, total, softcap, CAPPED, False)
    for start in range(whole, vocabulary, BLOCK):
        top, total = add_up(logits, start + lane, vocabulary, top, total, softcap, CAPPED, True)
    denominator = tl.sum(total, 0)
    chosen = tl.load(logits + target, target < vocabulary, float("nan")).to(tl.float32)
    slope = 1.0
    if CAPPED:
        chosen, slope = cap(chosen, softcap)
    tl.store(losses + row, tl.log(denominator) + (top - chosen))
    if GRADIENTS:
        share = 1 / denominator
        tl.debug_barrier()  # no thread may write before all have read the target's logit
        for start in range(0, whole, BLOCK):
            put_gradient(logits, start + lane, vocabulary, columns, top, share, softcap, CAPPED, False)
        for start in range(whole, columns, BLOCK):
            put_gradient(logits, start + lane, vocabulary, columns, top, share, softcap, CAPPED, True)
        tl.debug_barrier()  # the target's gradient goes over what another thread may have written
        gradient = (tl.exp(chosen - top) * share - 1) * slope
        tl.store(logits + target, gradient.to(logits.dtype.element_ty), target < vocabulary)


def launch_cross_entropy(logits, targets, losses, vocabulary, softcap, gradients):
    """Fill losses [N] float32 and, if asked, replace logits [N, columns] by their gradient."""
    rows, columns = logits.shape
    # Large programs, so that few rows are under way: all of them have to stay in the L2 cache between the passes.
    block = min(8192, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(rows,)](
            logits, targets, losses, logits.stride(0), vocabulary, columns, softcap,
            CAPPED=softcap > 0, GRADIENTS=gradients, BLOCK=block, num_warps=max(block // 1024, 1),
        )  # fmt: skip
