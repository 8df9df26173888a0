"""The MLP's activations by name: each formula and derivative in PyTorch, and in Triton for kernels that fuse them.

The formulas serve where no kernel does, and are the kernels' reference. A new activation is added to this file only.
"""

import torch
import torch.nn.functional as F

from attention.gpu import HAS_TRITON


def relu2(h):
    positive = F.relu(h)
    return positive * positive  # autocast computes square() in float32, on GPUs only


gelu_backward = torch.ops.aten.gelu_backward
ACTIVATIONS = {  # name: (activation(h), dactive * activation'(h))
    "gelu": (F.gelu, gelu_backward),
    "gelu_tanh": (
        lambda h: F.gelu(h, approximate="tanh"),
        lambda dactive, h: gelu_backward(dactive, h, approximate="tanh"),
    ),
    "relu2": (relu2, lambda dactive, h: dactive * (2 * F.relu(h))),
}


def activate(h, kind):
    return ACTIVATIONS[kind][0](h)


def activate_backward(dactive, h, kind):
    """dactive * activation'(h)"""
    return ACTIVATIONS[kind][1](dactive, h)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from attention.tiles import INTERPRETED

    # Of y = -2 log2(e) sqrt(2 / pi) (x + 0.044715 x^3), so that tanh GELU is x / (1 + 2^y).
    LINEAR = tl.constexpr(-2.302208198144325)
    CUBIC = tl.constexpr(-0.10294323958002350)
    HALF_LOG2E = tl.constexpr(-0.7213475204444817)  # e^(-x^2 / 2) = 2^(HALF_LOG2E x^2)

    @triton.jit
    def reciprocal(x):
        """1 / x, with a relative error of 1e-7."""
        if INTERPRETED:
            return 1 / x
        else:
            return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)

    @triton.jit
    def tail(x):
        """(p, e) with p e = erfc(|x| / sqrt 2) / 2 and e = e^(-x^2 / 2), to 8e-8 (Abramowitz and Stegun, 7.1.26).

        It takes half the instructions of erf() itself, and e also serves the derivative.
        """
        t = reciprocal(tl.abs(x) * 0.23164190 + 1.0)
        p = t * 0.5307027145 - 0.7265760135
        p = p * t + 0.7107068705
        p = p * t - 0.1422483680
        p = p * t + 0.1274147960
        return p * t, tl.exp2(x * (x * HALF_LOG2E))

    @triton.jit
    def activate_tile(x, KIND: tl.constexpr):
        """As activate(), to the accuracy that tests/test_mlp.py states."""
        if KIND == "gelu":
            p, e = tail(x)
            return tl.maximum(x, 0.0) - tl.abs(x) * (p * e)
        elif KIND == "gelu_tanh":
            return x * reciprocal(tl.exp2(x * (x * x * CUBIC + LINEAR)) + 1.0)
        else:
            tl.static_assert(KIND == "relu2", "unknown activation")
            positive = tl.where(x < 0, 0.0, x)  # keeps a NaN
            return positive * positive

    @triton.jit
    def slope_tile(x, KIND: tl.constexpr):
        """The derivative of activate_tile()."""
        if KIND == "gelu":
            p, e = tail(x)
            odd = 0.5 + e * (tl.abs(x) * 0.3989422804 - p)  # the derivative is 1/2 and an odd function
            return 0.5 + tl.where(x < 0, -odd, odd)
        elif KIND == "gelu_tanh":
            square = x * x
            s = reciprocal(tl.exp2(x * (square * CUBIC + LINEAR)) + 1.0)
            # (x s)' = s + x s (1 - s) times the derivative of -y ln 2
            return s + (x * s) * (1.0 - s) * (square * (-3 * 0.6931471805599453 * CUBIC) - 0.6931471805599453 * LINEAR)
        else:
            tl.static_assert(KIND == "relu2", "unknown activation")
            return 2.0 * tl.where(x < 0, 0.0, x)
