"""docs/attention.md: excerpts of simple.py, the worked example (docs/tilt.patch), other packages; names of tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attention import attention, attention_qkv

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs" / "tilt.patch"
PAGE = (ROOT / "docs" / "attention.md").read_text()
# Runs in a copy of the repository with the patch, beside the tests that the page names.
CHECK = """
import torch

from attention import attention, explain

# The definition: a bias of -tilt |i - j|.
q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
tilt, position = torch.tensor([0.3, -0.2]), torch.arange(9.0)
bias = -tilt[:, None, None] * (position[:, None] - position).abs()
found, expected = (attention(q, k, v, **options, impl="reference") for options in (dict(tilt=tilt), dict(bias=bias)))
torch.testing.assert_close(found, expected)

# Implementations that do not support it say so. Calls without it work as before, on a Hopper GPU by its kernels.
assert "tilt" in explain(q, k, v, tilt=tilt)
starts = torch.tensor([0, 4, 9], dtype=torch.int32)
torch.testing.assert_close(*(attention(q, k, v, cu_seqlens=starts, impl=impl) for impl in ("auto", "reference")))
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(1, 9, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
attention(x, x, x).sum().backward()
"""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_worked_example(tmp_path):
    for folder in ("attention", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}  # ignore any repository around tmp_path
    run = subprocess.run(["git", "apply", PATCH], cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert run.returncode == 0, f"docs/tilt.patch does not apply; make it anew with git diff -U1:\n{run.stderr}"
    [command] = re.findall(r"`pytest (tests/[^`]*)` tests it", PAGE)
    for argv in (["-c", CHECK], ["-m", "pytest", *command.split()]):
        run = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_quotes_of_the_worked_example():
    quotes = blocks("diff")
    assert quotes and set("".join(quotes).splitlines()) <= set(PATCH.read_text().splitlines())


def test_excerpts_of_the_simple_kernels():
    """Each is in simple.py or score_mods.py as it stands, except for its indentation."""
    files = ROOT / "attention" / "simple.py", ROOT / "tests" / "score_mods.py"
    code = "".join(dedented(file.read_text()) for file in files)
    excerpts = blocks("python")
    assert excerpts and all(dedented(excerpt) in code for excerpt in excerpts)


def dedented(text):
    return "".join(line.strip() + "\n" for line in text.splitlines())


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def test_arguments_of_other_packages():
    """The rows of section 15 that are more than a name."""
    q, k, v = torch.randn(3, 2, 10, 4, 16, dtype=torch.float64)
    distance = torch.arange(10)[:, None] - torch.arange(10)
    seen = distance >= 0
    torch.testing.assert_close(attention(q, k, v), sdpa(q, k, v, is_causal=True))
    torch.testing.assert_close(attention_qkv(torch.stack((q, k, v), 2).flatten(2), 4), sdpa(q, k, v, is_causal=True))
    torch.testing.assert_close(attention(q, k, v, window=4), sdpa(q, k, v, attn_mask=seen & (distance <= 3)))
    both = attention(q, k, v, causal=False, window=4)
    torch.testing.assert_close(both, sdpa(q, k, v, attn_mask=distance.abs() <= 3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    alibi = (-slopes[:, None, None] * distance.abs()).masked_fill(~seen, float("-inf")).double()
    torch.testing.assert_close(attention(q, k, v, alibi_slopes=slopes), sdpa(q, k, v, attn_mask=alibi))


def test_masks_of_sdpa():
    """What the table of section 15 gives for an attn_mask, evaluated as it stands."""
    q, k, v = torch.randn(3, 2, 10, 4, 16, dtype=torch.float64)
    lengths = torch.tensor([10, 7], dtype=torch.int32)
    holes = (torch.rand(2, 1, 10, 10) < 0.7) | torch.eye(10, dtype=torch.bool)
    padding = (torch.arange(10) < lengths[:, None])[:, None, None]
    masks = {"float": torch.randn(2, 4, 10, 10, dtype=q.dtype), "bool, True": holes, "for padding": padding}
    for kind, mask in masks.items():
        [arguments] = re.findall(rf"^\| `attn_mask` {kind}[^|]*\| `([^`]*)`", PAGE, re.MULTILINE)
        names = dict(torch=torch, mask=mask, q=q, lengths=lengths)
        ours, theirs = attention(q, k, v, **eval(f"dict({arguments})", names)), sdpa(q, k, v, attn_mask=mask)
        valid = [slice(None, n) for n in lengths] if kind == "for padding" else [slice(None)] * 2
        for row, tokens in enumerate(valid):
            torch.testing.assert_close(ours[row, tokens], theirs[row, tokens])


def test_pages_name_tests_that_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, f"{page.name} names {name}"


def test_lines_that_readme_counts():
    lines = sum((ROOT / name).read_text().count("\n") for name in ("train.py", "model.py"))
    assert f"in {lines} lines" in (ROOT / "README.md").read_text()
