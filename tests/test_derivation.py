"""The formulas of docs/attention.md, sections 2 to 8, in float64 against autograd or brute force; no kernel runs.

Names are those of the document. test_attention_tiles.py tests the ranges of section 7, on the kernels.
"""

import math

import pytest
import torch

LOG2E = math.log2(math.e)
INF = float("inf")


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def causal_mask(q_len, k_len):
    return torch.arange(k_len) <= torch.arange(q_len)[:, None] + k_len - q_len


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


# Softmax: sections 2 and 7


def attend(scores2, v, block_k):
    """The forward's loop over key tiles: acc, top, total of base-2 scores."""
    rows = len(scores2)
    acc, top, total = torch.zeros(rows, v.shape[1]), torch.full((rows,), -INF), torch.zeros(rows)
    for start in range(0, len(v), block_k):
        tile = scores2[:, start : start + block_k]
        new_top = torch.maximum(top, tile.amax(1))
        pivot = torch.where(new_top == -INF, 0.0, new_top)
        weights = torch.exp2(tile - pivot[:, None])
        fade = torch.exp2(top - pivot)
        total = total * fade + weights.sum(1)
        acc = acc * fade[:, None] + weights @ v[start : start + block_k]
        top = new_top
    return acc, top, total


def finish(acc, top, total, sink=None):
    """Output and base-2 LSE of the final state, as at the end of the forward kernel. sink is in natural units."""
    dead, fade = total == 0, torch.ones_like(total)
    if sink is not None:
        logit = torch.tensor(sink * LOG2E)
        new_top = torch.maximum(top, logit)
        fade = torch.exp2(top - new_top)
        total = total * fade + torch.exp2(logit - new_top)
        top = new_top
    total = torch.where(dead, 1.0, total)
    return acc * (fade / total)[:, None], torch.where(dead, -INF, top + torch.log2(total))


@pytest.mark.parametrize("block_k", [1, 3, 4, 16])
def test_online_softmax_in_base_2(block_k):
    """Any tiling gives the same output and LSE. Rows that see no key yet, or none at all, give no NaN."""
    q_len, k_len = 9, 7  # causal, so the first two queries see no key
    scores = (100 * torch.randn(q_len, k_len)).masked_fill(~causal_mask(q_len, k_len), -INF)
    scores[4, :3] = -INF
    v = torch.randn(k_len, 5)
    out, lse2 = finish(*attend(scores * LOG2E, v, block_k))
    close(out, torch.softmax(scores, -1).nan_to_num(0.0) @ v)
    close(lse2 / LOG2E, torch.logsumexp(scores, -1))
    assert (out[:2] == 0).all() and (lse2[:2] == -INF).all()


# Backward: sections 4, 7 and 8


def test_delta_dq_dk_dv_with_dropout_and_dlse():
    q_len, k_len, dim, scale = 6, 8, 4, 0.3
    q, k, v = (torch.randn(n, dim, requires_grad=True) for n in (q_len, k_len, k_len))
    mask = causal_mask(q_len, k_len)
    keep = (torch.rand(q_len, k_len) < 0.7) / 0.7
    scores = (scale * q @ k.T).masked_fill(~mask, -INF)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1)
    out = (weights * keep) @ v
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = gradients((out * dout).sum() + (lse * dlse).sum(), q, k, v, scores)

    with torch.no_grad():
        recomputed = torch.exp2(scores * LOG2E - (lse * LOG2E)[:, None])
        close(recomputed, weights)
        dweights = (dout @ v.T) * keep
        delta = (out * dout).sum(-1)
        close(delta, (weights * dweights).sum(-1))  # the sum over all keys that delta replaces
        delta = delta - dlse
        dscores = weights * (dweights - delta[:, None])
        found = scale * dscores @ k, scale * dscores.T @ q, (weights * keep).T @ dout, dscores
    for ours, truth in zip(found, expected, strict=True):
        close(ours, truth)


# Terms of the score: section 8


def test_softcap_and_its_slope():
    softcap = 1.5
    scaled = torch.linspace(-30, 30, 50).requires_grad_()
    scores = softcap * torch.tanh(scaled / softcap)
    cap = 1 - 2 / (torch.exp(2 * scaled / softcap) + 1)
    close(cap * softcap, scores)
    close(1 - cap * cap, *gradients(scores.sum(), scaled))
    x = torch.linspace(-0.2, 0.2, 1000)  # for x^2 < 0.04 the series up to x^7 is exact to half a unit in float32
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    assert (series / torch.tanh(x) - 1).abs().max() < 2**-24


@pytest.mark.parametrize("q_len, k_len", [(6, 6), (4, 7), (7, 4)])
def test_decay_is_a_difference_of_gates(q_len, k_len):
    """The term is sum(decay[j + 1 .. i]). dgate is the row sums minus the column sums of dS; cumsum does the rest."""
    decay = (-torch.rand(k_len)).requires_grad_()
    mask, shift = causal_mask(q_len, k_len), k_len - q_len
    weight = torch.randn(q_len, k_len).masked_fill(~mask, 0.0)  # plays the role of dS, which is 0 at hidden pairs
    brute = sum(
        (weight[i, j] * decay[j + 1 : i + shift + 1].sum() for i in range(q_len) for j in range(k_len) if mask[i, j]),
        start=torch.zeros(()),
    )
    expected = gradients(brute, decay)[0]

    gate = decay.cumsum(0)
    dgate = -weight.sum(0)  # the key half
    for i in range(q_len):
        if i + shift >= 0:
            dgate[i + shift] += weight[i].sum()  # the query half, at the key where the query stands
    close(torch.autograd.grad(gate, decay, dgate)[0], expected)
    close(dgate.flip(0).cumsum(0).flip(0), expected)  # the sum over this key and all later ones


@pytest.mark.parametrize("sink", [-3.0, 0.4, 30.0])
def test_sink_and_its_gradient(sink):
    q_len, k_len = 5, 4  # the first row sees no key, and a sink does not change its output of 0
    mask = causal_mask(q_len, k_len)
    alive = mask.any(-1)
    scores = torch.randn(q_len, k_len).masked_fill(~mask, -INF)
    v, keep = torch.randn(k_len, 3), (torch.rand(q_len, k_len) < 0.6) / 0.6
    leaf = torch.tensor(sink, requires_grad=True)
    logits = torch.cat((scores, leaf.expand(q_len, 1)), -1)
    weights = torch.softmax(logits, -1)[:, :-1] * alive[:, None]
    lse = torch.logsumexp(logits, -1).masked_fill(~alive, -INF)
    out = (weights * keep) @ v

    bare, lse2 = finish(*attend(scores * LOG2E, v, 2), sink)
    close(bare, (weights @ v).detach())
    close(lse2 / LOG2E, lse.detach())

    dout, dlse = torch.randn_like(out), torch.randn(q_len)
    (expected,) = gradients((out * dout).sum() + (lse.masked_fill(~alive, 0.0) * dlse).sum(), leaf)
    with torch.no_grad():
        delta = (out * dout).sum(-1) - dlse
        weight = torch.where(alive, torch.exp(leaf - lse), 0.0)
        mean = (weights * keep * (dout @ v.T)).sum(-1) / (weights.sum(-1) + weight)  # delta, by a walk
        close((mean - dlse)[alive], delta[alive])
        close(-(weight * delta)[alive].sum(), expected)
