"""The kernels as torch.library custom ops, so that autograd, torch.compile and fake tensors know them.

The package loads on machines that have no Triton: what needs it is imported when an op first runs.
"""

import math
from functools import cache, partial
from importlib import import_module
from itertools import compress

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import register_flop_formula

from . import score_mod
from .features import GRADIENTS, OP_ARGUMENTS, TENSORS, Call

BACKENDS = {"triton": ".portable.launch", "hopper": ".hopper.launch"}  # modules that launch kernels


@cache
def backend(impl):
    """The module that launches the kernels of an implementation; it imports Triton."""
    return import_module(BACKENDS[impl], __package__)


# Dynamo would look into an op that runs outside of its graphs. This is torch.compiler.disable, but it imports Dynamo,
# which takes more than a second, only when the function is first called.
outside_graphs = torch._disable_dynamo
KINDS = {Tensor: "Tensor", int | Tensor | None: "Tensor?", float | None: "float?", int | None: "int?"}
KINDS |= {Tensor | None: "Tensor?", bool: "bool", int: "int", float: "float", str: "str", str | None: "str?"}
KINDS |= {list[Tensor | None]: "Tensor?[]", list[float]: "Scalar[]"}
CALL = ", ".join(f"{KINDS[Call.__annotations__[name]]} {name}" for name in Call._fields[:OP_ARGUMENTS])
# torch.library.custom_op would do the same with three times the Python per call: it reads a long schema anew each time.
LIBRARY = torch.library.Library("attention", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
LIBRARY.define(f"forward({CALL}) -> Tensor[]", tags=TAGS)
RESULTS = "Tensor out, Tensor lse2, Tensor dout, Tensor? dlse, bool[] wanted"  # of a forward, and what comes back
LIBRARY.define(f"backward({RESULTS}, {CALL}) -> Tensor[]", tags=TAGS)
forward_op, backward_op = torch.ops.attention.forward.default, torch.ops.attention.backward.default


@torch.library.impl(LIBRARY, "forward", "CompositeExplicitAutograd")
@outside_graphs
def _(*call):
    """out [B, Tq, H, Dv] in the dtype of q, lse2 [B, H, Tq] float32 and if asked max_logit2 [H] float32, base 2."""
    call = Call(*call)
    return list(backend(call.impl).forward(call))


@torch.library.register_fake("attention::forward", lib=LIBRARY)
def _(*call):
    call = Call(*call)
    q, _, v = call.split()
    batch, q_len, heads, _ = q.shape
    shapes = [(batch, heads, q_len), (heads,)][: 1 + call.return_max_logit]
    return [q.new_empty(batch, q_len, heads, v.shape[-1]), *(q.new_empty(x, dtype=torch.float32) for x in shapes)]


@torch.library.impl(LIBRARY, "backward", "CompositeExplicitAutograd")
@outside_graphs
def _(out, lse2, dout, dlse, wanted, *call):
    """The gradients of GRADIENTS that are wanted; dq is that of all three if k and v are None.

    dlse [B, H, Tq] is in natural units, or None.
    """
    return list(compress(launch_backward(Call(*call), (out, lse2, dout, dlse, wanted)), wanted))


def launch_backward(call, results, problem=None):
    """The gradients of GRADIENTS by a backend's kernels; None for those that are not wanted. results: see RESULTS."""
    *tensors, wanted = results
    wanted = dict(zip(GRADIENTS, wanted, strict=True))
    impl = "triton" if torch.are_deterministic_algorithms_enabled() else call.impl  # Hopper's add in any order
    gradients = backend(impl).backward(call, *tensors, wanted, problem)
    return [gradients[name] if needed else None for name, needed in wanted.items()]


@torch.library.register_fake("attention::backward", lib=LIBRARY)
def _(out, lse2, dout, dlse, wanted, *call):
    inputs = compress(Call(*call).learned, wanted)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def count_flops(q, k, v, dim_products, value_dim_products):
    """Of so many matmuls [Tq, D] by [D, Tk] and [Tq, Dv] by [Dv, Tk] for each query head.

    As PyTorch counts its own attention: what a mask hides is counted too.
    """
    depth = dim_products * q.shape[3] + value_dim_products * v.shape[3]
    return 2 * q.shape[:3].numel() * k.shape[1] * depth


@register_flop_formula(torch.ops.attention.forward, get_raw=True)
def _(*call, out_val):
    return count_flops(*Call(*call).split(), 1, 1)


@register_flop_formula(torch.ops.attention.backward, get_raw=True)
def _(out, lse2, dout, dlse, wanted, *call, out_val):
    return count_flops(*Call(*call).split(), 3, 2)  # scores, dQ and dK; dP and dV


def one_by_one(op, library=LIBRARY):
    """Let torch.vmap call an op once per example."""

    def call_each(info, dims, *args):
        def select(x, dim, i):
            if not isinstance(dim, int):
                return x
            # zeros if there is no example, for the shapes of the outputs
            return x.select(dim, i) if info.batch_size else x.sum(dim, dtype=x.dtype)

        def example(i):
            return tree_map(partial(select, i=i), args, dims)

        calls = [op(*example(i)) for i in range(max(info.batch_size, 1))]
        outputs = tree_map(lambda *x: torch.stack(x)[: info.batch_size], *calls)
        return outputs, tree_map(lambda x: 0, outputs)

    torch.library.register_vmap(op, call_each, lib=library)


one_by_one(forward_op)
one_by_one(backward_op)


def transformed():
    """Whether torch.vmap or a transform of torch.func is at work, which then must see the ops."""
    return torch._C._are_functorch_transforms_active()


PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # as make_fx(pre_dispatch=True) traces
TYPES = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


def watched(*args):
    """Whether a dispatch mode, or a subclass among the arguments of an op, such as a fake tensor, is to see the op."""
    return not TYPES.issuperset(map(type, args)) or torch._C._len_torch_dispatch_stack() > 0


def can_skip_dispatcher(*args):
    """Whether nothing but the device is to see an op below autograd."""
    return not (watched(*args) or transformed())


def recorded():
    """Whether calls go into a graph before autograd sees them: torch.compile's, or one of a tracer."""
    return (
        torch.compiler.is_compiling()
        or torch._C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH)
        or torch._C._get_tracing_state() is not None
    )


def may_launch(*args):
    """Whether a function of tensors and numbers may start kernels that are no op, above autograd."""
    return not recorded() and can_skip_dispatcher(*args)


def refuse_unseen(name, *args):
    """RuntimeError unless a function of this name may_launch()."""
    if not may_launch(*args):
        raise RuntimeError(
            f"{name}() starts kernels that fake tensors, tracers, dispatch modes and torch.func do not see; call it "
            "without them"
        )


def forward_without_gradient(call, problem=None):
    """The op below autograd; called directly where that is the same, since the dispatcher takes as long as a kernel.

    problem: that of a call that may_launch(), if it is known.
    """
    if problem is not None or can_skip_dispatcher(*call.tensors):
        return backend(call.impl).forward(call, problem)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(*call.for_op)


def backward_without_gradient(call, results, problem=None):
    """As forward_without_gradient(); returns all gradients, None for those that are not wanted."""
    if can_skip_dispatcher(*call.tensors, *results[:-1]):
        return launch_backward(call, results, problem)
    with torch._C._AutoDispatchBelowAutograd():
        return call_backward_op(call, results)


def call_backward_op(call, results, problem=None):
    """All gradients by the op, which finds the problem anew; None for those that are not wanted."""
    gradients = iter(backward_op(*results, *call.for_op))
    return [next(gradients) if wanted else None for wanted in results[-1]]


class Function(_SingleLevelFunction):
    """torch.autograd.Function for an op, which torch.func enters level by level."""

    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key


def apply(function, *inputs):
    """function.apply(); in a transform of torch.func for its level alone, since the dispatcher goes level by level."""
    if not transformed():
        return function.apply(*inputs)
    with enable_single_level_autograd_function():
        return function.apply(*inputs)


def keeping_outer_grad_mode(run, *inputs):
    """run(*inputs) in forward() of a Function, which turns gradients off: in torch.func, other levels need them on."""
    if not transformed():
        return run(*inputs)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return run(*inputs)


class Attention(Function):
    """The gradient of forward by backward. inputs: call.learned, for autograd to see them, a Call and its Problem."""

    @staticmethod
    def forward(ctx, *inputs):
        *_, call, ctx.problem = inputs
        out, lse2, *max_logit = keeping_outer_grad_mode(forward_without_gradient, call, ctx.problem)
        ctx.save_for_backward(out, lse2, *call.tensors)
        ctx.numbers = call[TENSORS + 1 : OP_ARGUMENTS]
        ctx.score_mod = score_mod.FUNCTIONS.get(call.score_mod)  # which the table may forget before the backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*max_logit)
        return out, lse2, *max_logit

    @staticmethod
    def backward(ctx, dout, dlse2, *_):
        out, lse2, *tensors = unwrap_dead_wrappers(ctx.saved_tensors)  # of a transform that has ended
        run = call_backward_op
        if not torch.compiler.is_compiling():  # as it is in compiled autograd
            if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in (dout, dlse2)):
                raise RuntimeError(
                    "attention() has no gradient with is_grads_batched=True or vectorize=True; use torch.vmap over "
                    "torch.func.vjp, or impl='reference'"
                )
            run = run if transformed() else backward_with_error
            if ctx.score_mod is not None:
                score_mod.remember(ctx.score_mod)
        call = Call(*tensors[:TENSORS], tensors[TENSORS:], *ctx.numbers)
        if dout is None:
            dout = torch.zeros_like(out)
        dlse = None if dlse2 is None else dlse2 / math.log(2)  # lse2 = lse / ln 2
        wanted = ctx.needs_input_grad[: len(GRADIENTS)]
        return *run(call, (out, lse2, dout, dlse, wanted), ctx.problem), None, None


class Backward(Function):
    """Has no gradient, and says so. inputs: tensors for autograd, which does not look into a Call, and the three."""

    @staticmethod
    def forward(ctx, *inputs):
        return tuple(keeping_outer_grad_mode(backward_without_gradient, *inputs[-3:]))

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("attention() has no second derivative; for one, use impl='reference'")


def refuse_tangents(tensors):
    """Forward-mode derivatives would be silently zero: nothing below autograd hands them on."""
    if has_tangent(tensors):
        raise RuntimeError("attention() has no forward-mode derivative; for one, use impl='reference'")


def has_tangent(tensors):
    """Whether forward-mode derivatives of some are asked for; a tensor with a tangent need not require a gradient."""
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def backward_with_error(call, results, problem=None):
    """backward_without_gradient(), with an error in place of its own gradient where one may be asked for."""
    if forward_ad._current_level >= 0:
        refuse_tangents((*call.tensors, *results[:-1]))
    if torch.is_grad_enabled():
        return apply(Backward, *call.tensors, *results[:-1], call, results, problem)
    return backward_without_gradient(call, results, problem)


def forward_with_gradient(call, problem=None):
    """What the forward op does under autograd, and attention() in eager mode, which knows the call's problem."""
    if forward_ad._current_level >= 0:
        refuse_tangents(call.tensors)
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in call.learned]):
        return apply(Attention, *call.learned, call, problem)
    return forward_without_gradient(call, problem)


@torch.library.impl(LIBRARY, "forward", "Autograd")
@outside_graphs
def _(*call):
    return list(forward_with_gradient(Call(*call)))


@torch.library.impl(LIBRARY, "backward", "Autograd")
@outside_graphs
def _(out, lse2, dout, dlse, wanted, *call):
    return list(compress(backward_with_error(Call(*call), (out, lse2, dout, dlse, wanted)), wanted))
