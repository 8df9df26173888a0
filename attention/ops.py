"""The kernels as torch.library custom ops, so that autograd, torch.compile and fake tensors know them.

Triton is imported when an op first runs, never before: the package loads on machines that have none.
"""

import math

import torch
from torch import Tensor


@torch.library.custom_op("attention::forward", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, causal: bool, window: int, softcap: float, dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, Tq, H, Dv] in the dtype of q and lse2 [B, H, Tq] float32, base 2; 0 for window or softcap means none."""
    from . import launch
    from .score import Rule

    return launch.forward(q, k, v, seed, scale, Rule(causal, window, softcap, dropout))


@forward.register_fake
def _(q, k, v, seed, causal, window, softcap, dropout, scale):
    batch, q_len, heads, _ = q.shape
    return q.new_empty(batch, q_len, heads, v.shape[-1]), q.new_empty(batch, heads, q_len, dtype=torch.float32)


@torch.library.custom_op("attention::backward", mutates_args=())
def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse2: Tensor, dout: Tensor, dlse: Tensor | None, seed: Tensor | None,
    causal: bool, window: int, softcap: float, dropout: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv. dlse [B, H, Tq] is the gradient of the LSE in natural units, or None."""
    from . import launch
    from .score import Rule

    rule = Rule(causal, window, softcap, dropout)
    return launch.backward(q, k, v, out, lse2, dout, dlse, seed, scale, rule)


@backward.register_fake
def _(q, k, v, out, lse2, dout, dlse, seed, causal, window, softcap, dropout, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, seed, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, *output, seed)
    ctx.set_materialize_grads(False)


def _autograd(ctx, dout, dlse2):
    q, k, v, out, lse2, seed = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dlse = None if dlse2 is None else dlse2 / math.log(2)  # lse2 = lse / ln 2
    return *backward(q, k, v, out, lse2, dout, dlse, seed, *ctx.rule), *[None] * 6


forward.register_autograd(_autograd, setup_context=_setup_context)
