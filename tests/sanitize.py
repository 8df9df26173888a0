"""Run forward and backward of every case of test_attention_pairs.py, and decode(), for compute-sanitizer on a GPU:

compute-sanitizer --tool memcheck --kernel-regex kns=$(python tests/sanitize.py --kernels) python tests/sanitize.py
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import test_decode
import test_hopper
from problems import kernels, make_problem, results
from test_attention_pairs import CASES, arguments

from attention import decode
from attention.portable import launch as portable

# all other kernels are PyTorch's
KERNELS = "(forward|dq|dkdv|group_sum|dbias|distance|backward|prepare|finish|list|blank|decode|merge)_kernel"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="print the pattern of our kernels' names and exit")
    parser.add_argument("--hopper", action="store_true", help="run the cases of test_hopper.py with the Hopper kernels")
    parser.add_argument("--part", type=int, default=0, help="which part of the cases to run")
    parser.add_argument("--parts", type=int, default=1)
    args = parser.parse_args()
    if args.kernels:
        print(KERNELS)
        return
    cases = CASES[args.part :: args.parts]
    if args.hopper:
        cases = test_hopper.each(test_hopper.CASES, test_hopper.DIMS)
        for case, dim, value_dim in (found.values for found in cases[args.part :: args.parts]):
            problem = make_problem("cuda", torch.bfloat16, dim=dim, value_dim=value_dim, **case)
            for _ in range(2):  # the second call uses what the first one cached
                results(test_hopper.hopper, problem, torch.bfloat16)
    for case in () if args.hopper else cases:
        portable.loops_over_group = lambda problem, programs, device, loops=case.loops: loops
        problem = make_problem("cuda", case.dtype, **arguments(case))
        for _ in range(2):
            results(kernels, problem, case.dtype)
    for case in () if args.hopper or args.part else test_decode.CASES.values():
        for dtype in (torch.float32, torch.bfloat16):
            for lengths in ([300], test_decode.SOME_LENGTHS):
                decode(**test_decode.make_call("cuda", dtype, lengths, **case)[0])
    torch.cuda.synchronize()
    print(f"ran {len(cases)} problems")


if __name__ == "__main__":
    main()
