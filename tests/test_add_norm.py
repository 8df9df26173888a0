"""Dropout, residual and norm in one kernel: against float64, its masks, and inside a network."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from attention.reference import philox
from model import GPT, GPTConfig, RMSNorm

pytest.importorskip("triton", reason="Triton exists for Linux only")
from kernels import add_norm
from kernels import add_norm_kernel as module

NORMS = {
    "layernorm": lambda width: nn.LayerNorm(width, bias=False),
    "bias": nn.LayerNorm,
    "bare layernorm": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "rmsnorm": RMSNorm,
    "bare rmsnorm": lambda width: RMSNorm(width, elementwise_affine=False),
}


def kept(shape, dropout, seed):
    """Which elements of [N, C] dropout keeps: as the kernels, from 16 bits of philox(row, column / 4) each."""
    row, column = torch.arange(shape[0])[:, None], torch.arange(shape[1])[None, :]
    seed = seed.cpu()
    words = philox((row + (seed >> 32)) & 0xFFFFFFFF, column // 4, seed & 0xFFFFFFFF)
    word = torch.where(column % 4 < 2, *words)
    return torch.where(column % 2 == 0, word >> 16, word & 0xFFFF) >= round(dropout * 2**16)


def formula(x, y, norm, dropout, seed):
    mask = kept(y.flatten(0, -2).shape, dropout, seed).view(y.shape).to(y.device)
    x = x + torch.where(mask, y / (1 - round(dropout * 2**16) / 2**16), 0)
    wide = x if x.dtype == torch.float64 else x.float()
    if isinstance(norm, nn.LayerNorm):
        return x, norm(wide).type_as(x)
    return x, nn.functional.rms_norm(wide, x.shape[-1:], norm.weight, torch.finfo(torch.float32).eps).type_as(x)


def make(rows, width, dtype, device, name="layernorm"):
    """(x, y, the gradients of both results, norm)"""
    tensors = (torch.randn(4, rows, width) + 0.5).to(device, dtype).unbind()
    norm = NORMS[name](width).to(device)
    for parameter in norm.parameters():
        parameter.data.normal_()
    return *(x.requires_grad_() for x in tensors[:2]), tensors[2:], norm


def run(function, x, y, gradients, norm, *options):
    """Both results and all gradients."""
    results = function(x, y, norm, *options)
    return [*results, *torch.autograd.grad(results, [x, y, *norm.parameters()], gradients)]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, width", [(1, 384), (37, 100), (70, 384), (33, 768), (35, 1024)])
def test_against_float64(rows, width, dtype, name, device, poisoned):
    """At most twice the error of PyTorch's formula with the same mask."""
    x, y, gradients, norm = make(rows, width, dtype, device, name)
    seed = torch.randint(2**62, (1,), device=device)
    ours, eager = (run(f, x, y, gradients, norm, 0.2, seed) for f in (module.fused_add_norm, formula))
    exact = [z.detach().double().requires_grad_() for z in (x, y)]
    norm.double()
    exact = run(formula, *exact, [z.double() for z in gradients], norm, 0.2, seed)
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        error, allowed = ((z.double() - truth).norm() for z in (mine, theirs))
        assert error <= 2 * allowed


def test_masks(device):
    """Masks of two seeds, and of rows and columns of one, are independent; a share of dropout is dropped."""
    zero, one = torch.zeros(512, 384, device=device), torch.ones(512, 384, device=device)
    norm = nn.LayerNorm(384, device=device)
    seeds = torch.tensor([5, 6, 5 + 2**32, 2**62 - 1], device=device).split(1)
    masks = [module.fused_add_norm(zero, one, norm, 0.3, seed)[0] for seed in seeds]
    assert torch.equal(masks[0], module.fused_add_norm(zero, one, norm, 0.3, seeds[0])[0])
    masks = [(mask > 0).double() - 0.7 for mask in masks]
    deviation = (0.3 * 0.7 / masks[0].numel()) ** 0.5
    assert all(abs(mask.mean()) < 5 * deviation for mask in masks)
    first = masks[0]
    pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
    pairs += [(first[1:], first[:-1])] + [(first[:, n:], first[:, :-n]) for n in (1, 2, 3, 4, 128)]
    for a, b in pairs:
        assert abs(cosine_similarity(a.flatten(), b.flatten(), dim=0)) < 5 / b.numel() ** 0.5
    by_row, by_column = (first.mean(dim).std() for dim in (1, 0))
    assert abs(by_row / (0.21 / 384) ** 0.5 - 1) < 0.2 and abs(by_column / (0.21 / 512) ** 0.5 - 1) < 0.2


def test_types(device):
    """Under autocast the norm has its dtype, and the stream and each gradient that of its input."""
    x, y, gradients, norm = make(5, 64, torch.float32, device)
    y = y.detach().bfloat16().requires_grad_()
    seed = torch.tensor([7], device=device)
    with torch.autocast(device, torch.bfloat16):
        total, h = module.fused_add_norm(x, y, norm, 0.2, seed)
    dx, dy, dweight = torch.autograd.grad([total, h], [x, y, norm.weight], [gradients[0], gradients[1].bfloat16()])
    assert [z.dtype for z in (total, h, dx, dy, dweight)] == [torch.float32, torch.bfloat16] * 2 + [torch.float32]


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_alone_is_used(used, device, poisoned):
    x, y, gradients, norm = make(6, 100, torch.float32, device, "bias")
    seed = torch.tensor([7], device=device)
    leaves = [x, y, *norm.parameters()]
    found, expected = (
        torch.autograd.grad(f(x, y, norm, 0.2, seed)[used], leaves, gradients[0], materialize_grads=True)
        for f in (module.fused_add_norm, formula)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["bias", "bare rmsnorm"])
def test_compiled_as_eager(name, device):
    x, y, gradients, norm = make(9, 64, torch.float32, device, name)
    seed = torch.tensor([7], device=device)
    compiled = torch.compile(
        module.fused_add_norm, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    found, expected = (run(f, x, y, gradients, norm, 0.2, seed) for f in (compiled, module.fused_add_norm))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, dict(norm="rmsnorm", norm_weight=False, embed_skip=True)], ids=str)
def test_in_a_network(options, device, monkeypatch):
    """Loss and gradients are those of the formula with the same masks, and each branch has a mask of its own."""
    sizes = dict(vocab_size=50, block_size=24, n_layer=2, n_head=4, n_embd=64)
    model = GPT(GPTConfig(**sizes, dropout=0.3, attention="reference", **options)).to(device).train()
    tokens, targets = torch.randint(50, (2, 3, 24), device=device)
    if device == "cpu":  # on which the network does without kernels
        monkeypatch.setattr("model.draw_seeds", lambda x, dropout, count: list(torch.arange(count).split(1)))
    kernels = module.fused_add_norm

    def loss_and_gradients(function):
        seeds = []
        monkeypatch.setattr(module, "fused_add_norm", lambda *given: seeds.append(given[-1].item()) or function(*given))
        torch.manual_seed(3)
        logits = model.logits(model.hidden(tokens))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))], seeds

    (found, seeds), (expected, same) = map(loss_and_gradients, (kernels, formula))
    assert seeds == same and len(set(seeds)) == (3 if options else 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_seeds(device, monkeypatch):
    """One for each mask, given by PyTorch's random state. Without dropout, or for float64, PyTorch draws the masks."""
    x = torch.zeros(2, 384, device=device)
    if device == "cpu":
        assert add_norm.draw_seeds(x, 0.2, 2) == [None, None]
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.manual_seed(3)
    seeds, others = (add_norm.draw_seeds(x, 0.2, 5) for _ in range(2))
    assert len({seed.item() for seed in seeds + others}) == 10
    assert all(seed.shape == (1,) and seed.dtype == torch.int64 and seed.data_ptr() % 16 == 0 for seed in seeds)
    torch.manual_seed(3)
    assert seeds == add_norm.draw_seeds(x, 0.2, 5)
    assert add_norm.draw_seeds(x, 0.0, 1) == add_norm.draw_seeds(x.double(), 0.2, 1) == [None]
    assert add_norm.draw_seeds(torch.zeros(2, add_norm.WIDEST + 1, device=device), 0.2, 1) == [None]


def test_strides_an_empty_batch_and_a_frozen_weight(device, poisoned):
    x, y, gradients, norm = make(6, 100, torch.float32, device, "bias")
    seed = torch.tensor([7], device=device)
    expected = run(formula, x, y, gradients, norm, 0.2, seed)
    across = [z.detach().T.contiguous().T.requires_grad_() for z in (x, y, *gradients)]
    found = run(module.fused_add_norm, *across[:2], across[2:], norm, 0.2, seed)
    torch.testing.assert_close(found, expected)
    norm.weight.requires_grad_(False)
    leaves = [x, y, norm.bias]
    found = torch.autograd.grad(module.fused_add_norm(x, y, norm, 0.2, seed), leaves, gradients)
    torch.testing.assert_close(list(found), [*expected[2:4], expected[5]])
    empty = torch.zeros(0, 100, device=device, requires_grad=True)
    total, out = module.fused_add_norm(empty, empty, norm, 0.2, seed)
    (total + out).sum().backward()
    assert total.shape == out.shape == empty.grad.shape == (0, 100) and (norm.bias.grad == 0).all()


def test_a_second_derivative_is_an_error(device):
    x, y, _, norm = make(2, 64, torch.float32, device)
    _, out = module.fused_add_norm(x, y, norm, 0.2, torch.tensor([7], device=device))
    [slope] = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_ops(device):
    """torch.library.opcheck: schemas, shapes and autograd."""
    x, y, (dtotal, dout), norm = make(3, 32, torch.float32, device, "bias")
    seed, options = torch.tensor([7], device=device), (0.2, 1e-5, True, torch.float32)
    torch.library.opcheck(module._add_norm, (x, y, norm.weight, norm.bias, seed, *options))
    given = x.detach(), norm.weight.detach(), seed, dtotal, dout
    torch.library.opcheck(module._gradients, (*given, True, *options))
