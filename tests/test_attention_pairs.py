"""Every pair of argument values of attention() occurs in some problem: kernels against the float64 reference.

Sizes are small in the interpreter; on a GPU they cover the full range of lengths, head dims and dtypes.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from allpairspy import AllPairs
from problems import ON_GPU, check, kernels, make_problem, needs_gpu, results
from score_mods import SCORE_MODS

from attention.portable import launch as portable

PARAMETERS = {
    "q_len": [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 257, 300] if ON_GPU else [1, 16, 17, 33],
    "dim": [8, 24, 40, 64, 72, 96, 128, 160, 200, 256] if ON_GPU else [8, 16, 24],
    "bias": [None, "full", "heads", "keys", "queries", "one"],
    "value_dim": [None, 8, 24, 40, 48, 128] if ON_GPU else [None, 8],
    "ragged": [None, "lengths", "packed", "packed_pair"],
    "group": [1, 2, 3, 8] if ON_GPU else [1, 3],
    "window": [None, 1, 16, 50] if ON_GPU else [None, 1, 12],
    "keys": ["same", "more", "fewer"],
    "scale": [None, -1.5, 0.0],  # as a multiple of 1 / sqrt(dim)
    "dtype": [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16],
    "kv_heads": [1, 2] if ON_GPU else [1],
    "causal": [True, False],
    "softcap": [None, 2.0],
    "dropout": [0.0, 0.3],
    "decay": [False, True],
    "alibi": [0, 1, 2],
    "sink": [False, True],
    "relative": [None, (1,), (2, 12)],
    "score_mod": [None, *SCORE_MODS],
    "seed": [None, 5],  # None: drawn from torch
    "hide": [False, True],  # part of the bias is -inf
    "longest": [True, False],  # whether max_seqlen is given
    "return_lse": [True, False],
    "loops": [True, False],
}


def possible(values):
    """Whether these values are allowed together; allpairspy calls this with growing prefixes of the parameters."""
    case = dict.fromkeys(PARAMETERS) | dict(zip(PARAMETERS, values, strict=False))
    packed = case["ragged"] in ("packed", "packed_pair")
    return not (
        (case["decay"] and case["causal"] is False)
        or (case["ragged"] == "packed" and case["keys"] in ("more", "fewer"))
        or (case["hide"] and case["bias"] is None)
        or (case["longest"] is False and not packed)
        or (case["loops"] and case["dtype"] == torch.float32)  # loops_over_group() allows no such loop
    )


def arguments(case):
    """Keyword arguments of make_problem."""
    q_len, heads, dim = case.q_len, case.group * case.kv_heads, case.dim
    k_len = {"same": q_len, "more": q_len + 37, "fewer": q_len // 2 + 1}[case.keys]
    batch = {None: 2, "lengths": 3, "packed": 1, "packed_pair": 1}[case.ragged]
    arguments = dict(
        q_len=q_len, k_len=k_len, dim=dim, value_dim=case.value_dim, heads=heads, kv_heads=case.kv_heads, batch=batch,
        causal=case.causal, decay=case.decay, alibi=case.alibi, sink=case.sink, relative=case.relative,
        score_mod=case.score_mod, window=case.window, softcap=case.softcap, dropout=case.dropout, seed=case.seed,
        scale=None if case.scale is None else case.scale * dim**-0.5, hide=case.hide, longest=case.longest,
        return_lse=case.return_lse,
    )  # fmt: skip
    arguments["bias"] = {
        None: None,
        "full": (batch, heads, q_len, k_len),
        "heads": (1, heads, q_len, k_len),
        "keys": (batch, 1, 1, k_len),
        "queries": (heads, q_len, 1),
        "one": (1,),
    }[case.bias]
    # the second sequence is empty, and the last tokens belong to none
    starts = [0, q_len // 3, q_len // 3, q_len - q_len // 8]
    if case.ragged == "lengths":
        arguments["lengths"] = [k_len, k_len * 2 // 3, 0]
    elif case.ragged == "packed":
        arguments["packed"] = starts
    elif case.ragged == "packed_pair":
        arguments["packed"] = starts, [0, k_len // 2, k_len // 2 + 1, k_len]
    return arguments


CASES = [
    SimpleNamespace(**dict(zip(PARAMETERS, values, strict=True)))
    for values in AllPairs(list(PARAMETERS.values()), filter_func=possible)
]


@pytest.fixture
def draw(case, device, poisoned, monkeypatch):
    monkeypatch.setattr(portable, "loops_over_group", lambda problem, programs, device: case.loops)
    return partial(make_problem, device, case.dtype, **arguments(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_pair(case, draw):
    check(draw, case.dtype)


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_repeatable(case, draw):
    """The same bits in each of 50 calls, for every pair of features."""
    problem = draw()
    first = results(kernels, problem, case.dtype)
    for _ in range(50):
        again = results(kernels, problem, case.dtype)
        assert all(torch.equal(first[name], again[name]) for name in first)
