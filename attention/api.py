"""attention(): what it computes, what it accepts, and which implementation serves a call."""

import inspect
import math
import os
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch

from . import ops
from .checks import DTYPES, check_call, check_is_tensor, check_ragged, check_seed, pair
from .reference import reference_attention
from .sdpa import sdpa_attention, sdpa_lacks

# asked once, here: torch.compile cannot trace the question in PyTorch 2.11
AUTOCAST_DEVICES = frozenset(d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d))

MAX_HOPPER_LENGTH = 2**20  # products of lengths in its kernels are 32-bit


def attention(
    q, k, v, *, causal=True, window=None, scale=None, softcap=None, dropout=0.0, seed=None, bias=None, decay=None,
    sink=None, lengths=None, cu_seqlens=None, max_seqlen=None, return_lse=False, impl="auto",
):  # fmt: skip
    """Scaled dot-product attention, exact, in O(T) memory: dropout(softmax(mask(cap(scale q k^T) + terms))) v per head.

    Letters: B batch, Tq queries, Tk keys, H query heads, Hkv key/value heads (H a multiple of Hkv: grouped queries),
    D and Dv head dims (multiples of 8 up to 256), N packed sequences. Query i stands at key i + Tk - Tq of its
    sequence: masks are aligned to the last key, as in flash-attention and unlike SDPA's is_causal. A row that sees no
    key gives 0, lse = -inf and gradients of 0. All arguments compose, but for what Raises names.

    Args:
        q: [B, Tq, H, D] float16, bfloat16 or float32; any strides as long as the last dimension is contiguous;
            multiples of 8 elements from a 16-byte boundary need no copy. The Hopper kernels also copy what is broadcast
            and, with lengths, rows that do not follow each other.
        k, v: [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv], dtype and device of q.
        causal: a query sees the keys up to its own position.
        window: a query at key position i sees keys i - window + 1 .. i, and without causal also the window - 1 after
            it; None = no limit.
        scale: factor of q.k; None = 1 / sqrt(D).
        softcap: scores s become softcap * tanh(s / softcap) before bias and mask, 1e-30 to 1e30; None = off.
        dropout: probability in [0, 1) with which a normalised weight is dropped; the others grow by 1 / (1 - dropout).
        seed: int or int64 tensor of one element on the device of q, for dropout; None draws one from torch's generator.
            The same seed drops the same (sequence, head, query, key), whatever the tile sizes.
        bias: floating tensor broadcastable to [B, H, Tq, Tk], added to the scores; -inf hides a key, and so does all
            below -2.3e38, such as float32's least number. Has a gradient, which costs one more pass over the scores.
        decay: [B, Tk, H] float32 or float64, log forget gate of each key's token, <= 0: a score of query position i
            and key j gets sum(decay[j + 1 .. i]). Needs causal. A constant gives ALiBi. -1e4 forgets all before; past
            about -1e9 later gates lose digits. Has a gradient.
        sink: [H] floating, a logit that joins each row's softmax denominator and has no value. Has a gradient.
        lengths: [B] int32, how many tokens of each row are valid: keys past it are invisible, queries standing past it
            give 0.
        cu_seqlens: [N + 1] int32, where packed sequences start in the one row (B = 1), from 0 to at most T; a pair of
            such tensors, for queries and for keys, where they differ. Empty sequences are allowed; tokens behind the
            last start belong to no sequence and give 0.
        max_seqlen: length of the longest sequence, or a pair (queries, keys); None = T, which is safe and starts more
            programs than needed. What a smaller one than the longest gives is undefined. Triton's kernels are looked
            up anew for each value, as for each T and N: better round it up than pass that of every batch.
        return_lse: also return the logarithm of the softmax denominator (with the sink), natural log, differentiable.
        impl: "auto" takes, where they passed a self-check, the Hopper kernels on their chip for the calls they serve,
            else Triton on a CUDA GPU; SDPA elsewhere where it can express the call, else the reference. The first call
            on a device in a dtype prints which and why, once more where Hopper kernels could not serve, and for their
            first lengths or packed sequences; explain() says it of a call. "portable" is auto without the Hopper
            kernels: a program that cannot do without Triton's then compiles and checks one set. "hopper", "triton",
            "sdpa" and "reference" never fall back. float32 matmuls follow torch.set_float32_matmul_precision. Two runs
            give the same bits, but for dq from the Hopper kernels: torch.use_deterministic_algorithms(True) has the
            backward of "triton" serve there.

    Returns:
        [B, Tq, H, Dv] in the dtype of q; with return_lse also [B, H, Tq] float32, -inf where a row sees no key.

    Raises:
        ValueError: an argument breaks a rule above; decay without causal; lengths together with cu_seqlens.
        RuntimeError: a second derivative of the kernels, or one in forward mode. Other transforms of torch.func work;
            torch.vmap starts the kernels once per example.

    Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023); Ainslie et al., GQA (2023); Lin et al.,
    Forgetting Transformer (2025), for decay.
    """
    q, k, v = _cast_for_autocast(q, k, v)
    options, terms = (causal, window, scale, softcap, dropout, impl, return_lse, seed), (bias, decay, sink)
    impl, _ = _decide(q, k, v, options, terms, (lengths, cu_seqlens, max_seqlen))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    if impl == "sdpa":
        return sdpa_attention(q, k, v, causal, window, scale, dropout, bias)
    if dropout > 0:
        seed = _seed_tensor(seed, q.device)
    if impl == "reference":
        return reference_attention(
            q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, dropout=dropout, seed=seed, bias=bias,
            decay=decay, sink=sink, lengths=lengths, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            return_lse=return_lse,
        )  # fmt: skip
    (q_starts, k_starts), (max_q_len, max_k_len) = pair(cu_seqlens), pair(max_seqlen)
    options = ops.Options(
        bias=bias,
        gate=None if decay is None else _cumulative(decay),
        sink=sink,
        seed=seed if dropout > 0 else None,
        lengths=lengths,
        q_starts=q_starts,
        k_starts=k_starts,
        max_q_len=q.shape[1] if max_q_len is None else max_q_len,
        max_k_len=k.shape[1] if max_k_len is None else max_k_len,
        causal=causal,
        window=window or 0,
        softcap=softcap or 0.0,
        dropout=dropout,
        scale=scale,
        hopper=impl == "hopper",
    )
    # else what the op does, since the way through PyTorch's dispatcher takes as long as a kernel
    if torch.compiler.is_compiling() or ops.transformed():
        out, lse2 = ops.forward(q, k, v, *options)
    else:
        out, lse2 = ops.forward_with_gradient(q, k, v, options)
    return (out, lse2 * math.log(2)) if return_lse else out


def explain(q, k, v, **arguments):
    """Which implementation serves attention(q, k, v, **arguments), and why: a line of text. Raises as attention()."""
    call = inspect.signature(attention).bind(q, k, v, **arguments)
    call.apply_defaults()
    options, terms, ragged = (
        tuple(call.arguments[name] for name in names.split())
        for names in (
            "causal window scale softcap dropout impl return_lse seed", "bias decay sink",
            "lengths cu_seqlens max_seqlen",
        )
    )  # fmt: skip
    impl, reason = _decide(*_cast_for_autocast(q, k, v), options, terms, ragged)
    return f"{impl}: {reason}"


_SIMPLE = frozenset({bool, int, float, str, type(None)})
_DECIDED = {}


def _decide(q, k, v, options, terms, ragged):
    """The implementation that serves a call, and why, in words; ValueError if a rule is broken.

    options: causal, window, scale, softcap, dropout, impl, return_lse, seed; terms: bias, decay, sink; ragged: lengths,
    cu_seqlens, max_seqlen. Remembered for calls without further tensors but those of ragged, and for any seed: checking
    takes as long as launching.
    """
    call, types = None, tuple(map(type, options))  # the types too, since True == 1
    if all(x is None for x in terms) and _SIMPLE.issuperset(types) and not torch.compiler.is_compiling():
        given = tuple(x is not None for x in ragged)
        call = (*((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v)), options[:-1], types, given)
        try:
            found = _DECIDED.get(call)
        except TypeError:  # symbolic shapes have no hash
            call = found = None
        if found is not None:
            if any(given):
                check_ragged(q, k, *ragged)
            if options[-1] is not None:
                check_seed(options[-1], q.device)
            return found
    check_call(q, k, v, options, terms, ragged)
    causal, window, _, softcap, dropout, asked, return_lse, seed = options
    rule = dict(causal=causal, window=window, softcap=softcap, dropout=dropout)
    names = ("bias", "decay", "sink")
    extra = dict(zip(names, terms, strict=True)) | dict(lengths=ragged[0], cu_seqlens=ragged[1])
    found = _choose(asked, q, k, v, rule, extra, seed, return_lse)
    if call is not None:
        if len(_DECIDED) >= 4096:  # lengths that never repeat
            _DECIDED.clear()
        _DECIDED[call] = found
    return found


def _choose(asked, q, k, v, rule, extra, seed, return_lse):
    """The implementation that serves a call, and why, in words; ValueError if it is asked for and cannot."""
    impl, reason = asked, "asked for"
    misses = lack = None
    if asked in ("auto", "hopper"):
        misses = hopper_misses(q.device)
        lack = misses or hopper_lacks(q, k, v, rule, extra)
    if asked == "hopper" and lack:
        raise ValueError(f"the Hopper kernels do not serve {lack}; use impl='auto'")
    if asked in ("auto", "portable") and q.dtype in DTYPES:
        serves = asked == "auto" and not lack
        choice = implementation(q.device, q.dtype, serves, serves and bounded(extra))
        impl, reason = choice.name, choice.reason  # by name: Dynamo of PyTorch 2.11 cannot unpack a Choice
        if impl == "triton" and lack and not misses:
            reason = f"the Hopper kernels do not serve {lack}"
    elif asked in ("auto", "portable"):
        impl, reason = "sdpa", f"the kernels do not compute in {q.dtype}"
    if impl == "triton" and not (q.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f"impl='triton' needs tensors on a CUDA GPU, got {q.device}; use impl='auto' or 'sdpa'")
    if impl == "sdpa" and (lack := sdpa_lacks(q, k, rule, extra, seed, return_lse)):
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


@torch.compiler.assume_constant_result  # Dynamo calls it while tracing and keeps the answer
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

    That memory is out is an error of the caller's: it says nothing of the kernels, and the next call asks again.
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


@torch.compiler.assume_constant_result  # of a cached function itself Dynamo warns
def hopper_misses(device):
    """What a torch.device lacks to run the Hopper kernels, in words; None if nothing."""
    return _hopper_misses(device)


@cache
def _hopper_misses(device):
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return f"{device}, which is no Hopper GPU (sm_90)"
    try:
        from . import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this Triton, whose Gluon is another: {error}"
    return None


def hopper_lacks(q, k, v, rule, extra):
    """What of a call the Hopper kernels do not serve, in words; None if they serve all."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return str(q.dtype)
    for name in ("bias", "decay"):
        if extra[name] is not None:
            return name
    if rule["dropout"] > 0:
        return "dropout"
    if not 40 <= q.shape[-1] <= 256:
        return f"head dim {q.shape[-1]} (40 to 256)"
    if v.shape[-1] != q.shape[-1]:
        return f"values of head dim {v.shape[-1]} beside keys of {q.shape[-1]}"
    if 0 in q.shape or 0 in k.shape:
        return "an empty tensor"
    if max(q.shape[1], k.shape[1]) > MAX_HOPPER_LENGTH:
        return f"more than {MAX_HOPPER_LENGTH:,} positions"
    if rule["window"] is not None and not bounded(extra) and k.shape[1] - q.shape[1] >= rule["window"]:
        return "a window that leaves keys unseen by all queries (they may hold NaN, and tiles are read whole)"
    return None


def bounded(extra):
    """Whether sequences of a call are ragged: have lengths, or bounds in packed rows."""
    return extra["lengths"] is not None or extra["cu_seqlens"] is not None


def _cumulative(decay):
    """[B, Tk, H] -> sums up to and including each key, [B, H, Tk] float64."""
    gate = decay.transpose(1, 2).to(torch.float64)
    if gate.shape[:2] == (1, 1):  # PyTorch adds a single row in an order that varies, rows of several in a fixed one
        return gate.expand(2, 1, -1).cumsum(2)[:1]
    return gate.cumsum(2)


def _seed_tensor(seed, device):
    if seed is None:
        return torch.randint(2**62, (1,), device=device)
    if isinstance(seed, int):
        return torch.full((1,), seed, dtype=torch.int64, device=device)  # no copy from the host, so it can be captured
    return seed


def _cast_for_autocast(*tensors):
    """As torch does it: float64 and integers stay what they are."""
    for name, x in zip("qkv", tensors, strict=True):
        check_is_tensor(name, x)
    device = tensors[0].device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [x.to(dtype) if x.dtype in DTYPES else x for x in tensors]
    return tensors
