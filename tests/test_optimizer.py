"""Muon against torch.optim.Muon, parameter groups and learning rates."""

import copy

import pytest
import torch

from model import GPT, GPTConfig
from training import optimizer
from training.config import Config
from training.distributed import Ranks
from training.optimizer import (
    Muon,
    averaged,
    learning_rate,
    make_optimizer,
    moment_bytes,
    move_average,
    orthogonal,
    set_learning_rate,
)  # fmt: skip


@pytest.fixture
def model():
    return GPT(GPTConfig(vocab_size=8, n_layer=2, n_head=2, n_embd=16, block_size=8))


def make(model, **options):
    return make_optimizer(model, Config(optimizer="muon", **options), Ranks(0, 1, "cpu"))


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonal_keeps_singular_vectors_and_moves_the_values_close_to_one(shape):
    x = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = u.mT @ orthogonal(x) @ v.mT  # in the basis of x: diagonal
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(values, diagonal.diag_embed(), rtol=0, atol=1e-9)
    assert 0.3 < diagonal.min() and diagonal.max() < 1.25


@pytest.mark.parametrize("batch_elements", [optimizer.BATCH_ELEMENTS, 2 * 16 * 16])
def test_steps_equal_those_of_torch(model, monkeypatch, batch_elements):
    """torch.optim.Muon for each matrix of the blocks, with q, k and v apart, and AdamW for the other parameters."""
    monkeypatch.setattr(optimizer, "BATCH_ELEMENTS", batch_elements)
    # torch's own iterations are in bfloat16, whose rounding errors grow with small singular values
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda x, *_: orthogonal(x[None])[0])
    ours = make(model, learning_rate=0.01, muon_scale=2.0, weight_decay=0.1)
    inner = {p for p in model.blocks.parameters() if p.dim() == 2}
    for _ in range(3):
        before = {p: p.detach().clone() for p in model.parameters()}
        moments = {p: copy.deepcopy(ours.state[p]) for p in model.parameters()}
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        ours.step()
        for p, start in before.items():
            pieces = start.split(getattr(p, "parts", len(p))) if p in inner else [start]
            for number, piece in enumerate(pieces):
                q = torch.nn.Parameter(piece.clone())
                rows = slice(sum(map(len, pieces[:number])), sum(map(len, pieces[: number + 1])))
                q.grad = p.grad[rows].clone()
                if p in inner:
                    other = torch.optim.Muon([q], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
                    if moments[p]:
                        other.state[q]["momentum_buffer"] = moments[p]["momentum"][rows].clone()
                else:
                    other = torch.optim.AdamW([q], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1 if p.dim() > 1 else 0.0)
                    other.state[q] = moments[p]
                other.step()
                torch.testing.assert_close(p[rows], q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_kernels_equal_their_formulas(device, skip):
    """In float64, for a matrix of two blocks and a part. A step is skipped when there are NaN.

    Triton's interpreter truncates to bfloat16.
    """
    muon = pytest.importorskip("kernels.muon")
    weight, momentum, gradient = torch.randn(3, 77, 111, device=device)
    direction = torch.randn(111, 77, device=device).bfloat16().mT
    scale, rate = torch.tensor([3.0, 0.01], device=device)
    if skip is None:
        scale = None
    else:
        skip = torch.tensor(skip, device=device)
        gradient[0, 0] = direction[0, 0] = float("nan") if skip > 0 else 1.0
    ours = [weight.clone(), momentum.clone(), torch.full_like(weight, torch.nan, dtype=torch.bfloat16)]
    muon.blend(ours[1], gradient, ours[2], 0.05, scale, skip)
    muon.update(ours[0], direction, rate, 0.2, 0.5, skip)
    exact = [x.double().cpu() for x in (weight, momentum, torch.zeros_like(weight))]
    other = [None if x is None else x.double().cpu() for x in (gradient, direction, scale, rate, skip)]
    optimizer.blend(exact[1], other[0], exact[2], 0.05, other[2], other[4])
    optimizer.update(exact[0], other[1], other[3], 0.2, 0.5, other[4])
    for found, expected, error in zip(ours, exact, (1e-6, 1e-6, 2**-7), strict=True):
        torch.testing.assert_close(found.double().cpu(), expected, rtol=error, atol=error, equal_nan=found is ours[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
def test_steps_on_a_gpu_equal_those_on_the_cpu(model):
    """But for iterations in bfloat16. An entry of Muon's step is about as large as the tolerance, of AdamW's larger."""
    on_gpu = copy.deepcopy(model).cuda()
    models = [(model, make(model, learning_rate=0.01))]
    config = Config(optimizer="muon", learning_rate=0.01)
    models.append((on_gpu, make_optimizer(on_gpu, config, Ranks(0, 1, "cuda"))))
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in model.parameters()]
        for network, ours in models:
            for p, gradient in zip(network.parameters(), gradients, strict=True):
                p.grad = gradient.to(p.device)
            ours.step()
    for p, q in zip(model.parameters(), on_gpu.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=0, atol=2e-3)
        assert (q.cpu() - p).square().mean() < 2e-4**2  # a tenth of one step of Muon


def test_gradients_are_divided_by_grad_scale(model):
    """Those of Muon's matrices, of which the momentum is a sum, and those of AdamW's."""
    other = GPT(model.config)
    other.load_state_dict(model.state_dict())
    pairs = [(model, make(model), 4.0), (other, make(other), None)]
    for _ in range(2):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad / 4
        for _, ours, scale in pairs:
            ours.grad_scale = None if scale is None else torch.tensor(scale)
            ours.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    for one, two in zip(*(ours.state.values() for _, ours, _ in pairs), strict=True):
        torch.testing.assert_close(one, two)


def test_a_matrix_without_a_gradient_stays_as_it_is(model):
    optimizer = make(model)
    tokens = torch.randint(8, (4, 8))
    model(tokens, tokens).backward()
    still = model.blocks[1].mlp.expand.weight
    still.grad, before = None, still.clone()
    optimizer.step()
    assert torch.equal(still, before) and not optimizer.state[still]


def test_every_parameter_is_in_one_group_and_has_its_rate(model):
    optimizer = make(model, learning_rate=1e-3, muon_scale=20.0, min_learning_rate=0.0)
    assert isinstance(optimizer, Muon)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    assert set(optimizer.param_groups[2]["params"]) == {p for p in model.blocks.parameters() if p.dim() == 2}
    set_learning_rate(optimizer, 5e-4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-4, 1e-2])


def test_embeddings_may_have_a_rate_of_their_own():
    config = GPTConfig(vocab_size=8, n_layer=2, n_head=2, n_embd=16, block_size=8, tie_head=False)
    model = GPT(config)
    optimizer = make(model, learning_rate=1e-3, embed_scale=30.0, tie_head=False)
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert [of[layer.weight]["lr"] for layer in (model.embed, model.embed_position)] == pytest.approx([3e-2] * 2)
    set_learning_rate(optimizer, 2e-3)
    rates = [of[p]["lr"] for p in (model.embed.weight, model.head.weight, model.norm.weight)]
    assert rates == pytest.approx([6e-2, 2e-3, 2e-3]) and len(of) == len(list(model.parameters()))


def test_cosine_decay():
    config = Config(steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1)
    rates = [learning_rate(step, config) for step in range(111)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == max(rates) == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)


def test_cooldown():
    config = Config(steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1, cooldown=0.2)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[9] < 1.0 and rates[10:81] == pytest.approx([1.0] * 71)
    assert rates[90] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)
    assert learning_rate(50, Config(steps=100, warmup_steps=0, cooldown=1.0)) == pytest.approx((1e-3 + 1e-4) / 2)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_running_averages(model, kind):
    """Against the formula; in averaged() they and the parameters have changed places, also if an error ends it."""
    ours = make_optimizer(model, Config(optimizer=kind), Ranks(0, 1, "cpu"))
    expected = None
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        ours.step()
        move_average(ours, 0.75)
        now = [p.detach().clone() for p in model.parameters()]
        expected = [0.75 * a + 0.25 * p for a, p in zip(expected or now, now, strict=True)]
    with pytest.raises(ZeroDivisionError), averaged(ours):
        torch.testing.assert_close(list(model.parameters()), expected)
        1 / 0  # noqa: B018
    assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), now, strict=True))
    torch.testing.assert_close([ours.state[p]["average"] for p in model.parameters()], expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_bytes_of_the_moments(model, kind):
    """After a step the optimizer holds as many, apart from counts of steps."""
    config = Config(optimizer=kind, ema=0.9)
    optimizer = make_optimizer(model, config, Ranks(0, 1, "cpu"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    move_average(optimizer, config.ema)
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    assert moment_bytes(model, config) == sum(x.numel() * x.element_size() for x in moments)
