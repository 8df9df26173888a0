"""The kernels as torch.library custom ops, so that autograd, torch.compile and fake tensors know them.

Triton is imported when an op first runs, never before: the package loads on machines that have none.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """The optional tensors and numbers of a call, as the ops take them; None or 0 = without."""

    bias: Tensor | None  # [B or 1, H or 1, Tq or 1, Tk or 1]
    gate: Tensor | None  # [B, H, Tk] float64, cumulative decay
    sink: Tensor | None  # [H]
    seed: Tensor | None  # [1] int64
    lengths: Tensor | None  # [B] int32
    q_starts: Tensor | None  # [N + 1] int32, cumulative; both or none
    k_starts: Tensor | None
    max_q_len: int
    max_k_len: int
    causal: bool
    window: int
    softcap: float
    dropout: float
    scale: float

    @property
    def rule(self):
        from .score import Rule

        return Rule(self.causal, self.window, self.softcap, self.dropout)


TENSORS = "Tensor q, Tensor k, Tensor v"
OPTIONS = (  # the fields of Options, in their order
    "Tensor? bias, Tensor? gate, Tensor? sink, Tensor? seed, Tensor? lengths, Tensor? q_starts, Tensor? k_starts, "
    "SymInt max_q_len, SymInt max_k_len, bool causal, int window, float softcap, float dropout, float scale"
)


@torch.library.custom_op("attention::forward", mutates_args=(), schema=f"({TENSORS}, {OPTIONS}) -> (Tensor, Tensor)")
def forward(q, k, v, *options):
    """out [B, Tq, H, Dv] in the dtype of q and lse2 [B, H, Tq] float32, base 2."""
    from . import launch

    options = Options(*options)
    return launch.forward(q, k, v, options.rule, options)


@forward.register_fake
def _(q, k, v, *options):
    batch, q_len, heads, _ = q.shape
    return q.new_empty(batch, q_len, heads, v.shape[-1]), q.new_empty(batch, heads, q_len, dtype=torch.float32)


@torch.library.custom_op(
    "attention::backward",
    mutates_args=(),
    schema=f"({TENSORS}, Tensor out, Tensor lse2, Tensor dout, Tensor? dlse, bool bias_grad, {OPTIONS}) -> Tensor[]",
)
def backward(q, k, v, out, lse2, dout, dlse, bias_grad, *options):
    """dq, dk, dv, then dbias if bias_grad, dgate and dsink if given. dlse [B, H, Tq] is in natural units, or None."""
    from . import launch

    options = Options(*options)
    gradients = launch.backward(q, k, v, out, lse2, dout, dlse, bias_grad, options.rule, options)
    return [x for x in gradients if x is not None]


@backward.register_fake
def _(q, k, v, out, lse2, dout, dlse, bias_grad, *options):
    options = Options(*options)
    inputs = (q, k, v, options.bias if bias_grad else None, options.gate, options.sink)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs if x is not None]


def _setup_context(ctx, inputs, output):
    q, k, v, *options = inputs
    tensors = [x for x in options if isinstance(x, Tensor)]
    ctx.options = [None if isinstance(x, Tensor) else x for x in options]
    ctx.places = [place for place, x in enumerate(options) if isinstance(x, Tensor)]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.set_materialize_grads(False)


def _autograd(ctx, dout, dlse2):
    q, k, v, out, lse2, *tensors = ctx.saved_tensors
    options = Options(*ctx.options)._asdict()
    for place, tensor in zip(ctx.places, tensors, strict=True):
        options[Options._fields[place]] = tensor
    options = Options(**options)
    if dout is None:
        dout = torch.zeros_like(out)
    dlse = None if dlse2 is None else dlse2 / math.log(2)  # lse2 = lse / ln 2
    bias_grad = ctx.needs_input_grad[3]
    dq, dk, dv, *rest = backward(q, k, v, out, lse2, dout, dlse, bias_grad, *options)
    learned = (options.bias if bias_grad else None, options.gate, options.sink)
    rest = [None if x is None else rest.pop(0) for x in learned]
    return dq, dk, dv, *rest, *[None] * (len(options) - len(learned))


forward.register_autograd(_autograd, setup_context=_setup_context)


def _no_second_derivative(ctx, *gradients):
    raise RuntimeError("attention() has no second derivative; for one, use impl='reference'")


backward.register_autograd(_no_second_derivative)
