"""One test suite for every machine: kernels run on the GPU if there is one, else in the Triton interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)  # the parallel workers of pytest-xdist share the cores
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton.jit is first used


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned(monkeypatch):
    """Fill what kernels write to with NaN first: an element they forget shows."""

    def nan(make):
        def empty(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, nan(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seed():
    """The same random inputs in every run: a comparison of two rounding errors must not fail by luck of the draw."""
    torch.manual_seed(0)
