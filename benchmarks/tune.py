"""Time candidate tile sizes on this GPU and print settings for attention/table.py.

    python benchmarks/tune.py                          every kernel, head dims 64, 128 and 256, bfloat16 and float32
    python benchmarks/tune.py --dims 128 --kernels dq
    TRITON_INTERPRET=1 python benchmarks/tune.py --small    one tile size, to try this script on a CPU

The cost of a candidate is the geometric mean of its times relative to the best candidate's, over the lengths, causal
and full. All candidates run once; the best dozen then run five times.

To find rows for short ways, run this once with short --lengths and once with long ones. Candidates that do not fit the
chip are dropped. Some may spill (see tests/compile_kernels.py). Compilation comes first, in parallel.
"""

import argparse
import itertools
import math
import multiprocessing
from functools import cache, partial
from statistics import median

import torch
from harness import DEVICE, machine, milliseconds
from triton.runtime.errors import OutOfResources

from attention import launcher, problem
from attention.features import Call
from attention.portable import launch as portable
from attention.table import Launch
from attention.tiles import rows_view, view

KERNELS = ("forward", "dq", "dkdv", "dk", "dv")
TOKENS = {2: 16_384, 4: 4096}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def candidates(kernel, element_size, dim):
    """Every Launch worth trying: its sums and scores, one float32 per register, may fit the 255 registers of a thread.

    In float32 (ieee) a matmul is unrolled into one instruction per multiplication of a thread. A thousand take seconds
    to compile, four thousand take a minute.
    """
    if DEVICE == "cpu":
        yield Launch(16, 16, 4, 1, False)
        return
    own_sizes, other_sizes = ((64, 128), (32, 64, 128)) if element_size == 2 else ((16, 32, 64), (16, 32, 64))
    by_tma = element_size == 2 and torch.cuda.get_device_capability() >= (9, 0)
    sums, scores = {"forward": (1, 1), "dq": (1, 2), "dkdv": (2, 2), "dk": (1, 2), "dv": (1, 1)}[kernel]
    for own, other, warps, stages, tma in itertools.product(own_sizes, other_sizes, (4, 8), (1, 2, 3), {False, by_tma}):
        threads = 32 * warps
        unrolled = element_size == 4 and own * other * dim // threads > 1024
        if (sums * own * dim + scores * own * other) // threads <= 255 and not unrolled:
            q, k = (own, other) if kernel in ("forward", "dq") else (other, own)
            yield Launch(q, k, warps, stages, tma)


def runner(kernel, dtype, dim, length, causal):
    """A function of a Launch that runs one kernel on a random problem. In float32, "dq" includes the walk for delta."""
    batch, heads = (TOKENS[dtype.itemsize] // length, 2048 // dim) if DEVICE == "cuda" else (1, 1)
    q, k, v, dout = (torch.randn(batch, length, heads, dim, device=DEVICE, dtype=dtype) for _ in range(4))
    given = Call(q, k, v, causal=causal, scale=dim**-0.5, impl="triton")
    call = problem.describe(q, k, v, given)
    out, lse2 = portable.forward(given)
    first, second = torch.empty_like(q), torch.empty_like(q)
    inputs = (view(q), view(k), view(v), view(dout), rows_view(lse2), rows_view(torch.randn_like(lse2)))

    @cache
    def call_with(settings):
        return call._replace(launches={kernel: settings}, cache={}, layouts={})

    def run(settings):
        changed = call_with(settings)
        if kernel == "forward":
            portable.launch_forward(changed, q, k, v, out, lse2, None, None)
        elif kernel == "dq":
            portable.launch_dq(changed, inputs, out, None, None, None, first, None, True)
        else:
            portable.launch_dkdv(changed, inputs, first, second, None)

    return run


def fits(run, settings):
    """Compile the kernel; returns whether Triton can and whether it fits the shared memory of the chip."""
    launcher.RETRY_WITH_FEWER_STAGES = False
    try:
        run(settings)
    except (OutOfResources, RuntimeError) as error:
        if isinstance(error, OutOfResources) or "PassManager" in str(error):  # Triton's compiler failed
            return False
        raise
    finally:
        launcher.RETRY_WITH_FEWER_STAGES = True
    return True


def compile_some(work):
    """Compile candidates of one kernel into Triton's cache on disk."""
    *arguments, some = work
    run = runner(*arguments)
    for settings in some:
        fits(run, settings)


def rank(kernel, dtype, dim, lengths):
    """(cost, times in ms, Launch) of the best dozen candidates, best first."""
    runs = [runner(kernel, dtype, dim, length, causal) for length in lengths for causal in (True, False)]
    chosen = [x for x in candidates(kernel, dtype.itemsize, dim) if all(fits(run, x) for run in runs)]
    for count in (1, 5):
        times = {x: [median(milliseconds(partial(run, x)) for _ in range(count)) for run in runs] for x in chosen}
        best = [min(column) for column in zip(*times.values(), strict=True)]
        ranking = sorted(
            (math.prod(t / b for t, b in zip(ms, best, strict=True)) ** (1 / len(best)), ms, settings)
            for settings, ms in times.items()
        )
        chosen = [settings for _, _, settings in ranking[:12]]
    return ranking


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--small", action="store_true", help="one tile size of one kernel, to try this script")
    args = parser.parse_args()
    if args.small:
        args.kernels, args.dims, args.lengths, args.dtypes = ["forward"], [16], [16], ["float32"]
    jobs = list(itertools.product(args.kernels, map(DTYPES.get, args.dtypes), args.dims))
    work = []
    for kernel, dtype, dim in jobs:
        every = list(candidates(kernel, dtype.itemsize, dim))
        pieces = -(-len(every) // 6)  # small, so that processes finish at about the same time
        for causal in (True, False):
            work += [(kernel, dtype, dim, 1024, causal, every[piece::pieces]) for piece in range(pieces)]
    if not args.small:
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.map(compile_some, work, chunksize=1)
    print("#", *machine().values())
    for kernel, dtype, dim in jobs:
        for cost, ms, settings in rank(kernel, dtype, dim, args.lengths)[:3]:
            times = " ".join(f"{t:.3f}" for t in ms)
            launch = ", ".join(map(str, settings[:4])) + (", tma=True" if settings.tma else "")
            print(f'("{kernel}", {dtype.itemsize}), {dim}: Launch({launch})  # cost {cost:.3f}, ms {times}', flush=True)


if __name__ == "__main__":
    main()
