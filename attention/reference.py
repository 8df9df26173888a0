"""attention() in eager PyTorch, with every feature, in any dtype: the specification that kernels are tested against.

Memory is O(Tq Tk). Letters: B batch, T sequence, H query heads, G key heads, D head dim.
"""

import torch


def reference_attention(
    q, k, v, *, causal=True, window=None, scale=None, softcap=None, dropout=0.0, seed=None, return_lse=False
):
    """Arguments and results as attention(); seed is a tensor of one int64. Computes in the dtype of q throughout."""
    q_len, k_len, heads = q.shape[1], k.shape[1], q.shape[2]
    group = heads // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))

    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    q_pos = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len  # counted in keys
    k_pos = torch.arange(k_len, device=q.device)[None, :]
    visible = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device)
    if causal:
        visible &= k_pos <= q_pos
    if window is not None:
        visible &= (q_pos - k_pos < window) & (k_pos - q_pos < window)

    # A row that sees no key gives 0 and lse = -inf, without a NaN on the way back.
    alive = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible & alive, float("-inf"))
    weights = torch.softmax(scores, -1) * alive
    if dropout > 0:
        weights = weights * keep_mask(seed, scores.shape, dropout) / (1 - dropout)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    if not return_lse:
        return out
    lse = torch.logsumexp(scores, -1).masked_fill(~alive.squeeze(-1), float("-inf"))
    return out, lse.float() if q.dtype != torch.float64 else lse


def keep_mask(seed, shape, dropout):
    """Which weights dropout keeps: [B, H, Tq, Tk] bool, bit for bit as score.drop decides in the kernels."""
    batch, heads, q_len, k_len = shape

    def counter(size, axis):
        return torch.arange(size, device=seed.device).view([-1 if a == axis else 1 for a in range(4)])

    value = seed.view(1, 1, 1, 1)
    low, high = philox(counter(batch, 0), counter(heads, 1), value & 0xFFFFFFFF)
    key, _ = philox(low, high, (value >> 32) & 0xFFFFFFFF)
    q_pos = counter(q_len, 2) + k_len - q_len
    bits, _ = philox(q_pos & 0xFFFFFFFF, counter(k_len, 3), key)
    return bits >= int(dropout * 2**32)


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
