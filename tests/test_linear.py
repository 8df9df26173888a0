"""Kernels of generation against the same formulas: linear() and store_heads()."""

import pytest
import torch
import torch.nn.functional as F
from problems import ON_GPU
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.activation import activate

store_heads = pytest.importorskip("generation.heads").store_heads
linear = pytest.importorskip("generation.linear", reason="Triton exists for Linux only").linear
best_and_kth = pytest.importorskip("generation.top_k").best_and_kth
gumbel_scores = pytest.importorskip("generation.gumbel").gumbel_scores
muon = pytest.importorskip("kernels.muon")


def plain(x, layer, norm=None, activation=None, gate=None, residual=None, softcap=None):
    x = x if norm is None else norm(x)
    y = layer(x)
    if activation is not None:
        y = F.silu(gate(x)) * y if activation == "swiglu" else activate(y, activation)
    y = y if softcap is None else softcap * torch.tanh(y / softcap)
    return y if residual is None else y + residual


def make_norm(kind, width):
    norm = {"none": None, "layernorm": nn.LayerNorm(width), "rmsnorm": nn.RMSNorm(width)}[kind]
    for parameter in norm.parameters() if norm else ():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize(
    "inputs, outputs, norm, activation, bias, softcap",
    [
        (768 if ON_GPU else 600, 33, "layernorm", None, True, None),
        (40, 2050 if ON_GPU else 70, "layernorm", "gelu", False, None),
        (24, 16_400 if ON_GPU else 130, "rmsnorm", None, False, 3.0),
        (1030, 8, "none", "gelu_tanh", True, None),
        (96, 40, "rmsnorm", "relu2", False, None),
        (136, 72, "layernorm", "swiglu", True, None),
    ],
)
def test_at_most_twice_the_error_of_pytorch(dtype, rows, inputs, outputs, norm, activation, bias, softcap, device):
    squares = torch.zeros(2, rows)
    for _ in range(3 if ON_GPU else 1):
        layer, gate = (nn.Linear(inputs, outputs, bias=bias).to(device, dtype) for _ in range(2))
        arguments = dict(norm=make_norm(norm, inputs), activation=activation, softcap=softcap)
        arguments["norm"] = arguments["norm"] and arguments["norm"].to(device, dtype)
        arguments["gate"] = gate if activation == "swiglu" else None
        x = torch.randn(rows, inputs, device=device).to(dtype)
        arguments["residual"] = torch.randn(rows, outputs, device=device).to(dtype) if activation is None else None
        with torch.no_grad():
            found, eager = linear(x, layer, **arguments), plain(x, layer, **arguments)
            modules = (layer, gate, arguments["norm"])
            for module in filter(None, modules):
                module.double()
            exact = plain(x.double(), layer, **arguments)
        squares += torch.stack([(y.double() - exact).square().sum(1) for y in (found, eager)]).cpu()
    ours, eager = squares.sqrt()
    assert ours.norm() <= 2 * eager.norm(), f"error {ours.norm():.2e}, PyTorch's {eager.norm():.2e}"
    assert ours.max() <= 2 * eager.max(), f"worst row {ours.max():.2e}, PyTorch's {eager.max():.2e}"


def test_kernels_that_nothing_sees_refuse_fake_tensors(device):
    """They would read addresses that do not exist; a mode would miss them."""
    with FakeTensorMode():
        x, layer = torch.randn(3, 24, device=device), nn.Linear(24, 24, device=device)
        cache, slots = torch.zeros(3, 6, 1, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
        calls = {
            "linear_kernel": lambda: linear(x, layer),
            "heads_kernel": lambda: store_heads(x, cache, cache, slots),
            "maxima_kernel": lambda: best_and_kth(x, 2),
            "gumbel_kernel": lambda: gumbel_scores(x, x[:, :1], None, slots, slots, 1.0, 0.0),
            "blend_kernel": lambda: muon.blend(x, x, x, 0.5, None, None),
            "update_kernel": lambda: muon.update(x, x, x[0, 0], 0.5, 0.1, None),
        }
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=rf"{name}\(\) starts kernels that fake tensors"):
                call()


def transposed(*shape, **options):
    """Random numbers in memory by columns."""
    return torch.randn(*shape, **options).mT.contiguous().mT


def test_weights_and_residual_of_any_strides(device):
    layer, gate = nn.Linear(24, 40, device=device), nn.Linear(24, 40, device=device)
    x, residual = torch.randn(3, 48, device=device).half()[:, ::2], transposed(3, 40, device=device).half()
    for module in (layer, gate):
        module.half().weight.data = transposed(40, 24, device=device).half()
    with torch.no_grad():
        found = linear(x, layer, activation="swiglu", gate=gate, residual=residual, dtype=torch.float64)
        expected = plain(x, layer, None, "swiglu", gate, residual).double()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_store_heads_in_caches_of_different_strides(device):
    batch, heads, kv_heads, dim = 3, 4, 2, 8
    qkv = transposed(batch, (heads + 2 * kv_heads) * dim, device=device)
    k, v = torch.zeros(batch, 6, kv_heads, dim, device=device), torch.zeros(batch, kv_heads, 7, dim, device=device)
    v, slots = v.transpose(1, 2)[:, :6], torch.tensor([5, 0, 2], device=device)
    found = store_heads(qkv, k, v, slots)
    expected = qkv.view(batch, -1, dim).split((heads, kv_heads, kv_heads), 1)
    rows = torch.arange(batch, device=device)
    assert all(map(torch.equal, (found[:, 0], k[rows, slots], v[rows, slots]), expected))
    assert k.count_nonzero() + v.count_nonzero() == 2 * batch * kv_heads * dim  # nothing else is written
