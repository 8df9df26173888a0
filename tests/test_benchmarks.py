"""Benchmarks: flat.py, the control of attention.py, computes the same as the reference; sampling.py prints tables."""

import pytest
import torch
from problems import ON_GPU

from attention.reference import reference_attention
from benchmarks import sampling
from benchmarks.flat import flat_attention


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128 if ON_GPU else 16])  # loaded through pointers and by TMA
@pytest.mark.parametrize("causal", [True, False])
def test_flat_attention(causal, dim, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [torch.randn(2, 128, 2, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 128, 2, dim, device=device, dtype=dtype)
    found, expected = (function(*leaves, causal=causal) for function in (flat_attention, reference_attention))
    gradients = (torch.autograd.grad(out, leaves, dout) for out in (found, expected))
    tolerance = 3e-2 if device == "cuda" else 1e-5
    for ours, truth in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
        torch.testing.assert_close(ours, truth, rtol=tolerance, atol=tolerance)


def test_sampling(capsys):
    """Each row of the tables has a batch or context, and positive figures of ours."""
    sampling.main(["--small", "--parts", "text", "attention"])
    out = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    rates = [float(row[index].replace(",", "")) for row, index in ((rows[2], 1), (rows[3], 1), (rows[6], 3))]
    assert len(rows) == 2 + 2 + 2 + 3 * 2 * 2 and min(rates) > 0 and "failed" not in out
