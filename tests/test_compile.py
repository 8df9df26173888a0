"""Every entry of the launch table compiles for its chips, within their shared memory and without spills (Triton 3.9).

No GPU is needed: Triton and its ptxas compile for any chip. COMPILE_ALL=1 adds full attention, else compiled in
float32 alone, where it once spilled unseen, and all combinations for Hopper. Of the portable kernels grouped queries
are compiled for three chips, and for sm_90 with dk/dv by partials only: the dk/dv that loops over a group does spill
there from head dim 128 on, and is the fastest all the same (benchmarks/LOG.md). On sm_80 both spill at head dim 128,
by 24 and 8 bytes, and are left out.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")

SHARED_KB = {80: 163, 89: 99, 90: 227, 100: 227}  # chip -> shared memory one program may take
COMPILE_ALL = os.environ.get("COMPILE_ALL") == "1"

# What is compiled for Hopper: dtype, bounds of sequences, whether with features, masks.
HOPPER = [
    ("bfloat16", None, True, "causal"),
    ("float16", "packed", True, "causal"),
    ("bfloat16", "lengths", True, "full"),
    ("bfloat16", None, False, "causal"),
    ("bfloat16", "packed", False, "causal full"),
    ("float16", None, False, "full"),
    ("float16", "lengths", False, "causal"),
]
if COMPILE_ALL:
    values = ("bfloat16", "float16"), (None, "lengths", "packed"), (False, True), ("causal full",)
    HOPPER = list(itertools.product(*values))
# Portable kernels that spill under Triton 3.6, not 3.9: (chip, dtype, head dim, kernel) -> bytes of a thread, out and
# in. 3.7 and 3.8 were not asked, and are allowed as much.
SPILLED_BEFORE_3_9 = {
    (80, "float32", 128, "dkdv_kernel"): 16,
    (80, "float32", 128, "dq_kernel"): 8,
    (80, "tf32", 256, "forward_kernel"): 8,
    (90, "float32", 256, "dq_kernel"): 16,
    (100, "float16", 128, "forward_kernel"): 36,
    (100, "bfloat16", 128, "forward_kernel"): 36,
}
# Hopper kernels that do spill: (kernel, head dim) -> bytes of a thread, out and in, under Triton 3.9; 3.6 spills less.
SPILLED = {("backward_kernel", 64): 28, ("backward_kernel", 128): 64, ("backward_kernel", 256): 72}
SPILLED_WITH_FEATURES = {
    ("hopper_forward_kernel", 64): 104,
    ("hopper_forward_kernel", 256): 152,
    ("backward_kernel", 128): 316,
    ("backward_kernel", 256): 52,
}


def misfits(chip, kernels):
    """Of the portable kernels' reports those that spill, or ask for more shared memory than the chip has."""
    known = SPILLED_BEFORE_3_9 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9) else {}
    spilled = [k for k in kernels if k["spilled"] > known.get((chip, k["dtype"], k["dim"], k["kernel"]), 0)]
    return spilled + too_large(chip, kernels)


def too_large(chip, kernels):
    return [k for k in kernels if k["shared"] > SHARED_KB[chip] * 1024]


def compile_kernels(chip, *options):
    """What tests/compile_kernels.py reports of each kernel."""
    script = Path(__file__).with_name("compile_kernels.py")
    # A process of its own: once Triton is imported to interpret, it no longer compiles.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, str(chip), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert kernels
    return kernels


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "tf32"])
@pytest.mark.parametrize("chip", SHARED_KB)
def test_kernels_fit_the_chip(chip, dtype):
    masks = ["causal", "full"] if dtype == "float32" or COMPILE_ALL else ["causal"]
    kernels = compile_kernels(chip, "--groups", "1", "--dtypes", dtype, "--masks", *masks)
    bad = misfits(chip, kernels)
    assert not bad, "\n".join(map(str, bad))


GROUPED = [(89, (128,), ("loop", "partials")), (90, (128, 256), ("partials",)), (100, (128, 256), ("loop", "partials"))]


@pytest.mark.parametrize("chip, dims, ways", GROUPED)
def test_grouped_kernels_fit_the_chip(chip, dims, ways):
    """In float16, by both tables of launch.py."""
    options = ["--dtypes", "float16", "--groups", "2", "--dims", *map(str, dims), "--ways", *ways]
    kernels = compile_kernels(chip, *options, *([] if COMPILE_ALL else ["--masks", "causal"]))
    compiled = {(k["kernel"], k["dim"]) for k in kernels}
    assert compiled >= set(itertools.product(("dkdv_kernel", "group_sum_kernel"), dims))
    bad = misfits(chip, kernels)
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("dtype, bounds, features, masks", HOPPER)
def test_hopper_kernels_fit_their_chip(dtype, bounds, features, masks):
    """And no warning that ptxas runs matmuls one by one or waits for them (C7510 to C7515).

    Every two values of dtype, mask, bounds of sequences (none, lengths, packed) and features (none, or window, softcap
    and sink at once) meet, each time at head dims 64, 128 and 256, at lengths that tiles divide and not, and with a
    group of two in one program and in parts. COMPILE_ALL=1 adds all other combinations. Groups of one are left out:
    their backward is the one that walks a group, their forward lacks a division. So are features one by one, negative
    scales, a gradient of the LSE, and head dims in between, whose tiles are those of the next power of two.
    """
    options = ["--hopper", "--dtypes", dtype, "--masks", *masks.split(), "--groups", "2"]
    options += ["--bounds", bounds] if bounds else []
    options += ["--features"] if features else []
    kernels = compile_kernels(90, *options)
    backwards = 3 * len(masks.split()) * 2 * (1 if bounds else 2)  # head dims, masks, one program or parts, lengths
    assert sum(k["kernel"] == "backward_kernel" for k in kernels) == backwards
    spilled = SPILLED_WITH_FEATURES if features else SPILLED
    serialized = {f"C75{i}" for i in range(10, 16)}
    bad = [k for k in kernels if k["spilled"] > spilled.get((k["kernel"], k["dim"]), 0)]
    bad += too_large(90, kernels) + [k for k in kernels if serialized & set(k["warnings"])]
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_every_feature_fits_the_smallest_shared_memory(dtype):
    """They may cost registers; memory that is not there would be an error."""
    chip = min(SHARED_KB, key=SHARED_KB.get)
    kernels = compile_kernels(chip, "--dtypes", dtype, "--masks", "causal", "--groups", "1", "--features")
    bad = too_large(chip, kernels)
    assert not bad, "\n".join(map(str, bad))
