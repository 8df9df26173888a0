"""The worked example of docs/attention.md: its patch applies, works, and is what the page quotes. README's tree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs" / "tilt.patch"


def test_worked_example(tmp_path):
    for folder in ("attention", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}  # of any repository
    run = subprocess.run(["git", "apply", PATCH], cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert run.returncode == 0, f"docs/tilt.patch no longer applies; refresh it with git diff -U1:\n{run.stderr}"
    cases = ("tests/test_attention.py", "-k", "output_and_gradients and tilt")
    command = [sys.executable, "-m", "pytest", "-n", "0", *cases]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "2 passed" in run.stdout, run.stdout + run.stderr
    # what chooses among implementations has heard of it, and takes nothing else for it
    check = """
import torch
from attention import attention, explain
q, starts = torch.randn(1, 9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
assert torch.equal(*(attention(q, q, q, cu_seqlens=starts, impl=impl) for impl in ("auto", "reference")))
assert "SDPA cannot express tilt" in explain(q, q, q, tilt=torch.zeros(2))
"""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=hidden, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_quotes_of_the_worked_example():
    blocks = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "attention.md").read_text(), re.DOTALL)
    assert blocks and set("".join(blocks).splitlines()) <= set(PATCH.read_text().splitlines())


def test_every_module_has_its_line_and_is_installed():
    modules = {path.stem for path in ROOT.glob("*.py")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(project["py-modules"]) == modules
    readme = (ROOT / "README.md").read_text()
    assert all(f"{name}.py" in readme for name in modules)
