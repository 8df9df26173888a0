"""Pictures of docs/attention.md show what the kernels do."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT
from problems import ON_GPU

from attention.reference import reference_attention
from benchmarks import draw

pytest.importorskip("triton", reason="Triton exists for Linux only")
if ON_GPU:
    pytest.skip("pictures.py runs a kernel in the interpreter, chosen for a whole process", allow_module_level=True)
from benchmarks import pictures

OPTIONS = dict(dtypes="bfloat16", dims="128", masks="causal", groups="1", lengths="4096")


@pytest.fixture(scope="module")
def drawn():
    return pictures.pictures()


@pytest.mark.parametrize("case", pictures.CASES)
def test_tiles_cover_what_is_visible(case, drawn):
    """Each pair of query and key that the reference shows, once; and no pair that it hides without a mask."""
    length, heads, kv_heads, options = pictures.CASES[case]
    image, boxes = drawn["docs/images/tiles.svg"][0][case]
    q, k = torch.zeros(1, length, heads, 8), torch.zeros(1, length, kv_heads, 8)
    v = torch.eye(kv_heads * length).view(1, kv_heads, length, -1).transpose(1, 2)  # each key has its own column
    sees = reference_attention(q, k, v, **options)[0].transpose(0, 1).flatten(0, 1) > 0
    image = np.array(image)
    assert np.array_equal(image >= 2, sees) and image.max() == 3 and {0, 1} <= set(image.flat)
    assert all(image[row : row + rows, column : column + columns].max() > 1 for column, row, columns, rows in boxes)


def test_pictures_are_drawn(drawn):
    for name, (data, _) in drawn.items():
        assert draw.digest(data) in (ROOT / name).read_text(), f"draw {name} again: python benchmarks/pictures.py"
        assert name.removeprefix("docs/") in (ROOT / "docs/attention.md").read_text()


def compiled(first="pass"):
    """{kernel: its report} of tests/compile_kernels.py, after the code `first`."""
    options = [x for name, value in OPTIONS.items() for x in (f"--{name}", value)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"import sys; sys.path[:0] = 'tests', 'benchmarks'; {first}; import compile_kernels; compile_kernels.main()"
    command = [sys.executable, "-c", code, "90", "hopper", *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {kernel["kernel"]: kernel for kernel in map(json.loads, run.stdout.splitlines())}


@pytest.mark.slow
def test_memory_and_clock_are_those_of_the_compiled_kernels():
    """Shared memory but for barriers, messages and rows; and the clock is read only if it is switched on."""
    plain, marked = compiled(), compiled("import timeline; timeline.switch_on(2**40)")
    for kernel, places in zip(("hopper_forward_kernel", "backward_kernel"), pictures.memory().values(), strict=True):
        used, *_ = places["shared memory"][-1]
        assert used < plain[kernel]["shared"] / 1024 < used + 1.5
        assert plain[kernel]["clocks"] == 0 < marked[kernel]["clocks"]


def test_boxes_of_a_log(monkeypatch):
    """Of a log that began anew in between; cut off where the window begins and ends."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import timeline as module

    end, log = module.SPAN.value, torch.zeros(module.LOGS, module.SPAN.value, dtype=torch.int8)
    for warp, cycle, code in (
        (0, end - 300, 4), (0, end - 100, 1), (0, end - 50, 4), (0, 0, 6), (0, 100, 1), (0, 300, 5), (0, 400, 4),
        (0, 500, 1), (10, end - 500, 2), (10, 450, 3),
    ):  # fmt: skip
        log[warp, cycle] = code
    assert list(module.boxes("forward", log, ("(1)", "(2)"), 1, 2)) == [
        ("forward", "warpgroup 1", 0, 50, "multiplies"),
        ("forward", "warpgroup 1", 50, 100, "waits"),
        ("forward", "products of 1", 0, 150, "multiplies (1)"),
        ("forward", "warpgroup 1", 150, 200, "computes softmax"),
        ("forward", "warpgroup 1", 350, 100, "waits"),
        ("forward", "products of 1", 150, 300, "multiplies (2)"),
        ("forward", "loader", 0, 450, "waits"),
    ]
