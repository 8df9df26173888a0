"""attention() by torch's scaled_dot_product_attention: which calls it can express, and how."""

import math
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F

from . import ops
from .checks import pair
from .features import feature_lacking, four_dims
from .reference import hides, narrowed

TOGETHER = 128  # tokens: shorter packed sequences always share a call
LEVELS = 2**15  # of a 16-bit number without its sign


def sdpa_problem(call):
    """What of a Call torch's scaled_dot_product_attention cannot express, in words; None if it can express all."""
    q_len, k_len = call.q.shape[1], call.k.shape[1]
    if call.softcap is not None:
        return "softcap"
    if lacking := feature_lacking(call, "sdpa"):
        return lacking
    for name in ("return_lse", "return_max_logit"):
        if getattr(call, name):
            return name
    if call.cu_seqlens is not None:
        if call.max_seqlen is None and hides_values(call):
            return "cu_seqlens without max_seqlen on a GPU, in a graph or of a fake tensor"
        if isinstance(call.cu_seqlens, tuple) or call.bias is not None:
            return "cu_seqlens of queries and keys apart, or with a bias"
    if call.dropout > 0 and call.seed is not None:
        return "dropout with a given seed"
    if call.causal and q_len > k_len:
        return "causal attention of more queries than keys (the first queries see no key)"
    if call.window is not None and q_len > k_len:
        return "a window with more queries than keys"
    if call.lengths is not None:
        return "lengths (queries past them see no key)"
    return None


def hides_values(call):
    """Whether the host must not read what is in the tensors of a Call, or would wait for a GPU."""
    return call.q.device.type != "cpu" or ops.recorded() or ops.watched(*call[:3], call.cu_seqlens)


def attention_by_sdpa(call):
    """out [B, Tq, H, Dv] of a Call that sdpa_problem() accepts, with its scale."""
    arguments = *call[:3], call.causal, call.window, call.scale, call.dropout
    if call.cu_seqlens is not None:
        if hides_values(call):
            return sdpa_attention_in_blocks(*arguments, call.cu_seqlens, pair(call.max_seqlen)[0])
        return packed_sdpa_attention(*arguments, call.cu_seqlens)
    return sdpa_attention(*arguments, None if call.bias is None else four_dims(call, call.bias))


def packed_sdpa_attention(q, k, v, causal, window, scale, dropout, cu_seqlens):
    """sdpa_attention() of packed sequences on a CPU. Neighbours share a call if they are no longer than the longest."""
    tokens = q.shape[1]
    starts = cu_seqlens.clamp(0, tokens).tolist()
    most = max(TOGETHER, *(end - start for start, end in pairwise(starts)))
    cuts = starts[:1]
    for start, end in pairwise(starts):
        if end - cuts[-1] > most:
            cuts.append(start)
    sizes = [end - start for start, end in pairwise([*cuts, starts[-1]])]
    every = q, k, v, numbers(cu_seqlens, tokens)[None]
    parts = zip(*(x[:, starts[0] : starts[-1]].split(sizes, 1) for x in every), strict=True)
    outs = [
        sdpa_attention(*qkv, causal, window, scale, dropout, None, None if (own == own[:, :1]).all() else own.mT == own)
        for *qkv, own in parts
    ]
    return F.pad(torch.cat(outs, 1), (0, 0, 0, 0, starts[0], tokens - starts[-1]))  # others are in no sequence


def sdpa_attention_in_blocks(q, k, v, causal, window, scale, dropout, cu_seqlens, longest):
    """sdpa_attention() of packed sequences of at most `longest` tokens; reads nothing on the host.

    Blocks of queries are its batch, each with the blocks of keys that they may see. A token sees itself, so no row of
    the mask is empty: tokens of no sequence, and the padding, are zeros that see each other.
    """
    tokens = q.shape[1]
    reach = min(longest, tokens, window or tokens)  # keys that a query sees at most, its own included
    block = max(64, -(-reach // 2))  # those of a query lie in its own block and two before; without causal two after
    blocks, around = -(-tokens // block), 3 if causal else 5
    number = numbers(cu_seqlens, tokens)
    outside = ((number == 0) | (number == cu_seqlens.shape[0]))[:, None, None]
    parts = []
    for x in (*(x[0].masked_fill(outside, 0.0) for x in (q, k, v)), number):
        padding = 2 * block, (blocks + around - 3) * block - tokens
        parts.append(F.pad(x, (*(0, 0) * (x.dim() - 1), *padding)).unflatten(0, (-1, block)))
    q, q_number = (x[2 : 2 + blocks] for x in parts[::3])
    k, v, k_number = (torch.cat([x[i : i + blocks] for i in range(around)], 1) for x in parts[1:])
    q_pos = torch.arange(2 * block, 3 * block, device=q.device)[:, None]
    distance = q_pos - torch.arange(around * block, device=q.device)
    seen = (q_number[:, :, None] == k_number[:, None]) & (distance < reach) & (distance > (-1 if causal else -reach))
    out = sdpa_attention(q, k, v, False, None, scale, dropout, None, seen[:, None])
    return out.flatten(0, 1)[:tokens].masked_fill(outside, 0.0)[None]


def numbers(cu_seqlens, tokens):
    """The number of each token's sequence, [T] int32: from 1 on, 0 before the first, N + 1 behind the last."""
    tokens = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True, out_int32=True)


def sdpa_attention(q, k, v, causal, window, scale, dropout, bias, seen=None):
    """out [B, Tq, H, Dv] of a call that lacks nothing; arguments as in attention(), bias with four dimensions.

    seen: bool [B, 1 or H, Tq, Tk], of which causal and window leave a part; None = all. What nobody sees is cut off or
    zeroed: it may hold NaN, and 0 * NaN is NaN.
    """
    dtype, on_cpu = q.dtype, q.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled():  # in 16 bits, PyTorch's backward takes three times as long there
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    drops = on_cpu and dropout > 0 and bias is None
    if window is not None:  # positions are counted from the last key, so nothing else moves
        before = max(k.shape[1] - q.shape[1] + 1 - window, 0)
        k, v = k[:, before:], v[:, before:]
        if bias is not None and bias.shape[-1] > 1:
            bias = bias[..., before:]
    q_len, k_len = q.shape[1], k.shape[1]
    if bias is not None:
        bias = bias.expand(*bias.shape[:-1], k_len)  # a kernel of PyTorch's for GPUs wants this dimension contiguous
    mask = None
    if q_len == 1:  # it sees all keys
        causal = False
    # PyTorch's causal attention on CPUs gives NaN unless the scale is positive
    needs_mask = q_len < k_len or bias is not None or scale <= 0 or drops
    if seen is not None or window is not None or (causal and needs_mask):
        q_pos = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len
        distance = q_pos - torch.arange(k_len, device=q.device)
        mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            mask = mask & (distance.abs() < window)
        if seen is not None:
            mask = mask & seen
    if bias is not None:
        hidden = hides(bias) if mask is None else hides(bias) | ~mask
        mask = narrowed(bias, q.dtype).masked_fill(hidden, float("-inf"))
        # A 0 that depends on the bias: where the mask alone learns, PyTorch's GPU kernel reads past memory (its issue
        # 148476, mended by its pull request 188302).
        q = torch.where(hidden.all(-1).transpose(1, 2)[..., None], mask[..., :0].sum(), q)
        hidden = hidden.all(-2)  # [B or 1, H or 1, Tk or 1]
        if hidden.shape[1] > 1:
            hidden = hidden.unflatten(1, (k.shape[2], -1)).all(2)  # from all query heads of a key head
        k, v = (x.masked_fill(hidden.transpose(1, 2)[..., None], 0.0) for x in (k, v))
    grouped = True if q.shape[2] != k.shape[2] else False  # noqa: SIM210, a bool where torch.compile has symbols
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False) if on_cpu else nullcontext():
        if drops:
            out = attention_with_dropout(q, k, v, mask, dropout, scale)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=causal and mask is None,
                enable_gqa=grouped,
            )  # fmt: skip
    return out.transpose(1, 2).to(dtype)


def attention_with_dropout(q, k, v, seen, dropout, scale):
    """out [B, H, Tq, D] of q [B, H, Tq, D], k and v [B, Hkv, Tk, D]; seen: bool, as in sdpa_attention().

    As PyTorch computes it on a CPU, where most of its time goes into a random number for each weight, in one thread.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (scale * q) @ k.mT
    if seen is not None:
        scores = scores + torch.where(seen, 0.0, float("-inf"))  # sooner than masked_fill() of all of them
    weights = torch.softmax(scores, -1)
    kept, growth = keep(weights.shape, dropout, q.device)
    return growth * (weights * kept @ v)


def keep(shape, dropout, device):
    """Which elements dropout keeps, a bool tensor, and the factor by which they grow.

    Four numbers of 15 bits come from one of 64, so dropout is rounded to n / 32,768.
    """
    count, dropped = math.prod(shape), min(round(dropout * LEVELS), LEVELS - 1)
    numbers = torch.randint(-(2**62), 2**62, (-(-count // 4),), device=device).view(torch.int16)[:count].view(shape)
    return numbers.bitwise_and(LEVELS - 1) >= dropped, LEVELS / (LEVELS - dropped)
