"""Where a training step's time goes: the GPU's milliseconds by part, from PyTorch's profiler, beside their floors.

    python benchmarks/step_parts.py configs/gpt2.py --batch_size 32     any config and options of train.py

It trains a few steps and writes no run.
"""

import re
import sys
import time
from bisect import bisect
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from data import Batches
from training.config import load_config
from training.distributed import open_on_all_ranks, start_distributed
from training.network import compile_and_wrap, make_model
from training.optimizer import make_optimizer
from training.start import compile_network
from training.step import TrainStep, choose_micro_batch, prefetch

WARM_UPS, STEPS = 10, 20  # steps before the measurement, and in each of its two halves
LONGEST = 12  # kernels that are named below the table
HEAD, MATMULS = "head and cross-entropy", "matmuls"
PARTS = {  # part of a step -> pattern of its kernels' names; the first one found counts
    "attention": r"^((hopper_)?forward|backward|prepare|finish|dq|dkdv|dbias|group_sum|list|blank)_kernel$|flash|fmha",
    HEAD: "^cross_entropy(_hopper)?_kernel$",
    "optimizer and clipping": "^(blend|update)_kernel$|multi_tensor_apply|lpnorm|NormTwoOps",
    "casts and copies": r"^Mem(cpy|set)|copy_kernel|CatArray|FillFunctor"
    r"|^triton_poi_fused(_(_to_copy|_unsafe_view|view|t|permute|transpose|clone|cat|slice|mlp|mlp_dh))+_\d+$",
    MATMULS: "^matmul_kernel$|nvjet|gemm|cutlass|splitK",
    "norms and elementwise": r"^add_norm(_backward)?_kernel$|^triton_|layer_norm|GammaBeta|dropout|masked_scale"
    "|elementwise|reduce_kernel",
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


def floors(model, tokens, copy_rate, matmul_rate):
    """{part: the least milliseconds} of a step of N = `tokens` tokens at rates in bytes and FLOP per second.

    For a GPT with GPT-2's options, in bfloat16 with float32 weights, and an activation inside the matmuls. Other
    options cost more; tensors that stay in the GPU's L2 cache can take less. L blocks of width C, context T and
    vocabulary V; W weights in the blocks' linear layers, P parameters in all.

        attention               14 C FLOP for each pair of token and key: 2 matmuls forward, 5 backward. L N T / 2 pairs
        matmuls                 6 W N FLOP
        head and cross-entropy  6 V C N FLOP, and 4 V N bytes: logits are read once, their gradients written once
        norms and elementwise   2 L branches x 16 C N bytes: forward, stream and branch are read, their sum and its norm
                                written; backward, the sum and both its gradients are read, and one written
        optimizer and clipping  32 P bytes: gradients are read twice, weights and two moments read and written
        casts and copies        12 W + 6 V C bytes: weights to bfloat16, and gradients of W back to float32
    """
    config = model.config
    L, C, T, V = config.n_layer, config.n_embd, config.block_size, config.vocab_size
    W = sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, nn.Linear))
    P = sum(p.numel() for p in model.parameters())
    flop, byte = 1000 / matmul_rate, 1000 / copy_rate
    return {
        "attention": 14 * C * L * tokens * T / 2 * flop,
        MATMULS: 6 * W * tokens * flop,
        HEAD: 6 * V * C * tokens * flop + 4 * V * tokens * byte,
        "norms and elementwise": 2 * L * 16 * C * tokens * byte,
        "optimizer and clipping": 32 * P * byte,
        "casts and copies": (12 * W + 6 * V * C) * byte,
    }


def measured_rates(device):
    """Bytes per second of a large copy, read and written, and FLOP per second of a large matmul in bfloat16."""
    size = 8192 if device.startswith("cuda") else 256
    a, b, c = (torch.randn(size, size, device=device).bfloat16() for _ in range(3))
    source, target = (torch.zeros(size, 8 * size, device=device) for _ in range(2))
    return (
        2 * source.nbytes / seconds_of(lambda: target.copy_(source), 50),
        2 * size**3 / seconds_of(lambda: torch.mm(a, b, out=c), 200),
    )


def seconds_of(function, repeats):
    """Mean seconds of a call that returns a tensor, after as many that do not count."""
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(repeats):
            result = function()
        result.flatten()[0].item()  # waits for the device
    return (time.perf_counter() - start) / repeats


def step_table(config):
    """Markdown table of a Config's training step: parts, their milliseconds and floors, the peak memory, long kernels.

    The whole step is timed without the profiler. "gaps" is what its kernels leave of that time.
    """
    ranks = start_distributed(config)
    torch.set_float32_matmul_precision("high")
    copy_rate, matmul_rate = measured_rates(ranks.device)
    if ranks.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    corpus = open_on_all_ranks(config, ranks, None)
    model, ranks = make_model(config, corpus.tokenizer, ranks)
    optimizer = make_optimizer(model, config, ranks)
    rows = choose_micro_batch(model, config, ranks, None)
    network = compile_and_wrap(model, config, ranks)
    take_step = TrainStep(network, optimizer, config, ranks, rows)
    compile_network(network, config, ranks, rows)
    batches = Batches(corpus.train, config.block_size, config.batch_size, config.seed)
    steps = enumerate(prefetch(batches, range(WARM_UPS + 3 * STEPS), ranks))

    def train():
        step, batch = next(steps)
        loss, _ = take_step(step, *batch, config.learning_rate)
        return loss

    for _ in range(WARM_UPS):
        train()
    whole = 1000 * seconds_of(train, STEPS)
    with profile(activities=[ProfilerActivity.CUDA if ranks.on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(STEPS):
            loss = train()
        loss.item()
    kernels = sorted(
        (event for event in recorded.events() if event.device_type == DeviceType.CUDA and not event.is_user_annotation),
        key=lambda event: event.time_range.start,
    )
    spent, times = dict.fromkeys(PARTS, 0.0), defaultdict(list)
    for part, kernel in zip(parts_of([kernel.name for kernel in kernels]), kernels, strict=True):
        times[part, kernel.name].append(kernel.time_range.elapsed_us() / 1000 / STEPS)
        spent[part] += times[part, kernel.name][-1]
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    spent |= {"gaps": whole - sum(spent.values()), "whole step": whole}
    least = floors(model, config.batch_size * config.block_size, copy_rate, matmul_rate)
    least["whole step"] = sum(least.values())
    chip, memory = ("CPU", 0) if not ranks.on_gpu else (torch.cuda.get_device_name(), torch.cuda.max_memory_allocated())
    lines = [
        f"\n{config.n_layer} layers of width {config.n_embd}, {config.batch_size} x {config.block_size} tokens a step\n"
        f"{chip}: copies at {copy_rate / 1e12:.2f} TB/s, matmuls at {matmul_rate / 1e12:.0f} TFLOP/s; "
        f"peak memory {memory / 1e9:.2f} GB, {len(kernels) / STEPS:.0f} kernels and copies a step",
        "",
        "| part | ms | floor |",
        "|---|---|---|",
        *(f"| {part} | {ms:.2f} | {least.get(part, 0):.2f} |" for part, ms in spent.items()),
        "",
        *(f"{sum(ms):6.2f} ms {len(ms) / STEPS:5.0f} x {name[:90]} ({part})" for (part, name), ms in longest),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(step_table(load_config(sys.argv[1:])), flush=True)
