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
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run as a script
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from problems import ON_GPU, check, make_problem
from test_attention_pairs import PARAMETERS, arguments, possible

from attention.portable import launch as portable

# Without the phase that shrinks a failing problem, which would run hundreds of others.
BOUNDED = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=[Phase.generate])
# Kernels are compiled for each combination of these arguments, a variant. This takes seconds and a problem takes
# milliseconds, so many problems share a variant.
COMPILED = ("dim", "value_dim", "dtype", "group", "kv_heads", "bias", "ragged", "window", "causal", "softcap",
            "dropout", "decay", "alibi", "sink", "seed", "hide", "longest", "return_lse", "loops")  # fmt: skip
VARIANTS = 80 if ON_GPU else 10_000
LONGEST = 300 if ON_GPU else 40


# What the Hopper kernels support.
FOR_HOPPER = PARAMETERS | {
    "dim": [dim for dim in PARAMETERS["dim"] if dim >= 40],
    "value_dim": [None],
    "dtype": [torch.float16, torch.bfloat16],
    "bias": [None],
    "dropout": [0.0],
}


def variant(number, parameters):
    """Values of COMPILED, which depend on the number only."""
    generator = random.Random(number)
    while True:
        case = dict.fromkeys(parameters) | {name: generator.choice(parameters[name]) for name in COMPILED}
        if possible(case.values()):
            return case


@st.composite
def problems(draw, numbers, parameters=PARAMETERS):
    """Keyword arguments of make_problem, a dtype, and whether dk/dv loops over the group."""
    case = SimpleNamespace(**variant(draw(st.sampled_from(numbers)), parameters))
    case.q_len = draw(st.integers(1, LONGEST))
    case.keys = "same" if case.ragged == "packed" else draw(st.sampled_from(PARAMETERS["keys"]))
    case.scale = draw(st.sampled_from(PARAMETERS["scale"]))
    problem = arguments(case)
    if case.seed is not None:
        problem["seed"] = draw(st.integers(0, 2**62))
    if case.ragged == "lengths":
        problem["lengths"] = [draw(st.integers(0, problem["k_len"])) for _ in range(problem["batch"])]
    if case.ragged in ("packed", "packed_pair"):
        count = draw(st.integers(1, 4))
        q_starts, k_starts = (
            [0, *sorted(draw(st.lists(st.integers(0, n), min_size=count, max_size=count)))]
            for n in (problem["q_len"], problem["k_len"])
        )
        problem["packed"] = q_starts if case.ragged == "packed" else (q_starts, k_starts)
    return problem, case.dtype, case.loops


def run(problem, seed):
    problem, dtype, loops = problem
    torch.manual_seed(seed)
    with mock.patch.object(portable, "loops_over_group", lambda problem, programs, device: loops):
        return check(partial(make_problem, "cuda" if ON_GPU else "cpu", dtype, **problem), dtype)


@pytest.mark.slow
@settings(BOUNDED, max_examples=60 if ON_GPU else 15, derandomize=True)
@given(problems(range(VARIANTS)), st.integers(0, 2**31))
def test_random_problems(problem, seed):
    run(problem, seed)


class Report(NamedTuple):
    done: int
    hopper: int  # problems that the Hopper kernels computed too
    worst: dict[str, tuple[float, str]]  # dtype -> largest error (the bound is 2), and its problem
    precise: Counter  # (dtype, result) -> problems where the result was compared with a sum in float32
    by_precision: int  # problems with any such result
    failures: list[str]


def search(count, deadline, parameters, numbers, seed):
    """Run `count` random problems over some variants, starting none after the deadline; failures do not stop it."""
    done, hopper, worst, precise, by_precision, failures = 0, 0, {}, Counter(), 0, []
    if ON_GPU:
        torch.cuda.set_device(seed % torch.cuda.device_count())

    @hypothesis.seed(seed)
    @settings(BOUNDED, max_examples=count)
    @given(problems(numbers, parameters), st.integers(0, 2**31))
    def fuzz(problem, seed):
        nonlocal done, hopper, by_precision
        if time.time() > deadline:
            return
        done += 1
        name = str(problem[1])
        try:
            found = run(problem, seed)
            hopper += "hopper" in found.impls
            precise.update((name, result) for result in found.precise)
            by_precision += bool(found.precise)
            worst[name] = max(worst.get(name, (0.0, "")), (found.ratio, str(problem)))
        except Exception as error:
            failures.append(f"{repr(error)[:300]} {problem} {seed}")

    fuzz()
    return Report(done, hopper, worst, precise, by_precision, failures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="each compiles and runs its share")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no problem after this time, which includes imports and compilation",
    )
    parser.add_argument("--hopper", action="store_true", help="only problems that the Hopper kernels support")
    args = parser.parse_args()
    if args.hopper and not ON_GPU:
        parser.error("--hopper needs a Hopper GPU")
    start = time.time()
    parameters = FOR_HOPPER if args.hopper else PARAMETERS
    share = -(-args.problems // args.processes)
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = range(args.processes)
        numbers = [range(args.seed + job, args.seed + VARIANTS, args.processes) for job in jobs]
        seeds = [args.seed + job for job in jobs]
        reports = list(pool.map(partial(search, share, start + args.seconds, parameters), numbers, seeds))
    failures = [failure for report in reports for failure in report.failures]
    for failure in failures:
        print("FAILED", failure)
    done = sum(report.done for report in reports)
    hopper = sum(report.hopper for report in reports)
    precise = sum((report.precise for report in reports), Counter())
    print(
        f"{done} problems in {time.time() - start:.0f} s, {hopper} of them also by the Hopper kernels, "
        f"{len(failures)} failed"
    )
    for name in map(str, PARAMETERS["dtype"]):
        results = ", ".join(f"{result} {n}" for (dtype, result), n in precise.most_common() if dtype == name)
        print(f"problems in {name} with results compared with a sum in float32: {results or 'none'}")
        ratio, problem = max(report.worst.get(name, (0.0, "")) for report in reports)
        print(f"largest error in {name} (the bound is 2): {ratio:.2f}, of {problem}")
    print(f"{sum(report.by_precision for report in reports)} problems with a result compared with a sum in float32")
    sys.exit(bool(failures) or not done)


if __name__ == "__main__":
    main()
