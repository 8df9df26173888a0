"""Random problems over all arguments of attention(), against the float64 reference.

pytest -m slow tests/test_attention_fuzz.py                             a few problems, on any machine
PROBLEMS=5000 [HOPPER=1] pytest -m slow tests/test_attention_fuzz.py    many, on GPUs; HOPPER: only what those support
"""

import os
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from problems import ON_GPU, check, make_problem
from test_attention_pairs import PARAMETERS, arguments, possible

from attention.portable import launch as portable

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
        starts = tuple([0, *sorted(generator.randint(0, n) for _ in range(count))] for n in sizes)
        problem["packed"] = starts[0] if case.ragged == "packed" else starts
    return problem, case.dtype, case.loops


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PROBLEMS))
def test_random_problem(seed, monkeypatch):
    problem, dtype, loops = draw_problem(seed, FOR_HOPPER if "HOPPER" in os.environ else PARAMETERS)
    monkeypatch.setattr(portable, "loops_over_group", lambda problem, programs, device: loops)
    torch.manual_seed(seed)
    with torch.cuda.device(seed % torch.cuda.device_count() if ON_GPU else -1):
        check(partial(make_problem, "cuda" if ON_GPU else "cpu", dtype, **problem), dtype)
