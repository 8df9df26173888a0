"""Muon against torch's own, and what AdamW and it leave alone."""

import copy

import pytest
import torch

import optimizer
from config import Config
from distributed import Distributed
from model import GPT, GPTConfig
from optimizer import Muon, learning_rate, make_optimizer, orthogonal, set_learning_rate

SMALL = GPTConfig(vocab_size=8, n_layer=2, n_head=2, n_embd=16, block_size=8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL)


def make(model, **options):
    return make_optimizer(model, Config(optimizer="muon", **options), Distributed(0, 1, "cpu"))


def give_gradients(model):
    tokens = torch.randint(8, (4, 8))
    model(tokens, tokens).backward()


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonal_keeps_the_singular_vectors_and_makes_the_values_nearly_one(shape):
    x = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = u.mT @ orthogonal(x) @ v.mT  # in the basis of x: a diagonal
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(values, diagonal.diag_embed(), rtol=0, atol=1e-9)
    assert 0.3 < diagonal.min() and diagonal.max() < 1.25


@pytest.mark.parametrize("at_once", [None, 2 * 16 * 16])
def test_steps_are_those_of_torch(model, monkeypatch, at_once):
    """Of torch.optim.Muon for the blocks' matrices, q, k and v apart, of AdamW for the rest."""
    if at_once:
        monkeypatch.setattr(optimizer, "AT_ONCE", at_once)
    # torch rounds to bfloat16, which small singular values amplify
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


def test_a_matrix_without_a_gradient_stays(model):
    optimizer = make(model)
    give_gradients(model)
    still = model.blocks[1].mlp.expand.weight
    still.grad, before = None, still.clone()
    optimizer.step()
    assert torch.equal(still, before) and not optimizer.state[still]


def test_a_skipped_step_leaves_matrices_and_momenta_alone(model):
    optimizer = make(model)
    give_gradients(model)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    before = [x.clone() for x in [*model.parameters(), *(x for s in optimizer.state.values() for x in s.values())]]
    for p in model.parameters():
        p.grad.fill_(float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    after = [*model.parameters(), *(x for s in optimizer.state.values() for x in s.values())]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_every_parameter_is_in_one_group_and_has_its_rate(model):
    optimizer = make(model, learning_rate=1e-3, muon_scale=20.0, min_learning_rate=0.0)
    assert isinstance(optimizer, Muon)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    assert set(optimizer.param_groups[2]["params"]) == {p for p in model.blocks.parameters() if p.dim() == 2}
    set_learning_rate(optimizer, 5e-4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-4, 1e-2])


def test_learning_rate_schedules():
    cosine = Config(steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1)
    rates = [learning_rate(step, cosine) for step in range(111)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0 and rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1) and max(rates) == 1.0
    wsd = Config(
        steps=100,
        warmup_steps=10,
        learning_rate=1.0,
        min_learning_rate=0.0,
        schedule="wsd",
        decay_fraction=0.2,
    )
    rates = [learning_rate(step, wsd) for step in range(101)]
    assert (
        rates[10:80] == [1.0] * 70
        and rates[80] == pytest.approx(1.0)
        and rates[90] == pytest.approx(0.5)
        and rates[100] == 0.0
    )
