"""decode(): attention of the newest tokens over a key/value cache. It has no gradient.

Letters: B batch, Tq new tokens, S slots of the cache, H query heads, Hkv key/value heads, D and Dv head dims.
"""

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import ops
from .api import AUTOCAST_DEVICES
from .checks import DTYPES, check_impl, check_is, check_is_tensor, check_options, check_tensor, check_tensors
from .features import Call, features_of
from .gpu import runs_kernels, takes_kernels
from .ops import CALL, LIBRARY, TAGS, outside_graphs
from .reference import reference_attention
from .sdpa import sdpa_attention

IMPLEMENTATIONS = ("auto", "triton", "eager")


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
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
    call = Call(
        q, k, v, decay=decay_sum, sink=sink, alibi_slopes=alibi_slopes, lengths=lengths, window=window, softcap=softcap,
        scale=scale, impl=impl,
    )  # fmt: skip
    check_decode(call, ring)
    triton = impl == "triton" or (impl == "auto" and takes_kernels(q.device) and q.dtype in DTYPES)
    call = call._replace(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale), lengths=lengths.contiguous(),
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.expand(q.shape[0], -1),
        impl="triton" if triton else "eager",
    )  # fmt: skip
    if ops.may_launch(*call.tensors):
        check_no_gradient(call)
        return serve(call, ring)  # without PyTorch's dispatcher, which takes as long as a small kernel
    if torch.compiler.is_compiling():  # else the op checks, at each level of torch.func
        check_no_gradient(call)
    return torch.ops.attention.decode.default(*call.for_op, ring)


def check_decode(call, ring):
    """Check all rules of a call, except the values of lengths, for which the host would have to wait."""
    q, window, slots = call.q, call.window, call.k.shape[1]
    check_tensors(*call[:3])
    check_impl(call.impl, IMPLEMENTATIONS)
    if call.impl == "triton" and not runs_kernels(q.device):
        raise ValueError(f"impl='triton' needs tensors on a CUDA GPU, got {q.device}; use impl='auto'")
    check_is("ring", ring, bool)
    check_options(call)
    check_tensor("lengths", call.lengths, q.device, (torch.int32,), [(q.shape[0],)], "[B] = ")
    for feature in features_of(call):
        feature.check(call, "decay_sum" if feature.name == "decay" else feature.name, getattr(call, feature.name))
    if ring and (window is None or window + q.shape[1] - 1 > slots):
        raise ValueError(
            f"ring with window={window} and {q.shape[1]} new tokens needs a window of at most "
            f"{slots - q.shape[1] + 1}, because the cache has {slots} slots"
        )


def check_no_gradient(call):
    """Neither backward nor in forward mode."""
    backward = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in call.learned])
    if backward or (forward_ad._current_level >= 0 and ops.has_tangent(call.learned)):
        raise ValueError("decode() has no gradient; call it under torch.no_grad(), or use attention()")


def serve(call, ring):
    """out [B, Tq, H, Dv] of a call that has been checked."""
    if call.impl == "triton":
        from .decode_kernel import launch_decode  # imports Triton

        return launch_decode(call, ring)
    if call.q.device.type not in AUTOCAST_DEVICES:  # such as meta
        return eager_decode(call, ring)
    with torch.autocast(call.q.device.type, enabled=False):  # in the dtype of q, as the kernels
        return eager_decode(call, ring)


def eager_decode(call, ring):
    """decode() in eager PyTorch: attention() over all slots of the cache, with a bias that hides keys from queries.

    A CPU computes only with the slots that a row has filled, row by row where the lengths differ; on other devices the
    host would have to wait for the lengths.
    """
    q, k, v, lengths, sums, slopes = call.q, call.k, call.v, call.lengths, call.decay, call.alibi_slopes
    (batch, q_len, heads, _), slots = q.shape, k.shape[1]
    features = call.softcap is not None or len(features_of(call)) > 0
    if q.device.type == "cpu" and not ring and batch > 0:
        counts = lengths.clamp(0, slots).tolist()
        if len(set(counts)) > 1:
            rows = [[x if x is None or x is call.sink else x[i : i + 1] for x in call.tensors] for i in range(batch)]
            return torch.cat([eager_decode(call.with_tensors(row), ring) for row in rows])
        slots = counts[0]
        k, v, sums = (None if x is None else x[:, :slots] for x in (k, v, sums))
        if q_len == 1 and slots > 0 and not (features or call.window):  # the query sees all keys
            return sdpa_attention(q, k, v, False, None, call.scale, 0.0, None)
    if batch == 0 or slots == 0:
        return q.new_zeros(batch, q_len, heads, v.shape[-1])
    lengths = lengths.long() if ring else lengths.long().clamp(max=slots)
    last = lengths[:, None, None] - 1
    q_pos = last - torch.arange(q_len, device=q.device).flip(0)[:, None]  # [B, Tq, 1]
    k_pos = torch.arange(slots, device=q.device)
    if ring:  # the newest position in each slot, negative if there is none
        k_pos = last - (last - k_pos) % slots  # [B, 1, S]
    visible = (k_pos >= 0) & (k_pos <= q_pos)
    if call.window:
        visible = visible & (q_pos - k_pos < call.window)
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
        rest = dict(scale=call.scale, softcap=call.softcap, sink=call.sink)
        return reference_attention(q, k, v, causal=False, bias=bias, **rest)
    return sdpa_attention(q, k, v, False, None, call.scale, 0.0, bias)


LIBRARY.define(f"decode({CALL}, bool ring) -> Tensor", tags=TAGS)


@torch.library.impl(LIBRARY, "decode", "CompositeExplicitAutograd")
@outside_graphs
def _decode(*arguments):
    *call, ring = arguments
    return serve(Call(*call), ring).contiguous()  # as the fake below


@torch.library.impl(LIBRARY, "decode", "Autograd")
@outside_graphs
def _decode_or_error(*arguments):
    check_no_gradient(Call(*arguments[:-1]))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attention.decode.default(*arguments)


@torch.library.register_fake("attention::decode", lib=LIBRARY)
def _(q, k, v, *rest):
    return q.new_empty(*q.shape[:3], v.shape[-1])


@register_flop_formula(torch.ops.attention.decode, get_raw=True)
def _(q, k, v, *rest, out_val):
    return ops.count_flops(q, k, v, 1, 1)


ops.one_by_one(torch.ops.attention.decode.default)
