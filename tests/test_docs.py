"""docs/tilt.patch, the worked example of docs/attention.md: it applies, it works, and the page quotes it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs" / "tilt.patch"
# Runs in a copy of the repository with the patch.
CHECK = """
import sys
from functools import partial

sys.path[:0] = [".", "tests"]
import conftest  # chooses the GPU or the interpreter
import torch
from problems import CASES, check, make_problem

from attention import attention, explain

# The definition: a bias of -tilt |i - j|.
q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
tilt, position = torch.tensor([0.3, -0.2]), torch.arange(9.0)
bias = -tilt[:, None, None] * (position[:, None] - position).abs()
found, expected = (attention(q, k, v, **options, impl="reference") for options in (dict(tilt=tilt), dict(bias=bias)))
torch.testing.assert_close(found, expected)

# The kernels against the reference: output, log-sum-exp and all gradients, including dtilt.
device = "cuda" if torch.cuda.is_available() else "cpu"
for name in ("tilt", "tilt_packed"):
    check(partial(make_problem, device, torch.float32, **CASES[name]), torch.float32)

# Implementations that do not support it say so. Calls without it work as before, on a Hopper GPU by its kernels.
assert "tilt" in explain(q, k, v, tilt=tilt)
starts = torch.tensor([0, 4, 9], dtype=torch.int32)
assert torch.equal(*(attention(q, k, v, cu_seqlens=starts, impl=impl) for impl in ("auto", "reference")))
x = torch.randn(1, 9, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
attention(x, x, x).sum().backward()
"""


@pytest.mark.slow
def test_worked_example(tmp_path):
    for folder in ("attention", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}  # ignore any repository around tmp_path
    run = subprocess.run(["git", "apply", PATCH], cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert run.returncode == 0, f"docs/tilt.patch does not apply; make it anew with git diff -U1:\n{run.stderr}"
    run = subprocess.run([sys.executable, "-c", CHECK], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_quotes_of_the_worked_example():
    blocks = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "attention.md").read_text(), re.DOTALL)
    assert blocks and set("".join(blocks).splitlines()) <= set(PATCH.read_text().splitlines())
