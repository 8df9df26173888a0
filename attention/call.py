"""The arguments of one attention() call."""

from typing import NamedTuple

import torch
from torch import Tensor

_SIMPLE = frozenset({bool, int, float, str, type(None)})


class Call(NamedTuple):
    """All of them, as given, but for q, k and v under autocast, which have its dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window: int | None
    scale: float | None
    softcap: float | None
    dropout: float
    seed: int | Tensor | None
    bias: Tensor | None
    decay: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    lengths: Tensor | None
    cu_seqlens: Tensor | tuple | None
    max_seqlen: int | tuple | None
    prefix_lengths: Tensor | None
    return_lse: bool
    return_max_logit: bool
    impl: str


def is_ragged(call):
    """Whether sequences have lengths, or bounds in packed rows."""
    return call.lengths is not None or call.cu_seqlens is not None


def key_of(call):
    """What decides which implementation serves a Call; None with tensors of terms, prefixes or a seed tensor.

    Left out are the seed and the values of lengths, cu_seqlens and max_seqlen, so each call must check them.
    """
    options = (
        call.causal, call.window, call.scale, call.softcap, call.dropout, call.return_lse, call.return_max_logit,
        call.impl,
    )  # fmt: skip
    types = tuple(map(type, (*options, call.seed)))  # the types too, since True == 1
    terms = any(x is not None for x in (call.bias, call.decay, call.alibi_slopes, call.sink))
    if terms or call.prefix_lengths is not None or not _SIMPLE.issuperset(types) or torch.compiler.is_compiling():
        return None
    given = call.lengths is not None, type(call.cu_seqlens), call.max_seqlen is not None  # one tensor, or a pair
    return (*((x.shape, x.stride(), x.dtype, x.device) for x in (call.q, call.k, call.v)), options, types, given)
