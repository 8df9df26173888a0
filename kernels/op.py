"""Functions that start kernels, as ops of PyTorch's dispatcher, so that torch.compile, fake tensors and modes see them.

torch.library.custom_op would do the same, but its first call imports Dynamo, which takes seconds, and its gradients do
not work in torch.func.
"""

import torch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.utils.flop_counter import register_flop_formula

from attention import ops

LIBRARY = torch.library.Library("gpt", "FRAGMENT")


class Op:
    """The op gpt::name, called as function(*args): annotated tensors and numbers, without defaults.

    The function itself runs where only the device is to see its kernels, because the dispatcher takes long.

    Args:
        fake: of the same arguments, makes tensors like the results. flops: of the same arguments, what PyTorch counts.
        save: (ctx, args, results) -> None, as setup_context() of torch.autograd.Function; None without a gradient.
        backward: (ctx, saved tensors, *gradients of the results, each may be None) -> gradients of the arguments.
    """

    def __init__(self, name, function, fake, flops, save=None, backward=None):
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=ops.TAGS)
        packet = getattr(torch.ops.gpt, name)
        self.function, self.op, self.gradient = function, packet.default, None
        LIBRARY.impl(name, ops.outside_graphs(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"gpt::{name}", fake, lib=LIBRARY)
        register_flop_formula(packet, get_raw=True)(lambda *args, out_val: flops(*args))
        ops.one_by_one(self.op, LIBRARY)
        if save is not None:
            self.gradient = make_gradient(self.without_gradient, save, backward)
            LIBRARY.impl(name, ops.outside_graphs(lambda *args: self.with_gradient(*args)), "Autograd")

    def __call__(self, *args):
        if ops.recorded() or ops.transformed():
            return self.op(*args)
        return self.with_gradient(*args)

    def with_gradient(self, *args):
        return self.without_gradient(*args) if self.gradient is None else ops.apply(self.gradient, *args)

    def without_gradient(self, *args):
        if ops.can_skip_dispatcher(*args):
            return self.function(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.op(*args)


def make_gradient(run, save, backward):
    class Gradient(ops.Function):
        @staticmethod
        def forward(ctx, *args):
            results = ops.keeping_outer_grad_mode(run, *args)
            ctx.set_materialize_grads(False)  # most results have no gradients: do not fill zeros for them
            save(ctx, args, results)
            return results

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx, unwrap_dead_wrappers(ctx.saved_tensors), *gradients)

    return Gradient
