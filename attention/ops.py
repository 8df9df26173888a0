"""The kernels as torch.library custom ops, so that autograd, torch.compile and fake tensors know them.

Triton is imported when an op first runs, never before: the package loads on machines that have none.
"""

import math
from functools import cache
from importlib import import_module
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import _offsets_to_lengths, register_flop_formula

LEARNED = 4  # of the options of a call, the first ones, have gradients: bias, gate, sink and relative_bias


class Options(NamedTuple):
    """The optional tensors and numbers of a call, as the ops take them; None or 0 = without."""

    bias: Tensor | None  # [B or 1, H or 1, Tq or 1, Tk or 1]
    gate: Tensor | None  # [B, H, Tk] float64, cumulative decay
    sink: Tensor | None  # [H]
    relative_bias: Tensor | None  # [1 or 2, H, R]
    alibi_slopes: Tensor | None  # [B or N, H] float32
    seed: Tensor | None  # [1] int64
    lengths: Tensor | None  # [B] int32
    q_starts: Tensor | None  # [N + 1] int32, cumulative; both or none
    k_starts: Tensor | None
    prefix_lengths: Tensor | None  # [B] int32
    max_q_len: torch.SymInt
    max_k_len: torch.SymInt
    causal: bool
    window: int
    softcap: float
    dropout: float
    scale: float
    backend: str = "triton"  # whose kernels serve: see HOSTS
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
        """Those that have gradients."""
        return self[:LEARNED]

    @property
    def numbers(self):
        return self[TENSOR_OPTIONS:]

    @property
    def is_ragged(self):
        """Whether sequences have lengths, or bounds in packed rows."""
        return self.lengths is not None or self.q_starts is not None


GRADIENTS = ("q", "k", "v", *Options._fields[:LEARNED])  # whose gradients the backward op returns, in this order
HOSTS = {"triton": ".portable.launch", "hopper": ".hopper.launch"}  # modules that launch a backend's kernels


@cache
def host(backend):
    """The module of a backend, which imports Triton."""
    return import_module(HOSTS[backend], __package__)


# Dynamo would look into an op that runs outside of its graphs. This is torch.compiler.disable, but it imports Dynamo,
# which takes more than a second, only when the function is first called.
outside_graphs = torch._disable_dynamo
TENSORS = "Tensor q, Tensor? k, Tensor? v"
KINDS = {Tensor | None: "Tensor?", torch.SymInt: "SymInt", bool: "bool", int: "int", float: "float", str: "str"}
OPTIONS = ", ".join(f"{KINDS[kind]} {name}" for name, kind in Options.__annotations__.items())
TENSOR_OPTIONS = OPTIONS.count("Tensor?")  # they come first
# torch.library.custom_op would do the same with three times the Python per call: it reads a long schema anew each time.
LIBRARY = torch.library.Library("attention", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
LIBRARY.define(f"forward({TENSORS}, {OPTIONS}) -> Tensor[]", tags=TAGS)
LIBRARY.define(
    f"backward({TENSORS}, Tensor out, Tensor lse2, Tensor dout, Tensor? dlse, bool[] wanted, {OPTIONS}) -> Tensor[]",
    tags=TAGS,
)
forward = torch.ops.attention.forward.default
backward = torch.ops.attention.backward.default


@torch.library.impl(LIBRARY, "forward", "CompositeExplicitAutograd")
@outside_graphs
def _forward(q, k, v, *options):
    """out [B, Tq, H, Dv] in the dtype of q, lse2 [B, H, Tq] float32 and if asked max_logit2 [H] float32, base 2."""
    options = Options(*options)
    return list(host(options.backend).forward(q, k, v, options))


@torch.library.register_fake("attention::forward", lib=LIBRARY)
def _(q, k, v, *options):
    options = Options(*options)
    q, k, v = options.split(q, k, v)
    batch, q_len, heads, _ = q.shape
    shapes = [(batch, heads, q_len), (heads,)][: 1 + options.max_logit]
    return [q.new_empty(batch, q_len, heads, v.shape[-1]), *(q.new_empty(x, dtype=torch.float32) for x in shapes)]


@torch.library.impl(LIBRARY, "backward", "CompositeExplicitAutograd")
@outside_graphs
def _backward(q, k, v, out, lse2, dout, dlse, wanted, *options):
    """The gradients of GRADIENTS that are wanted; dq is that of all three if k and v are None.

    dlse [B, H, Tq] is in natural units, or None.
    """
    return list(compress(launch_backward(q, k, v, out, lse2, dout, dlse, wanted, Options(*options)), wanted))


def launch_backward(q, k, v, out, lse2, dout, dlse, wanted, options):
    """The gradients of GRADIENTS by a backend's kernels; anything for those that are not wanted."""
    wanted = dict(zip(GRADIENTS, wanted, strict=True))
    found = host(options.backend).backward(q, k, v, out, lse2, dout, dlse, wanted, options)
    return [found.get(name) for name in GRADIENTS]


@torch.library.register_fake("attention::backward", lib=LIBRARY)
def _(q, k, v, out, lse2, dout, dlse, wanted, *options):
    inputs = compress((q, k, v, *Options(*options).learned), wanted)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def one_by_one(op):
    """Let torch.vmap call an op once per example."""

    def call_each(info, dims, *args):
        def example(i):  # zeros if there is none, for the shapes of the outputs
            return [
                x if not isinstance(dim, int) else x.select(dim, i) if info.batch_size else x.sum(dim, dtype=x.dtype)
                for x, dim in zip(args, dims, strict=True)
            ]

        calls = [op(*example(i)) for i in range(max(info.batch_size, 1))]
        outputs = tree_map(lambda *x: torch.stack(x)[: info.batch_size], *calls)
        return outputs, tree_map(lambda x: 0, outputs)

    torch.library.register_vmap(op, call_each, lib=LIBRARY)


one_by_one(forward)
one_by_one(backward)


def transformed():
    """Whether torch.vmap or a transform of torch.func is at work, which then must see the ops."""
    return torch._C._functorch.maybe_current_level() is not None


PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def _can_skip_dispatcher(*tensors):
    """Whether nothing but the device is to see the operators: no tensor subclass, tracing, counting mode or vmap."""
    return PLAIN.issuperset(map(type, tensors)) and torch._C._len_torch_dispatch_stack() == 0 and not transformed()


def _run_forward(q, k, v, options):
    """The op below autograd; called directly where that is the same, since the dispatcher takes as long as a kernel."""
    if _can_skip_dispatcher(q, k, v):
        return host(options.backend).forward(q, k, v, options)
    with torch._C._AutoDispatchBelowAutograd():
        return forward(q, k, v, *options)


def _run_backward(q, k, v, out, lse2, dout, dlse, wanted, options):
    """As _run_forward(); returns all gradients, anything for those that are not wanted."""
    if _can_skip_dispatcher(q, k, v, dout):
        return launch_backward(q, k, v, out, lse2, dout, dlse, wanted, options)
    with torch._C._AutoDispatchBelowAutograd():
        return _call_backward(q, k, v, out, lse2, dout, dlse, wanted, options)


def _call_backward(q, k, v, out, lse2, dout, dlse, wanted, options):
    """The op, with None for those gradients that are not wanted."""
    found = iter(backward(q, k, v, out, lse2, dout, dlse, wanted, *options))
    return [next(found) if x else None for x in wanted]


def _apply(function, *inputs):
    """function.apply(); in a transform of torch.func for its level alone, since the dispatcher goes level by level."""
    if not transformed():
        return function.apply(*inputs)
    with enable_single_level_autograd_function():
        return _for_one_level(function).apply(*inputs)


@cache
def _for_one_level(function):
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (_SingleLevelFunction,), methods)


def _keeping_outer_grad_mode(run, *inputs):
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
        out, lse2, *max_logit = _keeping_outer_grad_mode(_run_forward, q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse2, *options.tensors)
        ctx.numbers = options.numbers
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*max_logit)
        return out, lse2, *max_logit

    @staticmethod
    def backward(ctx, dout, dlse2, *_):
        q, k, v, out, lse2, *tensors = unwrap_dead_wrappers(ctx.saved_tensors)  # of a transform that has ended
        options = Options(*tensors, *ctx.numbers)
        if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in (dout, dlse2)):
            raise RuntimeError(
                "attention() has no gradient with is_grads_batched=True or vectorize=True; use torch.vmap over "
                "torch.func.vjp, or impl='reference'"
            )
        if dout is None:
            dout = torch.zeros_like(out)
        dlse = None if dlse2 is None else dlse2 / math.log(2)  # lse2 = lse / ln 2
        run = _call_backward if transformed() else _backward_or_error
        return *run(q, k, v, out, lse2, dout, dlse, ctx.needs_input_grad[: len(GRADIENTS)], options), None


class Backward(torch.autograd.Function):
    """Has no gradient, and says so."""

    @staticmethod
    def forward(ctx, *inputs):
        tensors_and_options = inputs[TENSOR_OPTIONS:]  # autograd does not look for tensors in options
        return tuple(_keeping_outer_grad_mode(_run_backward, *tensors_and_options))

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


def backward_with_error(q, k, v, out, lse2, dout, dlse, wanted, *options):
    """What the backward op does under autograd."""
    found = _backward_or_error(q, k, v, out, lse2, dout, dlse, wanted, Options(*options))
    return list(compress(found, wanted))


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
def _(q, k, v, out, lse2, dout, dlse, wanted, *options, out_val=None):
    """Scores, dq and dk, and dweights and dv: the work of any implementation, not that of these kernels."""
    options = Options(*options)
    q, k, v = options.split(q, k, v)
    return 2 * _pairs(q, k, options) * (3 * q.shape[-1] + 2 * v.shape[-1])
