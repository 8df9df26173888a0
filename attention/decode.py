"""decode(): attention of the newest tokens over a key/value cache. It has no gradient.

Letters: B batch, Tq new tokens, S slots of the cache, H query heads, Hkv key/value heads, D and Dv head dims.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import ops
from .api import AUTOCAST_DEVICES
from .checks import DTYPES, check_impl, check_is, check_is_tensor, check_options, check_tensor, check_tensors
from .features import Call, features_of
from .gpu import runs_kernels, takes_kernels
from .ops import LIBRARY, TAGS, outside_graphs
from .reference import reference_attention
from .sdpa import sdpa_attention

IMPLEMENTATIONS = ("auto", "triton", "eager")


class DecodeOptions(NamedTuple):
    """The optional arguments of a call, as the op takes them; None or 0 means absent."""

    decay_sum: Tensor | None
    alibi_slopes: Tensor | None  # [B, H]
    sink: Tensor | None
    window: int
    softcap: float
    scale: float
    ring: bool
    triton: bool  # whether the kernels serve the call


def decode(
    q, k, v, lengths, *, window=None, scale=None, softcap=None, decay_sum=None, alibi_slopes=None, sink=None,
    ring=False, impl="auto",
):  # fmt: skip
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
        window, scale, softcap, alibi_slopes, sink: as in attention().
        decay_sum: [B, S, H] float32 or float64: for each key in the cache, the sum of attention()'s decay up to and
            including its token. In float64 the difference of two neighbours stays exact in a long row.
        ring: position p is in slot p % S. A cache of window + Tq - 1 slots then serves rows of any length.
        impl: "auto" takes the kernels on NVIDIA's GPUs from compute capability 8.0 on, except in float64, and eager
            PyTorch elsewhere. That computes with all slots, or on a CPU without ring with those that are filled.
            "triton" and "eager" never fall back.

    Returns:
        [B, Tq, H, Dv] in the dtype of q.

    Raises:
        ValueError: an argument breaks a rule above, or needs a gradient.

    Source: Dao et al., Flash-Decoding for long-context inference (2023).
    """
    check_decode(q, k, v, lengths, window, scale, softcap, decay_sum, alibi_slopes, sink, ring, impl)
    triton = impl == "triton" or (impl == "auto" and takes_kernels(q.device) and q.dtype in DTYPES)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(q.shape[0], -1)
    lengths = lengths.contiguous()
    options = DecodeOptions(decay_sum, alibi_slopes, sink, window or 0, softcap or 0.0, scale, ring, triton)
    if ops.may_launch(q, k, v, lengths, decay_sum, alibi_slopes, sink):
        check_no_gradient(q, k, v, decay_sum, sink)
        return serve(q, k, v, lengths, options)  # without PyTorch's dispatcher, which takes as long as a small kernel
    if torch.compiler.is_compiling():  # else the op checks, at each level of torch.func
        check_no_gradient(q, k, v, decay_sum, sink)
    return torch.ops.attention.decode.default(q, k, v, lengths, *options)


def check_decode(q, k, v, lengths, window, scale, softcap, decay_sum, alibi_slopes, sink, ring, impl):
    """Check all rules of a call, except the values of lengths, for which the host would have to wait."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
    check_tensors(q, k, v)
    check_impl(impl, IMPLEMENTATIONS)
    if impl == "triton" and not runs_kernels(q.device):
        raise ValueError(f"impl='triton' needs tensors on a CUDA GPU, got {q.device}; use impl='auto'")
    check_is("ring", ring, bool)
    options = dict(window=window, scale=scale, softcap=softcap, impl="auto" if impl == "eager" else impl)
    call = Call(q, k, v, alibi_slopes=alibi_slopes, sink=sink, **options)
    check_options(call)
    for feature in features_of(call):
        feature.check(call, feature.name, getattr(call, feature.name))
    (batch, q_len, heads, _), slots = q.shape, k.shape[1]
    check_tensor("lengths", lengths, q.device, (torch.int32,), [(batch,)], "[B] = ")
    if ring and (window is None or window + q_len - 1 > slots):
        raise ValueError(
            f"ring with window={window} and {q_len} new tokens needs a window of at most {slots - q_len + 1}, "
            f"because the cache has {slots} slots"
        )
    if decay_sum is not None:
        dtypes, shape = (torch.float32, torch.float64), (batch, slots, heads)
        check_tensor("decay_sum", decay_sum, q.device, dtypes, [shape], "[B, S, H] = ")


def check_no_gradient(*tensors):
    """Neither backward nor in forward mode."""
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return
    tensors = [x for x in tensors if x is not None]
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    dual = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if backward or dual:
        raise ValueError("decode() has no gradient; call it under torch.no_grad(), or use attention()")


def serve(q, k, v, lengths, options):
    """out [B, Tq, H, Dv] of a call that has been checked."""
    if options.triton:
        from .decode_kernel import launch_decode  # imports Triton

        return launch_decode(q, k, v, lengths, options)
    if q.device.type not in AUTOCAST_DEVICES:  # such as meta
        return eager_decode(q, k, v, lengths, options)
    with torch.autocast(q.device.type, enabled=False):  # in the dtype of q, as the kernels
        return eager_decode(q, k, v, lengths, options)


def eager_decode(q, k, v, lengths, options):
    """decode() in eager PyTorch: attention() over all slots of the cache, with a bias that hides keys from queries.

    A CPU computes only with the slots that a row has filled, row by row where the lengths differ; on other devices the
    host would have to wait for the lengths.
    """
    (batch, q_len, heads, _), slots, sums, slopes = q.shape, k.shape[1], options.decay_sum, options.alibi_slopes
    features = options.softcap or any(x is not None for x in (sums, slopes, options.sink))
    if q.device.type == "cpu" and not options.ring and batch > 0:
        counts = lengths.clamp(0, slots).tolist()
        if len(set(counts)) > 1:
            terms = (batch * [None] if x is None else x.split(1) for x in (sums, slopes))
            rows = zip(*(x.split(1) for x in (q, k, v, lengths)), *terms, strict=True)
            return torch.cat([eager_decode(*row, options._replace(decay_sum=x, alibi_slopes=y)) for *row, x, y in rows])
        slots = counts[0]
        k, v, sums = (None if x is None else x[:, :slots] for x in (k, v, sums))
        if q_len == 1 and slots > 0 and not (features or options.window):  # the query sees all keys
            return sdpa_attention(q, k, v, False, None, options.scale, 0.0, None)
    if batch == 0 or slots == 0:
        return q.new_zeros(batch, q_len, heads, v.shape[-1])
    lengths = lengths.long() if options.ring else lengths.long().clamp(max=slots)
    last = lengths[:, None, None] - 1
    q_pos = last - torch.arange(q_len, device=q.device).flip(0)[:, None]  # [B, Tq, 1]
    k_pos = torch.arange(slots, device=q.device)
    if options.ring:  # the newest position in each slot, negative if there is none
        k_pos = last - (last - k_pos) % slots  # [B, 1, S]
    visible = (k_pos >= 0) & (k_pos <= q_pos)
    if options.window:
        visible = visible & (q_pos - k_pos < options.window)
    visible = visible[:, None]
    if sums is not None:
        sums = sums.transpose(1, 2)  # [B, H, S]
        own = (q_pos.clamp(min=0) % slots).transpose(1, 2).expand(batch, heads, q_len)
        bias = (sums.gather(2, own)[..., None] - sums[:, :, None]).masked_fill(~visible, float("-inf"))
    else:
        bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    if slopes is not None:
        slopes = slopes.to(torch.promote_types(q.dtype, torch.float32))
        bias = bias - slopes[:, :, None, None] * (q_pos - k_pos)[:, None]
    if features:
        rest = dict(softcap=options.softcap or None, sink=options.sink)
        return reference_attention(q, k, v, causal=False, scale=options.scale, bias=bias, **rest)
    return sdpa_attention(q, k, v, False, None, options.scale, 0.0, bias)


LIBRARY.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? decay_sum, Tensor? alibi_slopes, Tensor? sink, "
    "int window, float softcap, float scale, bool ring, bool triton) -> Tensor",
    tags=TAGS,
)


@torch.library.impl(LIBRARY, "decode", "CompositeExplicitAutograd")
@outside_graphs
def _decode(q, k, v, lengths, *options):
    return serve(q, k, v, lengths, DecodeOptions(*options)).contiguous()  # as the fake below


@torch.library.impl(LIBRARY, "decode", "Autograd")
@outside_graphs
def _decode_or_error(q, k, v, lengths, *options):
    decay_sum, _, sink, *_ = options
    check_no_gradient(q, k, v, decay_sum, sink)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attention.decode.default(q, k, v, lengths, *options)


@torch.library.register_fake("attention::decode", lib=LIBRARY)
def _(q, k, v, lengths, *options):
    return q.new_empty(*q.shape[:3], v.shape[-1])


@register_flop_formula(torch.ops.attention.decode, get_raw=True)
def _(q, k, v, *rest, out_val):
    return ops.count_flops(q, k, v, 1, 1)


ops.one_by_one(torch.ops.attention.decode.default)
