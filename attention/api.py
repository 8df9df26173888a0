"""attention(): what it computes, what it accepts, and which implementation serves a call."""

import math
import os
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import ops
from .reference import reference_attention

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
IMPLEMENTATIONS = ("auto", "triton", "sdpa", "reference")


def attention(
    q, k, v, *, causal=True, window=None, scale=None, softcap=None, dropout=0.0, seed=None, bias=None, decay=None,
    sink=None, lengths=None, cu_seqlens=None, max_seqlen=None, return_lse=False, impl="auto",
):  # fmt: skip
    """Scaled dot-product attention, exact, in O(T) memory: softmax(mask(cap(scale q k^T))) v for each head.

    Letters: B batch, Tq queries, Tk keys, H query heads, Hkv key/value heads (H a multiple of Hkv: grouped queries),
    D and Dv head dims (multiples of 8 up to 256). Gradients flow to q, k and v; a row that sees no key gives 0.

    Args:
        q: [B, Tq, H, D] float16, bfloat16 or float32; any strides as long as the last dimension is contiguous.
        k, v: [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv], dtype and device of q.
        causal: query i sees keys 0 .. i + Tk - Tq: aligned to the last key, as flash-attention and unlike SDPA.
        window: query at key position i sees keys i - window + 1 .. i, and without causal also the window - 1 after it;
            None = no limit.
        scale: factor of q.k; None = 1 / sqrt(D).
        softcap: scores s become softcap * tanh(s / softcap) before the mask; None = off.
        dropout: probability in [0, 1) with which a normalised weight is dropped; the others grow by 1 / (1 - dropout).
        seed: int or int64 tensor of one element on the device of q, for dropout; None draws one from torch's generator.
            The same seed drops the same (sequence, head, query, key), whatever the tile sizes.
        bias, decay, sink, lengths, cu_seqlens, max_seqlen: not built yet.
        return_lse: also return the log-sum-exp of the scores, natural log, differentiable.
        impl: "auto" takes Triton on a CUDA GPU where it passed the start-up self-check, SDPA elsewhere where it can
            express the call, else the reference, and prints once which and why. "triton", "sdpa" and "reference" never
            fall back. float32 matmuls follow torch.set_float32_matmul_precision.

    Returns:
        [B, Tq, H, Dv] in the dtype of q; with return_lse also [B, H, Tq] float32, -inf where a row sees no key.

    Raises:
        ValueError: an argument breaks a rule above; NotImplementedError: an argument that is not built yet.

    Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023); Ainslie et al., GQA (2023).
    """
    later = dict(bias=bias, decay=decay, sink=sink, lengths=lengths, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    for name, value in later.items():
        if value is not None:
            raise NotImplementedError(f"attention({name}=...) is not built yet; leave it None")
    q, k, v = _cast_for_autocast(q, k, v)
    _check_tensors(q, k, v)
    _check_options(q, window, scale, softcap, dropout, seed, impl)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    rule = dict(causal=causal, window=window, scale=scale, softcap=softcap, dropout=dropout)

    if impl == "auto":
        impl = implementation(q.device).name
        if impl == "sdpa" and sdpa_lacks(q, k, rule, seed, return_lse):
            impl = "reference"
    if impl == "sdpa":
        if lack := sdpa_lacks(q, k, rule, seed, return_lse):
            raise ValueError(f"SDPA cannot express {lack}; use impl='triton' or impl='reference'")
        return _sdpa(q, k, v, causal, window, scale, dropout)
    if dropout > 0:
        seed = _seed_tensor(seed, q.device)
    if impl == "reference":
        return reference_attention(q, k, v, seed=seed, return_lse=return_lse, **rule)
    if not (q.is_cuda or _interpreting()):
        raise ValueError(f"impl='triton' needs tensors on a CUDA GPU, got {q.device}; use impl='auto' or 'sdpa'")
    out, lse2 = ops.forward(
        q, k, v, seed if dropout > 0 else None, causal, window or 0, softcap or 0.0, float(dropout), scale
    )
    return (out, lse2 * math.log(2)) if return_lse else out


class Choice(NamedTuple):
    """The implementation impl="auto" takes on a device, and why, in words."""

    name: str
    reason: str


_CHOICES = {}


@torch.compiler.assume_constant_result  # Dynamo calls it while tracing and keeps the answer
def implementation(device):
    """What impl="auto" takes on a torch.device; decided once per device and said by the first call that asks.

    On a CUDA GPU the kernels first compute a tiny case, which is compared with the reference: about a second.
    """
    if device not in _CHOICES:
        _CHOICES[device] = choice = _choose(device)
        if os.environ.get("RANK", "0") == "0":  # torchrun's other processes would say the same
            print(f"attention  {choice.name} on {device}: {choice.reason}", file=sys.stderr, flush=True)
    return _CHOICES[device]


def _choose(device):
    if device.type != "cuda":
        return Choice("sdpa", f"the Triton kernels need a CUDA GPU, this is {device.type}")
    try:
        worst = max(_self_check(device, dtype) for dtype in (torch.float16, torch.float32))
    except Exception as error:  # whatever breaks here would break training later: a missing package, driver or compiler
        return Choice("sdpa", f"the Triton kernels failed their self-check: {type(error).__name__}: {error}")
    if not worst < 1e-2:  # a NaN must fail
        return Choice("sdpa", f"the Triton kernels failed their self-check: relative error {worst:.1e}, at most 1e-2")
    return Choice("triton", f"self-check passed, relative error {worst:.1e}")


def _self_check(device, dtype):
    """Largest relative error of output and gradients on a tiny grouped, causal, ragged case."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 70, heads, 64, generator=generator) for heads in (2, 1, 1, 2))

    def run(impl, device, dtype):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = attention(*leaves, impl=impl)
        return [x.double().cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout.to(device, dtype)))]

    exact = run("reference", "cpu", torch.float32)
    ours = run("triton", device, dtype)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


def sdpa_lacks(q, k, rule, seed, return_lse):
    """What of a call torch's scaled_dot_product_attention cannot express, in words; None if it can express all."""
    if rule["softcap"] is not None:
        return "softcap"
    if return_lse:
        return "return_lse"
    if rule["dropout"] > 0 and seed is not None:
        return "dropout with a given seed"
    if rule["causal"] and q.shape[1] > k.shape[1]:
        return f"causal attention of {q.shape[1]} queries to {k.shape[1]} keys (the first queries see no key)"
    if rule["window"] is not None and q.shape[1] != k.shape[1]:
        return f"a window with {q.shape[1]} queries and {k.shape[1]} keys"
    return None


def _sdpa(q, k, v, causal, window, scale, dropout):
    q_len, k_len = q.shape[1], k.shape[1]
    mask = None
    if window is not None or (causal and 1 < q_len < k_len):
        q_pos = torch.arange(q_len, device=q.device)[:, None] + k_len - q_len
        distance = q_pos - torch.arange(k_len, device=q.device)
        mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            mask &= distance.abs() < window
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, dropout_p=dropout, scale=scale,
        is_causal=causal and mask is None and q_len > 1, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def _interpreting():
    """Whether kernels run in the Triton interpreter, on any device."""
    from .tiles import INTERPRETED

    return bool(INTERPRETED.value)


def _seed_tensor(seed, device):
    if seed is None:
        return torch.randint(2**62, (1,), device=device)
    if isinstance(seed, int):
        return torch.tensor([seed], device=device)
    return seed


def _cast_for_autocast(*tensors):
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [x.to(dtype) for x in tensors]
    return tensors


def _check_tensors(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [batch, sequence, heads, head_dim]")
        if x.dtype not in (*DTYPES, torch.float64):
            raise ValueError(f"{name} is {x.dtype}; cast it to float16, bfloat16 or float32")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must be the same")
        if x.shape[-1] % 8 or not 8 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has head dim {x.shape[-1]}; it must be a multiple of 8 up to {MAX_HEAD_DIM}: pad it"
            )
        if x.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {x.stride(-1)} in its last dimension; it must be 1: call .contiguous()"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}; batch, sequence and heads must be the same"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k and v {k.shape[0]}; they must be the same")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]}, k {k.shape[-1]}; they must be the same")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, k and v {k.shape[2]}; the first must be a multiple of the second")


def _check_options(q, window, scale, softcap, dropout, seed, impl):
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 (the query's own position); None means no limit")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite; None means 1 / sqrt(head_dim)")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap={softcap} must be positive and finite; None turns it off")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be in [0, 1)")
    if isinstance(seed, torch.Tensor) and (seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device):
        raise ValueError(
            f"seed is {seed.dtype} with {seed.numel()} elements on {seed.device}; it must be one int64 on {q.device}"
        )
    if q.dtype == torch.float64 and impl == "triton":
        raise ValueError(
            "q is torch.float64; the kernels take float16, bfloat16 and float32: cast it or use 'reference'"
        )
