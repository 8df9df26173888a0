"""Time attention(), forward and backward, against its alternatives: one process, the same random inputs, medians.

    python benchmarks/attention.py                    every cell, every implementation that can be imported
    python benchmarks/attention.py --cells d128 --implementations triton flash cudnn --csv FILE
    python benchmarks/attention.py --overhead         the CPU time of a call, before its kernels start
    python benchmarks/attention.py --here             in a minute: is what impl="auto" takes here faster than SDPA?
    TRITON_INTERPRET=1 python benchmarks/attention.py --small    a few small cells, to try this script on a CPU

If --here finds SDPA faster, `--attention sdpa` keeps that answer for a run of train.py, and impl="sdpa" for a call. Its
last line is for an issue, as docs/machines.md asks.

TFLOP/s count 4 D operations per visible (query, key) pair in the forward and 2.5 times as many in the backward. A
causal mask shows half of all pairs.
"""

import contextlib
import statistics
import time
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from timeit import repeat
from typing import NamedTuple

import torch
from harness import DEVICE, command_line, machine, milliseconds, save, sdpa, synchronize, table
from torch.nn.attention import SDPBackend

from attention import attention, explain
from kernels.documents import find_documents

TOKENS = 16_384  # batch * length, except in the GPT-2 cell and the small ones
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
HERE = (  # panels and lengths of the cells of --here, the most usual first
    ("GPT-2 124M layer", 1024), ("d128 causal", 4096), ("d64 causal", 4096), ("d128 causal 32/8 heads", 4096),
    ("GPT-2 documents of 800", 32 * 1024),
)  # fmt: skip
SECONDS = 45  # of --here, after which no cell begins
FLOP = {"forward": 1, "backward": 2.5, "both": 3.5}  # of the forward's


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
    rows: int | None = None  # of tokens in the packed row, whose documents find_documents() found

    def pairs(self, starts):
        """Visible (query, key) pairs of one head, over the batch."""
        if starts is not None:
            return sum(n * n / 2 for n in starts.diff().tolist())
        if self.window:
            return self.batch * (self.length * self.window - self.window**2 / 2)
        return self.batch * self.length**2 * (0.5 if self.causal else 1)


def cells(small=False):
    if small:
        yield Cell("d16 causal", 2, 16, 1, 1, 16)
        yield Cell("d16 causal", 1, 32, 1, 1, 16)
        yield Cell("d16 window 8", 1, 32, 2, 1, 16, window=8)
        return
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
    yield Cell("GPT-2 documents of 800", 1, 32 * 1024, 12, 12, 64, documents=800, rows=32)


def document_starts(cell):
    """cu_seqlens of documents of random lengths around the mean."""
    mean, lengths, generator = cell.documents, [], torch.Generator().manual_seed(0)
    if cell.rows:
        tokens = torch.randint(mean, (cell.rows, cell.length // cell.rows), generator=generator)
        return find_documents(tokens.to(DEVICE), end=0)[0].unique_consecutive()  # without the empty ones at the end
    while sum(lengths) < TOKENS:
        lengths.append(int(torch.randint(mean // 2, mean * 3 // 2, (1,), generator=generator)))
    lengths[-1] -= sum(lengths) - TOKENS
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


# Each of these returns a function of q, k, v [B, T, H, D]; NotImplementedError says what it cannot compute.


def ours(impl, cell, starts):
    packed = {} if starts is None else dict(cu_seqlens=starts, max_seqlen=int(starts.diff().max()))
    return partial(attention, causal=cell.causal, window=cell.window, impl=impl, **packed)


def pytorch(backend, cell, starts):
    if starts is None and not cell.window:
        return partial(sdpa, backend, causal=cell.causal)
    if backend != SDPBackend.FLASH_ATTENTION:
        raise NotImplementedError("SDPA would need a mask of T^2")
    from torch.nn.attention.varlen import varlen_attn  # the same kernel, for windows and packed sequences

    starts = torch.tensor([0, cell.length], dtype=torch.int32, device=DEVICE) if starts is None else starts
    limit, window = int(starts.diff().max()), (cell.window - 1 if cell.window else -1, 0)
    packed = dict(cu_seq_q=starts, cu_seq_k=starts, max_q=limit, max_k=limit, window_size=window)
    # squeeze(), as the gradient of q[0] would be a copy
    return lambda *qkv: varlen_attn(*(x.squeeze(0) for x in qkv), **packed).unsqueeze(0)


def flex(cell, starts):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if cell.panel and cell.length not in (1024, 4096, 16_384):
        raise NotImplementedError("it compiles for every shape, half a minute each: three lengths are enough")
    torch._dynamo.reset()  # it compiles per shape, and gives up after eight
    mask = None
    if starts is not None:
        document = torch.bucketize(torch.arange(cell.length, device=DEVICE), starts[1:], right=True)

    def visible(b, h, i, j):
        seen = i >= j
        if cell.window:
            seen = seen & (i - j < cell.window)
        if starts is not None:
            seen = seen & (document[i] == document[j])
        return seen

    if cell.causal:
        mask = create_block_mask(visible, None, None, cell.length, cell.length, device=DEVICE)
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
        if starts is None:
            out = flash_attn_func(q, k, v, causal=cell.causal, window_size=window)
        else:
            packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=limit, max_seqlen_k=limit)
            out = flash_attn_varlen_func(*(x.squeeze(0) for x in (q, k, v)), causal=True, **packed)
        out = out[0] if isinstance(out, tuple) else out
        return out if starts is None else out.unsqueeze(0)

    return call


def fla(cell, starts):
    from fla.ops.attn import parallel_attn

    if not cell.causal:
        raise NotImplementedError("parallel_attn is causal")
    return partial(parallel_attn, window_size=cell.window, cu_seqlens=None if starts is None else starts.long())


# name -> what makes the function of a cell
IMPLEMENTATIONS = {
    "hopper": partial(ours, "hopper"),
    "triton": partial(ours, "triton"),
    "flash": partial(pytorch, SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(pytorch, SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "flash4": flash4,
    "fla": fla,
    "auto": partial(ours, "auto"),
    "sdpa": partial(ours, "sdpa"),
}


def directions(call, inputs, dout):
    """The output of an implementation, and {direction: its function}; backward has the graph of one forward."""
    gradients = partial(torch.autograd.grad, inputs=inputs, grad_outputs=dout)
    out = call(*inputs)
    return out, {
        "forward": lambda: call(*inputs),
        "backward": lambda: gradients(out, retain_graph=True),
        "both": lambda: gradients(call(*inputs)),
    }


def run(cell, names):
    """Rows of the table for one cell."""
    starts = None if cell.documents is None else document_starts(cell)
    q, k, v = (
        torch.randn(cell.batch, cell.length, n, cell.dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for n in (cell.heads, cell.kv_heads, cell.kv_heads)
    )
    dout, inputs = torch.randn_like(q), (q, k, v)
    calls, lacks, expected = {}, {}, None
    milliseconds(q.detach)  # allocates the buffer that flushes the cache
    for name in names:
        try:
            out, ways = directions(IMPLEMENTATIONS[name](cell, starts), inputs, dout)
            found = (out, *ways["backward"]())
            ways["both"]()  # memory must hold the kept output too, as when it is timed
            expected = expected or found
            # bfloat16 rounds by 0.004
            if any((a - b).norm() > 0.02 * b.norm() for a, b in zip(found, expected, strict=True)):
                raise ArithmeticError("its output or a gradient differs")
            calls |= {(name, way): function for way, function in ways.items()}
        except Exception as error:  # a missing package, an unsupported call, too little memory
            unserved = isinstance(error, ValueError) and (name == "hopper" or DEVICE == "cpu")
            if name in ("auto", "hopper", "triton") and not unserved:
                raise  # a bug in ours must not look like a cell that is left out
            lacks[name] = f"{type(error).__name__}: {str(error)[:80]}".splitlines()[0]
            torch.cuda.empty_cache()
    times = {key: [] for key in calls}
    for turn in range(50):  # turns, so that clocks and other work are the same for all
        for key, call in calls.items():
            if turn < 3 or sum(times[key]) < 20:  # ms
                times[key].append(milliseconds(call))
    for (name, way), found in times.items():
        ms, flops = statistics.median(found), 4 * cell.heads * cell.dim * cell.pairs(starts) * FLOP[way]
        speed = dict(ms=round(ms, 4), tflops=float(f"{flops / ms / 1e9:.4g}"))
        yield cell._asdict() | dict(implementation=name, direction=way) | speed
    for name, reason in lacks.items():
        yield dict(cell._asdict(), implementation=name, direction="none", reason=reason)


def overhead(names):
    """Print microseconds of CPU time per call at T = 128, without waiting for the GPU.

    The smallest of ten medians of fifty calls, taken in turns: other work on the host only adds time.
    """
    cell, calls = Cell("", 1, 128, 2, 2, 64), {}
    q, k, v = (torch.randn(1, 128, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    for name in names:
        with contextlib.suppress(ImportError, NotImplementedError):
            _, ways = directions(IMPLEMENTATIONS[name](cell, None), (q, k, v), torch.randn_like(q))
            ways["backward"]()
            calls[name] = ways
    medians = {key: [] for key in product(("forward", "backward"), calls)}
    for _, (way, name) in product(range(10), medians):
        seconds = repeat(calls[name][way], synchronize, repeat=50, number=1)
        medians[way, name].append(statistics.median(seconds))
    rows = ([way, *(f"{1e6 * min(medians[way, name]):.0f}" for name in calls)] for way in ("forward", "backward"))
    table(["pass", *(f"{name}, us" for name in calls)], rows)  # "triton" is the column of its version


def here(small):
    """Print the times of what impl="auto" takes here and of SDPA, and which of them to take."""
    began, ours, rows = time.perf_counter(), "triton" if small else "auto", []
    q = torch.empty(1, 64, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    taken, _, reason = explain(q, q, q, impl=ours).partition(": ")
    if taken == "sdpa":
        print(f"impl='auto' takes SDPA here: {reason}")
        return
    known = {(cell.panel, cell.length): cell for cell in cells(small)}
    totals = {ours: 0.0, "sdpa": 0.0}  # ms of the cells that both serve

    def timed():
        for cell in map(known.get, known if small else HERE):
            if time.perf_counter() - began > SECONDS:
                return
            ms = {(row["implementation"], row["direction"]): row["ms"] for row in run(cell, totals) if "ms" in row}
            served = [name for name in totals if (name, "both") in ms]
            times = {name: f"{ms[name, 'forward']:.3g}/{ms[name, 'backward']:.3g}" for name in served}
            rows.append([f"{cell.panel}, {cell.length}", *(times.get(name, "-") for name in totals)])
            for name in served if len(served) == 2 else ():
                totals[name] += ms[name, "both"]
            yield rows[-1]

    table(["cell", f"{taken}, forward/backward in ms", "sdpa"], timed())
    mine, theirs = totals.values()
    if not theirs:
        print(f"impl='auto' takes {taken} here; no cell was served by both")
        return
    advice = "which is right" if mine <= theirs else "but should take SDPA: --attention sdpa, impl='sdpa'"
    print(f"impl='auto' takes {taken} here, {advice}: {mine:.4g} ms where both serve, SDPA {theirs:.4g} ms")
    chip, _, *versions = machine().values()
    cells_of_row = "; ".join(f"{cell}: {our} (SDPA {other})" for cell, our, other in rows)
    print("|", chip, "|", *versions, "|", cells_of_row, "|", taken if mine <= theirs else "sdpa", "|")


def main():
    parser = command_line(__doc__)
    parser.add_argument("--cells", nargs="+", default=[""], help="parts of panel names")
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS)[:-2], choices=IMPLEMENTATIONS)
    parser.add_argument("--csv", type=Path, help="write to this file")
    parser.add_argument("--overhead", action="store_true", help="only the CPU time of a call, at T = 128")
    parser.add_argument("--here", action="store_true", help="only a few cells, of what impl='auto' takes and of SDPA")
    parser.add_argument("--small", action="store_true", help="a few small cells, to try this script on a CPU")
    args = parser.parse_args()
    if args.overhead:
        return overhead(args.implementations)
    if args.here:
        return here(args.small)
    versions, rows = machine(), []
    for cell in cells(args.small):
        if not any(part in cell.panel for part in args.cells):
            continue
        found = [versions | row for row in run(cell, args.implementations)]
        rows += found
        if args.csv:
            save(rows, args.csv)
        text = {}
        for r in found:
            text.setdefault(r["implementation"], []).append(f"{r['tflops']:.3g}" if "tflops" in r else r["reason"])
        line = "  ".join(f"{name} {'/'.join(values)}" for name, values in text.items())
        print(f"{cell.panel:24} {cell.length:6}  {line}", flush=True)


if __name__ == "__main__":
    main()
