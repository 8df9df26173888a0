"""The kernels compile for every chip of the launch table, without register spills and within its shared memory.

No GPU is needed: Triton and its ptxas compile for any chip. COMPILE_ALL=1 takes the whole table (half an hour), else a
sample that CI can afford.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # chip -> shared memory one program may take
# Bytes: for float32 ptxas gives a few away by itself, to reach a rounder number of registers.
SPILLS = {"bfloat16": 0, "float32": 64, "tf32": 64}
SAMPLE = ["--dtypes", "bfloat16", "--dims", "64", "--masks", "causal", "--groups", "1"]
SAMPLES = {90: [*SAMPLE, "--dims", "64", "128"]}


@pytest.mark.parametrize("chip", SHARED_KB)
def test_kernels_fit_the_chip(chip):
    script = Path(__file__).with_name("compile_kernels.py")
    options = [] if os.environ.get("COMPILE_ALL") == "1" else SAMPLES.get(chip, SAMPLE)
    # A process of its own: once Triton is imported to interpret, it no longer compiles.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, script, str(chip), *options], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert kernels
    bad = [k for k in kernels if k["spilled"] > SPILLS[k["dtype"]] or k["shared"] > SHARED_KB[chip] * 1024]
    assert not bad, "\n".join(map(str, bad))
