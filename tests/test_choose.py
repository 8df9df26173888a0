"""The choice of a token: probabilities, filters, and random numbers that do not depend on the batch."""

import math

import pytest
import torch

from generation.choose import Sampling, choose, exponential, mix, sample_keys
from model import HAS_TRITON


def test_choices_at_any_batch_size(device):
    """Also among equal logits, which bfloat16 makes many of."""
    logits = torch.randn(64, 50_257, device=device).bfloat16().float()
    keys, positions = sample_keys(3, torch.arange(64, device=device)), torch.arange(64, device=device)
    for sampling in (Sampling(), Sampling(top_k=0), Sampling(top_k=0, top_p=0.9), Sampling(top_p=0.5, min_p=0.1)):
        together = choose(logits, sampling, keys, positions)
        for row in (0, 1, 7, 63):
            one = slice(row, row + 1)
            assert choose(logits[one], sampling, keys[one], positions[one]) == together[row]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton exists for Linux only")
@pytest.mark.parametrize("options", [{}, dict(top_k=0), dict(top_k=0, min_p=0.01), dict(temperature=1e-30)])
def test_the_kernel_has_the_same_scores(device, options):
    """As choose() computes them on a CPU; logarithms may differ by a rounding."""
    from kernels.gumbel import gumbel_scores

    logits = torch.randn(4, 5_003)
    sampling, keys, positions = Sampling(**options), sample_keys(3, torch.arange(4)), torch.arange(4) + 7
    best, least = logits.amax(1, keepdim=True), logits.topk(sampling.top_k).values[:, -1:] if sampling.top_k else None
    log_min_p = math.log(sampling.min_p) if sampling.min_p else -math.inf
    arguments = (x if x is None else x.to(device) for x in (logits, best, least, keys, positions))
    scores = gumbel_scores(*arguments, sampling.temperature, log_min_p).cpu()
    expected = (logits - best) / sampling.temperature
    hidden = (expected < log_min_p) | (logits < (-math.inf if least is None else least))
    expected -= exponential(mix(keys + positions)[:, None], torch.arange(5_003)).log()
    torch.testing.assert_close(scores, expected.masked_fill(hidden, -math.inf), rtol=1e-6, atol=1e-6)
    assert torch.equal(scores.argmax(1), choose(logits, sampling, keys, positions))


@pytest.mark.skipif(not HAS_TRITON, reason="Triton exists for Linux only")
@pytest.mark.parametrize("vocabulary, k", [(5_003, 200), (5_003, 1), (5_003, 256), (300, 200), (64, 64), (7, 3)])
def test_kth_largest(vocabulary, k, device):
    """Exactly: random logits, many equal ones, hidden ones, and all large ones in one chunk."""
    from kernels.top_k import best_and_kth

    logits = torch.randn(4, vocabulary + 5, device=device)[:, :vocabulary]
    logits[1] = logits[1].mul(2).round()
    logits[2, logits[2] < 1] = -math.inf
    logits[3] = torch.arange(vocabulary, 0, -1, device=device) / 7 - 100
    best, kth = best_and_kth(logits, k)
    assert torch.equal(best, logits.amax(1, keepdim=True))
    assert torch.equal(kth, logits.topk(k).values[:, -1:])


def test_choices_follow_the_probabilities(device):
    """Frequencies over samples, and over positions, are within 5 standard deviations."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.049, 0.001], device=device)
    count, one = 20_000, Sampling(temperature=1.0, top_k=0)
    numbers, fixed = torch.arange(count, device=device), torch.full((count,), 7, device=device)
    logits = probabilities.log().expand(count, -1)
    for seed, keys, positions in ((0, numbers, fixed), (0, fixed, numbers), (1, numbers, fixed)):
        chosen = choose(logits, one, sample_keys(seed, keys), positions)
        share = torch.bincount(chosen, minlength=5) / count
        assert ((share - probabilities).abs() <= 5 * (probabilities / count).sqrt()).all(), share
    # choices at neighbouring positions are independent
    before, after = (choose(logits, one, sample_keys(0, fixed), numbers + shift) for shift in (0, 1))
    both = ((before == 0) & (after == 0)).float().mean().item()
    assert abs(both - 0.25) < 5 * (0.25 / count) ** 0.5


def test_random_numbers(device):
    """Exponential variables: their mean and variance are 1, and none is 0 or infinite."""
    keys = sample_keys(5, torch.arange(1000, device=device))
    drawn = exponential(keys[:, None], torch.arange(1000, device=device)).double()
    assert drawn.isfinite().all() and drawn.min() > 0
    assert abs(drawn.mean() - 1) < 0.005 and abs(drawn.var() - 1) < 0.02
    assert len(mix(torch.arange(10_000)).unique()) == 10_000


def test_filters(device):
    """The tokens that can be chosen, with probabilities 0.5, 0.3, 0.15 and 0.05 in a shuffled order."""
    logits = torch.log(torch.tensor([[0.15, 0.5, 0.05, 0.3]], device=device)).expand(400, -1)
    keys, positions = sample_keys(0, torch.arange(400, device=device)), torch.zeros(400, dtype=torch.int64).to(device)

    def support(seen=None, **options):
        sampling = Sampling(**dict(temperature=1.0, top_k=0) | options)
        return set(choose(logits, sampling, keys, positions, seen).tolist())

    assert support() == {0, 1, 2, 3}
    assert support(top_k=2) == {1, 3} and support(top_k=1) == {1} and support(top_k=9) == {0, 1, 2, 3}
    assert support(top_p=0.7) == {1, 3} and support(top_p=0.01) == {1} and support(top_k=2, top_p=0.6) == {1}
    assert support(min_p=0.2) == {0, 1, 3} and support(min_p=1.0) == {1} and support(min_p=0.2, top_p=0.7) == {1, 3}
    assert support(temperature=0) == {1} and support(temperature=1e-30) == {1}
    equal = torch.tensor([[1.0, 0.0, 1.0, 2.0, 1.0]], device=device).expand(400, -1)
    for limit in (dict(top_k=2), dict(top_k=0, top_p=0.5), dict(top_k=3, top_p=0.7)):
        chosen = choose(equal, Sampling(temperature=1.0, **limit), keys, positions)
        assert set(chosen.tolist()) == {0, 2, 3, 4}  # the filter takes all of equal logits or none
    seen = torch.tensor([[False, True, False, False]], device=device).expand(400, -1)
    assert support(seen, repetition_penalty=5.0, top_k=1) == {3}  # log 0.5 * 5 is below log 0.3
    assert support(~seen, repetition_penalty=0.01, top_k=1) == {3}
