"""Output head and cross-entropy in one: for GPT-2 the logits are the largest tensor of a step.

For as many rows as a share of the GPU's memory holds: logits = x W^T, then one kernel computes their loss and
overwrites the logits with their gradient P - Y, then dX and dW follow by two matmuls (Hsu et al. 2024, Liger Kernel).
The backward only scales the stored gradients.

Letters: N rows (tokens), C width, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu import hopper_problem
from attention.ops import transformed
from attention.score import tanh
from kernels.fp8 import Float8Linear, multiply
from kernels.op import Op

# Of the GPU's memory, the most that a chunk of logits takes; with several chunks their dW must be added.
LOGITS_MEMORY_FRACTION = 1 / 16
MULTIPLE = 128  # columns are padded to a multiple of this: matmuls of odd widths are slow


def linear_cross_entropy(x, weight, targets, softcap=None, layer=None):
    """Mean cross-entropy, in nats, of the logits cap(x weight^T), where cap(z) = softcap * tanh(z / softcap).

    Args:
        x: [N, C] on a GPU; under autocast it is cast to autocast's dtype.
        weight: [V, C], of any floating dtype; its gradient has that dtype and is summed in float32.
        targets: [N] int64 in [0, V), or negative for rows that do not count. A target >= V makes the loss NaN.
        softcap: positive float, or None for no cap.
        layer: the nn.Linear with this weight, or None. A Float8Linear in training mode computes the logits in FP8.

    Returns:
        float32 scalar; 0 with gradients of 0 if no row counts.

    Raises:
        ValueError: shapes break a rule above. RuntimeError: a second derivative is asked for.
    """
    if x.dim() != 2 or weight.shape[1:] != x.shape[1:] or targets.shape != x.shape[:1]:
        found = [list(tensor.shape) for tensor in (x, weight, targets)]
        raise ValueError("x {}, weight {} and targets {} must be [N, C], [V, C] and [N]; flatten them".format(*found))
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    learned = x.requires_grad or weight.requires_grad or transformed()
    fp8 = isinstance(layer, Float8Linear) and layer.training
    operands = layer.operands(x, MULTIPLE) if fp8 else (None,) * 4
    total, _, _ = loss_and_gradients(x, weight, targets, softcap, torch.is_grad_enabled() and learned, *operands)
    return total / (targets >= 0).sum().clamp(min=1)


@triton.jit
def cap(z, softcap):
    """softcap * tanh(z / softcap), and its slope."""
    t = tanh(z / softcap)
    return softcap * t, 1 - t * t


@triton.jit
def load_capped(logits, column, vocabulary, softcap, MASKED: tl.constexpr):
    """Capped logits of a block of columns in float32, -inf from column `vocabulary` on, and the slope of the cap."""
    if MASKED:
        z = tl.load(logits + column, column < vocabulary, float("-inf")).to(tl.float32)
    else:
        z = tl.load(logits + column).to(tl.float32)
    slope = tl.full(z.shape, 1.0, tl.float32)
    if softcap is not None:
        z, slope = cap(z, softcap)
        if MASKED:
            z = tl.where(column < vocabulary, z, float("-inf"))
    return z, slope


@triton.jit
def accumulate(logits, column, vocabulary, top, total, softcap, MASKED: tl.constexpr):
    """One step of the online softmax: the largest logit of the row so far, and a sum of exponentials per lane."""
    z, _ = load_capped(logits, column, vocabulary, softcap, MASKED)
    higher = tl.maximum(top, tl.max(z, 0))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - pivot) + tl.exp(z - pivot)


@triton.jit
def store_gradient(logits, column, vocabulary, columns, top, share, softcap, MASKED: tl.constexpr):
    """logits <- share * exp(logit - top) * slope: the softmax times the slope of the cap."""
    z, slope = load_capped(logits, column, vocabulary, softcap, MASKED)
    gradient = (tl.exp(z - top) * share * slope).to(logits.dtype.element_ty)
    if MASKED:
        tl.store(logits + column, gradient, column < columns)
    else:
        tl.store(logits + column, gradient)


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, stride, vocabulary, columns, softcap, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr
):
    """losses[row] = log sum exp(z) - z[target]; with GRADIENTS also logits[row] <- d loss / d logit.

    Loss and gradient are 0 where target < 0. One program reads its row twice; the second time it is in the L2 cache.
    Columns from `vocabulary` on are padding: they are left out of the sum, and their gradient is 0.
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
    whole = vocabulary // BLOCK * BLOCK  # columns in full blocks, which need no mask
    top = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, BLOCK):
        top, total = accumulate(logits, start + lane, vocabulary, top, total, softcap, False)
    for start in range(whole, vocabulary, BLOCK):
        top, total = accumulate(logits, start + lane, vocabulary, top, total, softcap, True)
    denominator = tl.sum(total, 0)
    chosen = tl.load(logits + target, target < vocabulary, float("nan")).to(tl.float32)
    slope = 1.0
    if softcap is not None:
        chosen, slope = cap(chosen, softcap)
    tl.store(losses + row, tl.log(denominator) + (top - chosen))
    if GRADIENTS:
        share = 1 / denominator
        tl.debug_barrier()  # all threads have read the target's logit before any overwrites it
        for start in range(0, whole, BLOCK):
            store_gradient(logits, start + lane, vocabulary, columns, top, share, softcap, False)
        for start in range(whole, columns, BLOCK):
            store_gradient(logits, start + lane, vocabulary, columns, top, share, softcap, True)
        tl.debug_barrier()  # the store below comes after the other threads' stores to the same element
        gradient = (tl.exp(chosen - top) * share - 1) * slope
        tl.store(logits + target, gradient.to(logits.dtype.element_ty), target < vocabulary)


def padded(weight):
    """Columns of the logits, padded."""
    return -(-weight.shape[0] // MULTIPLE) * MULTIPLE


def chunk_rows(x, columns):
    """Rows of logits per chunk, a multiple of MULTIPLE. On an H200, GPT-2's batch of 32 x 1024 tokens is one chunk."""
    memory = torch.cuda.get_device_properties(x.device).total_memory if x.is_cuda else 2**33
    return max(int(memory * LOGITS_MEMORY_FRACTION) // (columns * x.element_size()) // MULTIPLE, 1) * MULTIPLE


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, gradients: bool, x_fp8: Tensor | None,
    head_fp8: Tensor | None, scale: Tensor | None, head_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum of the losses and, with gradients, dx in the dtype of x and dweight [V, C] float32 (else empty tensors).

    The last four, of Float8Linear.operands(), are None without FP8.
    """
    (rows, width), vocabulary, columns = x.shape, weight.shape[0], padded(weight)
    targets = targets.contiguous()
    head = x.new_empty(columns, width)
    head[:vocabulary], head[vocabulary:] = weight, 0
    losses = torch.empty(rows, device=x.device, dtype=torch.float32)
    dx = x.new_empty(x.shape if gradients else 0)
    dhead = x.new_zeros(head.shape if gradients and rows == 0 else 0, dtype=torch.float32)
    step = chunk_rows(x, columns)
    buffer = x.new_empty(min(step, rows), columns)
    for first in range(0, rows, step):
        chunk = slice(first, min(first + step, rows))
        logits = buffer[: chunk.stop - first]
        if x_fp8 is None:
            torch.mm(x[chunk], head.T, out=logits)
        else:
            multiply(x_fp8[chunk], head_fp8, scale, head_scale, x.dtype, out=logits)
        _launch(logits, targets[chunk], losses[chunk], vocabulary, softcap, gradients)
        if gradients:
            torch.mm(logits, head, out=dx[chunk])
            part = _matmul_float32(logits.T, x[chunk])
            dhead = dhead.add_(part) if first else part
    return losses.sum(), dx, dhead[:vocabulary]


def _launch(logits, targets, losses, vocabulary, softcap, gradients):
    """Start the kernel that fills losses and, with gradients or on a Hopper GPU, overwrites logits."""
    if hopper_problem(logits.device) is None:
        from kernels import cross_entropy_hopper as hopper  # imports Gluon, which not every Triton has

        if hopper.supports(logits, softcap):
            return hopper.cross_entropy(logits, targets, losses, vocabulary, softcap)
    rows, columns = logits.shape
    # Large programs: with fewer rows in flight, all of them stay in the L2 cache between the two passes.
    block = min(8192, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(rows,)](
            logits, targets, losses, columns, vocabulary, columns, softcap,
            GRADIENTS=gradients, BLOCK=block, num_warps=max(block // 1024, 1),
        )  # fmt: skip


def _matmul_float32(a, b):
    """a @ b with a float32 result; 16-bit operands use the tensor cores."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


def _fake(x, weight, targets, softcap, gradients, *operands):
    shapes = (x.shape, weight.shape) if gradients else ((0,), (0,))
    return x.new_empty((), dtype=torch.float32), x.new_empty(shapes[0]), x.new_empty(shapes[1], dtype=torch.float32)


def _flops(x, weight, targets, softcap, gradients, *operands):
    return 2 * x.numel() * padded(weight) * (3 if gradients else 1)


def _save(ctx, args, results):
    _, *gradients = results
    ctx.save_for_backward(*gradients)
    ctx.weight_dtype = args[1].dtype


def _backward(ctx, saved, dtotal, ddx, ddweight):
    if ddx is not None or ddweight is not None:  # as constants the stored gradients would be silently wrong
        raise RuntimeError("linear_cross_entropy() has no second derivative; use F.cross_entropy(x @ weight.T)")
    dx, dweight = saved
    return (dx.float() * dtotal).to(dx.dtype), (dweight * dtotal).to(ctx.weight_dtype), *(None,) * 7


loss_and_gradients = Op("linear_cross_entropy", chunked_cross_entropy, _fake, _flops, _save, _backward)
