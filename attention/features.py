"""The arguments of a call, and the tensors among them that change scores: what is accepted, and which backends serve.

A feature is declared here once: a field of Call, and a line of FEATURES. The schema of the ops, the checks of a call,
its signature and what a backend lacks follow from these. Section 9 of docs/attention.md says where its formula goes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_tensor, count_sequences
from .reference import of_sequences
from .score_mod import check_score_args

MAX_ALIBI_LENGTH = 2**24  # distances are float32


class Call(NamedTuple):
    """The arguments of one attention() call: as given, and later as the ops take them (see for_kernels() in api.py).

    The tensors that have gradients come first, then the other tensors. What the ops do not take comes last.
    """

    q: Tensor
    k: Tensor | None  # k and v are None in an op if kv_heads is not 0
    v: Tensor | None
    bias: Tensor | None = None  # for the ops [B or 1, H or 1, Tq or 1, Tk or 1]
    decay: Tensor | None = None  # for the ops its sum up to and including each key, [B, H, Tk] float64
    sink: Tensor | None = None  # [H]
    relative_bias: Tensor | None = None  # for the ops [1 or 2, H, R]
    alibi_slopes: Tensor | None = None  # for the ops [B or N, H]
    prefix_lengths: Tensor | None = None  # [B] int32
    lengths: Tensor | None = None  # [B] int32
    q_starts: Tensor | None = None  # this and the next for the ops alone: [N + 1] int32, both or none
    k_starts: Tensor | None = None
    seed: int | Tensor | None = None  # for the ops [1] int64, or None without dropout
    score_tensors: list[Tensor | None] = ()  # this and the next for the ops alone: score_args, as split_args() has them
    score_numbers: list[float] = ()
    score_mod: str | None = None  # a Triton function, for the ops its label: see score_mod.py
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    scale: float | None = None  # for the ops not None
    impl: str = "auto"  # for the ops that whose kernels serve: "triton" or "hopper"
    return_max_logit: bool = False
    kv_heads: int = 0  # if not 0, q is the qkv of attention_qkv(), [B, T, H + 2 kv_heads, D]
    return_lse: bool = False
    cu_seqlens: Tensor | tuple | None = None
    max_seqlen: int | tuple | None = None
    score_args: tuple = ()

    def split(self):
        """q, k and v: as they are, or as views of one tensor."""
        if self.kv_heads == 0:
            return self.q, self.k, self.v
        return self.q.split((self.q.shape[2] - 2 * self.kv_heads, self.kv_heads, self.kv_heads), 2)

    def apart(self):
        """The same Call with the three."""
        return self if self.kv_heads == 0 else Call(*self.split(), *self[3:])._replace(kv_heads=0)

    @property
    def is_ragged(self):
        """Whether sequences have lengths, or bounds in packed rows."""
        return self.lengths is not None or self.cu_seqlens is not None or self.q_starts is not None

    @property
    def learned(self):
        """The tensors that may have gradients: those of GRADIENTS."""
        return self[: len(GRADIENTS)]

    @property
    def tensors(self):
        """All tensors that the ops take: the fields up to seed, then score_tensors."""
        return self[:TENSORS] + tuple(self.score_tensors)

    def with_tensors(self, tensors):
        """The same Call with others in place of its tensors."""
        return Call(*tensors[:TENSORS], tensors[TENSORS:], *self[TENSORS + 1 :])

    @property
    def for_op(self):
        """The arguments of an op, in the order of its schema."""
        return self[:OP_ARGUMENTS]


SEED = Call._fields.index("seed")
TENSORS = SEED + 1
OP_ARGUMENTS = Call._fields.index("return_lse")


class Feature(NamedTuple):
    """One of the optional tensors of attention(), or score_mod."""

    name: str  # of the argument
    check: Callable  # check(call, name, value): ValueError with one sentence if it breaks a rule
    backends: tuple  # which compute with it, besides the reference: "triton", "hopper", "sdpa"
    for_kernels: Callable = lambda call, x: x  # the value as the kernels take it
    learned: bool = False  # whether it has a gradient
    # The gradient of a term by distance: (sums of dS, tensor as the kernels take it) -> gradient. sums: of the keys at
    # and before a query, and of those after, each [H, distances from 0 on].
    distance_gradient: Callable | None = None


def check_bias(call, name, x):
    q = call.q
    check_tensor(name, x, q.device)
    full = (q.shape[0], q.shape[2], q.shape[1], call.k.shape[1])
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    if len(shape) != 4 or any(n != 1 and n != m for n, m in zip(shape, full, strict=True)):  # Dynamo errs at `in`
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must broadcast to [B, H, Tq, Tk] = {full}")


def check_decay(call, name, x):
    q, dtypes = call.q, (torch.float32, torch.float64)  # others do not hold a sum over the sequence
    check_tensor(name, x, q.device, dtypes, [(q.shape[0], call.k.shape[1], q.shape[2])], "[B, Tk, H] = ")
    if not call.causal:
        raise ValueError(f"{name} with causal=False has no meaning for keys after the query; use causal=True")


def check_per_head(call, name, x):
    check_tensor(name, x, call.q.device, None, [(call.q.shape[2],)], "[H] = ")


def check_relative_bias(call, name, x):
    heads = call.q.shape[2]
    check_tensor(name, x, call.q.device)
    if x.dim() not in (2, 3) or x.shape[-2] != heads or x.shape[:-2] not in ((), (2,)) or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [H, R] or [2, H, R] with H = {heads}, R >= 1")


def check_alibi(call, name, x):
    q, heads, sequences = call.q, call.q.shape[2], count_sequences(call.q, call.cu_seqlens)
    shapes = (heads,), (sequences, heads)
    check_tensor(name, x, q.device, (torch.float32,), shapes, "[H], or one row for each sequence: ")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, but gets none: detach() it")
    longest = max(q.shape[1], call.k.shape[1])
    if longest > MAX_ALIBI_LENGTH:
        raise ValueError(f"{name} was given with {longest} positions; at most {MAX_ALIBI_LENGTH}: use decay")


def check_prefixes(call, name, x):
    check_tensor(name, x, call.q.device, (torch.int32,), [(call.q.shape[0],)], "[B] = ")
    if not call.causal or any(x is not None for x in (call.window, call.decay, call.cu_seqlens)):
        raise ValueError(f"{name} needs causal=True, without window, decay and cu_seqlens: use a bias there")


def four_dims(call, bias):
    return bias.reshape((1,) * (4 - bias.dim()) + bias.shape)


def cumulative(call, decay):
    """[B, Tk, H] -> sums up to and including each key, [B, H, Tk] float64."""
    decay = of_sequences(decay, call.cu_seqlens)
    if call.impl == "hopper":  # which subtracts one gate of a tile from the others in float32
        decay = decay.clamp(min=-1e3)
    gate = decay.transpose(1, 2).to(torch.float64)
    if gate.shape[:2] == (1, 1):  # PyTorch adds a single row in an order that varies, rows of several in a fixed one
        return gate.expand(2, 1, -1).cumsum(2)[:1]
    return gate.cumsum(2)


def of_each_sequence(call, slopes):
    return slopes.expand(count_sequences(call.q, call.cu_seqlens), -1)


def as_tables(call, x):
    return x.reshape(-1, *x.shape[-2:]).contiguous()


def contiguous(call, x):
    return x.contiguous()


def relative_bias_gradient(sums, tables):
    gradients, size = [], tables.shape[2]
    for x in sums:
        near = F.pad(x, (0, max(size - x.shape[1], 0)))[:, :size].clone()
        near[:, -1] += x[:, size:].sum(1)  # all that are as far or farther
        gradients.append(near)
    return (torch.stack(gradients) if len(tables) == 2 else sum(gradients)[None]).to(tables.dtype)


FEATURES = (  # those that are learned come first, in the order of Call
    Feature("bias", check_bias, ("triton", "sdpa"), four_dims, learned=True),
    Feature("decay", check_decay, ("triton", "hopper"), cumulative, learned=True),
    Feature("sink", check_per_head, ("triton", "hopper"), contiguous, learned=True),
    Feature("relative_bias", check_relative_bias, ("triton", "hopper"), as_tables, True, relative_bias_gradient),
    Feature("alibi_slopes", check_alibi, ("triton", "hopper"), of_each_sequence),
    Feature("prefix_lengths", check_prefixes, ("triton",), contiguous),
    Feature("score_mod", check_score_args, ("triton", "hopper")),
)
# The tensors of a call that may have gradients, in the order of the fields of Call.
GRADIENTS = ("q", "k", "v", *(feature.name for feature in FEATURES if feature.learned))
assert Call._fields[: len(GRADIENTS)] == GRADIENTS, "the learned features of FEATURES must be Call's fields after v"


def features_of(call):
    """The features that a Call uses."""
    return [feature for feature in FEATURES if getattr(call, feature.name) is not None]


def feature_lacking(call, backend):
    """Name of a feature of a Call that a backend does not compute with; None if there is none."""
    return next((feature.name for feature in features_of(call) if backend not in feature.backends), None)
