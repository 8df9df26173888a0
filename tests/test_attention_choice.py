"""Which implementation serves a call, and which calls the Hopper kernels support; runs anywhere."""

import pytest
import torch
from problems import MISSES, make_problem
from test_hopper import CASES, REPEATED

from attention import attention, explain
from attention.api import call_of
from attention.choose import call_problem, key_of


def test_explain_names_the_implementation(device):
    q = torch.randn(1, 16, 2, 64, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(16, 16, device=device)
    if device == "cpu":
        reason = explain(q, q, q)
        assert reason.startswith("sdpa: ") and "GPU" in reason and "cpu" in reason
        assert explain(q, q, q, sink=torch.zeros(2)).startswith("reference: ")
        with pytest.raises(ValueError, match=r"Hopper.*cpu"):
            attention(q, q, q, impl="hopper")
    elif MISSES is None:
        assert explain(q, q, q, window=5).startswith("hopper: ")
        assert explain(q, q, q, dropout=0.1).startswith("hopper: ")
        reason = explain(q, q, q, bias=bias)
        assert reason.startswith("triton: ") and "bias" in reason
        with pytest.raises(ValueError, match=r"Hopper.*bias.*impl='auto'"):
            attention(q, q, q, bias=bias, impl="hopper")
    with pytest.raises(ValueError, match="window"):
        explain(q, q, q, window=-1)
    with pytest.raises(TypeError, match="windows"):
        explain(q, q, q, windows=1)


@pytest.mark.parametrize(
    "lack, change",
    [
        ("torch.float32", dict(dtype=torch.float32)),
        ("head dim 32", dict(dim=32)),
        ("head dim 32", dict(value_dim=32)),
        ("head dim 64", dict(dim=192, value_dim=64)),
        ("empty", dict(batch=0)),
        ("decay with softcap", dict(decay=True, softcap=3.0)),
        ("bias", dict(bias=(8, 8))),
        ("prefix_lengths", dict(prefix_lengths=[3, 0])),
        ("window", dict(q_len=8, k_len=18, window=10)),
        ("dropout", dict(q_len=8, k_len=18, window=10, dropout=0.1, lengths=[18, 9])),
        ("dropout", dict(packed=([0, 8], [0, 8]), window=10, dropout=0.1)),
    ],
)
def test_unsupported_calls(lack, change):
    assert lack in lacks(**dict(q_len=8) | change)


def test_unsupported_sizes():
    q, k = (torch.empty(1, n, 1, 64, dtype=torch.bfloat16, device="meta") for n in (8, 2**20 + 1))
    for q_len, k_len, lack in (
        (8, 2**20, None), (8, 2**20 + 1, "1,048,576"), (8, 0, "empty"), (0, 8, "empty"),
    ):  # fmt: skip
        found = call_problem(call_of(q[:, :q_len], k[:, :k_len], k[:, :k_len]))
        assert found is None if lack is None else lack in found


@pytest.mark.parametrize("case", (CASES | REPEATED).values(), ids=CASES | REPEATED)
def test_supported_calls(case):
    assert lacks(**case) is None
    assert (lacks(dim=192, value_dim=128, **case) is None) == ("decay" not in case)


def lacks(dtype=torch.bfloat16, dim=64, **problem):
    """call_problem() of a problem: why the Hopper kernels do not support it, or None."""
    arguments, _, _ = make_problem("cpu", dtype, dim=dim, **problem)
    q, k, v = map(arguments.pop, "qkv")
    return call_problem(call_of(q, k, v, **arguments))


def test_bounds_of_queries_and_keys_apart_are_another_kind_of_call():
    """The choice for one tensor of bounds must not serve a pair: with a window and dropout it is another one."""
    q = torch.randn(1, 128, 2, 64, dtype=torch.bfloat16)
    starts = torch.tensor([0, 128], dtype=torch.int32)
    options = dict(window=16, dropout=0.1, seed=1, max_seqlen=128)
    alone, pair = (call_of(q, q, q, cu_seqlens=bounds, **options) for bounds in (starts, (starts, starts)))
    assert call_problem(alone) != call_problem(pair)
    assert key_of(alone) != key_of(pair)
