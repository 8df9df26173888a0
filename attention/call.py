"""The arguments of one attention() call."""

from typing import NamedTuple

import torch
from torch import Tensor

from .features import features_of

_SIMPLE = frozenset({bool, int, float, str, type(None)})


class Call(NamedTuple):
    """All of them, as given, but for q, k and v under autocast, which have its dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None
    bias: Tensor | None = None
    decay: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    relative_bias: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | tuple | None = None
    max_seqlen: int | tuple | None = None
    prefix_lengths: Tensor | None = None
    return_lse: bool = False
    return_max_logit: bool = False
    impl: str = "auto"


def is_ragged(call):
    """Whether sequences have lengths, or bounds in packed rows."""
    return call.lengths is not None or call.cu_seqlens is not None


def key_of(call):
    """What decides which implementation serves a Call; None with tensors of features or a seed tensor.

    Left out are the seed and the values of lengths, cu_seqlens and max_seqlen, so each call must check them.
    """
    options = (
        call.causal, call.window, call.scale, call.softcap, call.dropout, call.return_lse, call.return_max_logit,
        call.impl,
    )  # fmt: skip
    types = tuple(map(type, (*options, call.seed)))  # the types too, since True == 1
    if features_of(call) or not _SIMPLE.issuperset(types) or torch.compiler.is_compiling():
        return None
    given = call.lengths is not None, type(call.cu_seqlens), call.max_seqlen is not None  # one tensor, or a pair
    return (*((x.shape, x.stride(), x.dtype, x.device) for x in (call.q, call.k, call.v)), options, types, given)
