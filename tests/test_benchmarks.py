"""Benchmarks: each runs with --small on a CPU and prints its table."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from helpers import FAST, ROOT
from problems import ON_GPU

RUN = " ".join(f"--{name}={value}" for name, value in FAST.items() if name != "input")
PLAY = ROOT / "data/play.txt"
SMALL = [
    "attention.py --small --implementations triton flash --csv {folder}/attention.csv",
    "sampling.py --small",
    f"training.py --small --text {PLAY} --jobs char --with=--n_layer=1",
    f"step_parts.py configs/shakespeare_char.py {RUN} --input={PLAY}",
    "distributed.py --small --gpus 1 2 --parts xl",
    "recipes.py compare benchmarks/results/recipe_parts.csv --base recipe",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL, ids=lambda command: command.split()[0])
def test_small(command, folder):
    script, *argv = shlex.split(command.format(folder=folder))
    variables = {"TRITON_INTERPRET": "1"} if script == "attention.py" and not ON_GPU else {}
    arguments = [sys.executable, f"benchmarks/{script}", *argv]
    with subprocess.Popen(
        arguments, cwd=ROOT, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        output = process.stdout.read()
    assert process.returncode == 0 and re.search(r"\d\.\d", output), output
    own = process.pid if script != "training.py" else "small"  # other tests make such folders at the same time
    assert not (ROOT / "runs" / f"bench-{own}").exists()
