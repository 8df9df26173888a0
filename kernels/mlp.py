"""The MLP of a block: y = W2 activation(W1 x + b1) + b2.

On Hopper GPUs, the activation and its derivative are computed inside the matmuls before them (kernels/matmul.py). With
Float8Linear layers both products are in FP8, and the activation and its FP8 copy are made in the first; gradients are
computed as without FP8.

Letters: M tokens, C width, N inner width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.gpu import hopper_problem
from kernels.activation import ACTIVATIONS, activate, activate_backward
from kernels.fp8 import MULTIPLE, Float8Linear, find_largest, multiply, quantise
from kernels.op import Op


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
        y, _, _ = fused_mlp(x.to(dtype).flatten(0, -2), *weights, kind)
        return y.unflatten(0, x.shape[:-1])
    activation, _ = ACTIVATIONS[kind]
    return project(activation(expand(x)))


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


def find_dh(dy: Tensor, w2t: Tensor, h: Tensor, kind: str) -> Tensor:
    """Gradient of h [M, N] from dy [M, C]; w2t: the transpose [N, C] of W2, in which the kernel reads whole rows."""
    if fused(dy, dy.dtype, w2t):
        from kernels.matmul import matmul

        return matmul(dy, w2t, "slope", kind=kind, other=h)
    return formula_of_dh(dy, w2t, h, kind)


def formula_of_dh(dy, w2t, h, kind):
    return activate_backward(F.linear(dy, w2t), h, kind)


def product_flops(x, weight, *rest):
    """Of x weight^T."""
    return 2 * x.numel() * len(weight)


fused_dh = Op("mlp_dh", find_dh, lambda dy, w2t, h, kind: h.new_empty(h.shape), product_flops)


def _fake(x, w1, b1, w2, b2, kind):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], w1.shape[0]), x.new_empty(x.shape[0], w1.shape[0])


def _save(ctx, args, results):
    x, w1, b1, w2, b2, ctx.kind = args
    _, h, active = results
    ctx.save_for_backward(x, w1, w2, h, active)
    ctx.has_bias = b1 is not None, b2 is not None


def backward(ctx, saved, dy, *of_saved):
    if any(x is not None for x in of_saved):
        raise RuntimeError("mlp() has no second derivative; use project(activate(expand(x), kind))")
    if dy is None:
        return (None,) * 6
    x, w1, w2, h, active = saved
    operands = dy, w2.T.contiguous(), h, ctx.kind
    # in PyTorch's operators a second derivative reaches h, which is a result of the op: then the error above
    dh = formula_of_dh(*operands) if torch.is_grad_enabled() else fused_dh(*operands)
    db1, db2 = (d.sum(0) if bias else None for d, bias in zip((dh, dy), ctx.has_bias, strict=True))
    return dh @ w1, dh.T @ x, db1, dy.T @ active, db2, None


fused_mlp = Op("mlp", forward, _fake, lambda *args: 2 * product_flops(*args), _save, backward)


def multiply_and_activate(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, weight_scale: Tensor, active_scale: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h = x weight^T + bias, activation(h), the same quantised, its largest absolute value), by kernels/matmul.py."""
    from kernels.matmul import matmul

    return matmul(x, weight, "activate", kind=kind, bias=bias, scales=(scale, weight_scale, active_scale))


def _fake_fp8(x, weight, bias, scale, *rest):
    h = x.new_empty(len(x), len(weight), dtype=torch.bfloat16)
    return h, torch.empty_like(h), torch.empty_like(h, dtype=x.dtype), scale.new_empty(())


fused_fp8 = Op("mlp_fp8", multiply_and_activate, _fake_fp8, product_flops)


class TwoProducts(torch.autograd.Function):
    """(W2 a + b2, largest |x|, largest |a|) where a = activation(W1 x + b1). Gradients as above."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, w1_fp8, w2_fp8, scale, w1_scale, active_scale, w2_scale, kind):
        x_fp8 = quantise(x, scale)
        if fused(x_fp8, x_fp8.dtype, w1):
            h, active, active_fp8, largest = fused_fp8(x_fp8, w1_fp8, b1, scale, w1_scale, active_scale, kind)
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
        return *backward(ctx, ctx.saved_tensors, dy), *[None] * 6


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
