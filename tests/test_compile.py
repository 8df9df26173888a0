"""Every entry of the launch table compiles for its chips, without register spills and within their shared memory.

No GPU is needed: Triton and its ptxas compile for any chip. COMPILE_ALL=1 adds full attention. Grouped queries are left
out: the portable dk/dv that loops over a group does spill, and is faster than partials where it is taken all the same.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

SHARED_KB = {80: 163, 89: 99, 90: 227, 100: 227}  # chip -> shared memory one program may take


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
    options = ["--groups", "1"] + ([] if os.environ.get("COMPILE_ALL") == "1" else ["--masks", "causal"])
    kernels = compile_kernels(chip, "--dtypes", dtype, *options)
    bad = [k for k in kernels if k["spilled"] > 0 or k["shared"] > SHARED_KB[chip] * 1024]
    assert not bad, "\n".join(map(str, bad))


def test_hopper_kernels_fit_their_chip():
    """And no warning that ptxas runs matmuls one by one or waits for them (C7510 to C7515)."""
    options = ["--hopper", "--dtypes", "bfloat16", "--groups", "1"]
    plain = compile_kernels(90, *options)
    ragged = compile_kernels(90, *options, "--bounds", "packed")
    featured = compile_kernels(90, *options, "--masks", "causal", "--features")  # which may cost registers
    featured += compile_kernels(90, *options, "--masks", "causal", "--features", "--bounds", "lengths")
    # bytes: one register, out and in, of the backward at head dim 128 under Triton 3.9, a few more if keys end anywhere
    bad = [k for k in plain if k["spilled"] > (16 if k["length"] % 128 == 0 else 64)]
    bad += [k for k in ragged if k["spilled"] > 64]
    serialized = {f"C75{i}" for i in range(10, 16)}
    kernels = plain + ragged + featured
    bad += [k for k in kernels if k["shared"] > SHARED_KB[90] * 1024 or serialized & set(k["warnings"])]
    assert not bad, "\n".join(map(str, bad))


def test_every_feature_fits_the_smallest_shared_memory():
    """They may cost registers; memory that is not there would be an error."""
    chip = min(SHARED_KB, key=SHARED_KB.get)
    kernels = compile_kernels(chip, "--dtypes", "bfloat16", "--masks", "causal", "--groups", "1", "--features")
    bad = [k for k in kernels if k["shared"] > SHARED_KB[chip] * 1024]
    assert not bad, "\n".join(map(str, bad))
