"""linear_cross_entropy() against PyTorch's cross-entropy in float64."""

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from problems import BACKEND, ON_GPU, needs_gpu
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from kernels import cross_entropy
from kernels.cross_entropy import linear_cross_entropy


def plain(x, weight, targets, softcap):
    logits = F.linear(x, weight.to(x.dtype)).double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), targets)


def run(function, x, weight, targets, softcap, dtype):
    """[loss, dx, dweight] with x in a dtype; the weight stays in float32 unless the dtype is float64."""
    weight = weight.detach().to(torch.promote_types(weight.dtype, dtype)).requires_grad_()
    x = x.to(dtype).requires_grad_()
    loss = function(x, weight, targets, softcap)
    return [loss.detach(), *torch.autograd.grad(loss * 3, (x, weight))]


def inputs(device, rows=20, vocabulary=30, grad=True):
    """x [rows, 8], weight and targets."""
    x, weight = (torch.randn(n, 8, device=device, requires_grad=grad) for n in (rows, vocabulary))
    return x, weight, torch.randint(vocabulary, (rows,), device=device)


# The interpreter takes milliseconds per row. In chunks of at most 128 rows, 260 rows are three chunks and 140 two.
DRAWS = 4 if ON_GPU else 2
SIZES = [(8, 8, 3), (300 if ON_GPU else 260, 16, 65), (400 if ON_GPU else 140, 64, 5003), (60, 16, 9001)]


@pytest.mark.parametrize(
    "softcap, rows, width, vocabulary", [(cap, *size) for cap in (None, 5.0) for size in SIZES] + [(1e5, *SIZES[1])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_value_and_gradients(dtype, rows, width, vocabulary, softcap, device, monkeypatch):
    """At most twice PyTorch's error in the same dtype, over several draws, in one chunk and in chunks of 128 rows."""
    for fraction in (1 / 16, 0.0) if rows > 128 else (1 / 16,):
        monkeypatch.setattr(cross_entropy, "LOGITS_MEMORY_FRACTION", fraction)
        squares = 0
        for _ in range(DRAWS):
            x, weight = torch.randn(rows, width, device=device).to(dtype), torch.randn(vocabulary, width, device=device)
            targets = torch.randint(vocabulary, (rows,), device=device)
            targets[1::7] = -100
            exact = run(plain, x, weight.to(dtype), targets, softcap, torch.float64)
            found = [run(f, x, weight, targets, softcap, dtype) for f in (linear_cross_entropy, plain)]
            found.append([x * (1 + torch.finfo(torch.float32).eps) for x in exact])  # one rounding is allowed
            squares += torch.tensor(
                [[(a.double() - b).square().sum() for a, b in zip(x, exact, strict=True)] for x in found]
            )
        ours, eager, rounding = squares.sqrt()
        assert (ours <= 2 * eager.maximum(rounding)).all(), f"errors of loss, dx, dweight: {ours}, PyTorch's {eager}"


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs one program after another")
@pytest.mark.parametrize("softcap", [None, 15.0, 60.0, 100.0])  # the last one by the portable kernel
def test_many_programs_at_once(softcap):
    """Losses and gradients of GPT-2's vocabulary stay the same, in calls of more programs than run at once."""
    x, weight = torch.randn(8192, 64, device="cuda").bfloat16(), torch.randn(50_304, 64, device="cuda") / 8
    targets = torch.randint(len(weight), (len(x),), device="cuda")
    logits = (x @ weight.bfloat16().T).contiguous() * (3 * softcap if softcap else 1)  # most reach the cap
    z = logits.float().requires_grad_()
    exact = F.cross_entropy(softcap * torch.tanh(z / softcap) if softcap else z, targets, reduction="none")
    (exact_gradients,) = torch.autograd.grad(exact.sum(), z)
    exact = exact.detach()
    first, losses = None, torch.empty_like(exact)
    for _ in range(40):
        gradients = logits.clone()
        cross_entropy._launch(gradients, targets, losses.fill_(torch.nan), len(weight), softcap, True)
        first = gradients if first is None else first
        torch.testing.assert_close(losses, exact, rtol=1e-4, atol=1e-4)
        assert torch.equal(gradients, first)
    torch.testing.assert_close(first.float(), exact_gradients, rtol=2**-7, atol=1e-5)


def test_without_gradients(device):
    """With targets of any stride; one past the vocabulary gives NaN."""
    x, weight, _ = inputs(device, rows=5)
    targets = torch.randint(30, (5, 6), device=device)[:, -1]
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets), F.cross_entropy(x @ weight.T, targets))
        targets[3] = 30
        assert linear_cross_entropy(x, weight, targets).isnan()


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_where_no_row_counts(dtype, rows, device):
    """The loss is 0 and so are the gradients, where PyTorch's loss is NaN: a micro-batch may have no answer."""
    x, weight = (torch.randn(n, 8, device=device, dtype=dtype, requires_grad=True) for n in (rows, 30))
    loss = linear_cross_entropy(x, weight, torch.full((rows,), -100, device=device))
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("rows", [4, 6])
def test_targets_of_another_length(rows, device):
    x, weight, _ = inputs(device, rows=5)
    with pytest.raises(ValueError, match=rf"\[5, 8\].* targets \[{rows}\]"):
        linear_cross_entropy(x, weight, torch.zeros(rows, dtype=torch.int64, device=device))


def test_no_second_derivative(device):
    """The gradient, which is stored, would count as a constant: a derivative of it is an error."""
    x, weight, targets = inputs(device)
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets), x, create_graph=True)
    first = torch.func.grad(linear_cross_entropy)
    for call in (
        lambda: dx.square().sum().backward(),
        lambda: torch.func.grad(lambda x: first(x, weight, targets).square().sum())(x.detach()),
        lambda: torch.func.jvp(lambda x: linear_cross_entropy(x, weight, targets), (x.detach(),), (x.detach(),)),
    ):
        with pytest.raises(RuntimeError, match=r"no second derivative|forward mode"):
            call()


FUNCTION = {  # name -> what is made of a function of x, weight and targets, with x [2, N, C]
    "plain": lambda f: lambda x, *rest: f(x[0], *rest),
    "grad": lambda f: lambda x, *rest: torch.func.grad(f, (0, 1))(x[0], *rest),
    "vjp": lambda f: lambda x, *rest: torch.func.vjp(partial(f, weight=rest[0], targets=rest[1]), x[0])[1](x.sum()),
    "vmap": lambda f: torch.vmap(f, (0, None, None)),
    "grad_of_each": lambda f: torch.vmap(torch.func.grad(f, (0, 1)), (0, None, None)),
    "grad_of_all": lambda f: torch.func.grad(lambda *x: torch.vmap(f, (0, None, None))(*x).sum(), (0, 1)),
}


HOW = ["eager", "compiled", {}, dict(tracing_mode="symbolic")]  # or options of make_fx


@pytest.mark.parametrize("name, how", [*itertools.product(FUNCTION, HOW), ("plain", dict(pre_dispatch=True))], ids=str)
def test_torch_func(name, how, device):
    """Also where PyTorch records the transformed function, in a graph that then gets other inputs."""
    x, weight, targets = inputs(device, grad=False)
    operands = torch.stack((x, x.flip(1))), weight, targets
    transform = FUNCTION[name]
    call = transform(linear_cross_entropy)
    if how == "compiled":
        call = torch.compile(call, fullgraph=True, backend=BACKEND)
    elif how != "eager":
        call = make_fx(lambda *x: transform(linear_cross_entropy)(*x), **how)(*(x.flip(0) for x in operands))
    expected = transform(lambda x, weight, targets: F.cross_entropy(x @ weight.T, targets))
    torch.testing.assert_close(call(*operands), expected(*operands), rtol=1e-3 if ON_GPU else 1e-4, atol=1e-5)


def test_fake_tensors_and_flops(device):
    """Nothing is computed with fake tensors; PyTorch's counter counts the three matmuls, over the padded vocabulary."""
    with FakeTensorMode():
        x, weight, targets = inputs(device)
        loss = linear_cross_entropy(x, weight, targets)
        loss.backward()
    assert loss.shape == () and isinstance(x.grad, FakeTensor) and weight.grad.shape == weight.shape
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*inputs(device, vocabulary=300)).backward()
    assert counter.get_total_flops() == 3 * 2 * 20 * 8 * 384


def test_compiles_in_one_graph(device):
    """Forward and backward, and the backward alone, after a forward in eager mode."""
    x, weight, targets = inputs(device)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=BACKEND)
    found, expected = (torch.autograd.grad(run(x, weight, targets), x) for run in (compiled, linear_cross_entropy))
    torch.testing.assert_close(found, expected)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        linear_cross_entropy(x, weight, targets).backward()
    torch.testing.assert_close(x.grad, *expected)


def test_autocast(device):
    x, weight, targets = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        found = linear_cross_entropy(x, weight, targets)
    assert found == linear_cross_entropy(x.bfloat16(), weight, targets) and found.dtype == torch.float32


def test_custom_op(device):
    """Without a gradient: opcheck would also ask for that of the stored gradients."""
    x, weight, targets = inputs(device, grad=False)
    for hidden in (x, torch.randn(8, 20, device=device).T):
        operands = (hidden, weight, targets, 2.0, True, *[None] * 4)
        torch.library.opcheck(cross_entropy.loss_and_gradients.op, operands)


@needs_gpu
def test_chunks_of_logits_take_their_share_of_memory(monkeypatch):
    memory = torch.cuda.get_device_properties("cuda").total_memory
    monkeypatch.setattr(cross_entropy, "LOGITS_MEMORY_FRACTION", 2**28 / memory)
    rows, vocabulary = 16_384, 50_304
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device="cuda", requires_grad=True)
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, targets).backward()
    assert torch.cuda.max_memory_allocated() - before < rows * vocabulary * 2 / 2  # half the size of all logits


def test_torch_dynamo_is_imported_only_to_compile(device):
    code = f"""import sys, torch, tests.conftest
from kernels.cross_entropy import linear_cross_entropy
x, weight = (torch.randn(rows, 8, device="{device}", requires_grad=True) for rows in (20, 30))
linear_cross_entropy(x, weight, torch.zeros(20, dtype=torch.int64, device="{device}")).backward()
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
