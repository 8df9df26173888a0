"""Which implementation serves a call: the one asked for or, with impl="auto", the fastest that passes a self-check."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

from . import ops
from .checks import DTYPES, IMPLEMENTATIONS, check_impl, check_options, check_ragged, check_tensors
from .features import GRADIENTS, Call, feature_lacking, features_of
from .gpu import hopper_problem, runs_kernels, takes_kernels
from .reference import reference_attention
from .score_mod import name_of
from .sdpa import sdpa_problem
from .table import settings_dim

MAX_HOPPER_LENGTH = 2**20  # products of lengths in its kernels are 32-bit
LENGTH = 80  # of the self-check: a multiple of 16, as most are in training, but not of 32


class Case(NamedTuple):
    """What the self-check computes: seconds, since kernels are compiled for it."""

    device: torch.device
    dtype: torch.dtype
    # of keys and values, as tiles of the Hopper kernels hold them: each pair is a setting of its own; None: not theirs
    dims: tuple | None = None
    ragged: bool = False  # whether by the Hopper kernels for lengths and packed sequences
    heads: tuple = (2, 1)  # of queries and keys: with the caller's, most kernels need not be compiled again for him


def check_call(call):
    """Every rule of a Call."""
    check_tensors(call.q, call.k, call.v)
    check_impl(call.impl, IMPLEMENTATIONS)
    check_options(call)
    if call.score_mod is None and (not isinstance(call.score_args, tuple) or len(call.score_args) > 0):
        raise ValueError("score_args were given without score_mod; leave them out")
    check_ragged(call)
    for feature in features_of(call):
        feature.check(call, feature.name, getattr(call, feature.name))


def decide(call):
    """The implementation that serves a Call, and why, in words; ValueError if a rule is broken, or if it cannot."""
    check_call(call)
    q, asked = call.q, call.impl
    impl, reason = asked, "asked for"
    no_hopper = lack = None
    if asked in ("auto", "hopper"):
        no_hopper = hopper_problem(q.device)
        lack = no_hopper or call_problem(call) or rule_problem(call)
    if asked == "hopper" and lack:
        raise ValueError(f"the Hopper kernels do not serve {lack}; use impl='auto'")
    if asked == "auto" and q.dtype in DTYPES:
        inexpressible = None if takes_kernels(q.device) else sdpa_problem(call)
        dims = None if lack else (settings_dim(q.shape[-1]), settings_dim(call.v.shape[-1]))
        case, heads = (q.device, q.dtype, dims, not lack and call.is_ragged), (q.shape[2], call.k.shape[2])
        if not torch.compiler.is_compiling() and all(type(x) is int for x in heads):  # and no symbols
            case = *case, heads
        impl, reason, _ = implementation(inexpressible, *case)
        if impl == "triton" and lack and not no_hopper:
            reason = f"the Hopper kernels do not serve {lack}"
    elif asked == "auto":
        impl, reason = "sdpa", f"the kernels do not compute in {q.dtype}"
    if impl == "triton" and not runs_kernels(q.device):
        raise ValueError(f"impl='triton' needs tensors on a CUDA GPU, got {q.device}; use impl='auto' or 'sdpa'")
    if impl == "sdpa" and (lack := sdpa_problem(call)):
        if asked == "sdpa":
            raise ValueError(f"SDPA cannot express {lack}; use impl='triton' or impl='reference'")
        impl, reason = by_reference(reason, lack)
    return impl, reason


def by_reference(reason, lack):
    return "reference", f"{reason}; SDPA cannot express {lack}; the reference keeps all scores: many times slower"


_CHOICES = {}
_CHOOSING = threading.Lock()  # threads whose first calls coincide share one check


def implementation(inexpressible, *case):
    """What impl="auto" means for calls like a Case; decided once and printed by the first call that asks.

    Returns (name, reason in words, whether kernels failed their self-check), which Dynamo keeps.

    inexpressible: where no kernels are taken, what SDPA cannot express, in words, or None. case: the fields of a Case,
    of which Dynamo would make an empty one.
    """
    case = Case(*case)
    device = case.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
        case = case._replace(device=device)
    asked = case._replace(heads=None), inexpressible
    with _CHOOSING:
        if asked not in _CHOICES:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("attention() checks itself first; call it once before capturing a CUDA graph")
            _CHOICES[asked] = choice = _choose_for(case, inexpressible)
            if device.type == "cuda" or choice[0] == "reference":  # elsewhere SDPA is as expected
                _print_choice(*choice, case)
    return _CHOICES[asked]


def _print_choice(name, reason, failed, case):
    """On rank 0, and on each rank whose GPU fails: the others of torchrun's processes would say the same."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or failed:
        where = f"{case.device}, {str(case.dtype).removeprefix('torch.')}" + (f", rank {rank}" if rank != "0" else "")
        where += "" if case.dims is None else ", head dims up to {}/{}".format(*case.dims)
        with suppress(OSError):  # a full disk behind it
            print(f"attention  {name} on {where}: {reason}", file=sys.stderr, flush=True)


def _choose_for(case, inexpressible=None):
    if not takes_kernels(case.device):
        reason = f"the Triton kernels need a CUDA GPU, this is {case.device.type}"
        if case.device.type == "cuda":
            reason = "the Triton kernels need Triton, and NVIDIA's compute capability 8.0 or higher"
        return *(by_reference(reason, inexpressible) if inexpressible else ("sdpa", reason)), False
    failures = []
    for impl in ("triton",) if case.dims is None else ("hopper", "triton"):
        passed, reason = _passes(case, impl)
        if passed:
            return impl, "; ".join([reason, *failures]), bool(failures)
        failures.append(reason)
    return "sdpa", "; ".join(failures), True


def _passes(case, impl):
    """Whether the kernels of an implementation compute a Case right, and how well or why not, in words.

    An error of too little memory is passed on: it says nothing about the kernels, and the next call tries again.
    """
    try:
        # in a thread of its own, which stands in none of the caller's modes: inference, autocast, torch.func and so on
        with ThreadPoolExecutor(1) as pool:
            worst = pool.submit(_self_check, case, impl).result()
    except Exception as error:  # what breaks here would break training later: a missing package, driver or compiler
        if "out of memory" in str(error):
            raise
        return False, f"the {impl} kernels failed their self-check: {type(error).__name__}: {error}"
    if not worst < 2e-2:  # bfloat16 rounds by 4e-3; a NaN must fail
        return False, f"the {impl} kernels failed their self-check: relative error {worst:.1e}, at most 2e-2"
    return True, f"self-check passed, relative error {worst:.1e}"


def _self_check(case, impl):
    """Largest relative error of output and gradients on two tiny causal cases, whose length large tiles do not divide.

    The cases have the same shapes, because later starts of a kernel use what was prepared for the first (launcher.py),
    and other numbers at other addresses, so that what is left of the first start shows.
    No autograd on the device: a GPU has one thread for it, on which the caller may stand, and wait.
    """
    (dim, value_dim), (q_heads, kv_heads) = case.dims or (64, 64), case.heads
    wanted = {name: name in ("q", "k", "v") for name in GRADIENTS}
    kernels, errors, held = ops.backend(impl), [], []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        options = dict(generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are
        shapes = (q_heads, dim), (kv_heads, dim), (kv_heads, value_dim), (q_heads, value_dim)
        tensors = [torch.randn(1, LENGTH, *shape, **options) for shape in shapes]
        starts = torch.tensor([2, 33, 69], dtype=torch.int32, device="cpu") if case.ragged else None

        *leaves, dout = tensors
        out = reference_attention(*(x.requires_grad_() for x in leaves), cu_seqlens=starts)
        truths = out.detach(), *torch.autograd.grad(out, leaves, dout)

        q, k, v, dout = (x.detach().to(case.device, case.dtype) for x in tensors)
        starts = None if starts is None else starts.to(case.device)
        call = Call(q, k, v, q_starts=starts, k_starts=starts, scale=dim**-0.5, impl=impl)
        out, lse2 = kernels.forward(call)
        gradients = kernels.backward(call, out, lse2, dout, None, wanted)
        for x, truth in zip((out, *map(gradients.get, "qkv")), truths, strict=True):
            errors.append(float((x.double().cpu() - truth).norm() / truth.norm()))
        held.append((call, out, lse2, dout, gradients))
    return max(errors, key=lambda error: (error != error, error))  # NaN counts as the largest


implementation._dynamo_marked_constant = True  # as hopper_problem() of gpu.py


def rule_problem(call):
    """What keeps the Hopper kernels from a Call's score_mod, in words; None if nothing does."""
    if call.score_mod is not None:
        from .hopper.scores import compiles

        kinds = tuple([x.dtype if isinstance(x, torch.Tensor) else type(x) for x in call.score_args])
        if not compiles(call.score_mod, kinds):
            return f"{name_of(call.score_mod)}, which Gluon does not compile"
    return None


def call_problem(call):
    """What of a Call the Hopper kernels do not serve, in words; None if they serve all."""
    q, k, v = call.q, call.k, call.v
    if q.dtype not in (torch.float16, torch.bfloat16):
        return str(q.dtype)
    if lacking := feature_lacking(call, "hopper"):
        return lacking
    if call.decay is not None and call.softcap is not None:
        return "decay with softcap"
    if call.score_mod is not None and call.dropout > 0:  # which marks dropped weights by a sign
        return "score_mod with dropout"
    if not 40 <= q.shape[-1] <= 256:
        return f"head dim {q.shape[-1]} (40 to 256)"
    if v.shape[-1] != q.shape[-1] and not q.shape[-1] > 128 >= v.shape[-1] > 64:
        return f"values of head dim {v.shape[-1]} beside keys of {q.shape[-1]}"
    if call.decay is not None and v.shape[-1] != q.shape[-1]:
        return "decay with values of another head dim than keys"
    if 0 in q.shape or 0 in k.shape:
        return "an empty tensor"
    if max(q.shape[1], k.shape[1]) > MAX_HOPPER_LENGTH:
        return f"more than {MAX_HOPPER_LENGTH:,} positions"
    if call.window is not None:
        unseen = k.shape[1] - q.shape[1] >= call.window
        if unseen and not call.is_ragged:
            return "a window that leaves keys unseen by all queries (they may hold NaN, and tiles are read whole)"
        absolute = "dropout" if call.dropout > 0 else "score_mod" if call.score_mod is not None else None
        if absolute and (unseen or isinstance(call.cu_seqlens, tuple)):  # tiles begin behind these keys
            return f"{absolute} with a window that may leave keys unseen by all queries"
    return None
