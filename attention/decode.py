"""decode(): attention of the newest tokens over a key/value cache. It has no gradient.

Letters: B batch, Tq new tokens, S slots of the cache, H query heads, Hkv key/value heads, D and Dv head dims.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import DTYPES, check_is, check_is_tensor, check_options, check_tensors, check_terms
from .ops import LIBRARY, TAGS
from .reference import reference_attention
from .sdpa import sdpa_attention

IMPLEMENTATIONS = ("auto", "triton", "eager")


class Options(NamedTuple):
    """The optional tensors and numbers of a call, as the op takes them; None or 0 = without."""

    decay_sum: Tensor | None
    sink: Tensor | None
    window: int
    softcap: float
    scale: float
    ring: bool
    triton: bool  # whether the kernels serve the call


def decode(
    q, k, v, lengths, *, window=None, scale=None, softcap=None, decay_sum=None, sink=None, ring=False, impl="auto"
):
    """Causal attention of the newest Tq tokens of each row over the keys and values in a cache.

    The result is that of attention(q, k, v, causal=True) on the keys that each row has. The host never waits for
    lengths, and one compiled kernel serves all lengths, so calls can be captured in a CUDA graph. The keys are split
    over many programs, even if there is only one row. Queries with the same key head share one load of keys and values.

    Args:
        q: [B, Tq, H, D] float16, bfloat16 or float32; Tq is one or a few.
        k, v: [B, S, Hkv, D] and [B, S, Hkv, Dv], the cache, dtype and device of q, with the new tokens' keys and values
            already in it. Position p is in slot p. Slots that no query sees may hold NaN.
        lengths: [B] int32 on the device of q, the number of tokens of each row, new ones included, at most S. Query i
            stands at position lengths - Tq + i; one at a negative position gives 0.
        window, scale, softcap, sink: as in attention().
        decay_sum: [B, S, H] float32 or float64: for each key in the cache, the sum of attention()'s decay up to and
            including its token. In float64 the difference of two neighbours stays exact in a long row.
        ring: position p is in slot p % S. A cache of window + Tq - 1 slots then serves rows of any length.
        impl: "auto" takes the kernels on a CUDA GPU and eager PyTorch elsewhere, which waits for lengths. "triton" and
            "eager" never fall back.

    Returns:
        [B, Tq, H, Dv] in the dtype of q.

    Raises:
        ValueError: an argument breaks a rule above, or needs a gradient.

    Source: Dao et al., Flash-Decoding for long-context inference (2023).
    """
    check_decode(q, k, v, lengths, window, scale, softcap, decay_sum, sink, ring, impl)
    triton = impl == "triton" or (impl == "auto" and q.is_cuda and q.dtype in DTYPES)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options = Options(decay_sum, sink, window or 0, softcap or 0.0, scale, ring, triton)
    if torch.compiler.is_compiling():
        return torch.ops.attention.decode.default(q, k, v, lengths, *options)
    return serve(q, k, v, lengths, options)  # without PyTorch's dispatcher, which takes as long as a small kernel


def check_decode(q, k, v, lengths, window, scale, softcap, decay_sum, sink, ring, impl):
    """Every rule of a call but the values of lengths, which would make the host wait."""
    for name, x in (("q", q), ("k", k), ("v", v), ("lengths", lengths)):
        check_is_tensor(name, x)
    check_tensors(q, k, v)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "triton" and not (q.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f"impl='triton' needs tensors on a CUDA GPU, got {q.device}; use impl='auto'")
    check_options(q, True, window, scale, softcap, 0.0, impl if impl == "triton" else "auto", False, None)
    check_is("ring", ring, bool)
    check_terms(q, k, True, None, None, sink)
    (batch, q_len, heads, _), slots = q.shape, k.shape[1]
    if lengths.dtype != torch.int32 or lengths.shape != (batch,) or lengths.device != q.device:
        raise ValueError(
            f"lengths is {lengths.dtype} of shape {tuple(lengths.shape)} on {lengths.device}; "
            f"it must be int32 of shape ({batch},) on {q.device}"
        )
    if batch > 1 and lengths.stride(0) != 1:
        raise ValueError(f"lengths has stride {lengths.stride(0)}; it must be 1: call .contiguous()")
    if ring and (window is None or window + q_len - 1 > slots):
        raise ValueError(
            f"ring with window={window} and {q_len} new tokens needs a window of at most {slots - q_len + 1}, "
            f"because the cache has {slots} slots"
        )
    if decay_sum is not None:
        check_is_tensor("decay_sum", decay_sum)
        if tuple(decay_sum.shape) != (batch, slots, heads):
            raise ValueError(f"decay_sum has shape {tuple(decay_sum.shape)}; it must be {(batch, slots, heads)}")
        if decay_sum.dtype not in (torch.float32, torch.float64) or decay_sum.device != q.device:
            raise ValueError(f"decay_sum is {decay_sum.dtype} on {decay_sum.device}; it must be float64 on {q.device}")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, decay_sum, sink)):
        raise ValueError("decode() has no gradient; call it under torch.no_grad(), or use attention()")


def serve(q, k, v, lengths, options):
    """out [B, Tq, H, Dv] of a call that has been checked."""
    if options.triton:
        from .decode_kernel import launch_decode  # imports Triton

        return launch_decode(q, k, v, lengths, options)
    counts = lengths.clamp(0, None if options.ring else k.shape[1]).tolist()
    if len(set(counts)) == 1:
        return eager_decode(q, k, v, counts[0], options)
    rows = []
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        decay_sum = None if options.decay_sum is None else options.decay_sum[one]
        rows.append(eager_decode(q[one], k[one], v[one], count, options._replace(decay_sum=decay_sum)))
    return torch.cat(rows) if rows else q.new_zeros(*q.shape[:3], v.shape[-1])


def eager_decode(q, k, v, count, options):
    """decode() in eager PyTorch for rows of `count` tokens each: attention() on the keys that a query can see."""
    (batch, q_len, heads, _), slots = q.shape, k.shape[1]
    if count == 0:
        return q.new_zeros(batch, q_len, heads, v.shape[-1])
    window = options.window or None
    first = max(count - q_len + 1 - window, 0) if window else 0
    visible = torch.arange(first, count, device=q.device) % slots if options.ring else slice(first, count)
    k, v = k[:, visible], v[:, visible]
    if not (options.softcap or options.decay_sum is not None or options.sink is not None or q_len > k.shape[1]):
        return sdpa_attention(q, k, v, True, window, options.scale, 0.0, None)
    decay = None
    if options.decay_sum is not None:
        sums = options.decay_sum[:, visible]
        decay = sums.diff(dim=1, prepend=sums[:, :1])
    return reference_attention(
        q, k, v, window=window, scale=options.scale, softcap=options.softcap or None, decay=decay, sink=options.sink
    )


LIBRARY.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? decay_sum, Tensor? sink, int window, float softcap, "
    "float scale, bool ring, bool triton) -> Tensor",
    tags=TAGS,
)


@torch.library.impl(LIBRARY, "decode", "CompositeExplicitAutograd")
@torch.compiler.disable
def _decode(q, k, v, lengths, *options):
    return serve(q, k, v, lengths, Options(*options))


@torch.library.register_fake("attention::decode", lib=LIBRARY)
def _(q, k, v, lengths, *options):
    return q.new_empty(*q.shape[:3], v.shape[-1])
