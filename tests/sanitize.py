"""Run forward and backward of every case of test_attention.py once, for compute-sanitizer on a GPU:

compute-sanitizer --tool memcheck --kernel-regex kns=$(python tests/sanitize.py --kernels) python tests/sanitize.py
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_attention import CASES, kernels, make_problem, results

KERNELS = "(forward|delta|dq|dkdv|group_sum|dbias)_kernel"  # the others are PyTorch's


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="print the pattern of our kernels' names and end")
    parser.add_argument("--part", type=int, default=0, help="which part of the cases to run")
    parser.add_argument("--parts", type=int, default=1)
    args = parser.parse_args()
    if args.kernels:
        print(KERNELS)
        return
    names = list(CASES)[args.part :: args.parts]
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            results(kernels, make_problem("cuda", dtype, **CASES[name]), dtype)
    torch.cuda.synchronize()
    print(f"ran {2 * len(names)} problems")


if __name__ == "__main__":
    main()
