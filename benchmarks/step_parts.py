"""Where a training step's time goes: the GPU's milliseconds by part, from PyTorch's profiler, beside their floors.

    python benchmarks/step_parts.py configs/gpt2.py --batch_size 32     any config and options of train.py

It calls train.py, times and profiles some of its steps, prints the table and ends the run.
"""

import re
import shutil
import sys
import time
from bisect import bisect

import torch
from harness import DEVICE, FOLDER, seconds_of, synchronize, table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import train

STEPS = 30  # not counted, then timed, then profiled
HEAD, MATMULS = "head and cross-entropy", "matmuls"
PARTS = {  # part of a step -> pattern of its kernels' names; the first one found counts
    "attention": r"^((hopper_)?forward|backward|prepare|finish|dq|dkdv|dbias|group_sum|list|blank)_kernel$|flash|fmha",
    HEAD: "^cross_entropy(_hopper)?_kernel$",
    "optimizer and clipping": "^(blend|update)_kernel$|multi_tensor_apply|lpnorm|NormTwoOps",
    "casts and copies": r"^Mem(cpy|set)|copy_kernel|CatArray|FillFunctor"
    r"|^triton_poi_fused(_(_to_copy|_unsafe_view|view|t|permute|transpose|clone|cat|slice|mlp|mlp_dh))+_\d+$",
    MATMULS: "^matmul_kernel$|nvjet|gemm|cutlass|splitK",
    "norms and elementwise": r"^triton_|layer_norm|GammaBeta|dropout|masked_scale|elementwise|reduce_kernel",
    "other": "",
}


def parts_of(names):
    """The part of each kernel of a step, given their names in the order in which they run.

    cuBLAS names the head's matmuls like all others, so they are found by their place: one before the cross-entropy
    kernel computes the logits, and two after it dX and dW. cuBLAS adds up what splitK has divided in a kernel that
    follows.
    """
    parts = [next(part for part, pattern in PARTS.items() if re.search(pattern, name)) for name in names]
    matmuls = [i for i, part in enumerate(parts) if part == MATMULS and "splitKreduce" not in names[i]]
    for loss in [i for i, part in enumerate(parts) if part == HEAD]:
        place = bisect(matmuls, loss)
        for own in matmuls[max(place - 1, 0) : place + 2]:
            parts[own] = HEAD
    for i in range(1, len(names)):
        if "splitKreduce" in names[i]:
            parts[i] = parts[i - 1]
    return parts


def floors(config, copy_rate, matmul_rate):
    """{part: the least milliseconds} of a step of N tokens at rates in bytes and FLOP per second.

    For a GPT with GPT-2's options, in bfloat16 with float32 weights, and an activation inside the matmuls. Other
    options cost more; tensors that stay in the GPU's L2 cache can take less. L blocks of width C, context T and
    vocabulary V (0 if the config leaves it to the tokenizer, whose vocabulary is then small); W = 12 L C^2 weights in
    the blocks' linear layers, P parameters in all.

        attention               14 C FLOP for each pair of token and key: 2 matmuls forward, 5 backward. L N T / 2 pairs
        matmuls                 6 W N FLOP
        head and cross-entropy  6 V C N FLOP, and 4 V N bytes: logits are read once, their gradients written once
        norms and elementwise   2 L branches x 16 C N bytes: forward, stream and branch are read, their sum and its norm
                                written; backward, the sum and both its gradients are read, and one written
        optimizer and clipping  32 P bytes: gradients are read twice, weights and two moments read and written
        casts and copies        12 W + 6 V C bytes: weights to bfloat16, and gradients of W back to float32
    """
    L, C, T, V = config.n_layer, config.n_embd, config.block_size, config.vocab_size
    N, W = config.batch_size * T, 12 * L * C**2
    flop, byte = 1000 / matmul_rate, 1000 / copy_rate
    return {
        "attention": 14 * C * L * N * T / 2 * flop,
        MATMULS: 6 * W * N * flop,
        HEAD: 6 * V * C * N * flop + 4 * V * N * byte,
        "norms and elementwise": 2 * L * 16 * C * N * byte,
        "optimizer and clipping": 32 * (W + V * C + T * C) * byte,
        "casts and copies": (12 * W + 6 * V * C) * byte,
    }


def measured_rates():
    """Bytes per second of a large copy, read and written, and FLOP per second of a large matmul in bfloat16."""
    size = 8192 if DEVICE == "cuda" else 256
    a, b, c = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(3))
    source, target = (torch.zeros(size, 8 * size, device=DEVICE) for _ in range(2))

    def seconds(call):
        return min(seconds_of(lambda: [call() for _ in range(100)]) for _ in range(2)) / 100

    copy_rate = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    return copy_rate, 2 * size**3 / seconds(lambda: torch.mm(a, b, out=c))


def watched(run_step, config, rates):
    """run_step() of train.py, which prints the table and ends the program once it has been called often enough."""
    calls, clock, recorded = 0, [], profile(activities=[getattr(ProfilerActivity, DEVICE.upper())])

    def run(micro_batches):
        nonlocal calls
        calls += 1
        if calls % STEPS == 0:
            synchronize()
            clock.append(time.perf_counter())
        if calls == 2 * STEPS:
            recorded.start()
        if calls == 3 * STEPS:
            recorded.stop()
            show_parts(recorded, 1000 * (clock[1] - clock[0]) / STEPS, config, rates)
            sys.exit()
        return run_step(micro_batches)

    return run


def show_parts(recorded, whole, config, rates):
    """Print the table of STEPS recorded steps. whole: milliseconds of a step. rates: measured."""
    kernels = sorted(
        (event for event in recorded.events() if event.device_type == DeviceType.CUDA and not event.is_user_annotation),
        key=lambda event: event.time_range.start,
    )
    spent = dict.fromkeys(PARTS, 0.0)
    for part, kernel in zip(parts_of([kernel.name for kernel in kernels]), kernels, strict=True):
        spent[part] += kernel.time_range.elapsed_us() / 1000 / STEPS
    spent |= {"gaps": whole - sum(spent.values()), "whole step": whole}
    least = floors(config, *rates)
    least["whole step"] = sum(least.values())
    rows = [[part, f"{ms:.2f}", f"{least.get(part, 0):.2f}"] for part, ms in spent.items()]
    memory = torch.cuda.max_memory_allocated()  # 0 without a GPU
    table(["part", "ms", "floor"], [*rows, ["peak memory, GB", f"{memory / 1e9:.2f}", ""]])


if __name__ == "__main__":
    rates, as_graph = measured_rates(), train.as_graph
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # run_step() is what as_graph() returns; its fifth argument is the Config
    train.as_graph = lambda *arguments: watched(as_graph(*arguments), arguments[4], rates)
    fixed = dict(name=FOLDER.name, steps=10**6, eval_every=10**6, eval_batches=1, log_every=10)
    try:
        train.main([*sys.argv[1:], *(f"--{name}={value}" for name, value in fixed.items())])
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
