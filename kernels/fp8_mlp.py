"""The MLP of a block in FP8: both of its products, with the activation and its FP8 copy made in the first one.

kernels/matmul.py does that on Hopper GPUs, and a formula elsewhere. Gradients are those of kernels/mlp.py.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.activation import activate
from kernels.fp8 import MULTIPLE, find_largest, multiply, quantise
from kernels.mlp import _dh, backward, find_dh, fused


def multiply_and_activate(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, weight_scale: Tensor, active_scale: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h = x weight^T + bias, activation(h), the same quantised, its largest absolute value), by kernels/matmul.py."""
    from kernels.matmul import matmul  # imports Gluon, which not every machine has

    return matmul(x, weight, "activate", kind=kind, bias=bias, scales=(scale, weight_scale, active_scale))


_multiply_and_activate = torch.library.custom_op("gpt::mlp_fp8", multiply_and_activate, mutates_args=())


@_multiply_and_activate.register_fake
def _(x, weight, bias, scale, weight_scale, active_scale, kind):
    h = x.new_empty(len(x), len(weight), dtype=torch.bfloat16)
    return h, torch.empty_like(h), torch.empty_like(h, dtype=x.dtype), scale.new_empty(())


class TwoProducts(torch.autograd.Function):
    """(W2 a + b2, largest |x|, largest |a|) where a = activation(W1 x + b1). Gradients as in kernels/mlp.py."""

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
    """project(activation(expand(x))) of two Float8Linear layers, x: [..., C]. kind: a name in ACTIVATIONS."""
    if not expand.training:
        return project(activate(expand(x), kind))
    rows, w1, b1 = expand.cast(x)
    _, w2, b2 = project.cast(x)
    copies = [layer.quantised_weight(MULTIPLE) for layer in (expand, project)]
    scales = expand.scale, expand.weight_scale, project.scale, project.weight_scale
    y, *largest = TwoProducts.apply(rows, w1, b1, w2, b2, *copies, *scales, kind)
    for layer, value in zip((expand, project), largest, strict=True):
        layer.record(value)
    return y.unflatten(0, x.shape[:-1])
