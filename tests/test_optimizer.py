"""A training step: updates, clipping, skipped steps, micro-batches; and learning rates, and evaluation."""

import copy
import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import contents, equal, losses, metrics

from data.loader import Batches, validation_batches
from data.shards import Tokens
from model import GPT, GPTConfig
from train import evaluate, learning_rate, take_step, training_batches
from training import optimizer
from training.config import Config
from training.network import choose_micro_batch
from training.optimizer import Optimizer, orthogonal
from training.ranks import Ranks

SMALL = dict(vocab_size=8, n_layer=2, n_head=2, n_embd=16, block_size=8)
ONE = Ranks(0, 1, "cpu")


@pytest.fixture
def model():
    return GPT(GPTConfig(**SMALL, attention="sdpa"))


def make(model, device="cpu", **options):
    return Optimizer(model, Config(**dict(optimizer="muon") | options), Ranks(0, 1, device))


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonal_keeps_singular_vectors_and_moves_the_values_close_to_one(shape):
    x = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = u.mT @ orthogonal(x) @ v.mT  # in the basis of x: diagonal
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(values, diagonal.diag_embed(), rtol=0, atol=1e-9)
    assert 0.3 < diagonal.min() and diagonal.max() < 1.25


def test_steps_equal_those_of_torch(model, monkeypatch):
    """torch.optim.Muon for each matrix of the blocks, with q, k and v apart, and AdamW for the other parameters."""
    monkeypatch.setattr(optimizer, "BATCH_ELEMENTS", 2 * 16 * 16)  # as if these were too large for one step together
    # torch's own iterations are in bfloat16, whose rounding errors grow with small singular values
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda x, *_: orthogonal(x[None])[0])
    ours = make(model, learning_rate=0.01, muon_scale=2.0, weight_decay=0.1).inner
    matrices = {p for p in model.blocks.parameters() if p.dim() == 2}
    theirs = []  # (parameter, rows, a copy of them, its optimizer)
    for name, p in model.named_parameters():
        heights = [16, 16, 16] if name.endswith("qkv.weight") else [len(p)]
        for height, end in zip(heights, itertools.accumulate(heights), strict=True):
            rows = slice(end - height, end)
            q = torch.nn.Parameter(p[rows].detach().clone())
            if p in matrices:
                other = torch.optim.Muon([q], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            else:
                other = torch.optim.AdamW([q], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1 if p.dim() > 1 else 0.0)
            theirs.append((p, rows, q, other))
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for p, rows, q, other in theirs:
            q.grad = p.grad[rows].clone()
            other.step()
        ours.step()
        for p, rows, q, _ in theirs:
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


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), {0: 1 / 11, 10: 1.0, 60: 0.55, 110: 0.1}),
        (dict(cooldown=0.2), {0: 1 / 11, 10: 1.0, 50: 1.0, 88: 1.0, 99: 0.55, 110: 0.1}),
    ],
    ids=["cosine", "cooldown"],
)
def test_learning_rate(options, expected):
    config = Config(**dict(steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1) | options)
    assert {step: learning_rate(step, config) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_a_skipped_step_changes_nothing(bad, kind, model, device):
    """Neither weights nor moments nor step counts. The step after it is taken again."""
    ours, tokens = make(model.to(device), device, optimizer=kind), torch.randint(8, (2, 4, 8), device=device)

    def state_after_a_step():
        take_step(model, ours, [(*tokens, 1.0, None, True)], nullcontext(), ours.ranks)
        return copy.deepcopy((model.state_dict(), ours.inner.state_dict()["state"]))

    before = state_after_a_step()
    if bad == "gradient":
        hook = model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    else:
        hook = model.register_forward_hook(lambda module, inputs, loss: loss + float("nan"))  # its gradients are finite
    assert equal(state_after_a_step(), before) and ours.skipped == 1
    hook.remove()
    assert not any(map(equal, state_after_a_step(), before)) and ours.skipped == 1


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("grad_clip", [1e-2, 100.0, 0.0])
def test_gradient_clipping(folder, trains, device, grad_clip, kind):
    """0 turns it off. After one step, a moment of AdamW is a tenth of the gradient, and one of Muon a twentieth."""
    trains(steps=1, eval_every=1, grad_clip=grad_clip, optimizer=kind, device=device, compile="off")
    [norm] = [record["grad_norm"] for record in metrics(folder) if "loss" in record]
    states = contents("runs/run/checkpoint.pt")["optimizer"]["state"].values()
    gradients = [own["exp_avg"] * 10 if "exp_avg" in own else own["momentum"] * 20 for own in states]
    found = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert norm > 1 and found.item() == pytest.approx(1e-2 if grad_clip == 1e-2 else norm, rel=1e-3)


def test_micro_batches_give_the_same_losses_as_one_batch(folder, trains):
    for name, size in (("whole", 0), ("parts", 2)):
        trains(name=name, micro_batch=size, steps=6, eval_every=6, dropout=0)
    assert losses(folder, "parts") == pytest.approx(losses(folder, "whole"), rel=1e-5)


def test_dropout_depends_on_seed_step_and_rows_only():
    """So a resumed run draws the same masks, and several ranks those of one."""

    def seeds(step, seed=1, rank=0, world=1):
        config = Config(**SMALL, batch_size=8, dropout=0.5, seed=seed)
        batches = Batches(Tokens((np.arange(999) % 8,), documents=1, text_bytes=999), 8, 8, seed)
        ranks = Ranks(rank, world, "cpu")
        [parts] = training_batches(batches, range(step, step + 1), config, ranks, micro_batch=2)
        return [seed for *_, seed, is_last in parts]

    whole = seeds(step=5)
    assert len({*whole, *seeds(step=6), *seeds(step=5, seed=2)}) == 12
    assert whole == seeds(step=5, rank=0, world=2) + seeds(step=5, rank=1, world=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU")
def test_micro_batch_auto_takes_the_largest_that_fits(model):
    config = Config(**SMALL, batch_size=64, micro_batch="auto", device="cuda")
    ranks, limit = Ranks(0, 1, "cuda"), 64

    def refuse(module, inputs):
        if len(inputs[0]) > limit:
            raise torch.OutOfMemoryError("too many sequences")

    model.cuda().blocks[0].register_forward_pre_hook(refuse)
    assert choose_micro_batch(model, config, ranks, None) == 64
    limit = 20
    assert choose_micro_batch(model, config, ranks, None) == 16
    assert all(p.grad is None for p in model.parameters())
    limit = 0
    with pytest.raises(ValueError, match="not even a micro-batch of 1 fits"):
        choose_micro_batch(model, config, ranks, None)


def test_evaluation_is_the_mean_over_all_tokens_and_is_split_over_the_ranks(model):
    """17 windows in batches of 4: the last one is smaller, so the mean of the batches' losses would differ."""
    model.head.weight.data *= 50  # losses that differ from batch to batch
    ids = torch.randint(8, (17 * 8 + 1,))
    inputs, targets = ids[:-1].view(17, 8), ids[1:].view(17, 8)
    with torch.no_grad():
        expected = model.eval()(inputs, targets).item()
    text = Tokens((ids.numpy().astype("<u2"),), documents=1, text_bytes=len(ids))
    validation = validation_batches(text, block_size=8, batch_size=4)
    assert (
        evaluate(model.train(), validation, nullcontext(), ONE) == pytest.approx(expected, rel=1e-6) and model.training
    )
    # a group of this process alone, in which sums over all ranks leave a value as it is
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parts = [evaluate(model, validation, nullcontext(), Ranks(rank, 2, "cpu")) for rank in (0, 1)]
    dist.destroy_process_group()
    assert (9 * parts[0] + 8 * parts[1]) / 17 == pytest.approx(expected, rel=1e-6)
