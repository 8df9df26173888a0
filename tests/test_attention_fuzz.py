"""Random problems over all arguments of attention(), against the float64 reference.

pytest -m slow tests/test_attention_fuzz.py                         a few problems, on any machine
python tests/test_attention_fuzz.py --problems 5000 [--hopper]      many problems, on a GPU; prints a report
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import conftest  # noqa: F401 when run as a script
import pytest
import torch
from problems import ON_GPU, check, make_problem
from test_attention_pairs import PARAMETERS, arguments, possible

from attention.portable import launch as portable

# Kernels are compiled for each variant: the values of all arguments but these. This takes seconds and a problem takes
# milliseconds, so many problems share a variant.
NOT_COMPILED = ("q_len", "keys", "scale")
VARIANTS = 80 if ON_GPU else 10_000
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
    generator = random.Random(number)
    while True:
        names = [name for name in parameters if name not in NOT_COMPILED]
        case = dict.fromkeys(parameters) | {name: generator.choice(parameters[name]) for name in names}
        if possible(case.values()):
            return case


def draw_problem(generator, numbers, parameters=PARAMETERS):
    """Keyword arguments of make_problem, a dtype, and whether dk/dv loops over the group."""
    case = SimpleNamespace(**variant(generator.choice(numbers), parameters))
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


def run(problem, dtype, loops, seed):
    torch.manual_seed(seed)
    with mock.patch.object(portable, "loops_over_group", lambda problem, programs, device: loops):
        return check(partial(make_problem, "cuda" if ON_GPU else "cpu", dtype, **problem), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60 if ON_GPU else 15))
def test_random_problem(seed):
    run(*draw_problem(random.Random(seed), range(VARIANTS)), seed)


def search(count, deadline, parameters, numbers, seed):
    """(dtype, problem, what check() returns or an error) of random problems; none starts after the deadline."""
    generator, found = random.Random(seed), []
    if ON_GPU:
        torch.cuda.set_device(seed % torch.cuda.device_count())
    while len(found) < count and time.time() < deadline:
        problem, dtype, loops = draw_problem(generator, numbers, parameters)
        draws = generator.randrange(2**31)
        try:
            outcome = run(problem, dtype, loops, draws)
        except Exception as error:
            outcome = repr(error)[:300]
        found.append((str(dtype), f"{problem}, loops={loops}, seed {draws}", outcome))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="each compiles and runs its share")
    limit = "start no problem after this time, which includes imports and compilation"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=limit)
    parser.add_argument("--hopper", action="store_true", help="only problems that the Hopper kernels support")
    args = parser.parse_args()
    if args.hopper and not ON_GPU:
        parser.error("--hopper needs a Hopper GPU")
    start, jobs = time.time(), range(args.processes)
    call = partial(search, -(-args.problems // args.processes), start + args.seconds)
    call = partial(call, FOR_HOPPER if args.hopper else PARAMETERS)
    numbers = [range(args.seed + job, args.seed + VARIANTS, args.processes) for job in jobs]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        found = list(chain(*pool.map(call, numbers, [args.seed + job for job in jobs])))
    failures = [x for x in found if isinstance(x[2], str)]
    for _, problem, error in failures:
        print("FAILED", error, problem)
    passed = [x for x in found if not isinstance(x[2], str)]
    hopper = sum("hopper" in impls for _, _, (_, impls) in passed)
    print(f"{len(found)} problems in {time.time() - start:.0f} s, {hopper} of them also by the Hopper kernels, "
          f"{len(failures)} failed")  # fmt: skip
    for name in map(str, PARAMETERS["dtype"]):
        ratios = [(ratio, problem) for dtype, problem, (ratio, _) in passed if dtype == name]
        ratio, problem = max(ratios, default=(0.0, ""))
        print(f"largest error in {name} (the bound is 2): {ratio:.2f}, of {problem}")
    sys.exit(bool(failures) or not found)


if __name__ == "__main__":
    main()
