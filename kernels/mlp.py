"""The MLP of a block: y = W2 activation(W1 x + b1) + b2.

On Hopper GPUs, the activation and its derivative are computed inside the matmuls before them (kernels/matmul.py). With
Float8Linear layers both products are in FP8, and the activation and its FP8 copy are made in the first; gradients are
computed as without FP8.

Letters: M tokens, C width, N inner width.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.gpu import hopper_problem
from kernels.activation import activate, activate_backward
from kernels.fp8 import MULTIPLE, Float8Linear, find_largest, multiply, quantise


def mlp(x, expand, project, kind):
    """project(activation(expand(x))), and for its gradient fewer kernels where the GPU has them.

    Args:
        x: [..., C]. expand: nn.Linear from C to N. project: nn.Linear from N to C. kind: a name in ACTIVATIONS.
    """
    if isinstance(project, Float8Linear) and project.training:
        return mlp_fp8(x, expand, project, kind)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    weights = (expand.weight, expand.bias, project.weight, project.bias)
    if torch.is_grad_enabled() and fused(x, dtype, expand.weight):
        weights = [None if w is None else w.to(dtype) for w in weights]
        run = _mlp if torch.compiler.is_compiling() else EagerMLP.apply
        y, _, _ = run(x.to(dtype).flatten(0, -2), *weights, kind)
        return y.unflatten(0, x.shape[:-1])
    return project(activate(expand(x), kind))


def fused(x, dtype, weight):
    """Whether kernels/matmul.py computes with x, as cast to a dtype, and the weight [N, C]."""
    if dtype not in (torch.bfloat16, torch.float8_e4m3fn) or hopper_problem(x.device):
        return False
    from kernels.matmul import supports  # imports Gluon, which not every machine has

    columns, depth = weight.shape
    return supports(x.numel() // max(depth, 1), depth, columns, dtype)


def forward(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y [M, C], and for the backward h = W1 x + b1 and activation(h) [M, N]."""
    if fused(x, x.dtype, w1):
        from kernels.matmul import matmul

        h, active = matmul(x, w1, "activate", kind=kind, bias=b1)
    else:
        h = F.linear(x, w1, b1)
        active = activate(h, kind)
    return F.linear(active, w2, b2), h, active


_mlp = torch.library.custom_op("gpt::mlp", forward, mutates_args=())


@_mlp.register_fake
def _(x, w1, b1, w2, b2, kind):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], w1.shape[0]), x.new_empty(x.shape[0], w1.shape[0])


def find_dh(dy: Tensor, w2t: Tensor, h: Tensor, kind: str) -> Tensor:
    """Gradient of h [M, N] from dy [M, C]; w2t: the transpose [N, C] of W2, in which the kernel reads whole rows."""
    if fused(dy, dy.dtype, w2t):
        from kernels.matmul import matmul

        return matmul(dy, w2t, "slope", kind=kind, other=h)
    return activate_backward(F.linear(dy, w2t), h, kind)


_dh = torch.library.custom_op("gpt::mlp_dh", find_dh, mutates_args=())


@_dh.register_fake
def _(dy, w2t, h, kind):
    return h.new_empty(h.shape)


def _save(ctx, inputs, output):
    x, w1, b1, w2, b2, ctx.kind = inputs
    _, h, active = output
    ctx.save_for_backward(x, w1, w2, h, active)
    ctx.has_bias = b1 is not None, b2 is not None
    ctx.set_materialize_grads(False)  # h and active have no gradients of their own: do not fill zeros for them


def backward(find_dh, ctx, dy, *_):
    if dy is None:
        return (None,) * 6
    x, w1, w2, h, active = ctx.saved_tensors
    dh = find_dh(dy, w2.T.contiguous(), h, ctx.kind)
    db1, db2 = (d.sum(0) if bias else None for d, bias in zip((dh, dy), ctx.has_bias, strict=True))
    return dh @ w1, dh.T @ x, db1, dy.T @ active, db2, None


_mlp.register_autograd(partial(backward, _dh), setup_context=_save)


class EagerMLP(torch.autograd.Function):
    """The op for eager mode: the first call of a torch.library.custom_op imports torch._dynamo, which takes seconds."""

    forward, setup_context = staticmethod(forward), staticmethod(_save)
    backward = staticmethod(once_differentiable(partial(backward, find_dh)))


def multiply_and_activate(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, weight_scale: Tensor, active_scale: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h = x weight^T + bias, activation(h), the same quantised, its largest absolute value), by kernels/matmul.py."""
    from kernels.matmul import matmul

    return matmul(x, weight, "activate", kind=kind, bias=bias, scales=(scale, weight_scale, active_scale))


_multiply_and_activate = torch.library.custom_op("gpt::mlp_fp8", multiply_and_activate, mutates_args=())


@_multiply_and_activate.register_fake
def _(x, weight, bias, scale, weight_scale, active_scale, kind):
    h = x.new_empty(len(x), len(weight), dtype=torch.bfloat16)
    return h, torch.empty_like(h), torch.empty_like(h, dtype=x.dtype), scale.new_empty(())


class TwoProducts(torch.autograd.Function):
    """(W2 a + b2, largest |x|, largest |a|) where a = activation(W1 x + b1). Gradients as above."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, w1_fp8, w2_fp8, scale, w1_scale, active_scale, w2_scale, kind):
        x_fp8 = quantise(x, scale)
        if fused(x_fp8, x_fp8.dtype, w1):
            run = _multiply_and_activate if torch.compiler.is_compiling() else multiply_and_activate
            h, active, active_fp8, largest = run(x_fp8, w1_fp8, b1, scale, w1_scale, active_scale, kind)
        else:
            h = multiply(x_fp8, w1_fp8, scale, w1_scale, x.dtype, b1)
            active = activate(h, kind)
            active_fp8, largest = quantise(active, active_scale), find_largest(active)
        y, largest_x = multiply(active_fp8, w2_fp8, active_scale, w2_scale, x.dtype, b2), find_largest(x)
        ctx.save_for_backward(x, w1, w2, h, active)
        ctx.kind, ctx.has_bias = kind, (b1 is not None, b2 is not None)
        ctx.mark_non_differentiable(largest_x, largest)
        return y, largest_x, largest

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        run = _dh if torch.compiler.is_compiling() else find_dh
        return *backward(run, ctx, dy), *[None] * 6


def mlp_fp8(x, expand, project, kind):
    """project(activation(expand(x))) as mlp(), of two Float8Linear layers in training mode."""
    rows, w1, b1 = expand.cast(x)
    _, w2, b2 = project.cast(x)
    copies = [layer.quantised_weight(MULTIPLE) for layer in (expand, project)]
    scales = expand.scale, expand.weight_scale, project.scale, project.weight_scale
    y, *largest = TwoProducts.apply(rows, w1, b1, w2, b2, *copies, *scales, kind)
    for layer, value in zip((expand, project), largest, strict=True):
        layer.record(value)
    return y.unflatten(0, x.shape[:-1])
