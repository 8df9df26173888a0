"""Problems with every pair of argument values of attention(), and random ones: kernels against the float64 reference.

Sizes are small in the interpreter; on a GPU they cover the full range of lengths, head dims and dtypes.

`PROBLEMS=5000 pytest -m slow -k random tests/test_attention_pairs.py` runs 5,000 random problems on the GPUs; with
HOPPER=1 only such as the Hopper kernels support.
"""

import os
import random
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


# Kernels are compiled for each variant: the values of all arguments but these. This takes seconds and a problem takes
# milliseconds, so many problems share a variant.
NOT_COMPILED = ("q_len", "keys", "scale")
PROBLEMS = int(os.environ.get("PROBLEMS", 60 if ON_GPU else 15))
SHARE = max(1, PROBLEMS // 80)
LONGEST = 300 if ON_GPU else 40
FOR_HOPPER = PARAMETERS | {  # what the Hopper kernels support
    "dim": [dim for dim in PARAMETERS["dim"] if dim >= 40],
    "value_dim": [None],
    "score_mod": [None],
    "dtype": [torch.float16, torch.bfloat16],
    "bias": [None],
    "dropout": [0.0],
}


def variant(number, parameters):
    """Values of arguments, which depend on the number only."""
    generator = random.Random(f"variant {number}")
    while True:
        names = [name for name in parameters if name not in NOT_COMPILED]
        case = dict.fromkeys(parameters) | {name: generator.choice(parameters[name]) for name in names}
        if possible(case.values()):
            return case


def draw_problem(seed, parameters):
    """Keyword arguments of make_problem, a dtype, and whether dk/dv loops over the group."""
    generator, case = random.Random(seed), SimpleNamespace(**variant(seed // SHARE, parameters))
    case.q_len = generator.randint(1, LONGEST)
    case.keys = "same" if case.ragged == "packed" else generator.choice(parameters["keys"])
    case.scale = generator.choice(parameters["scale"])
    problem = arguments(case)
    if case.seed is not None:
        problem["seed"] = generator.randrange(2**62)
    if case.ragged == "lengths":
        problem["lengths"] = [generator.randint(0, problem["k_len"]) for _ in range(problem["batch"])]
    if case.ragged in ("packed", "packed_pair"):
        count = generator.randint(1, 4)
        sizes = problem["q_len"], problem["k_len"]
        starts = tuple(sorted(generator.randint(0, n) for _ in range(count + 1)) for n in sizes)
        problem["packed"] = starts[0] if case.ragged == "packed" else starts
    return problem, case.dtype, case.loops


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PROBLEMS))
def test_random_problem(seed, monkeypatch):
    problem, dtype, loops = draw_problem(seed, FOR_HOPPER if "HOPPER" in os.environ else PARAMETERS)
    monkeypatch.setattr(portable, "loops_over_group", lambda problem, programs, device: loops)
    torch.manual_seed(seed)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    with torch.cuda.device(worker % torch.cuda.device_count() if ON_GPU else -1):
        check(partial(make_problem, "cuda" if ON_GPU else "cpu", dtype, **problem), dtype)
