"""Compile the kernels for any chip, without a GPU, and print ptxas's report of each, one JSON per line.

The exit code is 1 if some of them, named at the end, need more shared memory than the chip has: where `too_large` is
true, with the settings they are first started with.

    python tests/compile_kernels.py 90 --dims 64 128 --masks causal
    python tests/compile_kernels.py 90 hopper --dtypes bfloat16 --features window sink --bounds packed
    python tests/compile_kernels.py 90 decode --groups 1 4 8

The host functions run on meta tensors, with a driver that compiles for the chip and launches nothing. So
every kernel is compiled with the arguments, tile sizes and specialisations of a real call.
"""

import argparse
import contextlib
import io
import itertools
import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[1]))
import score_mods

from attention.features import GRADIENTS, Call
from attention.portable import launch as portable
from attention.score_mod import label_of

# name -> (dtype, torch.set_float32_matmul_precision)
DTYPES = {
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
}
# chip -> KiB of shared memory that one program may use, by the CUDA C++ Programming Guide
SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
LENGTHS = (512, 4096)  # decode() splits only the longer one
REPORT = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)
ARRIVE = re.compile(r"mbarrier\.arrive\.shared")  # not those of the loading warp, which also expect bytes
ACCESS = re.compile(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.async")
BARRIER = re.compile(r"(?:bar|barrier)(\.warp)?\.sync\s+([^;]*);")
ADDRESS = re.compile(r"(?:mov|add|mad\.lo)\.\w32\s+(%r\d+), ([^;]+);")
STORE = re.compile(
    r"(?:st|atom|red)\.shared\S*?(?:\.v(\d))?\.[bus](\d+)\s+(?:%\w+, )?\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?"
)
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
LABEL = re.compile(r"(\$\w+):")
INIT = re.compile(r"mbarrier\.init\S*\s+\[([%\w]+)\]")
EFFECT = re.compile(r"(?:@\S+\s+)?(?:ld|st|cp|bra|red|atom|fence|wgmma|mbarrier|ldmatrix|stmatrix)\b")


def barriers_before_arrivals(ptx):
    """How often each barrier, such as "0, 128" or "warp", precedes an mbarrier.arrive, with only arithmetic in between.

    "none" counts the arrivals that have none.
    """
    found, barrier = Counter(), "none"
    for line in map(str.strip, ptx.splitlines()):
        if match := BARRIER.match(line):
            barrier = "warp" if match[1] else match[2]
        elif ARRIVE.search(line):
            found[barrier] += 1
        if EFFECT.match(line):
            barrier = "none"
    return found


def barriers_per_step(ptx):
    """The most barriers of several warps in an innermost loop that multiplies."""
    lines = list(map(str.strip, ptx.splitlines()))
    labels = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    branches = [(labels[match[1]], i) for i, line in enumerate(lines) if (match := BRANCH.search(line))]
    loops = [(a, b) for a, b in branches if a < b and any("wgmma.mma_async" in line for line in lines[a:b])]
    inner = [x for x in loops if not any(x[0] <= a and b <= x[1] and x != (a, b) for a, b in loops)]
    counts = [sum(match is not None and not match[1] for match in map(BARRIER.match, lines[a:b])) for a, b in inner]
    return max(counts, default=0)


def overlapping_barriers(ptx):
    """Offsets in shared memory of barriers that share it with other barriers or with stores.

    PTX allows the memory of a barrier no other use before the barrier is invalidated: what is stored there may be lost.
    Invalidations are not looked for, so later uses are reported too. The parts of an address that are known only at run
    time, such as a thread's place, count as 0.
    """
    offsets, barriers, stores = {"global_smem": 0}, Counter(), set()
    for line in map(str.strip, ptx.splitlines()):
        if match := ADDRESS.match(line):
            terms = match[2].split(", ")
            if match[0].startswith("mad"):  # a product that is known only at run time, and the rest
                terms = terms[2:]
            if offsets.keys() & set(terms):
                offsets[match[1]] = sum(offsets.get(x, int(x) if x.lstrip("-").isdigit() else 0) for x in terms)
        elif match := INIT.search(line):
            barriers[offsets[match[1]]] += 1
        elif (match := STORE.search(line)) and match[3] in offsets:
            first = offsets[match[3]] + int(match[4] or 0)
            stores |= set(range(first, first + int(match[1] or 1) * int(match[2]) // 8))
    return [at for at, count in barriers.items() if count > 1 or stores & set(range(at, at + 8))]


class Launcher:
    """Replaces Triton's launcher: starts nothing."""

    def __call__(self, *args):
        self.launch(*args)

    def launch(self, *args):
        pass


class Driver:
    """Replaces Triton's driver: describes the chip to the compiler and reports each kernel instead of loading it."""

    def __init__(self, chip, ptxas_log, report):
        self.chip, self.ptxas_log, self.report = chip, ptxas_log, report
        self.utils = self

    def remember_ptx(self, *, metadata_group, **compilation):
        self.ptx = Path(next(path for name, path in metadata_group.items() if name.endswith(".ptx"))).read_text()

    def get_current_target(self):
        return GPUTarget("cuda", self.chip, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 2**31 - 1}  # so that kernels that do not fit are reported too

    def load_binary(self, name, binary, shared, device):
        log = self.ptxas_log.getvalue()
        self.ptxas_log.seek(0)
        self.ptxas_log.truncate()
        stores, loads, registers = map(int, REPORT.search(log).groups())
        warnings = sorted(set(re.findall(r"\((C75\d\d)\)", log)))  # C7510...: wgmma instructions run one by one
        found = dict(spilled=stores + loads, shared=shared, registers=registers, warnings=warnings)
        found |= dict(barriers=barriers_per_step(self.ptx), arrivals=barriers_before_arrivals(self.ptx))
        found |= dict(overlaps=overlapping_barriers(self.ptx))
        before, wait, _ = self.ptx.partition("griddepcontrol.wait")  # for the previous kernel
        found |= dict(early=len(ACCESS.findall(before)) if wait else None, clocks=self.ptx.count("%clock"))
        self.report(kernel=name, **found)
        return 0, 0, registers, 0, 1024  # module, function, registers, spills, largest block

    def unload_module(self, module):
        pass

    def launcher_cls(self, source, metadata):
        return Launcher()


def feature_values(q, sequences):
    """Fields of a Call with every feature that all kernels serve; q: [B, T, H, D], and as many keys as queries."""
    batch, length, heads, _ = q.shape
    values = dict(window=1000, softcap=30.0, sink=q.new_empty(heads), return_max_logit=True, dropout=0.1)
    values["seed"] = q.new_empty(1, dtype=torch.int64)
    values["alibi_slopes"] = q.new_empty(heads, dtype=torch.float32).expand(sequences, -1)
    values["decay"] = q.new_empty(batch, heads, length, dtype=torch.float64)
    values["relative_bias"] = q.new_empty(2, heads, 128)
    values["score_mod"] = label_of(score_mods.alibi)
    return values


def launch_kernels(dtype, dim, causal, group, features=False, length=4096, ways=("loop", "partials")):
    """Forward and backward of one problem; with grouped queries, dk/dv in each of `ways`."""
    q, k = (torch.empty(2, length, heads, dim, dtype=dtype, device="meta") for heads in (2 * group, 2))
    call = Call(q, k, k, causal=causal, scale=dim**-0.5, impl="triton")
    if features:
        values = feature_values(q, 2) | dict(bias=q.new_empty(2, 2 * group, length, length))
        values |= dict(lengths=q.new_empty(2, dtype=torch.int32))
        values |= dict(score_tensors=[q.new_empty(2 * group, dtype=torch.float64)], score_numbers=[0])
        call = call._replace(**values if causal else values | dict(decay=None))
    wanted = {name: x is not None for name, x in zip(GRADIENTS, call.learned, strict=True)}
    out, lse2, *_ = portable.forward(call)
    for way in ways[: 1 if group == 1 else 2]:
        portable.loops_over_group = lambda problem, programs, device, way=way: way == "loop"
        portable.backward(call, out, lse2, out, None, wanted)


UNEVEN = 4095  # a length that no tile divides


def launch_hopper_kernels(dtype, dim, causal, group, features=(), length=4096, bounds=None):
    """Forward and backward of one problem, with a group in one program and in parts.

    bounds: "lengths" or "packed"; a packed row is as long as all rows of the dense batch together.
    """
    from attention.hopper import launch as hopper

    for batch in (1, 8) if group > 1 else (8,):
        rows, length_of_row = (1, batch * length) if bounds == "packed" else (batch, length)
        q, k = (torch.empty(rows, length_of_row, n, dim, dtype=dtype, device="meta") for n in (2 * group, 2))
        v = k[..., :128].contiguous() if dim == 192 else k  # the only head dims that differ
        call = Call(q, k, v, causal=causal, scale=dim**-0.5, impl="hopper")
        if bounds == "lengths":
            call = call._replace(lengths=q.new_empty(rows, dtype=torch.int32))
        elif bounds == "packed":
            starts = q.new_empty(batch + 1, dtype=torch.int32)
            call = call._replace(q_starts=starts, k_starts=starts)
        values = feature_values(q, batch)
        call = call._replace(**{name: values[name] for name in features})
        if call.dropout:
            call = call._replace(seed=values["seed"])
        if call.score_mod:
            call = call._replace(score_tensors=[values["alibi_slopes"]], score_numbers=[0])
        for dropout in {call.dropout, 2 * call.dropout}:  # another probability compiles nothing
            call = call._replace(dropout=dropout)
            out, lse2, *_ = hopper.forward(call)
            wanted = {name: name in "qkv" or getattr(call, name) is not None for name in GRADIENTS}
            hopper.backward(call, out, lse2, out, None, wanted)


def launch_simple_kernels(dtype, dim, causal, group, features=False, length=4096):
    from attention.simple import simple_attention

    q, k = (torch.empty(2, length, heads, dim, dtype=dtype, device="meta") for heads in (2 * group, 2))
    out = simple_attention(q.requires_grad_(), k, k, causal)
    torch.autograd.grad(out, q, torch.empty_like(q))


def launch_decode_kernels(dtype, dim, causal, group, features=False, length=4096):
    """decode() of one new token, or with features of three."""
    from attention import decode_kernel

    q, k = (torch.empty(2, n, h, dim, dtype=dtype, device="meta") for n, h in ((1, 2 * group), (length, 2)))
    lengths = q.new_empty(2, dtype=torch.int32)
    options = {}
    if features:
        q = q.expand(2, 3, 2 * group, dim)
        decay_sum = q.new_empty(2, length, 2 * group, dtype=torch.float64)
        slopes, sink = (q.new_empty(*shape, dtype=torch.float32) for shape in ((2, 2 * group), (2 * group,)))
        options = dict(decay=decay_sum, alibi_slopes=slopes, sink=sink, window=300, softcap=30.0)
    decode_kernel.launch_decode(Call(q, k, k, lengths=lengths, scale=dim**-0.5, **options), features)


def launch_generation_kernels(dtype, dim, causal, group, features=False, length=4096, row_counts=(1,)):
    """A block, the head and the choice of a token, for each number of rows; 12 heads, so C = 12 dim."""
    from torch import nn

    from generation.gumbel import gumbel_scores
    from generation.heads import store_heads
    from generation.linear import linear
    from generation.top_k import best_and_kth

    width, vocabulary = 12 * dim, 50_257
    make = partial(nn.Linear, bias=features, device="meta", dtype=dtype)
    layernorm = nn.LayerNorm(width, bias=features, device="meta", dtype=dtype)
    for rows in row_counts:
        x = torch.empty(rows, width, dtype=dtype, device="meta")
        qkv = linear(x, make(width, 3 * width), norm=layernorm)
        cache, slots = x.new_empty(rows, length, 12, dim), x.new_empty(rows, dtype=torch.int64)
        angles = x.new_empty(length, 1, dim // 2, dtype=torch.float32)
        store_heads(qkv, cache, cache, slots, *([(angles, angles), 1e-5, qkv, x[0], True] if features else []))
        added = dict(residual=x, embedded=x, skip=x[0] if features else None)
        linear(linear(x, make(width, 4 * width), norm=layernorm, activation="gelu"), make(4 * width, width), **added)
        gate = make(width, 4 * width)
        linear(x, make(width, 4 * width), norm=nn.RMSNorm(width, device="meta"), activation="swiglu", gate=gate)
        bare = nn.RMSNorm(width, elementwise_affine=False)
        linear(x, make(width, 4 * width), norm=bare, activation="relu2")
        logits = linear(x, make(width, vocabulary), norm=layernorm, softcap=15.0, dtype=torch.float32)
        best = logits[:, :1].contiguous()
        best_and_kth(logits, 200)
        best_and_kth(logits[:, :64], 1)
        gumbel_scores(logits, best, best if features else None, slots, slots, 0.8, -3.0)


def launch_training_kernels(dtype, dim, causal, group, features=False, length=4096):
    """An MLP of width 12 dim, Muon and cross-entropy; with features the MLP's other activations and a bias."""
    from kernels import matmul as module
    from kernels import muon
    from kernels.activation import ACTIVATIONS
    from kernels.cross_entropy_hopper import cross_entropy

    x, hidden, weight = (
        torch.empty(*shape, 12 * dim, dtype=dtype, device="meta") for shape in ((length,), (length, 4), (48 * dim,))
    )
    hidden, bias = hidden.flatten(1), weight.new_empty(48 * dim)
    scale = x.new_empty((), dtype=torch.float32)
    for kind in ACTIVATIONS if features else ("gelu",):
        module.matmul(x, weight, "activate", kind=kind, bias=bias if features else None)
        module.matmul(x, weight, "slope", kind=kind, other=hidden)
        copies, scales = (tensor.to(torch.float8_e4m3fn) for tensor in (x, weight)), (scale,) * 3
        module.matmul(*copies, "activate", kind=kind, bias=bias if features else None, scales=scales)
    targets = x.new_empty(length, dtype=torch.int64)
    for softcap in (None, 15.0):
        cross_entropy(x.new_empty(length, 50_304), targets, x.new_empty(length, dtype=torch.float32), 50_257, softcap)
    state = torch.empty_like(weight, dtype=torch.float32)
    muon.blend(state, state, weight, 0.05, scale, scale)
    muon.update(state, weight, scale, 0.2, 0.1, scale)


# name -> function, lengths, and where there is no choice of them: masks, groups
FAMILIES = {
    "portable": (launch_kernels, LENGTHS[-1:], None, None),
    "hopper": (launch_hopper_kernels, (LENGTHS[-1], UNEVEN), None, None),
    "simple": (launch_simple_kernels, (UNEVEN,), None, None),
    "decode": (launch_decode_kernels, LENGTHS, ("causal",), None),
    "generation": (launch_generation_kernels, LENGTHS[-1:], ("causal",), (1,)),
    "training": (launch_training_kernels, (UNEVEN,), ("causal",), (1,)),  # those for Hopper
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", type=int, choices=SHARED, help="compute capability without the dot, such as 90")
    parser.add_argument("kernels", nargs="?", default="portable", choices=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "tf32"], choices=DTYPES)
    parser.add_argument("--dims", nargs="+", default=[64, 128, 256], type=int)
    parser.add_argument("--masks", nargs="+", default=["causal", "full"], choices=["causal", "full"])
    parser.add_argument("--groups", nargs="+", default=[1, 2], type=int, help="query heads per key/value head")
    parser.add_argument(
        "--ways", nargs="+", default=["loop", "partials"], choices=["loop", "partials"],
        help="portable dk/dv with groups: one program per group, or one per query head",
    )  # fmt: skip
    parser.add_argument("--features", nargs="*", help="with all features; of hopper, with those named")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64], help="of generation")
    parser.add_argument("--lengths", nargs="+", type=int, help="of sequences; default: all that matter")
    parser.add_argument("--bounds", choices=["lengths", "packed"], help="of sequences, of hopper; default: none")
    args = parser.parse_args()

    triton.knobs.nvidia.dump_ptxas_log = True  # to stdout
    triton.knobs.compilation.always_compile = True  # a cached kernel has no log
    limit, too_large = SHARED[args.chip] * 2**10, set()
    chip = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=limit)
    torch.cuda.get_device_capability, torch.cuda.get_device_properties = lambda _: divmod(args.chip, 10), lambda _: chip
    stdout, ptxas_log = sys.stdout, io.StringIO()
    launch_all, lengths, masks, groups = FAMILIES[args.kernels]
    features, hopper = args.features is not None, args.kernels == "hopper"
    if hopper:
        features = args.features or ()
        lengths = lengths[:1] if args.bounds else lengths
    sizes = args.dtypes, args.dims, masks or args.masks, groups or args.groups, args.lengths or lengths
    own = dict(portable=dict(ways=args.ways), generation=dict(row_counts=args.rows), hopper=dict(bounds=args.bounds))
    for case in itertools.product(*sizes):
        name, dim, mask, group, length = case
        dtype, precision = DTYPES[name]
        torch.set_float32_matmul_precision(precision)
        known = dict(chip=args.chip, dtype=name, dim=dim, mask=mask, group=group, length=length)
        known |= dict(bounds=args.bounds, features=features) if hopper else {}

        def report(known=known, **found):
            known = known | found | dict(too_large=found["shared"] > limit)
            print(json.dumps(known), file=stdout, flush=True)
            if known["too_large"]:
                too_large.add("{kernel} ({dtype}, head dim {dim}: {shared:,} bytes)".format(**known))

        driver = Driver(args.chip, ptxas_log, report)
        triton.runtime.driver.set_active(driver)
        triton.knobs.compilation.listener = driver.remember_ptx
        with contextlib.redirect_stdout(ptxas_log):
            launch_all(dtype, dim, mask == "causal", group, features, length, **own.get(args.kernels, {}))
    if too_large:
        sys.exit(f"sm_{args.chip} has {limit:,} bytes of shared memory, too few for {', '.join(sorted(too_large))}")


if __name__ == "__main__":
    main()
