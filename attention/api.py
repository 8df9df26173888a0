"""attention(): what it computes, what it accepts, and which implementation serves a call."""

import math

import torch

from . import ops
from .checks import DTYPES, check_is_tensor, check_max_seqlen, check_qkv, check_seed, pair
from .choose import decide
from .features import SEED, Call, features_of
from .reference import reference_attention
from .score_mod import label_of, split_args
from .sdpa import attention_by_sdpa, hides_values

# asked once, here: torch.compile cannot trace the question in PyTorch 2.11
AUTOCAST_DEVICES = frozenset(d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d))


def attention(
    q, k, v, *, causal=True, window=None, scale=None, softcap=None, dropout=0.0, seed=None, bias=None, decay=None,
    alibi_slopes=None, sink=None, relative_bias=None, score_mod=None, score_args=(), lengths=None, cu_seqlens=None,
    max_seqlen=None, prefix_lengths=None, return_lse=False, return_max_logit=False, impl="auto",
):  # fmt: skip
    """Scaled dot-product attention, exact, in O(T) memory: dropout(softmax(mask(cap(scale q k^T) + terms))) v per head.

    Letters: B batch, Tq queries, Tk keys, H query heads, Hkv key/value heads (H a multiple of Hkv: grouped queries),
    D and Dv head dims (multiples of 8 up to 256), N packed sequences. Query i stands at key i + Tk - Tq of its
    sequence: masks are aligned to the last key, as in flash-attention and unlike SDPA's is_causal. A row that sees no
    key gives 0, lse = -inf and gradients of 0; with a sink its lse is the sink, which gets the gradient of this lse.
    All arguments compose, but for what Raises names.

    Args:
        q: [B, Tq, H, D] float16, bfloat16 or float32, the last dimension contiguous. It is copied unless it starts at
            a multiple of 16 bytes and its other strides are multiples of 8 elements. The Hopper kernels also copy what
            is broadcast and, with lengths, rows that do not follow each other.
        k, v: [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv], dtype and device of q.
        causal: a query sees the keys up to its own position.
        window: a query at key position i sees keys i - window + 1 .. i, and without causal also the window - 1 after
            it; None = no limit.
        scale: factor of q.k; None = 1 / sqrt(D).
        softcap: scores s become softcap * tanh(s / softcap) before bias and mask, 1e-30 to 1e30; None = off.
        dropout: probability in [0, 1) with which a normalised weight is dropped; the others grow by 1 / (1 - dropout).
            Our kernels and the reference round it, in this factor too, to n / 256 with n from 1 to 255, and 0 to 0;
            SDPA on a CPU rounds it to n / 32,768.
        seed: int or int64 tensor of one element on the device of q, for dropout; None draws one from torch's generator.
            The same seed drops the same (sequence, head, query, key), counted from the sequence's first, whatever the
            tile sizes, in the reference and all kernels.
        bias: floating tensor broadcastable to [B, H, Tq, Tk], added to the scores; -inf hides a key, and so does all
            below -2.3e38, such as float32's least number. Has a gradient, which costs one more pass over the scores.
        decay: [B, Tk, H] float32 or float64, log forget gate of each key's token, <= 0: a score of query position i
            and key j gets sum(decay[j + 1 .. i]). Needs causal. -1e3 forgets all before. The Hopper kernels take lower
            gates for -1e3; elsewhere past about -5e7 later ones lose digits. Has a gradient.
        alibi_slopes: [H] or [B, H] float32, with cu_seqlens [H] or [N, H]: a score of query position i and key j gets
            -slope |i - j|, as in flash-attention. For up to 2^24 queries and keys. Has no gradient.
        sink: [H] floating, a logit that joins each row's softmax denominator and has no value. Has a gradient.
        relative_bias: [H, R] floating and finite, or [2, H, R]: a score of query position i and key j gets
            relative_bias[h, min(|i - j|, R - 1)], of the second table where j > i. Has a gradient, which costs one more
            pass over the scores.
        score_mod: your own rule for scores, a @triton.jit function f(score, q_pos, k_pos, head, sequence, *score_args)
            -> (new score, d new score / d score), elementwise. score: scaled and soft-capped, before the other terms
            and the mask; q_pos is counted in keys, and both positions broadcast. A new score of -inf hides the key,
            which must be finite in the Hopper kernels. The reference computes f.eager, a PyTorch function of the same
            arguments that returns the new score. See check_score_mod(), and section 9 of docs/attention.md for
            examples.
        score_args: tuple of contiguous tensors, which f gets as pointers, and of ints and floats. They get no
            gradient. Another number does not compile f again, unless it is an int that is 1 or a multiple of 16. But in
            torch.compile, another float here, or another scale or dropout, makes another graph: give f a tensor of one
            element.
        lengths: [B] int32, how many tokens of each row are valid: keys past it are invisible, queries standing past it
            give 0, lse -inf also with a sink.
        cu_seqlens: [N + 1] int32, where packed sequences start in the one row (B = 1), and where the last one ends; a
            pair of such tensors, for queries and for keys, where they differ. Empty sequences are allowed. Tokens
            before the first start and from the last end on belong to no sequence: nobody sees them, their output and
            gradients are 0, their lse is -inf. What passes the end of the row is cut off.
        max_seqlen: length of the longest sequence or more, or a pair (queries, keys), as in flash-attention. The SDPA
            path needs it on GPUs and in graphs, and computes longer sequences wrongly there; the kernels do not.
        prefix_lengths: [B] int32, for prefix-LM: the keys at positions below it are visible to all queries of the row,
            before them too; 0 gives the causal mask. Needs causal; not with window, decay or cu_seqlens.
        return_lse: also return the logarithm of the softmax denominator (with the sink), natural log, differentiable.
        return_max_logit: also return the largest logit of each query head: of all scores that its softmax sees, after
            scale, softcap, decay, slopes and bias, without the sink. For QK-clip, and to watch a run. Has no gradient.
        impl: "hopper", "triton", "sdpa" or "reference", which never fall back; or "auto": the Hopper kernels on their
            chip for the calls they serve, else Triton's on NVIDIA's GPUs from compute capability 8.0 on, else SDPA if
            it can express the call, else the reference. Kernels that fail a self-check are not taken. With "auto", the
            first call of each kind prints the choice and why; explain() returns it for any call.

    Returns:
        [B, Tq, H, Dv] in the dtype of q; with return_lse also [B, H, Tq] float32; with return_max_logit also [H]
        float32, -inf for a head whose queries see no key.

    Compilation: another window or softcap compiles other kernels; another dropout probability, seed or scale does not.
    Precision: float32 matmuls follow torch.set_float32_matmul_precision().
    Determinism: two runs give the same bits, except dq and the gradient of decay from the Hopper kernels. With
    torch.use_deterministic_algorithms(True) Triton's kernels compute the backward in their place.

    Raises:
        ValueError: an argument breaks a rule above; decay without causal; lengths together with cu_seqlens;
            alibi_slopes that require a gradient.
        RuntimeError: a second derivative of the kernels, one in forward mode, or is_grads_batched=True. Other
            transforms of torch.func work; torch.vmap starts the kernels once per example.

    Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023); Ainslie et al., GQA (2023); Lin et al.,
    Forgetting Transformer (2025), for decay; Press et al., ALiBi (2022).
    """
    q, k, v = _cast_for_autocast(q=q, k=k, v=v)
    return _attend(Call(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, dropout=dropout, seed=seed, bias=bias,
        decay=decay, alibi_slopes=alibi_slopes, sink=sink, relative_bias=relative_bias, score_mod=score_mod,
        score_args=score_args, lengths=lengths, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
        prefix_lengths=prefix_lengths, return_lse=return_lse, return_max_logit=return_max_logit, impl=impl,
    ))  # fmt: skip


KEYWORDS = tuple(attention.__kwdefaults__)


def attention_qkv(qkv, n_head, n_kv_head=None, **options):
    """attention() of a QKV projection: queries, keys and values are in one tensor, and their gradients in another.

    It saves the copy that autograd makes of the gradients of three slices: the kernels write dq, dk and dv into one
    tensor. SDPA and the reference get the slices.

    Args:
        qkv: [B, T, (H + 2 Hkv) D]: all query heads, then all key heads, then all value heads. Else as q of attention().
        n_head: H.
        n_kv_head: Hkv, a divisor of H; None = H.
        options: the keyword arguments of attention().

    Returns:
        As attention(): [B, T, H, D]; with return_lse also [B, H, T]; with return_max_logit also [H].

    Raises:
        ValueError, RuntimeError: as attention(); the last dimension is no multiple of H + 2 Hkv, or H none of Hkv.
    """
    (qkv,) = _cast_for_autocast(qkv=qkv)
    kv_heads = n_head if n_kv_head is None else n_kv_head
    check_qkv(qkv, n_head, kv_heads)
    heads = n_head + 2 * kv_heads
    qkv = qkv.unflatten(2, (heads, qkv.shape[2] // heads))
    return _attend(call_of(qkv, None, None, **options)._replace(kv_heads=kv_heads))


class Route:
    """What is known of calls that are alike."""

    def __init__(self, call):
        self.impl, _ = decide(call)
        self.features = features_of(call)
        self.problem = None  # of problem.py, for the kernels


ROUTES = {}


def _attend(call):
    """attention() of a Call; q holds keys and values too if kv_heads is not 0."""
    if call.score_mod is not None:
        call = with_label(call)
    signature, route = signature_of(call), None
    if signature is not None:  # else Dynamo would look at what is remembered
        try:
            route = ROUTES.get(signature)
        except TypeError:  # symbolic shapes have no hash
            signature = None
    if route is None:
        route = Route(call.apart())
        if signature is not None:
            if len(ROUTES) >= 512:  # lengths that never repeat
                ROUTES.clear()
            ROUTES[signature] = route
    else:  # what the signature leaves out
        if call.seed is not None:
            check_seed(call.seed, call.q.device)
        if call.max_seqlen is not None:
            check_max_seqlen(call.max_seqlen)
    impl, q = route.impl, call.q
    if call.kv_heads > 0 and impl in ("sdpa", "reference"):
        call = call.apart()
    scale = q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
    seed = _seed_tensor(call.seed, q.device) if call.dropout > 0 and impl != "sdpa" else None  # SDPA draws its own
    call = call._replace(scale=scale, seed=seed, impl=impl)
    if impl == "sdpa":
        return attention_by_sdpa(call)
    if impl == "reference":
        return reference_attention(*call[:3], **{name: getattr(call, name) for name in KEYWORDS if name != "impl"})
    if route.features or call.is_ragged or call.score_args:
        call = for_kernels(call, route.features)
    # else what the op does, since the way through PyTorch's dispatcher takes as long as a kernel
    if not ops.may_launch(*call.tensors):
        out, *rows = ops.forward_op(*call.for_op)
    else:
        if route.problem is None:
            from .problem import problem_of  # imports Triton

            route.problem = problem_of(call)
        out, *rows = ops.forward_with_gradient(call, route.problem)
    rows = [x * math.log(2) for x in (rows if call.return_lse else rows[1:])]  # to natural units
    return (out, *rows) if rows else out


def signature_of(call):
    """What calls that are alike have in common; None while torch.compile traces.

    Left out are where tensors lie, what they hold, and the values of seed and max_seqlen.
    """
    if torch.compiler.is_compiling():
        return None
    precision = call.q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision
    bounds, _, score_args = call[-3:]
    return (
        *[None if x is None else traits(x) for x in call[:SEED]], *call[SEED + 1 : -3],
        *map(type, call[SEED:]),  # since True == 1
        torch.is_grad_enabled(), precision,
        bounds is not None and (traits(bounds), hides_values(call)), traits(score_args),
    )  # fmt: skip


def traits(x):
    """What of an argument decides how a call is served."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return tuple(map(traits, x)) if isinstance(x, tuple) else (type(x), x)


def for_kernels(call, features):
    """A Call as the ops take it."""
    changes = {feature.name: feature.for_kernels(call, getattr(call, feature.name)) for feature in features}
    if call.lengths is not None:
        changes["lengths"] = call.lengths.contiguous()
    if call.cu_seqlens is not None:
        changes["q_starts"], changes["k_starts"] = (x.contiguous() for x in pair(call.cu_seqlens))
    if call.score_args:
        changes |= split_args(call.score_args)
    return call._replace(**changes) if changes else call


def with_label(call):
    """A Call with the label of its score_mod in place of the function."""
    return call._replace(score_mod=label_of(call.score_mod))


def explain(q, k, v, **arguments):
    """Which implementation serves attention(q, k, v, **arguments), and why: a line of text. Raises as attention()."""
    call = call_of(*_cast_for_autocast(q=q, k=k, v=v), **arguments)
    return "{}: {}".format(*decide(call if call.score_mod is None else with_label(call)))


def call_of(q, k, v, /, **arguments):
    """The Call of attention(q, k, v, **arguments)."""
    for name in arguments:
        if name not in KEYWORDS:
            raise TypeError(f"attention_qkv() and explain() take the keywords of attention(); {name!r} is not one")
    return Call(q, k, v, **arguments)


def _seed_tensor(seed, device):
    if seed is None:
        return torch.randint(2**62, (1,), device=device)
    if isinstance(seed, int):
        return torch.full((1,), seed, dtype=torch.int64, device=device)  # no copy from the host, so it can be captured
    return seed


def _cast_for_autocast(**tensors):
    """As torch does it: float64 and integers stay what they are."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            check_is_tensor(name, x)  # raises
    tensors = list(tensors.values())
    device = tensors[0].device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [x.to(dtype) if x.dtype in DTYPES else x for x in tensors]
    return tensors
