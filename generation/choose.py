"""The choice of a token from logits. All of it runs on the device.

Letters: B rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from attention.gpu import takes_kernels
from attention.ops import may_launch
from errors import require

# Odd 64-bit constants of SplitMix64, as signed numbers: torch has no unsigned arithmetic.
GOLDEN, FIRST, SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen."""

    # choice of a token
    temperature: float = 0.8
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int = 200
    """Sample from the k most likely tokens, and any as likely as the last of these; 0 = all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together reach this probability; 1 = all."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this share of the highest one; 0 = all."""

    def __post_init__(self):
        require(0 <= self.temperature < math.inf, f"temperature={self.temperature} must be at least 0")
        require(self.top_k >= 0, f"top_k={self.top_k} must be at least 0; 0 keeps all tokens")
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens")
        require(0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]; 0 keeps all tokens")


def choose(logits, sampling, keys, positions):
    """One token for each row of logits [B, V] float32: [B] int64. A row with NaN, or with -inf alone, gives V.

    The random numbers are a function of key, position and token, so they do not depend on the rest of the batch.

    Args:
        sampling: Sampling. keys: [B] int64, of sample_keys(). positions: [B] int64, of the new tokens in their texts.
    """
    vocabulary = logits.shape[-1]
    if sampling.temperature == 0:
        best, chosen = logits.max(-1)
        return chosen.masked_fill_(~(best > float("-inf")), vocabulary)
    best, least = limits(logits, sampling)
    log_min_p = math.log(sampling.min_p) if sampling.min_p else float("-inf")
    # Gumbel-max: take the token with the smallest exponential variable divided by its probability
    if has_kernels(logits):
        from generation.gumbel import gumbel_scores

        return gumbel_scores(logits, best, least, keys, positions, sampling.temperature, log_min_p).argmax(-1)
    tokens = torch.arange(vocabulary, device=logits.device)
    if least is not None and logits.device.type == "cpu":  # elsewhere the host would have to wait
        tokens = (logits < least).all(0).logical_not().nonzero().squeeze(1)  # with NaN, all
        logits = logits[:, tokens]
    scores = (logits - best) / sampling.temperature  # at most 0, so a tiny temperature cannot overflow
    scores = scores.masked_fill(scores < log_min_p, float("-inf"))
    if least is not None:
        scores = scores.masked_fill(logits < least, float("-inf"))
    chosen = (scores - exponential(mix(keys + positions)[:, None], tokens).log()).argmax(-1)
    return tokens[chosen].masked_fill_(~(best[:, 0] > float("-inf")), vocabulary)


def refuse_nan(model, where):
    """Raise the UserError of a GPT that computes NaN. where: for which text."""
    name, rule = getattr(model, "source", "the model"), "its weights are damaged or its training diverged"
    require(False, f"{name} computes probabilities of NaN for {where}: {rule}; take an earlier checkpoint")


def has_kernels(logits):
    """Whether Triton, which not every machine has, can be imported and serves these logits."""
    return logits.is_cuda and takes_kernels(logits.device) and may_launch(logits)


def limits(logits, sampling):
    """The largest logit, and the smallest that top_k and top_p keep: [B, 1] each, the second None if they keep all.

    The largest of a row with NaN is NaN.
    Tokens with equal logits are kept or dropped together: which of them topk() takes may depend on the batch.
    """
    top_k = sampling.top_k if sampling.top_k < logits.shape[-1] else 0
    if top_k and sampling.top_p == 1 and has_kernels(logits):
        from generation.top_k import MOST, best_and_kth

        if top_k <= MOST:
            return best_and_kth(logits, top_k)
    best = logits.amax(-1, keepdim=True)
    if sampling.top_p < 1:
        values = logits.topk(top_k).values if top_k else logits.sort(stable=True, descending=True).values
        weights = (((values - best) / sampling.temperature).exp() * 2**32).long()  # integers: their sums are exact
        before, total = weights.cumsum(-1) - weights, weights.sum(-1, keepdim=True)
        last = (before[:, 1:].float() < sampling.top_p * total.float()).sum(-1, keepdim=True)  # the first is kept
        return best, values.gather(-1, last)
    if top_k:
        return best, logits.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
    return best, None


def mix(x):
    """Scramble int64 numbers by SplitMix64's finaliser (Steele et al. 2014), a bijection."""
    x = high_mix(x)
    return x ^ shifted(x, 31)


def high_mix(x):
    """mix() without its last line: the high 31 bits are the same."""
    x = (x ^ shifted(x, 30)) * FIRST
    return (x ^ shifted(x, 27)) * SECOND


def shifted(x, bits):
    """x >> bits of int64 taken as unsigned numbers."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def sample_keys(seed, numbers):
    """Keys of samples, [B] int64: a function of the seed and the numbers [B] int64 of the samples."""
    return mix(mix(numbers.new_tensor(seed) + GOLDEN) + numbers)


def exponential(keys, tokens):
    """Exponential variables in float32, a function of key and token; the two broadcast."""
    bits = shifted(high_mix(keys + tokens), 33)
    uniform = ((bits.float() + 0.5) * -(2.0**-31)).clamp(min=2.0**-24 - 1)  # negative; never 0 or -1, and fine near 0
    return -torch.log1p(uniform)
