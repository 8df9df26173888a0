"""attention() by torch's scaled_dot_product_attention: which calls it can express, and how."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from . import ops
from .features import feature_lacking, four_dims
from .reference import hides, narrowed

TOGETHER = 128  # tokens: shorter packed sequences always share a call


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
        if call.q.device.type != "cpu" or hides_values(call):  # which are read here, on the host
            return "cu_seqlens on a GPU, in a graph or of a fake tensor"
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
    """Whether the host must not read what is in the tensors of a Call."""
    return ops.recorded() or ops.watched(*call[:3], call.cu_seqlens)


def attention_by_sdpa(call):
    """out [B, Tq, H, Dv] of a Call that sdpa_problem() accepts, with its scale."""
    arguments = *call[:3], call.causal, call.window, call.scale, call.dropout
    if call.cu_seqlens is not None:
        return packed_sdpa_attention(*arguments, call.cu_seqlens)
    return sdpa_attention(*arguments, None if call.bias is None else four_dims(call, call.bias))


def packed_sdpa_attention(q, k, v, causal, window, scale, dropout, cu_seqlens):
    """sdpa_attention() of packed sequences on a CPU. Neighbours share a call if they are no longer than the longest."""
    tokens = q.shape[1]
    starts = cu_seqlens.clamp(0, tokens).tolist()
    most = max(TOGETHER, *(end - start for start, end in pairwise(starts)))
    cuts = [0, starts[0]]
    for start, end in pairwise(starts):
        if end - cuts[-1] > most:
            cuts.append(start)
    sizes = [end - start for start, end in pairwise([*cuts, starts[-1], tokens])]
    number = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(tokens, device=q.device), right=True)[None]
    *parts, rest = zip(*(x.split(sizes, 1) for x in (q, k, v, number)), strict=True)
    outs = [
        sdpa_attention(*qkv, causal, window, scale, dropout, None, None if numbers[0, 0] == numbers[0, -1] else numbers)
        for *qkv, numbers in parts[1:]
        if numbers.numel()
    ]
    zero = sum(x[..., :0].sum() for x in (q, k, v))  # with gradients of 0
    before, behind = (zero.expand(*x[0].shape[:3], v.shape[-1]) for x in (parts[0], rest))  # in no sequence
    return torch.cat([before, *outs, behind], 1)


def sdpa_attention(q, k, v, causal, window, scale, dropout, bias, number=None):
    """out [B, Tq, H, Dv] of a call that lacks nothing; arguments as in attention(), bias with four dimensions.

    number: [1, T], each token's sequence; None if there is one. What nobody sees is cut off or zeroed: it may hold
    NaN, and 0 * NaN is NaN.
    """
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
    if number is not None or window is not None or (causal and (q_len < k_len or bias is not None or scale <= 0)):
        q_pos = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len
        distance = q_pos - torch.arange(k_len, device=q.device)
        mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            mask = mask & (distance.abs() < window)
        if number is not None:
            mask = mask & (number.mT == number)
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
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, dropout_p=dropout, scale=scale,
        is_causal=causal and mask is None, enable_gqa=grouped,
    )  # fmt: skip
    return out.transpose(1, 2)
