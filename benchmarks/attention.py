"""Time attention(), forward and backward, against its alternatives: one process, the same random inputs, medians.

    python benchmarks/attention.py                    every cell, every implementation that can be imported
    python benchmarks/attention.py --cells d128 --implementations triton flash cudnn
    python benchmarks/attention.py --overhead         the CPU time of a call, before its kernels start

Writes benchmarks/results/attention.csv and .png. TFLOP/s count 4 D operations per visible (query, key) pair in the
forward and 2.5 times as many in the backward. A causal mask shows half of all pairs.
"""

import argparse
import contextlib
import csv
import itertools
import statistics
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder, where this file would be `attention`
from attention import attention, ops
from attention.ops import TENSOR_OPTIONS, Options
from benchmarks.flat import flat_attention

RESULTS = Path(__file__).parent / "results"
TOKENS = 16_384  # batch * length, except in the GPT-2 cell
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)


class Cell(NamedTuple):
    panel: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    window: int | None = None
    documents: int | None = None  # mean length of packed documents

    def pairs(self, starts):
        """Visible (query, key) pairs of one head, over the batch."""
        if starts is not None:
            return sum(n * n / 2 for n in starts.diff().tolist())
        if self.window:
            return self.batch * (self.length * self.window - self.window**2 / 2)
        return self.batch * self.length**2 * (0.5 if self.causal else 1)


def cells():
    for dim in (64, 128, 256):
        heads = 2048 // dim
        for causal in (True, False):
            panel = f"d{dim} {'causal' if causal else 'full'}"
            for length in LENGTHS if dim < 256 else (1024, 4096, 16_384):
                yield Cell(panel, TOKENS // length, length, heads, heads, dim, causal)
    for length in LENGTHS:
        yield Cell("d128 causal 32/8 heads", TOKENS // length, length, 32, 8, 128)
    yield Cell("GPT-2 124M layer", 32, 1024, 12, 12, 64)
    yield Cell("d128 window 1024", 1, TOKENS, 16, 16, 128, window=1024)
    yield Cell("d128 documents of 512", 1, TOKENS, 16, 16, 128, documents=512)


def document_starts(mean):
    """cu_seqlens of documents of random lengths around the mean."""
    lengths, generator = [], torch.Generator().manual_seed(0)
    while sum(lengths) < TOKENS:
        lengths.append(int(torch.randint(mean // 2, mean * 3 // 2, (1,), generator=generator)))
    lengths[-1] -= sum(lengths) - TOKENS
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


# Each of these returns a function of q, k, v [B, T, H, D]; NotImplementedError says what it cannot compute.


def ours(impl, cell, starts):
    packed = {} if starts is None else dict(cu_seqlens=starts, max_seqlen=int(starts.diff().max()))
    return partial(attention, causal=cell.causal, window=cell.window, impl=impl, **packed)


def control(cell, starts):
    if cell.window or starts is not None or cell.heads != cell.kv_heads or cell.dim > 128:
        raise NotImplementedError("the control has no features, groups or head dim over 128")
    return partial(flat_attention, causal=cell.causal)


def sdpa(backend, cell, starts):
    if cell.window or starts is not None:
        raise NotImplementedError("SDPA would need a mask of T^2")

    def call(q, k, v):
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads)
        return out.transpose(1, 2)

    return call


def flex(cell, starts):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if cell.panel and cell.length not in (1024, 4096, 16_384):
        raise NotImplementedError("it compiles for every shape, half a minute each: three lengths are enough")
    torch._dynamo.reset()  # it compiles per shape, and gives up after eight
    mask = None
    if starts is not None:
        document = torch.bucketize(torch.arange(cell.length, device="cuda"), starts[1:], right=True)

    def visible(b, h, i, j):
        seen = i >= j
        if cell.window:
            seen = seen & (i - j < cell.window)
        if starts is not None:
            seen = seen & (document[i] == document[j])
        return seen

    if cell.causal:
        mask = create_block_mask(visible, None, None, cell.length, cell.length, device="cuda")
    compiled = torch.compile(flex_attention, fullgraph=True)

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=cell.heads != cell.kv_heads).transpose(1, 2)

    return call


def flash4(cell, starts):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    window = (cell.window - 1, 0) if cell.window else (None, None)
    limit = None if starts is None else int(starts.diff().max())

    def call(q, k, v):
        if starts is not None:
            out = flash_attn_varlen_func(
                q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=limit, max_seqlen_k=limit,
                causal=True,
            )  # fmt: skip
            return (out[0] if isinstance(out, tuple) else out)[None]
        out = flash_attn_func(q, k, v, causal=cell.causal, window_size=window)
        return out[0] if isinstance(out, tuple) else out

    return call


def fla(cell, starts):
    from fla.ops.attn import parallel_attn

    if not cell.causal:
        raise NotImplementedError("parallel_attn is causal")
    return partial(parallel_attn, window_size=cell.window, cu_seqlens=None if starts is None else starts.long())


# name -> (label in the plot, what makes the function of a cell)
IMPLEMENTATIONS = {
    "hopper": ("attention(), Hopper", partial(ours, "hopper")),
    "triton": ("attention(), Triton", partial(ours, "triton")),
    "reference": ("attention(), reference", partial(ours, "reference")),
    "control": ("control without features", control),
    "flash": ("SDPA flash (FlashAttention-2)", partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    "cudnn": ("SDPA cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
    "math": ("SDPA math", partial(sdpa, SDPBackend.MATH)),
    "flex": ("FlexAttention", flex),
    "flash4": ("flash-attn-4", flash4),
    "fla": ("FLA parallel_attn", fla),
}


class Contender:
    """One implementation on the inputs of a cell. backward() uses the graph of one forward, which is kept."""

    def __init__(self, name, cell, starts, inputs, dout):
        _, make = IMPLEMENTATIONS[name]
        self.function, self.inputs, self.dout = make(cell, starts), inputs, dout
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.out = self.forward()
        self.backward()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - before
        self.times = {"forward": [], "backward": [], "both": []}

    def forward(self):
        return self.function(*self.inputs)

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def both(self):
        return torch.autograd.grad(self.forward(), self.inputs, self.dout)


def milliseconds(function):
    """Time with a cold L2 cache. While the cache is flushed the CPU runs ahead, so launches are not timed."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush_buffer().zero_()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@cache
def flush_buffer():
    return torch.empty(2**32, dtype=torch.int8, device="cuda")


def measure(contenders, seconds):
    """Fill the times. All contenders take turns, so that the GPU's clocks and temperature are the same for all."""
    for turn in range(50):
        for contender in contenders.values():
            for direction, times in contender.times.items():
                if turn < 3 or sum(times) < 1000 * seconds:
                    times.append(milliseconds(getattr(contender, direction)))


def run(cell, names, seconds):
    """Rows of the table for one cell."""
    starts = None if cell.documents is None else document_starts(cell.documents)
    q, k, v = (
        torch.randn(cell.batch, cell.length, n, cell.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (cell.heads, cell.kv_heads, cell.kv_heads)
    )
    dout = torch.randn_like(q)
    contenders, lacks, expected = {}, {}, None
    flush_buffer()
    for name in sorted(names, key=("math", "reference").__contains__):  # last: they fill the memory
        try:
            contenders[name] = Contender(name, cell, starts, (q, k, v), dout)
            contenders[name].both()  # memory must hold the kept output too, as when it is timed
            found = (contenders[name].out, *contenders[name].backward())
            expected = expected or found
            # bfloat16 rounds by 0.004
            if any((a - b).norm() > 0.02 * b.norm() for a, b in zip(found, expected, strict=True)):
                raise ArithmeticError("its output or a gradient differs")
        except Exception as error:  # a missing package, an unsupported call, too little memory
            unserved = name == "hopper" and isinstance(error, ValueError)
            if name in ("hopper", "triton") and not unserved:
                raise  # a bug in ours must not look like a cell that is left out
            contenders.pop(name, None)
            lacks[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
            torch.cuda.empty_cache()
    measure(contenders, seconds)
    forward_flops = 4 * cell.heads * cell.dim * cell.pairs(starts)
    for name, contender in contenders.items():
        for direction, times in contender.times.items():
            ms = statistics.median(times)
            flops = forward_flops * {"forward": 1, "backward": 2.5, "both": 3.5}[direction]
            yield dict(
                cell._asdict(), implementation=name, direction=direction, ms=round(ms, 4),
                tflops=round(flops / ms / 1e9, 1), peak_mib=round(contender.peak / 2**20),
            )  # fmt: skip
    for name, reason in lacks.items():
        yield dict(cell._asdict(), implementation=name, direction="none", reason=reason)


def op_alone(q, k, v, dout):
    """Forward and backward of the portable kernels' custom op, without autograd."""
    q, k, v = (x.detach() for x in (q, k, v))
    options = Options(*[None] * TENSOR_OPTIONS, 0, 0, True, window=0, softcap=0.0, dropout=0.0, scale=0.125)
    out, lse2 = ops.forward(q, k, v, *options)
    return (
        partial(ops.forward, q, k, v, *options),
        partial(ops.backward, q, k, v, out, lse2, dout, None, False, *options),
    )


def overhead(names):
    """{name: [forward, backward]}: microseconds of CPU time per call at T = 128, without waiting for the GPU.

    The smallest of ten medians of fifty calls: other work on the host only adds time. "op" is the custom op that
    "triton" calls, without attention() and autograd around it.
    """
    cell = Cell("", 1, 128, 2, 2, 64)
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    contenders, found = {"op": op_alone(q, k, v, torch.randn_like(q))} if "triton" in names else {}, {}
    for name in names:
        with contextlib.suppress(ImportError, NotImplementedError):
            contender = Contender(name, cell, None, (q, k, v), torch.randn_like(q))
            contenders[name] = contender.forward, contender.backward
    for _, name in itertools.product(range(10), contenders):
        medians = []
        for function in contenders[name]:
            times = []
            for _ in range(50):
                torch.cuda.synchronize()
                start = time.perf_counter()
                function()
                times.append(time.perf_counter() - start)
            medians.append(1e6 * statistics.median(times))
        found[name] = list(map(min, found.get(name, medians), medians))
    return found


def plot(rows, path):
    """Plot the panels that have several lengths, each with forward and backward."""
    rows = [row | dict(length=int(row["length"]), tflops=float(row["tflops"])) for row in rows if row.get("tflops")]
    lengths = {cell.panel: {c.length for c in cells() if c.panel == cell.panel} for cell in cells()}
    panels = [panel for panel in lengths if len(lengths[panel]) > 1 and panel in {row["panel"] for row in rows}]
    if not panels:
        return
    from matplotlib.figure import Figure

    height = -(-len(panels) // 2)  # two panels side by side
    figure = Figure(figsize=(14, 2.9 * height), layout="tight")
    axes = figure.subplots(height, 4, sharex=True, squeeze=False)
    places = [(panel, direction) for panel in panels for direction in ("forward", "backward")]
    for axis, (panel, direction) in itertools.zip_longest(axes.flat, places, fillvalue=(None, None)):
        axis.set_visible(panel is not None)
        for color, (name, (label, _)) in enumerate(IMPLEMENTATIONS.items()):
            points = sorted(
                (row["length"], row["tflops"]) for row in rows
                if (row["panel"], row["direction"], row["implementation"]) == (panel, direction, name)
            )  # fmt: skip
            if points:
                style = dict(color=f"C{color}", linewidth=2.5 if name in ("hopper", "triton") else 1, marker=".")
                axis.plot(*zip(*points, strict=True), label=label, **style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{panel}, {direction}", fontsize=9)
        axis.tick_params(labelbottom=True)
    figure.supylabel("TFLOP/s")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower right", ncols=2)
    figure.suptitle(f"{rows[0]['chip']}, torch {rows[0]['torch']}, triton {rows[0]['triton']}: TFLOP/s against T")
    figure.savefig(path, dpi=110)


def save(rows, folder):
    """Rewrite attention.csv: after every cell, so that an interrupted run keeps its results."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(folder / "attention.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def main():
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=[""], help="parts of panel names")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--seconds", type=float, default=0.02, help="of GPU time for each median")
    parser.add_argument("--out", type=Path, help="folder; benchmarks/results, or part/ in it for a part of the cells")
    parser.add_argument("--overhead", action="store_true", help="only the CPU time of a call, at T = 128")
    parser.add_argument("--join", nargs="+", type=Path, metavar="CSV", help="join the CSVs of runs on some cells; plot")
    parser.add_argument("--commit", default=commit, help="name of the code, if this is not a git checkout")
    args = parser.parse_args()
    part = (args.cells, args.lengths, args.implementations) != ([""], LENGTHS, list(IMPLEMENTATIONS))
    args.out = args.out or (RESULTS / "part" if part and not args.join else RESULTS)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.join:
        rows = [row for path in args.join for row in csv.DictReader(path.open())]
        if len({(row["chip"], row["commit"], row["torch"], row["triton"]) for row in rows}) != 1:
            parser.error("--join takes runs of one chip, commit, torch and triton; these differ")
        save(rows, args.out)
        plot(rows, args.out / "attention.png")
        return
    if not args.commit:
        parser.error("this is not a git checkout: name the code with --commit")
    if args.overhead:
        for name, (forward, backward) in overhead(args.implementations).items():
            print(f"{name:10} forward {forward:.0f} us, backward {backward:.0f} us")
        return

    versions = dict(
        chip=torch.cuda.get_device_name(), commit=args.commit, torch=torch.__version__, triton=triton.__version__
    )
    rows = []
    for cell in cells():
        if not any(part in cell.panel for part in args.cells) or cell.length not in args.lengths:
            continue
        found = list(run(cell, args.implementations, args.seconds))
        rows += [versions | row for row in found]
        save(rows, args.out)
        text = {}
        for r in found:
            text.setdefault(r["implementation"], []).append(f"{r['tflops']:.0f}" if "tflops" in r else r["reason"])
        line = "  ".join(f"{name} {'/'.join(values)}" for name, values in text.items())
        print(f"{cell.panel:24} {cell.length:6}  {line}", flush=True)
    save(rows, args.out)
    plot(rows, args.out / "attention.png")


if __name__ == "__main__":
    main()
