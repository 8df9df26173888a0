"""The MLP and its matmuls against the same formulas in float64; kernels for Hopper only on such a GPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from problems import on_hopper
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kernels import mlp as module
from kernels.activation import ACTIVATIONS, activate, activate_backward, activate_tile, slope_tile
from kernels.mlp import mlp

each_kind = pytest.mark.parametrize("kind", ACTIVATIONS)


@triton.jit
def apply_kernel(x, y, dy, COUNT: tl.constexpr, KIND: tl.constexpr):
    lane = tl.arange(0, COUNT)
    value = tl.load(x + lane)
    tl.store(y + lane, activate_tile(value, KIND))
    tl.store(dy + lane, slope_tile(value, KIND))


@each_kind
def test_activations_of_kernels(kind, device):
    """Within 2e-7 for |x| of at most 1, and relative to |x| beyond: 2^-22 is 2.4e-7."""
    x = torch.cat([torch.linspace(-12, 12, 4090), torch.tensor([0.0, -0.0, 1e-30, -80.0, 80.0, float("nan")])])
    x = x.to(device)
    y, dy = torch.full((2, len(x)), float("nan"), device=device)
    apply_kernel[(1,)](x, y, dy, COUNT=len(x), KIND=kind, enable_fp_fusion=True)
    exact = x.double()
    size = 2e-7 * exact.abs().clamp(1)
    scale = size * exact.abs().clamp(1) if kind == "relu2" else size
    assert ((y.double() - activate(exact, kind)).abs() <= scale)[:-1].all()
    assert ((dy.double() - activate_backward(torch.ones_like(exact), exact, kind)).abs() <= 2 * size)[:-1].all()
    assert y[-1].isnan() and dy[-1].isnan()


def make(bias, dtype, device="cpu", width=8, inner=24):
    layers = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
    return [layer.to(device, dtype) for layer in layers]


def weights_of(expand, project):
    return [w if w is None else w.detach().clone().requires_grad_() for w in (
        expand.weight, expand.bias, project.weight, project.bias)]  # fmt: skip


@each_kind
@pytest.mark.parametrize("bias", [False, True])
def test_formula_and_its_gradient(kind, bias):
    layers = make(bias, torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    leaves = (x, *weights_of(*layers))
    for run in (module.fused_mlp.op, module.fused_mlp):
        torch.testing.assert_close(run(*leaves, kind)[0], mlp(x, *layers, kind))
        assert torch.autograd.gradcheck(lambda *leaves, run=run: run(*leaves, kind)[0], leaves)


def test_custom_ops():
    layers = make(True, torch.float32)
    weights = [w.detach() for w in weights_of(*layers)]  # h, a result of the op, has no gradient that could be traced
    torch.library.opcheck(module.fused_mlp.op, (torch.randn(5, 8), *weights, "gelu"))
    torch.library.opcheck(module.fused_dh.op, (torch.randn(5, 8), torch.randn(24, 8), torch.randn(5, 24), "gelu"))


def test_transforms_and_flops():
    """torch.func.grad works, a second derivative is an error, and PyTorch's counter counts the matmuls."""
    layers = make(True, torch.float64)
    x, weights = torch.randn(5, 8, dtype=torch.float64), weights_of(*layers)

    def loss(x):
        return module.fused_mlp(x, *weights, "gelu")[0].square().sum()

    found, expected = (torch.func.grad(f)(x) for f in (loss, lambda x: mlp(x, *layers, "gelu").square().sum()))
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
    with FlopCounterMode(display=False) as counter:
        loss(x.requires_grad_()).backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 5 * 8 * 24)


def assert_twice_eager(found, eager, exact):
    """The error of each result is at most twice eager PyTorch's, and so is that of its worst row."""
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        error, of_eager = ((x.double() - truth).flatten(0, -2).norm(dim=-1) for x in (ours, theirs))
        assert error.norm() <= 2 * of_eager.norm() and error.max() <= 2 * of_eager.max()


SHAPES = [(1, 768, 256), (100, 192, 512), (129, 768, 3072), (5000, 384, 1536), (20_001, 768, 3072), (300, 3072, 768)]


@on_hopper
@pytest.mark.parametrize("rows, depth, columns", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epilogue", ["activate", "slope"])
@each_kind
def test_matmul_and_epilogue(epilogue, kind, bias, rows, depth, columns, poisoned):
    """At most twice the error of PyTorch's matmul and activation."""
    from kernels.matmul import matmul

    a, b, other, shift = (
        torch.randn(*shape, device="cuda").bfloat16()
        for shape in ((rows, depth), (columns, depth), (rows, columns), (columns,))
    )
    b *= depth**-0.5
    shift = shift if bias else None

    def plain(a, b, other, shift):
        y = F.linear(a, b, shift)
        return [activate_backward(y, other, kind)] if epilogue == "slope" else [y, activate(y, kind)]

    found = matmul(a, b, epilogue, kind=kind, bias=shift, other=other if epilogue == "slope" else None)
    found = found if isinstance(found, tuple) else [found]
    exact = plain(*(x if x is None else x.double() for x in (a, b, other, shift)))
    assert_twice_eager(found, plain(a, b, other, shift), exact)


@on_hopper
@pytest.mark.parametrize("rows, depth, columns", [(1, 384, 256), (129, 768, 3072), (20_001, 768, 3072)])
@pytest.mark.parametrize("bias", [False, True])
@each_kind
def test_matmul_in_fp8(kind, bias, rows, depth, columns, poisoned):
    """h and its activation within twice the error of a bfloat16 matmul of the same values; the FP8 copy of that."""
    from kernels.fp8 import find_scale, quantise
    from kernels.matmul import matmul

    a, b = torch.randn(rows, depth, device="cuda"), torch.randn(columns, depth, device="cuda") * depth**-0.5
    shift = torch.randn(columns, device="cuda").bfloat16() if bias else None
    scales = [find_scale(x.abs().max()) for x in (a, b)]
    a, b = (quantise(x, scale) for x, scale in zip((a, b), scales, strict=True))
    active_scale = torch.tensor(2 / 448, device="cuda")  # clamps the largest values
    found = matmul(a, b, "activate", kind=kind, bias=shift, scales=(*scales, active_scale))
    h, active, active_fp8, largest = found
    exact_h = F.linear(a.double() * scales[0], b.double() * scales[1], shift if shift is None else shift.double())
    eager_h = ((a.bfloat16() @ b.bfloat16().T) * (scales[0] * scales[1]).bfloat16()) + (0 if shift is None else shift)
    assert_twice_eager((h, active), *((x, activate(x, kind)) for x in (eager_h, exact_h)))
    assert largest == active.abs().max()
    expected = quantise(active, active_scale).float()
    assert ((active_fp8.float() - expected).abs() <= expected.abs() / 8 + 2**-9).all()  # 1 / scale rounds otherwise
    assert (active_fp8.float() != expected).float().mean() < 1e-3


@on_hopper
@pytest.mark.parametrize("rows", [7, 4097])
@pytest.mark.parametrize("bias", [False, True])
@each_kind
def test_mlp_on_hopper(kind, bias, rows, poisoned):
    """Output and all gradients, under autocast, against float64 and twice eager's error."""
    layers = make(bias, torch.float32, "cuda", 768, 3072)
    x, dy = torch.randn(2, 1, rows, 768, device="cuda").bfloat16()
    x.requires_grad_()
    assert module.fused(x, x.dtype, layers[0].weight)

    def run(function, cast, *arguments):
        leaves = [arguments[0], *layers[0].parameters(), *layers[1].parameters()]
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            y = function(*arguments)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    plain = lambda x: layers[1](activate(layers[0](x), kind))  # noqa: E731
    ours, eager = run(partial(mlp, expand=layers[0], project=layers[1], kind=kind), True, x), run(plain, True, x)
    for layer in layers:
        layer.double()
    exact = run(plain, False, x.detach().double().requires_grad_())
    for a, b, truth in zip(ours, eager, exact, strict=True):
        apart = [(x.double() - truth).norm() for x in (a, b)]
        assert a.dtype == b.dtype and apart[0] <= 2 * apart[1]


@on_hopper
def test_repeats_in_a_cuda_graph():
    from kernels.matmul import matmul

    a, b, other = (torch.randn(n, m, device="cuda").bfloat16() for n, m in ((9000, 768), (3072, 768), (9000, 3072)))
    expected = matmul(a, b, "slope", kind="gelu", other=other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = matmul(a, b, "slope", kind="gelu", other=other)
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)


@on_hopper
def test_trains_compiled_as_eager():
    layers = make(False, torch.float32, "cuda", 768, 3072)
    x = torch.randn(2, 500, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        found = [torch.autograd.grad(f(x, *layers, "gelu").float().square().sum(), (x, layers[0].weight))
                 for f in (mlp, torch.compile(mlp, fullgraph=True))]  # fmt: skip
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()
