"""attention() by torch's scaled_dot_product_attention: which calls it can express, and how."""

import torch
import torch.nn.functional as F

from .reference import hides, narrowed


def sdpa_lacks(call):
    """What of a Call torch's scaled_dot_product_attention cannot express, in words; None if it can express all."""
    q_len, k_len = call.q.shape[1], call.k.shape[1]
    for name in ("softcap", "decay", "alibi_slopes", "sink", "cu_seqlens", "prefix_lengths"):
        if getattr(call, name) is not None:
            return name
    for name in ("return_lse", "return_max_logit"):
        if getattr(call, name):
            return name
    if call.dropout > 0 and call.seed is not None:
        return "dropout with a given seed"
    if call.causal and q_len > k_len:
        return f"causal attention of {q_len} queries to {k_len} keys (the first queries see no key)"
    if call.window is not None and q_len > k_len:
        return f"a window with {q_len} queries and {k_len} keys"
    if call.lengths is not None:
        return "lengths (queries past them see no key)"
    return None


def sdpa_attention(q, k, v, causal, window, scale, dropout, bias):
    """out [B, Tq, H, Dv] of a call that lacks nothing; arguments as in attention(), bias with four dimensions.

    What nobody sees is cut off or zeroed: it may hold NaN, and 0 * NaN is NaN.
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
    if window is not None or (causal and (q_len < k_len or bias is not None or scale <= 0)):
        q_pos = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len
        distance = q_pos - torch.arange(k_len, device=q.device)
        mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            mask = mask & (distance.abs() < window)
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
