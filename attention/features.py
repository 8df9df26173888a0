"""The tensors that change scores: what attention() accepts as each, and which backends compute with it.

A feature is declared here once: the checks of a call, its key and what a backend lacks follow from the table at the
end. Section 9 of docs/attention.md says where its formula goes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .checks import check_is_tensor, count_sequences

MAX_ALIBI_LENGTH = 2**24  # distances are float32


class Feature(NamedTuple):
    """One of the optional tensors of attention()."""

    name: str  # of the argument
    check: Callable  # check(call, name, tensor): ValueError with one sentence if it breaks a rule
    backends: tuple  # which compute with it, besides the reference: "triton", "hopper", "sdpa"


def check_floating(call, name, x):
    device = call.q.device
    check_is_tensor(name, x)
    if not x.is_floating_point() or x.device != device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be floating point on {device}")


def check_bias(call, name, x):
    q = call.q
    check_floating(call, name, x)
    full = (q.shape[0], q.shape[2], q.shape[1], call.k.shape[1])
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    if len(shape) != 4 or any(n != 1 and n != m for n, m in zip(shape, full, strict=True)):  # Dynamo errs at `in`
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must broadcast to [B, H, Tq, Tk] = {full}")


def check_decay(call, name, x):
    check_floating(call, name, x)
    shape = (call.q.shape[0], call.k.shape[1], call.q.shape[2])
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [B, Tk, H] = {shape}")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} is {x.dtype}; a sum over the sequence needs float32: compute the gates in it")
    if not call.causal:
        raise ValueError(f"{name} with causal=False has no meaning for keys after the query; use causal=True")


def check_per_head(call, name, x):
    heads = call.q.shape[2]
    check_floating(call, name, x)
    if tuple(x.shape) != (heads,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [H] = ({heads},)")


def check_relative_bias(call, name, x):
    heads = call.q.shape[2]
    check_floating(call, name, x)
    if x.dim() not in (2, 3) or x.shape[-2] != heads or x.shape[:-2] not in ((), (2,)) or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [H, R] or [2, H, R] with H = {heads}, R >= 1")


def check_alibi(call, name, x):
    q, heads, sequences = call.q, call.q.shape[2], count_sequences(call.q, call.cu_seqlens)
    check_is_tensor(name, x)
    if x.dtype != torch.float32 or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be torch.float32 on {q.device}")
    if tuple(x.shape) not in ((heads,), (sequences, heads)):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be [H] = ({heads},), or one row for each sequence, "
            f"({sequences}, {heads})"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, but gets none: detach() it")
    longest = max(q.shape[1], call.k.shape[1])
    if longest > MAX_ALIBI_LENGTH:
        raise ValueError(f"{name} was given with {longest} positions; at most {MAX_ALIBI_LENGTH}: use decay")


def check_prefixes(call, name, x):
    q = call.q
    check_is_tensor(name, x)
    if x.dtype != torch.int32 or x.shape != q.shape[:1] or x.device != q.device:
        raise ValueError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}; it must be int32 of shape "
            f"({q.shape[0]},) on {q.device}"
        )
    if not call.causal or any(x is not None for x in (call.window, call.decay, call.cu_seqlens)):
        raise ValueError(f"{name} needs causal=True, without window, decay and cu_seqlens: use a bias there")


FEATURES = (
    Feature("bias", check_bias, ("triton", "sdpa")),
    Feature("decay", check_decay, ("triton", "hopper")),
    Feature("alibi_slopes", check_alibi, ("triton", "hopper")),
    Feature("sink", check_per_head, ("triton", "hopper")),
    Feature("relative_bias", check_relative_bias, ("triton", "hopper")),
    Feature("prefix_lengths", check_prefixes, ("triton",)),
)


def features_of(call):
    """The features that a Call uses."""
    return [feature for feature in FEATURES if getattr(call, feature.name) is not None]


def feature_lacking(call, backend):
    """Name of a feature of a Call that a backend does not compute with; None if there is none."""
    return next((feature.name for feature in features_of(call) if backend not in feature.backends), None)
