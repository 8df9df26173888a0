"""return_max_logit: the largest logit of each query head, against the reference in float64."""

from functools import partial

import pytest
import torch
from problems import CASES, ON_GPU, floats, from_qkv, integers, make_problem, our_kernels
from test_hopper import CASES as HOPPER_CASES

from attention import attention

MORE = {f"hopper_{name}": dict(dim=64) | case for name, case in HOPPER_CASES.items()} if ON_GPU else {}
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # of eager PyTorch in float32: up to 2e-6


def exact(arguments):
    """By the reference in float64."""
    floating = {n for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    doubled = arguments | {name: arguments[name].double() for name in floating - {"alibi_slopes"}}
    return attention(**doubled, return_max_logit=True, impl="reference")[1].float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", (CASES | MORE).values(), ids=CASES | MORE)
def test_errors_against_float64(case, dtype, device, poisoned):
    """The sums of products are in float32, whatever the dtype."""
    wide = dict(dim=64, value_dim=None) if dtype == torch.bfloat16 else {}
    arguments, _, _ = make_problem(device, dtype, **case | wide)
    for impl in our_kernels(arguments):
        close(attention(**arguments, return_max_logit=True, impl=impl)[1], exact(arguments))


@pytest.mark.parametrize("dim", [64, 128, 256] if ON_GPU else [16])
@pytest.mark.parametrize("bounds", [{}, dict(lengths=[50, 7]), dict(packed=[0, 20, 20, 53], sink=True)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_only_queries_that_exist_count(causal, bounds, dim, device):
    """All logits are far below 0, which is what a tile's rows past the end, or a sink, could have."""
    arguments, _, _ = make_problem(device, DTYPES[-1], dim=dim, causal=causal, kv_heads=1, **bounds)
    arguments |= dict(q=arguments["q"].abs() + 1, k=-arguments["k"].abs() - 1)
    truth = exact(arguments)
    assert (truth < -3).all()
    for impl in our_kernels(arguments):
        close(attention(**arguments, return_max_logit=True, impl=impl)[1], truth)


@pytest.mark.parametrize("impl", ["kernels", "reference"])
def test_heads_that_see_no_key(impl, device):
    """-inf: of one head by its bias, of all by lengths, and without rows, queries or keys."""
    hides = floats(1, 2, 1, 1)
    hides[:, 1] = float("-inf")
    for (batch, q_len, k_len), options, seen in (
        ((2, 20, 20), dict(bias=hides), [True, False]), ((2, 20, 20), dict(lengths=integers(0, 0)), [False, False]),
        ((0, 20, 20), {}, [False, False]), ((2, 0, 20), {}, [False, False]), ((2, 20, 0), {}, [False, False]),
        ((2, 20, 20), dict(sink=floats(2), lengths=integers(0, 0)), [False, False]),
    ):  # fmt: skip
        q, k = (torch.randn(batch, n, 2, 64, device=device, dtype=DTYPES[-1]) for n in (q_len, k_len))
        arguments = dict(q=q, k=k, v=k) | options
        for name in our_kernels(arguments) if impl == "kernels" else [impl]:
            found = attention(**arguments, return_max_logit=True, impl=name)[1]
            assert found.dtype == torch.float32 and found.shape == (2,)
            assert found.isfinite().tolist() == seen and not found.isnan().any() and (found < 10).all()


@pytest.mark.parametrize("call", [attention, from_qkv])
def test_other_results_stay(call, device):
    """It comes last, has no gradient, and changes neither the others nor the next call, whose key is another."""
    arguments, dout, dlse = make_problem(device, DTYPES[-1], dim=64, heads=4, kv_heads=2)
    leaves = [arguments[name].requires_grad_() for name in "qkv"]
    for impl in (*our_kernels(arguments), "reference"):
        run = partial(call, *leaves, impl=impl)
        out, lse, max_logit = run(return_lse=True, return_max_logit=True)
        assert not max_logit.requires_grad and out.requires_grad and lse.requires_grad
        plain, plain_lse = run(return_lse=True)
        again, same = run(return_max_logit=True)
        for x, y in ((out, plain), (out, again), (out, run()), (lse, plain_lse), (max_logit, same)):
            assert torch.equal(x, y)
        gradients = [torch.autograd.grad(x, leaves, (dout, dlse)) for x in ((out, lse), (plain, plain_lse))]
        for name, *both in zip("qkv", *gradients, strict=True):
            if impl == "hopper" and name == "q":  # summed in any order
                torch.testing.assert_close(*both)
            else:
                assert torch.equal(*both)
        if impl != "reference":
            assert torch.equal(torch.vmap(lambda q, run=run: run(return_max_logit=True)[1])(leaves[0][None])[0], same)
