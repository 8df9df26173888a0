"""Activations of the MLP and their derivatives, for kernels that compute them between other things."""

import triton
import triton.language as tl

from kernels.shared import INTERPRETED

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
def activate(x, KIND: tl.constexpr):
    """KIND: "gelu", "gelu_tanh" or "relu2"."""
    if KIND == "gelu":
        p, e = tail(x)
        return tl.maximum(x, 0.0) - tl.abs(x) * (p * e)
    elif KIND == "gelu_tanh":
        return x * reciprocal(tl.exp2(x * (x * x * CUBIC + LINEAR)) + 1.0)
    else:
        positive = tl.where(x < 0, 0.0, x)  # keeps a NaN
        return positive * positive


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of activate()."""
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
        return 2.0 * tl.where(x < 0, 0.0, x)
