"""attention/simple.py against the reference in float64, by check() of problems.py."""

from functools import partial

import pytest
import torch
from problems import ON_GPU, check, identical, make_problem, out_and_gradients

from attention.simple import simple_attention

CASES = {
    "causal": dict(q_len=70),
    "full": dict(q_len=70, causal=False),
    "grouped": dict(q_len=67, heads=4, kv_heads=2, dim=32),
    "multi_query_full": dict(q_len=33, heads=3, kv_heads=1, dim=64, causal=False),
    "less_than_a_tile": dict(q_len=17),
    "whole_tiles": dict(q_len=64, dim=128, batch=1),
}
DTYPES = [torch.float32, torch.bfloat16] + [torch.float16] * ON_GPU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case, dtype, device, poisoned, monkeypatch):
    monkeypatch.setattr("problems.attention", lambda *, impl, return_lse, **arguments: simple_attention(**arguments))
    draw = partial(make_problem, device, dtype, return_lse=False, **CASES[case])
    check(draw, dtype, impls=("simple",))


def test_tensors_that_are_not_contiguous(device):
    tensors = [torch.randn(1, 2, 40, 16, device=device).transpose(1, 2) for _ in range(4)]
    results = []
    for q, k, v, dout in (tensors, [x.contiguous() for x in tensors]):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        results.append(out_and_gradients(simple_attention, leaves, dout))
    identical(*results)


def test_shapes_that_do_not_fit(device):
    q, k = torch.zeros(1, 4, 3, 16, device=device), torch.zeros(1, 4, 2, 16, device=device)
    with pytest.raises(ValueError, match=r"q \[1, 4, 3, 16\], k \[1, 4, 2, 16\]"):
        simple_attention(q, k, k)
