"""Head and cross-entropy in one, without ever holding all logits: for GPT-2 they are the largest tensor of a step.

A few thousand rows at a time: logits = x W^T, their loss, and in place of the logits its gradient P - Y, from which dX
and dW follow at once (Hsu et al. 2024, Liger Kernel). The backward only scales them.

Letters: N rows (tokens), C width, V vocabulary.
"""

import os
from importlib.util import find_spec

import torch
import torch.nn.functional as F

LOGITS = 2**28  # of a piece, at most: half a gigabyte in 16 bits, and matmuls large enough to fill a GPU
MULTIPLE = 128  # of columns: matmuls of odd widths are slow
HAS_TRITON = find_spec("triton") is not None


def linear_cross_entropy(x, weight, targets, softcap=None):
    """Mean cross-entropy, in nats, of the logits cap(x weight^T) with cap(z) = softcap * tanh(z / softcap).

    Args:
        x: [N, C] in the dtype of the matmuls, or what autocast makes of it.
        weight: [V, C], of any floating dtype; its gradient has that dtype and is summed in float32.
        targets: [N] int64 in [0, V), or -100 where a row does not count; a larger one makes the loss NaN.
        softcap: positive, or None = off.

    Returns:
        float32 scalar; NaN if no row counts, as torch.nn.functional.cross_entropy. It can be differentiated once.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if not HAS_TRITON or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        logits = F.linear(x, weight.to(x.dtype)).float()
        return F.cross_entropy(cap_logits(logits, softcap), targets)
    needed = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total, _, _ = _pieces(x, weight, targets, softcap or 0.0, needed)
    return total / (targets >= 0).sum()


def cap_logits(logits, softcap):
    """softcap * tanh(logits / softcap); the logits themselves if softcap is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@torch.library.custom_op("gpt::linear_cross_entropy", mutates_args=())
def _pieces(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float, gradients: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of the losses, and if asked for its gradients: dx in the dtype of x, dweight [V, C] float32."""
    from loss_kernel import launch_cross_entropy  # imports Triton, which not every machine has

    (rows, width), vocabulary = x.shape, weight.shape[0]
    columns = -(-vocabulary // MULTIPLE) * MULTIPLE
    targets = targets.contiguous()
    head = x.new_zeros(columns, width)
    head[:vocabulary] = weight
    losses = torch.empty(rows, device=x.device, dtype=torch.float32)
    dx = x.new_empty(x.shape if gradients else 0)
    dhead = torch.zeros_like(head, dtype=torch.float32) if gradients else x.new_empty(0, dtype=torch.float32)
    step = max(LOGITS // columns // MULTIPLE, 1) * MULTIPLE
    room = x.new_empty(min(step, rows), columns)
    for first in range(0, rows, step):
        piece = slice(first, min(first + step, rows))
        logits = torch.mm(x[piece], head.T, out=room[: piece.stop - first])
        launch_cross_entropy(logits, targets[piece], losses[piece], vocabulary, softcap, gradients)
        if gradients:
            torch.mm(logits, head, out=dx[piece])
            dhead += _product(logits.T, x[piece])
    return losses.sum(), dx, dhead[:vocabulary]


def _product(a, b):
    """a @ b in float32, of 16-bit operands on the tensor cores."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


@_pieces.register_fake
def _(x, weight, targets, softcap, gradients):
    shapes = (x.shape, weight.shape) if gradients else ((0,), (0,))
    return x.new_empty((), dtype=torch.float32), x.new_empty(shapes[0]), x.new_empty(shapes[1], dtype=torch.float32)


def _save(ctx, inputs, output):
    _, weight, *_ = inputs
    _, dx, dweight = output
    ctx.save_for_backward(dx, dweight)
    ctx.set_materialize_grads(False)  # no zeros for the gradients of the gradients, which nobody takes
    ctx.weight_dtype = weight.dtype


def _backward(ctx, dtotal, *_):
    dx, dweight = ctx.saved_tensors
    return (dx.float() * dtotal).to(dx.dtype), (dweight * dtotal).to(ctx.weight_dtype), None, None, None


_pieces.register_autograd(_backward, setup_context=_save)
