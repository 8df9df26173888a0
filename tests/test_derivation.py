"""The formulas of docs/attention.md, sections 2 to 8, in float64 against autograd or brute force; no kernel runs.

Names are those of the document.
"""

import itertools
import math

import pytest
import torch

LOG2E = math.log2(math.e)
FAR = 2**29
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


# Softmax: sections 2 and 3


def test_safe_softmax():
    scores = torch.tensor([[1000.0, 1001.0, 999.0], [-1000.0, -1003.0, -INF]])
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    close(weights / weights.sum(-1, keepdim=True), torch.softmax(scores, -1))
    assert torch.exp(scores).sum(-1).tolist() == [INF, 0]  # without the shift, one row overflows and one underflows


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


def test_states_of_two_spans_merge():
    """Merging the states of two halves gives the state of all keys. Tiling and splitting rely on this."""
    scores, v = torch.randn(4, 10) * LOG2E, torch.randn(10, 3)
    (acc_a, top_a, total_a), (acc_b, top_b, total_b) = attend(scores[:, :6], v[:6], 4), attend(scores[:, 6:], v[6:], 4)
    top = torch.maximum(top_a, top_b)
    fade_a, fade_b = torch.exp2(top_a - top), torch.exp2(top_b - top)
    merged = acc_a * fade_a[:, None] + acc_b * fade_b[:, None], top, total_a * fade_a + total_b * fade_b
    for ours, whole in zip(merged, attend(scores, v, 4), strict=True):
        close(ours, whole)


# Backward: sections 5 and 6


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


def test_gradient_of_lse_is_softmax():
    scores = torch.randn(5, 7, requires_grad=True)
    (dscores,) = gradients(torch.logsumexp(scores, -1).sum(), scores)
    close(dscores, torch.softmax(scores, -1))


def test_base_2_gradient_conversion():
    """Autograd gives the op d loss / d lse2; the kernels need d loss / d lse."""
    lse = torch.randn(5, requires_grad=True)
    lse2 = lse * LOG2E
    dlse2, dlse = gradients((lse2 * math.log(2)).square().sum(), lse2, lse)
    close(dlse, dlse2 / math.log(2))


@pytest.mark.parametrize("strategy", ["loop", "partials"])
def test_grouped_queries_sum_over_the_group(strategy):
    length, kv_heads, group, dim = 5, 2, 3, 4
    q = torch.randn(length, kv_heads * group, dim, requires_grad=True)
    k, v = (torch.randn(length, kv_heads, dim, requires_grad=True) for _ in range(2))
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, wide_k), -1)
    out = torch.einsum("hqk,khd->qhd", weights, wide_v)
    dout = torch.randn_like(out)
    dk, dv = gradients((out * dout).sum(), k, v)

    with torch.no_grad():
        delta = (out * dout).sum(-1)

        def partial(head):
            kv_head = head // group
            dscores = weights[head] * (dout[:, head] @ v[:, kv_head].T - delta[:, head, None])
            return torch.cat((dscores.T @ q[:, head], weights[head].T @ dout[:, head]), -1)

        sums = torch.zeros(length, kv_heads, 2 * dim)
        if strategy == "loop":  # one program per key head, over its query heads
            for kv_head, member in itertools.product(range(kv_heads), range(group)):
                sums[:, kv_head] += partial(kv_head * group + member)
        else:  # one program per query head, then the sum over [kv_heads, group]
            partials = torch.stack([partial(head) for head in range(kv_heads * group)], 1)
            sums = partials.view(length, kv_heads, group, 2 * dim).sum(2)
    close(sums, torch.cat((dk, dv), -1))


# Terms of the score: section 7


@pytest.mark.parametrize("scale", [0.7, 0.0, -0.4])
def test_softcap_and_its_slope(scale):
    softcap = 1.5
    qk = (10 * torch.randn(50)).requires_grad_()
    scaled = scale * qk
    scores = softcap * torch.tanh(scaled / softcap)
    cap = 1 - 2 / (torch.exp2(qk * (2 * LOG2E * scale / softcap)) + 1)
    close(cap * softcap, scores)
    (slope,) = gradients(scores.sum(), scaled)
    close(1 - cap * cap, slope)
    close(gradients(scores.sum(), qk)[0], slope * scale)  # so dq and dk are multiplied by both
    huge = torch.tensor([-1e6, 1e6])
    assert (1 - 2 / (torch.exp2(huge) + 1)).tolist() == [-1, 1]


def test_tanh_near_zero_is_its_series():
    """For x^2 < 0.04 the series up to x^7 is exact to half a unit in float32; the formula with exp2 is not."""

    def error(found):
        return (found / torch.tanh(x) - 1).abs().max()

    x = torch.linspace(-0.2, 0.2, 1000)  # without 0
    square = x * x
    assert error(x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))) < 2**-24
    assert error(1 - 2 / (torch.exp2(x.float() * (2 * LOG2E)) + 1)) > 100 * 2**-24


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


def test_decay_of_packed_sequences():
    """With separate starts of queries and keys, the query half of sequence n is shifted by k_end[n] - q_end[n]."""
    q_starts, k_starts = [0, 3, 5, 9], [0, 3, 7, 12]
    decay = (-torch.rand(k_starts[-1])).requires_grad_()
    gate = decay.cumsum(0)
    dscores, brute = {}, torch.zeros(())
    for n in range(3):
        q_len, k_len = q_starts[n + 1] - q_starts[n], k_starts[n + 1] - k_starts[n]
        dscores[n] = torch.randn(q_len, k_len).masked_fill(~causal_mask(q_len, k_len), 0.0)
        own = decay[k_starts[n] : k_starts[n + 1]].cumsum(0)  # of this sequence alone
        q_own = own[k_len - q_len :]
        brute = brute + (dscores[n] * (q_own[:, None] - own)).sum()
    dgate = torch.zeros_like(decay)
    for n in range(3):
        dgate[k_starts[n] : k_starts[n + 1]] -= dscores[n].sum(0)
        at = k_starts[n + 1] - (q_starts[n + 1] - q_starts[n])
        dgate[at : k_starts[n + 1]] += dscores[n].sum(1)
    close(torch.autograd.grad(gate, decay, dgate)[0], gradients(brute, decay)[0])


def test_why_gates_are_summed_in_float64():
    decay = torch.full((20_000,), -1.001)
    exact = decay[-1]
    errors = [abs((gate[-1] - gate[-2]).item() - exact) for gate in (decay.cumsum(0), decay.float().cumsum(0))]
    assert errors[0] < 1e-10 and errors[1] > 1e-4


def test_constant_decay_is_a_linear_distance():
    gate = torch.full((8,), -0.25).cumsum(0)
    position = torch.arange(8)
    close(gate[:, None] - gate, -0.25 * (position[:, None] - position))


@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 3), (1, 4), (1, 5))))
def test_bias_gradient_sums_over_broadcast_axes(shape):
    full = (2, 3, 4, 5)
    qk, v = torch.randn(full), torch.randn(2, 3, 5, 6)
    bias = torch.randn(shape, requires_grad=True)
    weights = torch.softmax(qk + bias, -1)
    out = weights @ v
    dout = torch.randn_like(out)
    (expected,) = gradients((out * dout).sum(), bias)
    with torch.no_grad():
        dscores = weights * (dout @ v.mT - (out * dout).sum(-1, keepdim=True))
        dims = [axis for axis, n in enumerate(shape) if n == 1]
        close(dscores.sum(dims, keepdim=True) if dims else dscores, expected)


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


def test_dead_rows_have_no_weights():
    """The kernels replace lse2 = -inf by +inf, so that a weight is 2^(score - inf) = 0 and not 2^(-inf + inf) = NaN."""
    scores, lse2 = torch.tensor([-INF, 0.0, 5.0]), torch.tensor(-INF)
    lse2 = torch.where(lse2 == -INF, INF, lse2)
    assert (torch.exp2(scores - lse2) == 0).all()


# Tiles and lengths: sections 4 and 8


def meeting_range(first, last, behind, ahead, length, block, edge):
    lo = max(first - behind, 0) // edge * edge
    hi = min(last + ahead + 1, length)
    full_lo = -(-max(last - behind, 0) // block) * block
    full_hi = max(min(first + ahead + 1, length), 0) // block * block
    return lo, full_lo, max(full_lo, full_hi), hi


def visits(lo, full_lo, full_hi, hi, block, edge):
    """(positions, masked) of the kernels' two loops: over the interior, then over the edges, skipping the interior."""
    interior = [(range(start, start + block), False) for start in range(full_lo, full_hi, block)]
    steps = range(lo, hi - (full_hi - full_lo), edge)
    starts = [step if step < full_lo else step + full_hi - full_lo for step in steps]
    return interior + [(range(start, start + edge), True) for start in starts]


def sees(q_pos, k, behind, ahead):
    return q_pos - behind <= k <= q_pos + ahead


MASKS = {
    "causal": (FAR, 0),
    "full": (FAR, FAR),
    **{f"window {w}": (w - 1, 0) for w in (1, 2, 5)},
    **{f"full window {w}": (w - 1, w - 1) for w in (1, 2, 5)},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("block_q, block_k", [(4, 2), (2, 4), (3, 3), (1, 1)])
@pytest.mark.parametrize("parts", [1, 2], ids=["edges by blocks", "edges by half blocks"])
def test_tiles_of_keys_for_a_tile_of_queries(mask, block_q, block_k, parts):
    """Every visible pair is visited once, every unmasked tile is fully visible, and no fully hidden tile is visited."""
    (behind, ahead), edge = mask, max(block_k // parts, 1)
    for q_len, k_len in itertools.product(range(1, 11), range(0, 11)):
        for q_start in range(0, q_len, block_q):
            first = q_start + k_len - q_len
            last = first + min(block_q, q_len - q_start) - 1
            bounds = meeting_range(first, last, behind, ahead, k_len, block_k, edge)
            seen = {(p, k) for p in range(first, last + 1) for k in range(k_len) if sees(p, k, behind, ahead)}
            met = []
            for keys, masked in visits(*bounds, block_k, edge):
                tile = {(p, k) for p in range(first, last + 1) for k in keys}
                assert masked or tile <= seen  # MASKED=False requires this
                assert tile & seen
                met += tile & seen
            assert sorted(met) == sorted(seen)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("block_q, block_k", [(4, 2), (2, 4), (3, 3), (1, 1)])
@pytest.mark.parametrize("parts", [1, 2], ids=["edges by blocks", "edges by half blocks"])
def test_tiles_of_queries_for_a_tile_of_keys(mask, block_q, block_k, parts):
    """The same for dk/dv, which counts queries by index, not by position."""
    (behind, ahead), edge = mask, max(block_q // parts, 1)
    for q_len, k_len in itertools.product(range(0, 11), range(1, 11)):
        shift = k_len - q_len
        for k_start in range(0, k_len, block_k):
            keys = range(k_start, min(k_start + block_k, k_len))
            first, last = keys[0] - shift, keys[-1] - shift
            bounds = meeting_range(first, last, ahead, behind, q_len, block_q, edge)
            seen = {(i, k) for i in range(q_len) for k in keys if sees(i + shift, k, behind, ahead)}
            met = []
            for queries, masked in visits(*bounds, block_q, edge):
                tile = {(i, k) for i in queries for k in keys}
                assert masked or tile <= seen
                assert tile & seen
                met += tile & seen
            assert sorted(met) == sorted(seen)


def test_lengths_shrink_both_counts():
    """With a length, query i still stands at key i + Tk - Tq: see sequence() in tiles.py."""
    for q_len, k_len in itertools.product(range(1, 7), repeat=2):
        for length in range(k_len + 1):
            kept_q, kept_k = max(q_len - (k_len - length), 0), length
            before = {i: i + k_len - q_len for i in range(q_len) if i + k_len - q_len < length}
            assert before == {i: i + kept_k - kept_q for i in range(kept_q)}
