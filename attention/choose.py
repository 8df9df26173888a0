"""Which implementation serves a call: the one asked for or, with impl="auto", the fastest that passes a self-check."""

import os
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch

from . import ops
from .call import is_ragged, key_of
from .checks import DTYPES, check_call, check_ragged, check_seed
from .reference import reference_attention
from .sdpa import sdpa_lacks

MAX_HOPPER_LENGTH = 2**20  # products of lengths in its kernels are 32-bit

_DECIDED = {}


def decide(call):
    """The implementation that serves a Call, and why, in words; ValueError if a rule is broken.

    Remembered for calls that key_of() can tell from others: checking takes as long as launching.
    """
    key = key_of(call)
    found = None
    if key is not None:
        try:
            found = _DECIDED.get(key)
        except TypeError:  # symbolic shapes have no hash
            key = None
    if found is not None:  # what the key leaves out
        if is_ragged(call):
            check_ragged(call.q, call.k, call.lengths, call.cu_seqlens, call.max_seqlen)
        if call.seed is not None:
            check_seed(call.seed, call.q.device)
        return found
    check_call(call)
    found = _choose(call)
    if key is not None:
        if len(_DECIDED) >= 4096:  # lengths that never repeat
            _DECIDED.clear()
        _DECIDED[key] = found
    return found


def _choose(call):
    """The implementation that serves a call, and why, in words; ValueError if it is asked for and cannot."""
    q, asked = call.q, call.impl
    impl, reason = asked, "asked for"
    misses = lack = None
    if asked in ("auto", "hopper"):
        misses = hopper_misses(q.device)
        lack = misses or hopper_lacks(call)
    if asked == "hopper" and lack:
        raise ValueError(f"the Hopper kernels do not serve {lack}; use impl='auto'")
    if asked == "auto" and q.dtype in DTYPES:
        choice = implementation(q.device, q.dtype, not lack, not lack and is_ragged(call))
        impl, reason = choice.name, choice.reason  # by name: Dynamo of PyTorch 2.11 cannot unpack a Choice
        if impl == "triton" and lack and not misses:
            reason = f"the Hopper kernels do not serve {lack}"
    elif asked == "auto":
        impl, reason = "sdpa", f"the kernels do not compute in {q.dtype}"
    if impl == "triton" and not (q.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f"impl='triton' needs tensors on a CUDA GPU, got {q.device}; use impl='auto' or 'sdpa'")
    if impl == "sdpa" and (lack := sdpa_lacks(call)):
        if asked == "sdpa":
            raise ValueError(f"SDPA cannot express {lack}; use impl='triton' or impl='reference'")
        impl, reason = "reference", f"{reason}; SDPA cannot express {lack}"
    return impl, reason


class Choice(NamedTuple):
    """The implementation impl="auto" takes on a device, and why, in words."""

    name: str
    reason: str
    failed: bool = False  # whether kernels failed their self-check


_CHOICES = {}
_CHOOSING = threading.Lock()  # threads whose first calls coincide share one check


def implementation(device, dtype, hopper, ragged):
    """The Choice of impl="auto" on a torch.device for a dtype; decided once and said by the first call that asks.

    hopper: whether the Hopper kernels could serve, ragged: and would be those for lengths and packed sequences. On a
    CUDA GPU the kernels first compute a tiny case, which is compared with the reference: seconds, since they are
    compiled for it.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = device, dtype, hopper, ragged
    with _CHOOSING:
        if key not in _CHOICES:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "attention() checks itself when first called; call it once before capturing a CUDA graph"
                )
            _CHOICES[key] = choice = _choose_for(*key)
            _print_choice(choice, device, dtype)
    return _CHOICES[key]


def _print_choice(choice, device, dtype):
    """On rank 0, and on each rank whose GPU fails: the others of torchrun's processes would say the same."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or choice.failed:
        where = f"{device}, {str(dtype).removeprefix('torch.')}" + (f", rank {rank}" if rank != "0" else "")
        with suppress(OSError):  # a full disk behind it
            print(f"attention  {choice.name} on {where}: {choice.reason}", file=sys.stderr, flush=True)


def _choose_for(device, dtype, hopper, ragged=False):
    if device.type != "cuda":
        return Choice("sdpa", f"the Triton kernels need a CUDA GPU, this is {device.type}")
    failures = []
    for impl in ("hopper", "triton") if hopper else ("triton",):
        passed, reason = _passes(device, dtype, ragged, impl)
        if passed:
            return Choice(impl, "; ".join([reason, *failures]), bool(failures))
        failures.append(reason)
    return Choice("sdpa", "; ".join(failures), True)


def _passes(device, dtype, ragged, impl):
    """Whether the kernels of an implementation compute a tiny case right, and how well or why not, in words.

    An error of too little memory is passed on: it says nothing about the kernels, and the next call tries again.
    """
    try:
        worst = _apart(_self_check, device, dtype, ragged, impl)
    except Exception as error:  # what breaks here would break training later: a missing package, driver or compiler
        if "out of memory" in str(error):
            raise
        return False, f"the {impl} kernels failed their self-check: {type(error).__name__}: {error}"
    if not worst < 2e-2:  # bfloat16 rounds by 4e-3; a NaN must fail
        return False, f"the {impl} kernels failed their self-check: relative error {worst:.1e}, at most 2e-2"
    return True, f"self-check passed, relative error {worst:.1e}"


def _apart(function, *arguments):
    """function(*arguments), in a thread of its own, which stands in none of the caller's modes.

    Those are inference, autocast, fake tensors, torch.func, hooks of autograd. At the end of a program, when no thread
    can be started, it is called here.
    """
    answer = Future()

    def answer_it():
        try:
            answer.set_result(function(*arguments))
        except BaseException as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=answer_it, daemon=True).start()
    except RuntimeError:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            answer_it()
    return answer.result()


def _self_check(device, dtype, ragged, impl):
    """Largest relative error of output and gradients on a tiny grouped, causal case of odd lengths.

    No autograd on the device: a GPU has one thread for it, on which the caller may stand, and wait.
    """
    generator = torch.Generator().manual_seed(0)
    options = dict(generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are
    tensors = [torch.randn(1, 70, heads, 64, **options) for heads in (2, 1, 1, 2)]
    starts = torch.tensor([0, 33, 69], dtype=torch.int32, device="cpu") if ragged else None

    *leaves, dout = tensors
    out = reference_attention(*(x.requires_grad_() for x in leaves), cu_seqlens=starts)
    truths = out.detach(), *torch.autograd.grad(out, leaves, dout)

    q, k, v, dout = (x.detach().to(device, dtype) for x in tensors)
    starts = None if starts is None else starts.to(device)
    given = dict(q_starts=starts, k_starts=starts, max_q_len=70, max_k_len=70)
    rule = dict(causal=True, window=0, softcap=0.0, dropout=0.0, scale=64**-0.5, hopper=impl == "hopper")
    options = ops.Options(**dict.fromkeys(ops.Options._fields[: ops.TENSOR_OPTIONS]) | given | rule)
    kernels = ops.host(options.hopper)
    out, lse2 = kernels.forward(q, k, v, options)
    own = dict(deterministic=False) if options.hopper else {}  # else the portable backward might be checked
    found = out, *kernels.backward(q, k, v, out, lse2, dout, None, False, options, **own)[:3]
    errors = [float((x.double().cpu() - truth).norm() / truth.norm()) for x, truth in zip(found, truths, strict=True)]
    return max(errors, key=lambda error: (error != error, error))  # NaN counts as the largest


def hopper_misses(device):
    """What a torch.device lacks to run the Hopper kernels, in words; None if nothing."""
    return _hopper_misses(device)  # of a cached function itself Dynamo warns


# Dynamo calls these while tracing and keeps the answer. It is what torch.compiler.assume_constant_result does, which
# would import Dynamo: more than a second of each start.
implementation._dynamo_marked_constant = hopper_misses._dynamo_marked_constant = True


@cache
def _hopper_misses(device):
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return f"{device}, which is no Hopper GPU (sm_90)"
    try:
        from .hopper import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this Triton, whose Gluon is another: {error}"
    return None


def hopper_lacks(call):
    """What of a Call the Hopper kernels do not serve, in words; None if they serve all."""
    q, k, v = call.q, call.k, call.v
    if q.dtype not in (torch.float16, torch.bfloat16):
        return str(q.dtype)
    if call.bias is not None:
        return "bias"
    if call.decay is not None and call.softcap is not None:
        return "decay with softcap"
    if call.prefix_lengths is not None:
        return "prefix_lengths"
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
        if unseen and not is_ragged(call):
            return "a window that leaves keys unseen by all queries (they may hold NaN, and tiles are read whole)"
        if call.dropout > 0 and (unseen or isinstance(call.cu_seqlens, tuple)):  # tiles begin behind these keys
            return "dropout with a window that may leave keys unseen by all queries"
    return None
