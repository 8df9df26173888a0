"""attention_qkv(): the results of attention() on slices, and one gradient, which the kernels write in place."""

from functools import partial

import pytest
import torch
from problems import CASES, ON_GPU, by_impl, from_qkv, make_problem, our_kernels, results, same, sizes_of

from attention import attention, attention_qkv

DTYPE, DIM = (torch.bfloat16, 64) if ON_GPU else (torch.float32, 16)
# name -> arguments of make_problem, in which queries and keys are the same tokens
QKV_CASES = {
    "grouped": dict(heads=4, kv_heads=2),
    "multi_query_full": dict(causal=False, heads=3, kv_heads=1),
    "lengths_window": dict(lengths=[40, 30, 0], batch=3, window=9),
    "packed_with_rest": dict(packed=[0, 20, 20, 33, 40], heads=4, kv_heads=2),
    "packed_pair": dict(packed=([0, 20, 20, 30], [0, 30, 35, 40])),
    "bias": dict(bias=(2, 2, 40, 40), hide=True),
    "all": CASES["all"] | dict(q_len=60, bias=(3, 60, 60)),
    "all_packed": CASES["all_packed"] | dict(dim=DIM, value_dim=None),
}


@pytest.mark.parametrize("loops", [True, False], ids=["loop", "partials"])
@pytest.mark.parametrize("case", QKV_CASES.values(), ids=QKV_CASES)
def test_equals_attention_of_slices(case, loops, device, poisoned, monkeypatch):
    if not loops and "kv_heads" not in case:
        pytest.skip("partial sums are for grouped queries")
    monkeypatch.setattr("attention.portable.launch.loops_over_group", lambda problem, programs, device: loops)
    problem = make_problem(device, DTYPE, **dict(dim=DIM, q_len=40) | case)
    for impl in our_kernels(problem[0]):
        whole, slices = (results(partial(call, impl=impl), problem, DTYPE) for call in (from_qkv, attention))
        same(whole, slices, impl)


def projection(device, *batch, impl="triton"):
    """qkv of 4 query heads and 2 key heads."""
    dtype, dim = sizes_of(impl)
    return torch.randn(*batch, 30, 8 * dim, device=device, dtype=dtype, requires_grad=True)


def loss(qkv, impl, **options):
    return attention_qkv(qkv, 4, 2, impl=impl, **options).float().square().sum()


def loss_of_slices(qkv, impl, **options):
    q, k, v = qkv.unflatten(-1, (8, -1)).split((4, 2, 2), -2)
    return attention(q, k, v, impl=impl, **options).float().square().sum()


@by_impl
@pytest.mark.parametrize("ragged", [False, True])
def test_nothing_is_copied(impl, ragged, device, monkeypatch):
    """Neither the slices of qkv before the kernels nor the gradients after them."""
    qkv = projection(device, 2, impl=impl)
    options = dict(lengths=torch.tensor([30, 11], dtype=torch.int32, device=device)) if ragged else {}
    (expected,) = torch.autograd.grad(loss_of_slices(qkv, impl, **options), qkv)
    dout = torch.randn(2, 30, 4, qkv.shape[-1] // 8, device=device, dtype=qkv.dtype)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("copied"))
        out = attention_qkv(qkv, 4, 2, impl=impl, **options)
        kernels, _ = out.grad_fn.next_functions[0]
        gradient = torch.autograd.grad(out, qkv, dout)[0]
    assert "View" in kernels.name() or "Unflatten" in kernels.name()
    assert kernels.next_functions[0][0].variable is qkv
    assert gradient.is_contiguous() and gradient.shape == expected.shape


@pytest.mark.parametrize("impl", ["auto", "sdpa", "reference"])
def test_other_implementations(impl, device):
    qkv = projection(device, 2)
    found, expected = (torch.autograd.grad(call(qkv, impl), qkv)[0] for call in (loss, loss_of_slices))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "shape, heads, said",
    [
        ((2, 10, 100), (4, 2), r"qkv has shape \(2, 10, 100\); .*n_head=4 and n_kv_head=2.*8 \* head_dim\]"),
        ((2, 10, 8, 16), (4, 2), r"qkv has shape \(2, 10, 8, 16\)"),
        ((2, 10, 80), (4, 2), "head dim 10"),
        ((2, 10, 112), (3, 2), "n_head=3 must be a multiple of n_kv_head=2"),
        ((2, 10, 64), (0, None), "n_head=0 .* at least 1"),
        ((2, 10, 64), (2, -1), "n_kv_head=-1"),
        ((2, 10, 64), (2.0, 1), "n_head=2.0 is float"),
    ],
)
def test_rules(shape, heads, said):
    with pytest.raises(ValueError, match=said):
        attention_qkv(torch.zeros(shape), *heads)


def test_arguments():
    with pytest.raises(ValueError, match="qkv is list"):
        attention_qkv([1.0], 4)
    assert attention_qkv(torch.zeros(0, 30, 96), 2).shape == (0, 30, 2, 16)  # as many key heads as query heads
    for name in ("windows", "q"):
        with pytest.raises(TypeError, match=rf"attention_qkv\(\).*'{name}'"):
            attention_qkv(torch.zeros(1, 10, 96), 2, **{name: 3})
