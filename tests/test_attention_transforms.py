"""attention() and attention_qkv() under torch.vmap, torch.func and FlopCounterMode, with each implementation."""

from functools import partial

import pytest
import torch
from problems import BACKEND, ON_GPU, from_qkv, named
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from attention import attention

KERNELS = ["triton", "hopper", "triton_qkv", "hopper_qkv"]
by_kernels = pytest.mark.parametrize("impl", named(KERNELS))
by_all = pytest.mark.parametrize("impl", named([*KERNELS, "sdpa", "reference"]))
close = partial(torch.testing.assert_close, rtol=2e-2 if ON_GPU else 1e-4, atol=1e-2 if ON_GPU else 1e-5)


def inputs(impl, device):
    """q of two examples [2, 1, 9, 2, D], and k and v for both."""
    dtype, dim = (torch.bfloat16, 64) if "hopper" in impl else (torch.float32, 16)
    shapes = (2, 1, 9, 2, dim), (1, 9, 1, dim), (1, 9, 1, dim)
    return [torch.randn(*shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def function(impl):
    """attention() by an implementation, or attention_qkv(), as a function of q, k and v too."""
    return partial(from_qkv if "qkv" in impl else attention, impl=impl.removesuffix("_qkv"))


def loss(q, k, v, impl, **options):
    return function(impl)(q, k, v, **options).float().square().sum()


def expected(q, k, v, impl, **options):
    """The loss of each example and the gradients of their sum, by a loop."""
    losses = torch.stack([loss(x, k, v, impl, **options) for x in q])
    return losses, *torch.autograd.grad(losses.sum(), (q, k, v))


@by_all
def test_vmap_has_gradients(impl, device):
    """Of the tensor that torch.vmap splits, along any dimension, and of the others."""
    q, k, v = inputs(impl, device)
    truths = expected(q, k, v, impl)
    q = q.detach().movedim(0, 2).requires_grad_()
    losses = torch.vmap(partial(loss, impl=impl), (2, None, None))(q, k, v)
    dq, *others = torch.autograd.grad(losses.sum(), (q, k, v))
    close((losses, dq.movedim(2, 0), *others), truths)


@by_all
def test_func_grad(impl, device):
    """Alone, inside of torch.vmap, around it, and compiled."""
    q, k, v = inputs(impl, device)
    _, dq, dk, dv = expected(q, k, v, impl)
    q, k, v = (x.detach() for x in (q, k, v))
    grad = torch.func.grad(partial(loss, impl=impl), argnums=(0, 1, 2))
    close(grad(q[0], k, v)[0], dq[0])
    mapped = torch.vmap(grad, (0, None, None))
    around = torch.func.grad(lambda *x: torch.vmap(partial(loss, impl=impl), (0, None, None))(*x).sum(), (0, 1, 2))
    for found in (mapped(q, k, v), torch.compile(mapped, backend=BACKEND)(q, k, v), around(q, k, v)):
        for ours, truth in zip(found, (dq, dk, dv), strict=True):
            close(ours if ours.shape == truth.shape else ours.sum(0), truth)


def test_vmap_over_every_tensor(device):
    """All terms and lengths are split; the LSE alone has a gradient; the seed is drawn for each example."""
    q, k, v, bias = (torch.randn(2, 1, *n, device=device) for n in ((9, 2, 16), (9, 1, 16), (9, 1, 16), (2, 9, 9)))
    decay, sink = -torch.rand(2, 1, 9, 2, device=device), torch.randn(2, 2, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v, bias, decay, sink)]
    lengths = torch.tensor([[9], [5]], dtype=torch.int32, device=device)

    def call(q, k, v, bias, decay, sink, lengths):
        options = dict(bias=bias, decay=decay, sink=sink, lengths=lengths, window=6, return_lse=True)
        return attention(q, k, v, **options, impl="triton")[1].clamp(min=-100).square()

    mapped = torch.vmap(call)(*leaves, lengths)
    looped = torch.stack([call(*x) for x in zip(*leaves, lengths, strict=True)])
    close(mapped, looped)
    close(*(torch.autograd.grad(x.sum(), leaves) for x in (mapped, looped)))
    drop = torch.vmap(lambda q: attention(q, k[0], v[0], dropout=0.5, impl="triton"), randomness="different")
    assert not torch.equal(*drop(q[:1].expand_as(q)))


@by_kernels
def test_no_second_derivative(impl, device):
    """Of the kernels, in any order of transforms: an error, not zero."""
    q, k, v = (x.detach() for x in inputs(impl, device))
    first = torch.func.grad(partial(loss, impl=impl))
    again = torch.func.grad(lambda q: first(q, k, v).square().sum())
    leaf = q[0].clone().requires_grad_()
    (dq,) = torch.autograd.grad(loss(leaf, k, v, impl), leaf, create_graph=True)
    for call in (
        lambda: dq.sum().backward(),
        lambda: again(q[0]),
        lambda: torch.vmap(again)(q),
        lambda: torch.func.jacfwd(first)(q[0], k, v),
        lambda: first(leaf, k, v).sum().backward(),
    ):
        with pytest.raises(RuntimeError, match=r"no (second derivative|forward-mode derivative).*impl='reference'"):
            call()


@by_kernels
def test_batched_gradients_raise(impl, device):
    """Those of torch.vmap over torch.func.vjp work instead."""
    q, k, v = (x.detach() for x in inputs(impl, device))
    call, leaf = partial(function(impl), k=k, v=v), q[0].clone().requires_grad_()
    directions = torch.randn(2, *leaf.shape, device=device, dtype=leaf.dtype)
    out = call(leaf)
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True.*torch.func.vjp"):
        torch.autograd.grad(out, leaf, directions, is_grads_batched=True, retain_graph=True)
    _, pull = torch.func.vjp(call, leaf.detach())
    with torch.no_grad():
        (found,) = torch.vmap(pull)(directions)
        close(pull(directions[0])[0], found[0])
    close(found, torch.stack([torch.autograd.grad(out, leaf, x, retain_graph=True)[0] for x in directions]))


@pytest.mark.parametrize("name", named(["triton", "triton_qkv", "hopper"]))
def test_flops_are_those_that_pytorch_counts(name, device):
    """For its own attention, forward and backward: without a discount for what the mask hides."""
    impl, joint, _ = name.partition("_")
    dtype = torch.bfloat16 if impl == "hopper" else torch.float32
    q, k, v = (torch.randn(2, 20, n, 64, device=device, dtype=dtype, requires_grad=True) for n in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        (from_qkv if joint else attention)(q, k, v, window=9, impl=impl).sum().backward()
    shape = (2, 4, 20, 64)
    expected = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert counter.get_total_flops() == expected
