"""Every entry of the launch tables compiles for its chips, fits their shared memory and spills few registers.

This needs no GPU: Triton and its ptxas compile for any chip. The bounds hold for Triton 3.6 to 3.9.

Each chip, dtype and head dim is compiled. COMPILE_ALL=1, which .ci/gpu sets, compiles all combinations, and attention
that is not causal. Always left out: grouped queries on sm_80, and on sm_90 the dk/dv that loops over a group. That one
spills from head dim 128 on, but is the fastest (benchmarks/LOG.md).
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
CHIPS = (80, 89, 90, 100, 120)
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
    ("bfloat16", None, "score_mod", "causal", (64, 128, 256), (EVEN,)),
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
PORTABLE_SPILLS = 36  # bytes per thread, stores and loads; none with Triton 3.9
HOPPER_SPILLS, HOPPER_SPILLS_WITH_FEATURES = 128, 1220
# head dim -> barrier of the warps of backward_kernel that multiply (its number, threads), and their mbarrier.arrives
ARRIVALS = {64: ("0, 128", 2), 128: ("0, 256", 2), 192: ("0, 256", 2), 256: ("0, 256", 1)}
# Barriers in a step without features, at each of which warps wait for the slowest: what Triton 3.6 makes of it. 3.9 has
# one fewer in the forward, and in the backward at head dim 128.
BARRIERS = {
    "hopper_forward_kernel": {64: 4, 128: 4, 192: 3, 256: 3},
    "backward_kernel": {64: 4, 128: 5, 192: 5, 256: 4},
}


def assert_good(kernels, spills=PORTABLE_SPILLS, bad=()):
    """Fail if kernels spill more bytes than that, or are bad otherwise."""
    bad = [*bad, *(k for k in kernels if k["spilled"] > spills)]
    assert not bad, "\n".join(map(str, bad))


def run_one_by_one(kernels):
    """Reports with the ptxas warnings C7510 to C7515 about matmuls, or with barriers that share memory."""
    return [k for k in kernels if {f"C75{i}" for i in range(10, 16)} & set(k["warnings"]) or k["overlaps"]]


def compile_kernels(chip, *options, too_large=""):
    """Run tests/compile_kernels.py; returns its report of each kernel. It must name those that are too large.

    It runs in its own process, since a process that imported Triton for the interpreter cannot compile.
    """
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, str(chip), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == bool(too_large) and too_large in run.stderr, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert kernels
    return kernels


DIMS = (64, 128, 256)
# chip, dtype, head dims, and with groups of two the ways to compute dk/dv
PORTABLE = [
    (80, "bfloat16", (64, 128), ()),
    (89, "tf32", DIMS, ()),
    (90, "float32", (64, 256), ()),
    (100, "bfloat16", (256,), ()),
    (120, "float16", (128,), ()),
    (89, "float16", (128,), ("loop", "partials")),
    (90, "float16", (256,), ("partials",)),
]
if COMPILE_ALL:
    grouped = [*PORTABLE[-2:], (90, "float16", (128,), ("partials",)), (100, "float16", (128, 256), PORTABLE[-2][-1])]
    PORTABLE = [(*x, DIMS, ()) for x in itertools.product(CHIPS, ("bfloat16", "float32", "tf32"))] + grouped


@pytest.mark.parametrize("chip, dtype, dims, ways", PORTABLE)
def test_kernels_fit_the_chip(chip, dtype, dims, ways):
    options = ["--dtypes", dtype, "--dims", *map(str, dims), "--groups", *(["2", "--ways", *ways] if ways else ["1"])]
    kernels = compile_kernels(chip, *options, "--masks", "causal", *(["full"] if COMPILE_ALL else []))
    wanted = ("dkdv_kernel", "group_sum_kernel") if ways else ("dkdv_kernel",)
    assert {(k["kernel"], k["dim"]) for k in kernels} >= set(itertools.product(wanted, dims))
    assert_good(kernels)


def test_simple_kernels_fit_the_smallest_shared_memory():
    """Some spill thousands of bytes: dk/dv in float32 at the largest head dims."""
    kernels = compile_kernels(89, "simple", "--dims", "16", "128", "--dtypes", "bfloat16", "float32")
    assert Counter(k["kernel"] for k in kernels) == dict.fromkeys(("forward_kernel", "dq_kernel", "dkdv_kernel"), 16)


@pytest.mark.parametrize("dtype, bounds, features, masks, dims, lengths", HOPPER)
def test_hopper_kernels_fit_their_chip(dtype, bounds, features, masks, dims, lengths):
    """Also without the ptxas warnings C7510 to C7515: matmuls run one by one, or are waited for.

    And with a barrier of all multiplying warps before each mbarrier.arrive of theirs, on which backward_kernel relies,
    and no more of them in a step than BARRIERS says.

    HOPPER contains every pair of values of dtype, mask, bounds of sequences (none, lengths, packed) and features (none,
    or many), and each head dim with and without features, some of a length that tiles divide and some of one that they
    do not. Each combination is compiled with a group of two in one program and in parts.

    Left out: groups of one (their backward is the one that loops over a group, their forward lacks a division), other
    features one by one, negative scales, a gradient of the LSE, and head dims in between, which use the tiles of the
    next power of two. 192 stands for keys of 192 with values of 128.
    """
    options = ["hopper", "--dtypes", dtype, "--masks", *masks.split(), "--groups", "2"]
    options += ["--dims", *map(str, dims), "--lengths", *map(str, lengths)]
    options += ["--bounds", bounds] if bounds else []
    options += ["--features", *features.split()] if features else []
    kernels = compile_kernels(90, *options)
    backwards = len(dims) * len(masks.split()) * len(lengths) * 2  # one program, or parts
    assert sum(k["kernel"] == "backward_kernel" for k in kernels) == backwards
    bad = run_one_by_one(kernels)
    for k in kernels:
        barrier, arrivals = ARRIVALS[k["dim"]] if k["kernel"] == "backward_kernel" else ("none", 0)
        if k["arrivals"].get("none") or k["arrivals"].get(barrier, 0) < arrivals:
            bad.append(k)
        if not features and k["kernel"] in BARRIERS and not 0 < k["barriers"] <= BARRIERS[k["kernel"]][k["dim"]]:
            bad.append(k)
    assert_good(kernels, HOPPER_SPILLS_WITH_FEATURES if features else HOPPER_SPILLS, bad)


DECODE = [(89, "float32"), (90, "bfloat16")]
if COMPILE_ALL:
    DECODE = list(itertools.product(CHIPS, ("bfloat16", "float32", "tf32")))
    DECODE.remove((120, "float32"))  # spills 564 bytes at head dim 128 in groups of 8


@pytest.mark.parametrize("chip, dtype", DECODE)
def test_decode_kernels_fit_the_chip(chip, dtype):
    """One query of a key head without tensor cores, and groups of 8; both without and with splits."""
    dims = (64, 128, 256) if COMPILE_ALL else (64, 256)
    kernels = compile_kernels(chip, "decode", "--dtypes", dtype, "--dims", *map(str, dims), "--groups", "1", "8")
    assert sum(k["kernel"] == "merge_kernel" for k in kernels) >= 2 * len(dims)
    assert_good(kernels)


@pytest.mark.parametrize(
    "chip, rows", [(c, (1, 8, 32, 64)) for c in CHIPS] if COMPILE_ALL else [(89, (1, 64)), (90, (8, 64))]
)
def test_generation_kernels_fit_the_chip(chip, rows):
    """The tiles were tuned, so some may spill a few bytes (24 to 56 in bfloat16 with Triton 3.9)."""
    dims = ["64", "176"] if COMPILE_ALL else ["64"]  # 12 heads: GPT-2's width, and 2,112
    options = ["generation", "--dtypes", "bfloat16", "--dims", *dims, "--features", "--rows", *map(str, rows)]
    kernels = compile_kernels(chip, *options)
    assert Counter(k["kernel"] for k in kernels)["linear_kernel"] >= 4 * len(rows)
    if chip == 90:  # they start before the previous kernel has ended
        assert all(k["early"] == 0 for k in kernels), "a kernel reads or writes before it waits for the previous one"
    assert_good(kernels, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"] if COMPILE_ALL else ["bfloat16"])
def test_every_feature_fits_the_smallest_shared_memory(dtype):
    """Features may cause spills, but a kernel that needs too much shared memory would fail to start."""
    options = ["--dtypes", dtype, "--masks", "causal", "--features", "--groups"]
    dims = [] if COMPILE_ALL else ["--dims", "256", "--lengths", str(EVEN)]  # the largest
    compile_kernels(89, *options, "1", *dims)
    compile_kernels(89, "decode", *options, "1", "8", *dims)


def test_a_chip_that_cannot_hold_a_kernel():
    """A T4, on which attention() takes SDPA."""
    options = ["--dims", "128", "--dtypes", "float16", "--masks", "causal", "--groups", "1"]
    kernels = compile_kernels(75, "simple", *options, too_large="65,536 bytes")
    assert {k["kernel"] for k in kernels if k["too_large"]} == {"dkdv_kernel"}


@pytest.mark.parametrize("dims", [(64, 32)] if COMPILE_ALL else [(64,)])
def test_training_kernels_fit_their_chip(dims):
    """Matmuls of the MLP, which must not run one by one, and the cross-entropy, of which two programs share a chip's
    multiprocessor. COMPILE_ALL=1 adds the other activations, a bias, and another width."""
    features = ["--features"] if COMPILE_ALL else []
    kernels = compile_kernels(90, "training", "--dtypes", "bfloat16", "--dims", *map(str, dims), *features)
    assert sum(k["kernel"] == "matmul_kernel" for k in kernels) == len(dims) * (9 if COMPILE_ALL else 3)
    # all eight warps have read a slot before it is given back
    early = [k for k in kernels if k["kernel"] == "matmul_kernel" and k["arrivals"].keys() != {"0, 256"}]
    # kernels/matmul.py spills up to 84 bytes with Triton 3.9, and none with 3.6
    assert_good(kernels, 100, run_one_by_one(kernels) + early)
    loss = [k for k in kernels if k["kernel"] == "cross_entropy_hopper_kernel"]
    assert len(loss) == 2  # without and with a softcap; they do not depend on the width
    assert all(2 * (k["shared"] + 1024) <= 228 * 1024 and k["registers"] <= 128 and not k["spilled"] for k in loss)
