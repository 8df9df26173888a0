"""What attention() accepts: each rule as one sentence with the value, the rule and the remedy.

The contents of lengths and cu_seqlens are not checked: that would wait for the device.
"""

import torch

MAX_HEAD_DIM = 256
MAX_LENGTH = 2**29  # positions and their differences are 32-bit
MAX_FLOAT = torch.finfo(torch.float32).max
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
IMPLEMENTATIONS = ("auto", "hopper", "triton", "sdpa", "reference")


def check_is_tensor(name, x):
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is {type(x).__name__}; it must be a torch.Tensor")


def check_tensor(name, x, device, dtypes=None, shapes=(), meaning=""):
    """dtypes: those allowed, None = the floating ones; shapes: those allowed, if any, and what they mean, in words."""
    check_is_tensor(name, x)
    if x.device != device or (x.dtype not in dtypes if dtypes else not x.is_floating_point()):
        wanted = " or ".join(map(str, dtypes)) if dtypes else "floating point"
        raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be {wanted} on {device}")
    if shapes and all(tuple(x.shape) != shape for shape in shapes):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {meaning}{' or '.join(map(str, shapes))}")


def check_is(name, x, kind):
    """kind: bool, int, or float, which may be given as an int."""
    if not isinstance(x, (int, float) if kind is float else kind) or (isinstance(x, bool) and kind is not bool):
        remedy = ": call .item()" if hasattr(x, "item") else ""  # NumPy's numbers and tensors
        raise ValueError(f"{name}={x!r} is {type(x).__name__}; it must be a Python {kind.__name__}{remedy}")


def check_int(name, x, low, high, remedy=""):
    check_is(name, x, int)
    if not low <= x <= high:
        raise ValueError(f"{name}={x!r} must be from {low} to {high}{remedy}")


def check_number(name, x, holds, rule):
    """holds(x) of a number says whether `rule`, in words, is kept."""
    check_is(name, x, float)
    if not holds(x):
        raise ValueError(f"{name}={x!r} must be {rule}")


def check_tensors(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [batch, sequence, heads, head_dim]")
        if x.shape[1] > MAX_LENGTH:
            raise ValueError(f"{name} has {x.shape[1]} positions; at most {MAX_LENGTH} fit: split the sequence")
        if x.dtype not in (*DTYPES, torch.float64):
            raise ValueError(f"{name} is {x.dtype}; cast it to float16, bfloat16 or float32")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must be the same")
        if x.shape[-1] % 8 or not 8 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {x.shape[-1]}, no multiple of 8 up to {MAX_HEAD_DIM}: pad it")
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension, not 1: call .contiguous()")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}; batch, sequence and heads must be equal")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k and v {k.shape[0]}; they must be the same")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]}, k {k.shape[-1]}; they must be the same")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, k and v {k.shape[2]}; the first must be a multiple of the second")


def check_qkv(qkv, n_head, n_kv_head):
    check_is("n_head", n_head, int)
    check_is("n_kv_head", n_kv_head, int)
    if not 1 <= n_kv_head <= n_head or n_head % n_kv_head:
        raise ValueError(f"n_head={n_head} must be a multiple of n_kv_head={n_kv_head}, and both at least 1")
    heads = n_head + 2 * n_kv_head
    if qkv.dim() != 3 or qkv.shape[2] % heads:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; with n_head={n_head} and n_kv_head={n_kv_head} it must be "
            f"[batch, sequence, {heads} * head_dim]"
        )


def check_options(call):
    """Those of a Call that are no tensors, and the seed."""
    window, scale, softcap = call.window, call.scale, call.softcap
    for name in ("causal", "return_lse", "return_max_logit"):
        check_is(name, getattr(call, name), bool)
    if window is not None:
        check_int("window", window, 1, MAX_LENGTH, "; it counts the query's own position, and None means no limit")
    if scale is not None:
        check_number("scale", scale, lambda x: abs(x) < MAX_FLOAT, "a finite float32; None means 1 / sqrt(head_dim)")
    if softcap is not None:
        check_number("softcap", softcap, lambda x: 1e-30 <= x <= 1e30, "from 1e-30 to 1e30; None = off")
    check_number("dropout", call.dropout, lambda x: 0 <= x < 1, "in [0, 1)")
    check_seed(call.seed, call.q.device)
    if call.q.dtype == torch.float64 and call.impl == "triton":
        raise ValueError("q is torch.float64; the kernels take float16, bfloat16, float32: cast it or use 'reference'")


def check_impl(impl, known):
    if impl not in known:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(known)}")


def check_seed(seed, device):
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            given = f"{seed.dtype} of {seed.numel()} elements on {seed.device}"
            raise ValueError(f"seed is {given}; it must be one int64 on {device}")
    elif seed is not None:
        check_int("seed", seed, -(2**63), 2**63 - 1)


def count_sequences(q, cu_seqlens):
    """Rows of the batch, or packed sequences."""
    return q.shape[0] if cu_seqlens is None else pair(cu_seqlens)[0].shape[0] - 1


def check_ragged(call):
    """lengths, cu_seqlens and max_seqlen of a Call."""
    q, lengths, cu_seqlens, max_seqlen = call.q, call.lengths, call.cu_seqlens, call.max_seqlen
    batch, q_len, k_len = q.shape[0], q.shape[1], call.k.shape[1]
    if lengths is not None:
        check_tensor("lengths", lengths, q.device, (torch.int32,), [(batch,)], "one for each row of q, ")
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen={max_seqlen} was given without cu_seqlens; leave it out")
        return
    starts = check_pair("cu_seqlens", cu_seqlens)
    for x in starts:
        check_tensor("cu_seqlens", x, q.device, (torch.int32,))
    if max_seqlen is not None:
        check_max_seqlen(max_seqlen)
    if lengths is not None:
        raise ValueError("lengths and cu_seqlens were both given; packed sequences need no lengths: leave them out")
    if batch != 1:
        raise ValueError(f"q has batch {batch}; with cu_seqlens all sequences lie in one row: reshape to batch 1")
    shapes = [tuple(x.shape) for x in starts]
    if shapes[0] != shapes[1] or len(shapes[0]) != 1 or shapes[0][0] < 2:
        raise ValueError(
            "cu_seqlens has shapes {} and {} for queries and keys; both must be [N + 1] of N sequences".format(*shapes)
        )
    if not isinstance(cu_seqlens, tuple) and q_len != k_len:
        raise ValueError(f"q has {q_len} tokens, k {k_len}; give two cu_seqlens, a tuple, for queries and for keys")


def check_max_seqlen(x):
    for limit in check_pair("max_seqlen", x):
        check_int("max_seqlen", limit, 1, MAX_LENGTH)


def check_pair(name, x):
    """pair() of x."""
    if len(pair(x)) != 2:
        raise ValueError(f"{name}={x} must be one value, or a tuple of two, for queries and for keys")
    return pair(x)


def pair(x):
    """An argument given once for queries and keys, or for each."""
    return x if isinstance(x, tuple) else (x, x)
