"""Every entry of the launch tables compiles for its chips, fits their shared memory and spills no registers.

This needs no GPU: Triton and its ptxas compile for any chip. The bounds hold for Triton 3.9.

Each chip, dtype and head dim is compiled. COMPILE_ALL=1, which .ci/gpu sets, compiles all combinations, and attention
that is not causal. Always left out: grouped queries on sm_80, where both ways of dk/dv spill at head dim 128 (24 and 8
bytes), and on sm_90 the dk/dv that loops over a group. That one spills from head dim 128 on, but is the fastest
(benchmarks/LOG.md).
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")

pytestmark = pytest.mark.slow
SHARED_KB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}  # chip -> shared memory that one program may use
COMPILE_ALL = os.environ.get("COMPILE_ALL") == "1"

EVEN, UNEVEN = 4096, 4095  # lengths that tiles divide, or do not
MANY = "window softcap sink return_max_logit"
ALL = "window softcap sink return_max_logit dropout alibi_slopes"
DECAY = "window decay"
# Compiled for Hopper: dtype, bounds of sequences, features, masks, head dims, lengths.
HOPPER = [
    ("bfloat16", None, MANY, "causal", (128,), (UNEVEN,)),
    ("float16", "packed", MANY, "causal", (64,), (EVEN,)),
    ("bfloat16", "lengths", MANY, "full", (128, 256), (EVEN,)),
    ("bfloat16", None, "dropout", "causal", (64, 128), (EVEN,)),
    ("bfloat16", "packed", ALL, "full", (64, 256), (EVEN,)),
    ("bfloat16", None, "alibi_slopes", "causal", (64, 128), (UNEVEN,)),
    ("bfloat16", None, "", "causal", (64, 256), (EVEN,)),
    ("float16", None, "", "full", (64, 128), (UNEVEN,)),
    ("bfloat16", None, "", "causal", (192,), (UNEVEN,)),
    ("bfloat16", "packed", ALL, "full", (192,), (EVEN,)),
    ("bfloat16", "packed", DECAY, "causal", (64, 128, 256), (EVEN,)),
    ("bfloat16", "packed", "relative_bias", "causal", (64, 128, 256), (EVEN,)),
]
if COMPILE_ALL:
    values = (
        ("bfloat16", "float16"),
        (None, "lengths", "packed"),
        ("", "dropout", "alibi_slopes", MANY, ALL),
        ("causal full",),
        [(64, 128, 192, 256)],
    )
    HOPPER = [(*case, (EVEN,) if case[1] else (EVEN, UNEVEN)) for case in itertools.product(*values)]
# Portable kernels that spill under Triton 3.6 but not under 3.9: (chip, dtype, head dim, kernel) -> bytes per thread,
# stores and loads. Triton 3.7 and 3.8 were not measured and are allowed the same.
SPILLED_BEFORE_3_9 = {
    (80, "float32", 128, "dkdv_kernel"): 16,
    (80, "float32", 128, "dq_kernel"): 8,
    (80, "tf32", 256, "forward_kernel"): 8,
    (90, "float32", 256, "dq_kernel"): 16,
    (100, "float16", 128, "forward_kernel"): 36,
    (100, "bfloat16", 128, "forward_kernel"): 36,
}
# Hopper kernels that spill: features -> (kernel, head dim) -> bytes per thread, the most of Triton 3.9 and 3.6.
SPILLED = {
    "": {
        ("backward_kernel", 64): 28,
        ("backward_kernel", 128): 64,
        ("backward_kernel", 192): 16,
        ("backward_kernel", 256): 72,
    },
    MANY: {
        ("hopper_forward_kernel", 64): 152,
        ("hopper_forward_kernel", 256): 220,
        ("backward_kernel", 128): 316,
        ("backward_kernel", 256): 52,
    },
    "dropout": {
        ("hopper_forward_kernel", 128): 116,
        ("hopper_forward_kernel", 256): 372,
        ("backward_kernel", 64): 28,
        ("backward_kernel", 128): 352,
        ("backward_kernel", 192): 16,
        ("backward_kernel", 256): 260,
    },
    "alibi_slopes": {
        ("hopper_forward_kernel", 64): 176,
        ("backward_kernel", 128): 168,
        ("backward_kernel", 192): 16,
        ("backward_kernel", 256): 156,
    },
    "relative_bias": {
        ("hopper_forward_kernel", 128): 100,
        ("hopper_forward_kernel", 256): 280,
        ("backward_kernel", 64): 128,
        ("backward_kernel", 128): 784,
        ("backward_kernel", 256): 84,
    },
    DECAY: {
        ("hopper_forward_kernel", 128): 1208,
        ("hopper_forward_kernel", 256): 940,
        ("backward_kernel", 64): 28,
        ("backward_kernel", 128): 288,
        ("backward_kernel", 256): 400,
    },
    ALL: {
        ("hopper_forward_kernel", 128): 120,
        ("hopper_forward_kernel", 192): 172,
        ("hopper_forward_kernel", 256): 484,
        ("backward_kernel", 64): 28,
        ("backward_kernel", 128): 524,
        ("backward_kernel", 192): 16,
        ("backward_kernel", 256): 244,
    },
}
# head dim -> barrier of the warps of backward_kernel that multiply (its number, threads), and their mbarrier.arrives
ARRIVALS = {64: ("0, 128", 2), 128: ("0, 256", 2), 192: ("0, 256", 2), 256: ("0, 256", 1)}


def misfits(chip, kernels):
    """Reports of the portable kernels that spill or need more shared memory than the chip has."""
    known = SPILLED_BEFORE_3_9 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9) else {}
    spilled = [k for k in kernels if k["spilled"] > known.get((chip, k["dtype"], k["dim"], k["kernel"]), 0)]
    return spilled + too_large(chip, kernels)


def too_large(chip, kernels):
    return [k for k in kernels if k["shared"] > SHARED_KB[chip] * 1024]


def compile_kernels(chip, *options):
    """Run tests/compile_kernels.py; returns its report of each kernel.

    It runs in its own process, since a process that imported Triton for the interpreter cannot compile.
    """
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, str(chip), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert kernels
    return kernels


DIMS = (64, 128, 256)
PORTABLE = [(80, "bfloat16", (64, 128)), (89, "tf32", DIMS), (90, "float32", (64, 256)), (100, "bfloat16", (256,))]
PORTABLE += [(120, "float16", (128,))]
if COMPILE_ALL:
    PORTABLE = list(itertools.product(SHARED_KB, ("bfloat16", "float32", "tf32"), [DIMS]))


@pytest.mark.parametrize("chip, dtype, dims", PORTABLE)
def test_kernels_fit_the_chip(chip, dtype, dims):
    masks = ["causal", "full"] if COMPILE_ALL else ["causal"]
    options = ["--groups", "1", "--dtypes", dtype, "--masks", *masks]
    kernels = compile_kernels(chip, *options, "--dims", *map(str, dims))
    bad = misfits(chip, kernels)
    assert not bad, "\n".join(map(str, bad))


# chip, head dims, ways to compute dk/dv
GROUPED = [(89, (128,), ("loop", "partials")), (90, (256,), ("partials",))]
if COMPILE_ALL:
    GROUPED += [(90, (128,), ("partials",)), (100, (128, 256), ("loop", "partials"))]


@pytest.mark.parametrize("chip, dims, ways", GROUPED)
def test_grouped_kernels_fit_the_chip(chip, dims, ways):
    """In float16, with both tables of table.py."""
    options = ["--dtypes", "float16", "--groups", "2", "--dims", *map(str, dims), "--ways", *ways]
    kernels = compile_kernels(chip, *options, *([] if COMPILE_ALL else ["--masks", "causal"]))
    compiled = {(k["kernel"], k["dim"]) for k in kernels}
    assert compiled >= set(itertools.product(("dkdv_kernel", "group_sum_kernel"), dims))
    bad = misfits(chip, kernels)
    assert not bad, "\n".join(map(str, bad))


def test_simple_kernels_fit_the_smallest_shared_memory():
    """Some spill: dk/dv a few bytes in 16 bits, and thousands in float32 at the largest head dims."""
    kernels = compile_kernels(89, "--simple", "--dims", "16", "128", "--dtypes", "bfloat16", "float32")
    assert Counter(k["kernel"] for k in kernels) == dict.fromkeys(("forward_kernel", "dq_kernel", "dkdv_kernel"), 16)
    bad = too_large(89, kernels) + [k for k in kernels if k["dtype"] == "bfloat16" and k["spilled"] > 64]
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("dtype, bounds, features, masks, dims, lengths", HOPPER)
def test_hopper_kernels_fit_their_chip(dtype, bounds, features, masks, dims, lengths):
    """Also without the ptxas warnings C7510 to C7515: matmuls run one by one, or are waited for.

    And with a barrier of all multiplying warps before each mbarrier.arrive of theirs, on which backward_kernel relies.

    HOPPER contains every pair of values of dtype, mask, bounds of sequences (none, lengths, packed) and features (none,
    or many), and each head dim with and without features, some of a length that tiles divide and some of one that they
    do not. ALiBi alone is there once, and so is relative_bias. Each combination is compiled with a group of two in one
    program and in parts. Dropout, alone and with the others, is called with two probabilities, of which the second
    compiles nothing. COMPILE_ALL=1 adds all other combinations.

    Left out: groups of one (their backward is the one that loops over a group, their forward lacks a division), other
    features one by one, negative scales, a gradient of the LSE, and head dims in between, which use the tiles of the
    next power of two. 192 stands for keys of 192 with values of 128.
    """
    options = ["--hopper", "--dtypes", dtype, "--masks", *masks.split(), "--groups", "2"]
    options += ["--dims", *map(str, dims), "--lengths", *map(str, lengths)]
    options += ["--bounds", bounds] if bounds else []
    options += ["--features", *features.split()] if features else []
    kernels = compile_kernels(90, *options)
    backwards = len(dims) * len(masks.split()) * len(lengths) * 2  # one program, or parts
    assert sum(k["kernel"] == "backward_kernel" for k in kernels) == backwards
    spilled = SPILLED[features]
    serialized = {f"C75{i}" for i in range(10, 16)}
    bad = [k for k in kernels if k["spilled"] > spilled.get((k["kernel"], k["dim"]), 0)]
    bad += too_large(90, kernels) + [k for k in kernels if serialized & set(k["warnings"]) or k["overlaps"]]
    for k in kernels:
        barrier, arrivals = ARRIVALS[k["dim"]] if k["kernel"] == "backward_kernel" else ("none", 0)
        if k["arrivals"].get("none") or k["arrivals"].get(barrier, 0) < arrivals:
            bad.append(k)
    assert not bad, "\n".join(map(str, bad))


DECODE = [(89, "float32"), (90, "bfloat16")]
if COMPILE_ALL:
    DECODE = list(itertools.product(SHARED_KB, ("bfloat16", "float32", "tf32")))
    DECODE.remove((120, "float32"))  # spills 564 bytes at head dim 128 in groups of 8


@pytest.mark.parametrize("chip, dtype", DECODE)
def test_decode_kernels_fit_the_chip(chip, dtype):
    """One query of a key head without tensor cores, and groups of 8; both without and with splits."""
    dims = (64, 128, 256) if COMPILE_ALL else (64, 256)
    kernels = compile_kernels(chip, "--decode", "--dtypes", dtype, "--dims", *map(str, dims), "--groups", "1", "8")
    assert sum(k["kernel"] == "merge_kernel" for k in kernels) >= 2 * len(dims)
    bad = misfits(chip, kernels)
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize(
    "chip, rows", [(c, (1, 8, 32, 64)) for c in SHARED_KB] if COMPILE_ALL else [(89, (1, 64)), (90, (8, 64))]
)
def test_generation_kernels_fit_the_chip(chip, rows):
    """The tiles were tuned, so some may spill a few bytes (24 to 56 in bfloat16 with Triton 3.9)."""
    dims = ["64", "176"] if COMPILE_ALL else ["64"]  # 12 heads: GPT-2's width, and 2,112
    options = ["--generation", "--dtypes", "bfloat16", "--dims", *dims, "--features", "--rows", *map(str, rows)]
    kernels = compile_kernels(chip, *options)
    assert Counter(k["kernel"] for k in kernels)["linear_kernel"] >= 4 * len(rows)
    if chip == 90:  # they start before the previous kernel has ended
        assert all(k["early"] == 0 for k in kernels), "a kernel reads or writes before it waits for the previous one"
    bad = too_large(chip, kernels) + [k for k in kernels if k["spilled"] > 64]
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"] if COMPILE_ALL else ["bfloat16"])
def test_every_feature_fits_the_smallest_shared_memory(dtype):
    """Features may cause spills, but a kernel that needs too much shared memory would fail to start."""
    chip = min(SHARED_KB, key=SHARED_KB.get)
    options = [chip, "--dtypes", dtype, "--masks", "causal", "--features", "--groups"]
    dims = [] if COMPILE_ALL else ["--dims", "256", "--lengths", str(EVEN)]  # the largest
    kernels = compile_kernels(*options, "1", *dims) + compile_kernels(*options, "1", "8", "--decode", *dims)
    bad = too_large(chip, kernels)
    assert not bad, "\n".join(map(str, bad))


# Bytes per thread that kernels/matmul.py may spill: up to 84 with Triton 3.9, and none with 3.6.
MATMUL_SPILLED = 100


@pytest.mark.parametrize("dims", [(64, 32)] if COMPILE_ALL else [(64,)])
def test_training_kernels_fit_their_chip(dims):
    """Matmuls of the MLP, which must not run one by one, and the cross-entropy, of which two programs share a chip's
    multiprocessor. COMPILE_ALL=1 adds the other activations, a bias, and another width."""
    features = ["--features"] if COMPILE_ALL else []
    kernels = compile_kernels(90, "--training", "--dtypes", "bfloat16", "--dims", *map(str, dims), *features)
    assert sum(k["kernel"] == "matmul_kernel" for k in kernels) == len(dims) * (9 if COMPILE_ALL else 3)
    serialized = {f"C75{i}" for i in range(10, 16)}
    bad = too_large(90, kernels) + [k for k in kernels if k["spilled"] > MATMUL_SPILLED]
    bad += [k for k in kernels if serialized & set(k["warnings"]) or k["overlaps"]]
    # all eight warps have read a slot before it is given back
    bad += [k for k in kernels if k["kernel"] == "matmul_kernel" and k["arrivals"].keys() != {"0, 256"}]
    assert not bad, "\n".join(map(str, bad))
    loss = [k for k in kernels if k["kernel"] == "cross_entropy_hopper_kernel"]
    assert len(loss) == 2  # without and with a softcap; they do not depend on the width
    assert all(2 * (k["shared"] + 1024) <= 228 * 1024 and k["registers"] <= 128 and not k["spilled"] for k in loss)
