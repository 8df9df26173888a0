"""The network: causality, learning, masked documents, initialisation, and errors."""

import dataclasses
import math

import pytest
import torch

from model import GPT, GPTConfig
from training.report import flops_per_token

SMALL = dict(vocab_size=50, block_size=24, n_layer=2, n_head=4, n_embd=32)
MODERN = dict(norm="rmsnorm", position="rope", mlp="relu2", qk_norm=True, n_kv_head=2, tie_head=False)
CONFIGS = {
    "gpt2": GPTConfig(**SMALL, bias=True),
    "modern": GPTConfig(**SMALL, **MODERN, logit_softcap=15.0),
    "swiglu": GPTConfig(**SMALL, norm="rmsnorm", position="rope", mlp="swiglu", n_kv_head=1),
    "paths": GPTConfig(
        **SMALL, **MODERN, norm_weight=False, embed_norm=True, embed_skip=True, value_residual=True, key_offset=True,
        window=7,
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    return request.param


def make_model(config):
    """An untrained network; what begins at 0 is drawn at random, so that it has an effect."""
    model = GPT(config, seed=0).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("skips", "value_mix")):
            parameter.data.normal_(std=0.3)
    return model


@torch.no_grad()
def test_a_future_token_never_changes_a_past_logit(config):
    model = make_model(config)
    tokens = torch.randint(50, (1, 24))
    logits = model(tokens)
    for position in (1, 12, 23):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 50
        other = model(changed)
        assert torch.equal(other[:, :position], logits[:, :position])
        assert not torch.equal(other[:, position:], logits[:, position:])


def test_one_batch_overfits(config):
    model = make_model(config).train()
    tokens = torch.randint(50, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    first = model(tokens[:, :-1], tokens[:, 1:])
    assert abs(first.item() - math.log(50)) < 0.3  # an untrained network knows nothing
    for _ in range(36):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@torch.no_grad()
def test_masked_documents_are_isolated(config):
    """Every document has the logits that it has alone, at the same positions."""
    masked = make_model(dataclasses.replace(config, mask_documents=True, end_of_text=0))
    alone = make_model(config)
    for p, q in zip(masked.parameters(), alone.parameters(), strict=True):
        q.copy_(p.normal_(std=0.2))
    tokens = torch.randint(1, 50, (3, 24))
    tokens[0, 9] = tokens[0, 10] = tokens[1, 23] = tokens[2, 0] = 0
    logits = masked(tokens)
    for row, begin, end in [(0, 0, 10), (0, 10, 11), (0, 11, 24), (1, 0, 24), (2, 0, 1), (2, 1, 24)]:
        expected = alone(tokens[row : row + 1, begin:end])[0]
        torch.testing.assert_close(logits[row, begin:end], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[0, 11:], alone(tokens)[0, 11:], atol=1e-2)


def test_many_short_documents_share_the_last_place():
    """Attention gets as many places as the shape has room for, here 16. No document reaches into another row."""
    model = make_model(dataclasses.replace(CONFIGS["gpt2"], mask_documents=True, end_of_text=0, attention="sdpa"))
    tokens = torch.randint(1, 50, (2, 24))
    tokens[0, :19] = 0  # nineteen documents of a token
    changed = tokens.clone()
    changed[0, 20] = 1 + tokens[0, 20] % 49
    logits, other = model(tokens), model(changed)
    assert torch.equal(logits[0, :20], other[0, :20]) and torch.equal(logits[1], other[1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # for which SDPA needs to know their length
    torch.testing.assert_close(compiled(tokens), logits)


def test_parameters_and_flops():
    """Of GPT-2 as released. From the pairs of query and key, a triangle, a window of w cuts one of sides T - w."""
    options = dict(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=True)
    with torch.device("meta"):
        full, windowed = (GPT(GPTConfig(**options, window=window), seed=None) for window in (None, 256))
    assert sum(p.numel() for p in full.parameters()) == 124_439_808
    matmuls = 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(full) == 6 * matmuls + 6 * 12 * 768 * 1024
    saved = 9 * 12 * 768 * (768 * 768 / 2) / 1024  # in three of four blocks
    assert flops_per_token(full) - flops_per_token(windowed) == pytest.approx(saved)
