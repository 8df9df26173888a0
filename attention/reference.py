"""attention() in eager PyTorch, with every feature, in any dtype: the specification that kernels are tested against.

Memory is O(Tq Tk). Letters: B batch, T sequence, H query heads, D head dim.
"""

import math

import torch
import torch.nn.functional as F

from .checks import count_sequences, pair
from .score_mod import twin_of

LOWEST_BIAS = math.log(2) * torch.finfo(torch.float32).min  # what is lower is -inf in float32 and base 2


def reference_attention(
    q, k, v, *, causal=True, window=None, scale=None, softcap=None, dropout=0.0, seed=None, bias=None, decay=None,
    alibi_slopes=None, sink=None, relative_bias=None, score_mod=None, score_args=(), lengths=None, cu_seqlens=None,
    max_seqlen=None, prefix_lengths=None, return_lse=False, return_max_logit=False,
):  # fmt: skip
    """Arguments and results as attention(); seed is a tensor of one int64, and score_mod a label (see score_mod.py).

    Computes in the dtype of q throughout.
    """
    batch, q_len, heads, dim = q.shape
    k_len = k.shape[1]
    group = heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    shape = (batch, heads, q_len, k_len)
    sequence, q_index, q_pos, k_pos, q_exists, visible = place(shape, lengths, cu_seqlens, q.device)
    if causal:
        last = q_pos if prefix_lengths is None else torch.maximum(q_pos, prefix_lengths.view(-1, 1, 1, 1) - 1)
        visible = visible & (k_pos <= last)
    if window is not None:
        visible = visible & (q_pos - k_pos < window) & (k_pos - q_pos < window)
    in_mask = visible
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    places = q_pos, k_pos, torch.arange(heads, device=q.device).view(1, -1, 1, 1), sequence
    if bias is not None:
        visible = visible & ~hides(bias)
    if score_mod is not None:
        with torch.no_grad():
            visible = visible & ~hides(modified(raw_scores(q, k, scale, softcap), score_mod, places, score_args))
    # What no query of a head sees, and a query that sees no key, may be NaN, and 0 * NaN is NaN.
    alive = visible.any(-1, keepdim=True)  # [B, H or 1, Tq, 1]
    hidden = ~visible.any(-2).transpose(1, 2)[..., None]  # [B, Tk, H or 1, 1]
    q = q.masked_fill(~alive.transpose(1, 2), 0.0)
    k, v = (x.masked_fill(hidden, 0.0) for x in (k, v))

    scores = raw_scores(q, k, scale, softcap)
    if score_mod is not None:
        scores = modified(scores, score_mod, places, score_args)
    if decay is not None and k_len > 0:  # the sum runs through all sequences of a row, which the difference cancels
        decay = of_sequences(decay, cu_seqlens)
        gate = decay if decay.device.type == "mps" else decay.double()  # MPS has no float64
        gate = gate.cumsum(1).transpose(1, 2)  # [B, H, Tk]
        at = torch.where(in_mask, torch.arange(k_len, device=q.device), 0).amax(-1)  # last key a query sees: its own
        # The float64 sum as two numbers in the dtype of decay, in which gradients are summed then, as in the kernels.
        high = gate.to(decay.dtype)
        for part in (high, (gate - high).to(decay.dtype)):
            q_part = part.gather(2, at.expand(batch, heads, q_len))
            scores = scores + (q_part[..., :, None] - part[..., None, :]).to(scores.dtype)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(torch.promote_types(scores.dtype, torch.float32))
        slopes = slopes.expand(count_sequences(q, cu_seqlens), heads)
        slopes = slopes[sequence, torch.arange(heads, device=q.device)[:, None, None]]  # [B, H, 1 or Tq, 1]
        scores = scores - (slopes * (q_pos - k_pos).abs()).to(scores.dtype)
    if relative_bias is not None:
        scores = scores + relative_bias_at(relative_bias.to(scores.dtype), q_pos - k_pos)
    if bias is not None:
        scores = (scores + narrowed(bias, scores.dtype)).clamp(min=torch.finfo(scores.dtype).min)

    logits = scores = scores.masked_fill(~visible, float("-inf"))
    filled = alive  # rows whose softmax is of something
    if sink is not None:
        sink = sink[:, None, None]
        filled = alive | (q_exists & ~hides(sink))
        logits = torch.cat((scores, sink.to(scores.dtype).masked_fill(~filled, float("-inf"))), -1)
    logits = logits.masked_fill(~filled, 0.0)  # else NaN on the way back
    weights = torch.softmax(logits, -1)[..., :k_len]
    if dropout > 0:
        kept = keep_mask(seed, sequence, heads, q_index, k_pos, dropout)
        weights = weights * kept / (1 - drop_probability(dropout))
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v).masked_fill(~alive.transpose(1, 2), 0.0)  # and its gradient
    rows = []
    if return_lse:
        rows.append(torch.logsumexp(logits, -1).masked_fill(~filled.squeeze(-1), float("-inf")))
    if return_max_logit:
        by_head = scores.detach().transpose(0, 1).flatten(1)
        rows.append(F.pad(by_head, (0, 1), value=float("-inf")).amax(1))  # one more, since there may be no score at all
    rows = [x.float() if q.dtype != torch.float64 else x for x in rows]
    return (out, *rows) if rows else out


def of_sequences(decay, cu_seqlens):
    """decay [B, Tk, H], 0 before the first packed sequence: it would be in the sums of all tokens, and may be NaN."""
    if cu_seqlens is None:
        return decay
    first = pair(cu_seqlens)[1][0]
    return decay.masked_fill((torch.arange(decay.shape[1], device=decay.device) < first)[:, None], 0.0)


def raw_scores(q, k, scale, softcap):
    """[B, H, Tq, Tk], before score_mod, the other terms and the mask."""
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def modified(scores, score_mod, places, score_args):
    """The new scores of a score_mod; places: q_pos, k_pos, head and sequence."""
    return twin_of(score_mod)(scores, *places, *score_args).to(scores.dtype)


def relative_bias_at(tables, distance):
    """Elements [.., H, Tq, Tk] of relative_bias for the distances q_pos - k_pos [.., 1, Tq, Tk]."""
    index = distance.abs().clamp(max=tables.shape[-1] - 1)
    head = torch.arange(tables.shape[-2], device=index.device)[:, None, None]
    return tables[head, index] if tables.dim() == 2 else tables[(distance < 0).long(), head, index]


def hides(bias):
    """Where a bias hides a key; NaN does not."""
    return bias <= LOWEST_BIAS  # in float16 this is -inf itself


def narrowed(bias, dtype):
    """In a dtype that may hold no numbers as low: what hides no key shall not become -inf."""
    return bias.to(dtype).clamp(min=torch.finfo(dtype).min)


def place(shape, lengths, cu_seqlens, device):
    """Where queries and keys stand, and which pairs exist.

    Returns the number of each query's sequence; the query's index in it and its position, counted in the keys; the
    key's position; and whether the query and the pair exist. All broadcast to [B, H, Tq, Tk].
    """
    batch, _, q_len, k_len = shape
    q_pos = torch.arange(q_len, device=device).view(1, 1, -1, 1)
    k_pos = torch.arange(k_len, device=device).view(1, 1, 1, -1)
    if cu_seqlens is not None:
        q_starts, k_starts = (x.long().clamp(0, n) for x, n in zip(pair(cu_seqlens), (q_len, k_len), strict=True))
        sequence, q_index, q_exists = in_sequences(q_pos, q_starts)
        k_sequence, k_pos, k_exists = in_sequences(k_pos, k_starts)
        more_keys = (k_starts.diff() - q_starts.diff())[sequence]
        exists = (sequence == k_sequence) & q_exists & k_exists
        return sequence, q_index, q_index + more_keys, k_pos, q_exists, exists
    sequence = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    q_index, q_pos = q_pos, q_pos + k_len - q_len
    length = k_len if lengths is None else lengths.long().view(-1, 1, 1, 1)
    q_exists, k_exists = (x.expand(batch, 1, -1, -1) < length for x in (q_pos, k_pos))
    return sequence, q_index, q_pos, k_pos, q_exists, q_exists & k_exists


def in_sequences(pos, starts):
    """Number of the packed sequence of the tokens at pos, their index in it, and whether they are in one."""
    number = torch.searchsorted(starts[1:].contiguous(), pos, right=True)  # how many have ended
    last = starts.shape[0] - 2
    exists, number = (pos >= starts[0]) & (number <= last), number.clamp(max=last)
    return number, torch.where(exists, pos - starts[number], 0), exists  # others may be past the end of a user's table


def drop_probability(dropout):
    """dropout rounded to a multiple of 1 / 256, since 8 random bits decide; above 0 if dropout is, and below 1."""
    return min(max(round(dropout * 256), 1), 255) / 256 if dropout > 0 else 0.0


def keep_mask(seed, sequence, heads, q_index, k_index, dropout):
    """Which weights dropout keeps: [B, H, Tq, Tk] bool, bit for bit as score.drop decides in the kernels."""
    value = seed.view(1, 1, 1, 1)
    head = torch.arange(heads, device=seed.device).view(1, -1, 1, 1)
    low, high = philox(sequence, head, value & 0xFFFFFFFF)
    key, _ = philox(low, high, (value >> 32) & 0xFFFFFFFF)
    low, high = philox(q_index & ~8, k_index & ~9, key)  # shared by queries, and keys, 8 apart, and keys 1 apart
    word = torch.where(((q_index ^ k_index) & 1) == 0, low, high)
    byte = word >> ((q_index & 8) + 2 * (k_index & 8)) & 0xFF
    return byte >= drop_probability(dropout) * 256


def philox(low, high, key):
    """Philox2x32-7 on int64 tensors that hold uint32 values (Salmon et al. 2011)."""
    for _ in range(7):
        # The product has 64 bits and int64 holds 63: multiply the halves of `low` one by one.
        lower, upper = (low & 0xFFFF) * 0xD256D193, (low >> 16) * 0xD256D193
        product_high = (upper + (lower >> 16)) >> 16
        product_low = ((upper << 16) + lower) & 0xFFFFFFFF
        low, high = product_high ^ key ^ high, product_low
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return low, high
