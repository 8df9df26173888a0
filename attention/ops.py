"""The kernels as torch.library custom ops, so that autograd, torch.compile and fake tensors know them.

Triton is imported when an op first runs, never before: the package loads on machines that have none.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import _offsets_to_lengths, register_flop_formula


class Options(NamedTuple):
    """The optional tensors and numbers of a call, as the ops take them; None or 0 = without."""

    bias: Tensor | None  # [B or 1, H or 1, Tq or 1, Tk or 1]
    gate: Tensor | None  # [B, H, Tk] float64, cumulative decay
    sink: Tensor | None  # [H]
    alibi_slopes: Tensor | None  # [B or N, H] float32
    seed: Tensor | None  # [1] int64
    lengths: Tensor | None  # [B] int32
    q_starts: Tensor | None  # [N + 1] int32, cumulative; both or none
    k_starts: Tensor | None
    prefix_lengths: Tensor | None  # [B] int32
    max_q_len: int
    max_k_len: int
    causal: bool
    window: int
    softcap: float
    dropout: float
    scale: float
    hopper: bool = False  # whether the kernels of hopper/ serve
    kv_heads: int = 0  # if not 0, q is the qkv of attention_qkv(), [B, T, H + 2 kv_heads, D], and k and v are None
    max_logit: bool = False  # whether forward has a third result

    def split(self, q, k, v):
        """q, k and v of a call: as they are, or as views of one tensor."""
        if self.kv_heads == 0:
            return q, k, v
        return q.split((q.shape[2] - 2 * self.kv_heads, self.kv_heads, self.kv_heads), 2)

    @property
    def tensors(self):
        return self[:TENSOR_OPTIONS]

    @property
    def learned(self):
        """Those that have gradients: bias, gate and sink."""
        return self[:3]

    @property
    def numbers(self):
        return self[TENSOR_OPTIONS:]

    @property
    def bounded(self):
        """Whether sequences have lengths, or bounds in packed rows."""
        return self.lengths is not None or self.q_starts is not None


@cache
def host(hopper):
    """The module that launches the kernels, and imports Triton."""
    if hopper:
        from .hopper import launch as module
    else:
        from .portable import launch as module
    return module


# Dynamo would look into an op that runs outside of its graphs. This is torch.compiler.disable, but it imports Dynamo,
# which takes more than a second, only when the function is first called.
outside_graphs = torch._disable_dynamo
TENSORS = "Tensor q, Tensor? k, Tensor? v"
OPTIONS = (  # the fields of Options, in their order
    "Tensor? bias, Tensor? gate, Tensor? sink, Tensor? alibi_slopes, Tensor? seed, Tensor? lengths, "
    "Tensor? q_starts, Tensor? k_starts, Tensor? prefix_lengths, "
    "SymInt max_q_len, SymInt max_k_len, bool causal, int window, float softcap, float dropout, float scale, "
    "bool hopper, int kv_heads, bool max_logit"
)
TENSOR_OPTIONS = OPTIONS.count("Tensor?")  # they come first
# torch.library.custom_op would do the same with three times the Python per call: it reads a long schema anew each time.
LIBRARY = torch.library.Library("attention", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
LIBRARY.define(f"forward({TENSORS}, {OPTIONS}) -> Tensor[]", tags=TAGS)
LIBRARY.define(
    f"backward({TENSORS}, Tensor out, Tensor lse2, Tensor dout, Tensor? dlse, bool bias_grad, {OPTIONS}) -> Tensor[]",
    tags=TAGS,
)
forward = torch.ops.attention.forward.default
backward = torch.ops.attention.backward.default


@torch.library.impl(LIBRARY, "forward", "CompositeExplicitAutograd")
@outside_graphs
def _forward(q, k, v, *options):
    """out [B, Tq, H, Dv] in the dtype of q, lse2 [B, H, Tq] float32 and if asked max_logit2 [H] float32, base 2."""
    options = Options(*options)
    return list(host(options.hopper).forward(q, k, v, options))


@torch.library.register_fake("attention::forward", lib=LIBRARY)
def _(q, k, v, *options):
    options = Options(*options)
    q, k, v = options.split(q, k, v)
    batch, q_len, heads, _ = q.shape
    shapes = [(batch, heads, q_len), (heads,)][: 1 + options.max_logit]
    return [q.new_empty(batch, q_len, heads, v.shape[-1]), *(q.new_empty(x, dtype=torch.float32) for x in shapes)]


@torch.library.impl(LIBRARY, "backward", "CompositeExplicitAutograd")
@outside_graphs
def _backward(q, k, v, out, lse2, dout, dlse, bias_grad, *options):
    """dq, dk and dv, or one tensor if k and v are None; then dbias if bias_grad, dgate and dsink if given.

    dlse [B, H, Tq] is in natural units, or None.
    """
    options = Options(*options)
    gradients = host(options.hopper).backward(q, k, v, out, lse2, dout, dlse, bias_grad, options)
    return [x for x in gradients if x is not None]


@torch.library.register_fake("attention::backward", lib=LIBRARY)
def _(q, k, v, out, lse2, dout, dlse, bias_grad, *options):
    options = Options(*options)
    inputs = (q, k, v, options.bias if bias_grad else None, *options.learned[1:])
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs if x is not None]


def one_by_one(op):
    """Let torch.vmap call an op once per example."""

    def call_each(info, dims, *args):
        calls = (
            op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)))
            for i in range(info.batch_size)
        )
        outputs = [torch.stack(x) for x in zip(*calls, strict=True)]
        return outputs, [0] * len(outputs)

    torch.library.register_vmap(op, call_each, lib=LIBRARY)


one_by_one(forward)
one_by_one(backward)


def transformed():
    """Whether torch.vmap or a transform of torch.func is at work, which then must see the ops."""
    return torch._C._functorch.maybe_current_level() is not None


PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def _plain(*tensors):
    """Whether nothing but the device is to see the operators: no tensor subclass, tracing, counting mode or vmap."""
    return PLAIN.issuperset(map(type, tensors)) and torch._C._len_torch_dispatch_stack() == 0 and not transformed()


def _run_forward(q, k, v, options):
    """The op below autograd; called directly where that is the same, since the dispatcher takes as long as a kernel."""
    if _plain(q, k, v):
        return host(options.hopper).forward(q, k, v, options)
    with torch._C._AutoDispatchBelowAutograd():
        return forward(q, k, v, *options)


def _run_backward(q, k, v, out, lse2, dout, dlse, bias_grad, options):
    """As _run_forward(); returns all six gradients, None for those that are not asked for."""
    if _plain(q, k, v, dout):
        return host(options.hopper).backward(q, k, v, out, lse2, dout, dlse, bias_grad, options)
    with torch._C._AutoDispatchBelowAutograd():
        return _call_backward(q, k, v, out, lse2, dout, dlse, bias_grad, options)


def _call_backward(q, k, v, out, lse2, dout, dlse, bias_grad, options):
    """The op, with None for those gradients that are not asked for."""
    found = list(backward(q, k, v, out, lse2, dout, dlse, bias_grad, *options))
    wanted = (q, k, v, options.bias if bias_grad else None, *options.learned[1:])
    return [None if x is None else found.pop(0) for x in wanted]


def _apply(function, *inputs):
    """function.apply(); in a transform of torch.func for its level alone, since the dispatcher goes level by level."""
    if not transformed():
        return function.apply(*inputs)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*inputs)


def _below(run, *inputs):
    """run(*inputs) in forward() of a Function, which turns gradients off: in torch.func, other levels need them on."""
    if not transformed():
        return run(*inputs)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return run(*inputs)


class Attention(torch.autograd.Function):
    """The gradient of forward by backward. inputs: options.learned, for autograd to see them, and options."""

    @staticmethod
    def forward(ctx, q, k, v, *inputs):
        *_, options = inputs
        out, lse2, *max_logit = _below(_run_forward, q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse2, *options.tensors)
        ctx.numbers = options.numbers
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*max_logit)
        return out, lse2, *max_logit

    @staticmethod
    def backward(ctx, dout, dlse2, *_):
        q, k, v, out, lse2, *tensors = ctx.saved_tensors
        options = Options(*tensors, *ctx.numbers)
        if dout is None:
            dout = torch.zeros_like(out)
        dlse = None if dlse2 is None else dlse2 / math.log(2)  # lse2 = lse / ln 2
        run = _call_backward if transformed() else _backward_or_error
        return *run(q, k, v, out, lse2, dout, dlse, ctx.needs_input_grad[3], options), None


class Backward(torch.autograd.Function):
    """Has no gradient, and says so."""

    @staticmethod
    def forward(ctx, *inputs):
        return tuple(_below(_run_backward, *inputs[TENSOR_OPTIONS:]))  # autograd does not look for tensors in options

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("attention() has no second derivative; for one, use impl='reference'")


def _refuse_tangents(*tensors):
    """Forward-mode derivatives would be silently zero: nothing below autograd hands them on."""
    for x in tensors:
        if x is None or forward_ad.unpack_dual(x).tangent is None:
            continue
        raise RuntimeError("attention() has no forward-mode derivative; for one, use impl='reference'")


def _backward_or_error(*inputs):
    """_run_backward(), or with an error in place of its own gradient where one may be asked for."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(*inputs[:-2])
    if torch.is_grad_enabled():
        return _apply(Backward, *inputs[-1].tensors, *inputs)
    return _run_backward(*inputs)


def forward_with_gradient(q, k, v, options):
    """What the forward op does under autograd, and attention() in eager mode."""
    if forward_ad._current_level >= 0:  # asked here, since a tensor with a tangent need not require a gradient
        _refuse_tangents(q, k, v, *options.learned, options.alibi_slopes)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *options.learned)):
        return _apply(Attention, q, k, v, *options.learned, options)
    return _run_forward(q, k, v, options)


def backward_with_error(q, k, v, out, lse2, dout, dlse, bias_grad, *options):
    """What the backward op does under autograd."""
    found = _backward_or_error(q, k, v, out, lse2, dout, dlse, bias_grad, Options(*options))
    return [x for x in found if x is not None]


def _forward_with_gradient(q, k, v, *options):
    return list(forward_with_gradient(q, k, v, Options(*options)))


LIBRARY.impl("forward", outside_graphs(_forward_with_gradient), "Autograd")
LIBRARY.impl("backward", outside_graphs(backward_with_error), "Autograd")


def _pairs(q, k, options):
    """Pairs of a query and a key, over all query heads, counted as PyTorch counts SDPA's: masked ones too.

    Packed sequences count one by one, which waits for the device; if their lengths are not known, with the longest.
    """
    if options.q_starts is None:
        pairs = q.shape[0] * q.shape[1] * k.shape[1]
    else:
        starts = (options.q_starts, options.max_q_len), (options.k_starts, options.max_k_len)
        pairs = sum(math.prod(x) for x in zip(*(_offsets_to_lengths(*x) for x in starts), strict=True))
    return pairs * q.shape[2]


@register_flop_formula(torch.ops.attention.forward, get_raw=True)
def _(q, k, v, *options, out_val=None):
    options = Options(*options)
    q, k, v = options.split(q, k, v)
    return 2 * _pairs(q, k, options) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.attention.backward, get_raw=True)
def _(q, k, v, out, lse2, dout, dlse, bias_grad, *options, out_val=None):
    """Scores, dq and dk, and dweights and dv: the work of any implementation, not that of these kernels."""
    options = Options(*options)
    q, k, v = options.split(q, k, v)
    return 2 * _pairs(q, k, options) * (3 * q.shape[-1] + 2 * v.shape[-1])
