"""Layers that multiply in FP8, and training with them. A CPU computes the formula; train.py refuses --fp8 there."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FAST,
    assert_resumes_bit_exactly,
    assert_same_runs,
    contents,
    equal,
    finish,
    losses,
    metrics,
    refused,
    run_script,
    start,
)
from problems import ON_GPU, needs_gpu
from torch import nn

from kernels.activation import ACTIVATIONS, activate
from kernels.fp8 import HISTORY, LARGEST, Float8Linear, Scales, convert, find_scale, multiply, quantise, require_fp8
from kernels.mlp import mlp
from model import GPT, GPTConfig
from training import network
from training.report import flops_per_token
from weights import load

HAS_FP8 = not ON_GPU or torch.cuda.get_device_capability() >= (8, 9)
CHECKPOINT = "runs/run/checkpoint.pt"
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="the GPU has no FP8")


@pytest.fixture
def allow_cpu(monkeypatch):
    monkeypatch.setattr(network, "require_fp8", lambda device, dtype: None)


def begin_step(layers, *largest):
    """Set the scales of layers to those after steps whose largest inputs these were."""
    scales = Scales(nn.Sequential(*layers))
    scales.load(torch.tensor(largest, device=layers[0].weight.device)[:, None].expand(-1, HISTORY))
    scales.begin()


def error(found, exact):
    return (found.double() - exact).norm()


def test_quantise():
    """Within half a step of e4m3, which has 3 bits after the point; too large values are clamped and NaN stays."""
    scale = torch.tensor(0.5)
    x = torch.randn(10_000) * 20
    found = quantise(x, scale).float() * scale
    normal = x.abs() >= 2**-6 * scale
    assert ((found - x).abs() <= x.abs() / 16)[normal].all() and ((found - x).abs() <= 2**-10 * scale)[~normal].all()
    found = quantise(torch.tensor([1e6, -1e6, float("inf"), float("nan")]), scale).float()
    assert found[:3].tolist() == [LARGEST, -LARGEST, LARGEST] and found[3].isnan()


@pytest.mark.parametrize("value", [0.0, 1e-43, 1e-12, 1.0])
def test_a_scale_is_never_too_small_to_divide_by(value):
    """Nor is the product of two: the quotient would be infinite or NaN."""
    scale, x = find_scale(torch.tensor(value)), torch.tensor([value, -value, 0.0])
    assert (1 / scale**2).isfinite()
    torch.testing.assert_close(quantise(x, scale).float() * scale, x, rtol=1e-6, atol=1e-18)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, width, columns", [(1, 16, 16), (37, 64, 48), (300, 768, 256)])
def test_multiply(rows, width, columns, bias, device, poisoned):
    """At most twice the error of a bfloat16 matmul of the same values, which bfloat16 holds exactly."""
    x, weight = torch.randn(rows, width, device=device), torch.randn(columns, width, device=device)
    scales = [find_scale(a.abs().max()) for a in (x, weight)]
    x, weight = (quantise(a, scale) for a, scale in zip((x, weight), scales, strict=True))
    shift = torch.randn(columns, device=device).bfloat16() if bias else None
    values = [a.double() * scale.double() for a, scale in zip((x, weight), scales, strict=True)]
    exact = F.linear(*values, None if shift is None else shift.double())
    eager = (x.bfloat16() @ weight.bfloat16().T) * (scales[0] * scales[1]).bfloat16()
    eager = eager if shift is None else eager + shift
    found = multiply(x, weight, *scales, torch.bfloat16, shift)
    assert found.dtype == torch.bfloat16 and error(found, exact) <= 2 * error(eager, exact)


@pytest.mark.parametrize("columns", [48, 50])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_and_gradients(bias, columns, device):
    """The output is that of the formula, the gradients are those of a layer without FP8. Also compiled in one graph."""
    layer = nn.Linear(64, columns, bias=bias).to(device)
    ours = Float8Linear(layer)
    x, dy = torch.randn(2, 5, 64, device=device).bfloat16(), torch.randn(2, 5, columns, device=device).bfloat16()
    x.requires_grad_()
    begin_step([ours], 16.0)

    def run(function):
        with torch.autocast(device, torch.bfloat16):
            y = function(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]

    y, *gradients = run(ours)
    expected, *plain_gradients = run(layer)
    values = [quantise(a, s).double() * s for a, s in ((x, ours.scale), (layer.weight, ours.weight_scale))]
    exact = F.linear(*values, layer.bias.bfloat16().double() if bias else None)
    assert y.dtype == torch.bfloat16 and error(y, exact) <= 4e-3 * exact.norm()  # one rounding to bfloat16
    assert 1e-3 * exact.norm() < error(expected, exact) <= 6e-2 * exact.norm()
    torch.testing.assert_close(gradients, plain_gradients, rtol=1e-2, atol=1e-2)
    assert ours.largest == x.abs().max() and ours.scale == torch.tensor(16 / LARGEST)
    torch._dynamo.reset()
    compiled = run(torch.compile(ours, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, compiled, [y, *gradients]))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width, inner", [(32, 64), (384, 512)] if ON_GPU else [(32, 64)])
def test_mlp_and_gradients(width, inner, bias, kind, device, poisoned):
    """The output is that of two layers, one after the other; the gradients are those of an MLP without FP8.

    On a Hopper GPU, kernels/matmul.py serves the larger one.
    """
    plain = [nn.Linear(*shape, bias=bias).to(device) for shape in ((width, inner), (inner, width))]
    ours = expand, project = [Float8Linear(layer) for layer in plain]
    x, dy = torch.randn(2, 2, 70, width, device=device).bfloat16()
    x.requires_grad_()
    begin_step(ours, 6.0, 3.0)  # clamps some

    def run(function, *layers):
        leaves = [x, *expand.parameters(), *project.parameters()]
        with torch.autocast(device, torch.bfloat16):
            y = function(x, *layers, kind)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    y, *gradients = run(mlp, *ours)
    with torch.autocast(device, torch.bfloat16):
        largest = [layer.largest.clone() for layer in ours]
        active = activate(expand(x), kind)
        expected = project(active)
    assert torch.allclose(y, expected, rtol=2e-2, atol=2e-2) and error(y, expected.double()) <= 1e-2 * y.double().norm()
    assert largest[0] == x.abs().max()
    torch.testing.assert_close(largest[1], active.abs().max().float(), rtol=1e-2, atol=0)
    for a, b in zip(gradients, run(mlp, *plain)[1:], strict=True):
        assert (a - b).norm() <= 6e-2 * b.norm()
    torch._dynamo.reset()
    compiled = run(torch.compile(mlp, fullgraph=True, backend="aot_eager"), *ours)
    assert all(map(torch.equal, compiled, [y, *gradients]))
    for layer in ours:
        layer.eval()
    assert all(map(torch.equal, run(mlp, *ours), run(mlp, *plain)))


@pytest.mark.parametrize("fraction", [1 / 16, 0.0])
def test_cross_entropy(fraction, device, monkeypatch):
    """Loss and gradients of logits from FP8; dx and dweight by the bfloat16 values. Also in chunks of 128 rows."""
    cross_entropy = pytest.importorskip("kernels.cross_entropy", reason="Triton exists for Linux only")
    monkeypatch.setattr(cross_entropy, "LOGITS_MEMORY_FRACTION", fraction)
    layer = Float8Linear(nn.Linear(64, 300, bias=False).to(device))
    with torch.no_grad():
        layer.weight.mul_(8)
    x = torch.randn(150, 64, device=device).bfloat16().requires_grad_()
    targets = torch.randint(300, (150,), device=device)
    begin_step([layer], 4.0)
    x_values = quantise(x, layer.scale).float() * layer.scale
    weight_values = quantise(layer.weight, layer.weight_scale).float() * layer.weight_scale
    logits = (x_values @ weight_values.T).requires_grad_()
    expected = F.cross_entropy(logits, targets)
    [dlogits] = torch.autograd.grad(expected, logits)
    found = cross_entropy.linear_cross_entropy(x, layer.weight, targets, layer=layer)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert layer.largest == x.abs().max()
    dx, dweight = torch.autograd.grad(found, (x, layer.weight))
    for a, b in ((dx, dlogits @ layer.weight), (dweight, dlogits.T @ x.float())):
        assert (a - b).norm() <= 1e-2 * b.norm()
    arguments = (x.detach(), layer.weight, targets, 0.0, True, *layer.operands(x, 128))
    checks = ("test_faketensor", "test_autograd_registration")  # the others do arithmetic on FP8
    torch.library.opcheck(cross_entropy.loss_and_gradients.op, arguments, test_utils=checks)
    layer.eval()
    value = cross_entropy.linear_cross_entropy(x, layer.weight, targets, layer=layer)
    assert torch.equal(value, cross_entropy.linear_cross_entropy(x, layer.weight, targets))


def test_scales_follow_the_last_steps():
    """The largest of all micro-batches counts, for HISTORY steps; what is not finite is left out."""
    layer = Float8Linear(nn.Linear(16, 16))
    scales = Scales(nn.Sequential(layer))

    def step(*sizes):
        scales.begin()
        for size in sizes:
            layer(torch.full((2, 16), size))
        scales.end(1)
        return round(layer.scale.item() * LARGEST, 5)

    layer(torch.full((2, 16), 1e9))  # a pass before the first step, in which the network is compiled
    assert step(1.0, -5.0, 2.0) == 5.0
    assert [step(1.0) for _ in range(HISTORY)] == [5.0] * (HISTORY - 1) + [1.0]
    assert step(float("inf")) == step(float("nan"), 0.5) == 1.0
    assert layer.weight_scale == layer.weight.abs().max() / LARGEST
    before = layer.scale.clone()
    layer.eval()(torch.full((2, 16), 9.0))
    assert step() == 1.0 and layer.scale == before
    assert step(0.0) and layer.scale == before


@needs_gpu
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_trains_in_a_cuda_graph_as_without(mlp, folder, trains):
    """Compiled, with the kernels of the head and, on Hopper GPUs, of the MLP."""
    options = dict(device="cuda", dtype="bfloat16", attention="auto", n_embd=256, n_head=4, mlp=mlp, fp8=True)
    options |= dict(dropout=0, steps=10, learning_rate=1e-3, deterministic=True)  # other orders of sums drift apart
    for name, graph in (("graphed", True), ("eager", False)):
        trains(name=name, cuda_graph=graph, **options)
    graphed = losses(folder, "graphed")
    assert graphed == pytest.approx(losses(folder, "eager"), rel=1e-3) and graphed[-1] < graphed[0] - 0.5
    history, expected = (contents(f"runs/{x}/checkpoint.pt")["counters"]["fp8_history"] for x in ("graphed", "eager"))
    assert (history[:, :10] > 0).all() and (history[:, 10:] == 0).all()
    torch.testing.assert_close(history, expected, rtol=0.1, atol=0.1)


def test_trains_as_bfloat16_does(folder, trains, allow_cpu):
    for name, fp8 in (("plain", False), ("run", True)):
        trains(name=name, fp8=fp8, dtype="bfloat16", learning_rate=3e-3, dropout=0, steps=80)
    plain, found = losses(folder, "plain"), losses(folder)
    assert found[-1] < 0.6 * found[0] and found != plain and found == pytest.approx(plain, abs=0.1)


def test_evaluation_and_names_are_those_of_the_network_without_fp8():
    config = GPTConfig(vocab_size=50, n_layer=2, n_head=2, n_embd=32, block_size=16, attention="sdpa")
    model, plain = GPT(config, seed=0), GPT(config, seed=0)
    convert(model)
    Scales(model).begin()
    assert equal(dict(plain.state_dict()), dict(model.state_dict()))
    assert model.head.weight is model.embed.weight and flops_per_token(model) == flops_per_token(plain)
    tokens = torch.randint(50, (2, 16))
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens), plain.eval()(tokens))
        assert not torch.equal(model.train()(tokens), plain(tokens))


@pytest.mark.parametrize("kind", ["blocks", "selective"])
@pytest.mark.parametrize("compiled", ["off", pytest.param("model", marks=pytest.mark.slow)])
def test_checkpointed_activations_change_nothing(kind, compiled, folder, trains, allow_cpu, monkeypatch):
    options = dict(fp8=True, dtype="bfloat16", dropout=0, steps=4, eval_every=4)
    trains(name="whole", **options)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    trains(checkpoint_activations=kind, compile=compiled, **options)
    assert_same_runs(folder)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_a_resumed_run_is_bit_exact_and_can_be_sampled(mlp, folder, allow_cpu, monkeypatch, capsys, trains):
    options = dict(fp8=True, dtype="bfloat16", mlp=mlp, steps=8, micro_batch=4, bias=True)
    assert_resumes_bit_exactly(folder, trains, **options)
    whole = contents(CHECKPOINT)
    assert (whole["counters"]["fp8_history"][:, :8] > 0).all()
    model, *_ = load(CHECKPOINT, "cpu")
    assert equal(dict(model.state_dict()), whole["model"])
    code, out, _ = run_script(monkeypatch, capsys, "sample.py", "--max_tokens", "5")
    assert code == 0 and out


def test_a_run_without_fp8_resumes_with_it(folder, run, trains, allow_cpu):
    trains(steps=4, eval_every=2)
    (folder / CHECKPOINT).unlink()
    refused(run("--resume", "runs/run", "--fp8"), "fp8", "--allow_changes")
    trains("--resume", "runs/run", "--fp8", "--allow_changes")
    assert (contents(CHECKPOINT)["counters"]["fp8_history"][:, :2] > 0).all()


@pytest.mark.slow
def test_two_ranks_share_their_scales(folder, trains, allow_cpu):
    script = folder / "on_cpu.py"
    script.write_text(
        "import sys\nimport train\nfrom training import network\n"
        "network.require_fp8 = lambda device, dtype: None\ntrain.main(sys.argv[1:])\n"
    )
    options = dict(fp8=True, steps=6, eval_every=3, dropout=0, micro_batch=2)
    trains(name="whole", **options)
    finish(start(folder, ranks=2, script=script, **FAST | options))
    histories = [contents(f"runs/{name}/checkpoint.pt")["counters"]["fp8_history"] for name in ("run", "whole")]
    torch.testing.assert_close(*histories, rtol=1e-2, atol=1e-3)
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-3)
    assert metrics(folder)[-1]["val_loss"] == pytest.approx(metrics(folder, "whole")[-1]["val_loss"], rel=1e-3)


def test_refusals(folder, run, monkeypatch):
    refused(run(fp8=True), "--fp8", "8.9", "device=cpu", "leave it out")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"8\.9 or higher, not compute capability 8\.6"):
        require_fp8("cuda:0", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_fp8("cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        require_fp8("cuda", torch.float16)
    with pytest.raises(ValueError, match="multiples of 16, not 24"):
        Float8Linear(nn.Linear(24, 32))
