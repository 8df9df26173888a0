"""The rules of checks.py and features.py: for each, the values that it rejects and accepts."""

import numpy as np
import pytest
import torch
from problems import floats, integers

from attention import attention

# (a change of q [2, 10, 4, 16] and of k and v [2, 10, 2, 16], a part of the message)
TENSORS = [
    (lambda q, k, v: (q[0], k, v), "q has shape"),
    (lambda q, k, v: (q, k.half(), v), "k is torch.float16"),
    (lambda q, k, v: (q.int(), k, v), "cast it"),
    (lambda q, k, v: (q, k.to("meta"), v), "k is torch.float32 on meta"),
    (lambda q, k, v: (q.tolist(), k, v), "q is list"),
    (lambda q, k, v: (q[..., :12], k[..., :12], v), "head dim 12"),
    (lambda q, k, v: (q[..., :0], k[..., :0], v), "head dim 0"),
    (lambda q, k, v: tuple(x.repeat(1, 1, 1, 17) for x in (q, k, v)), "head dim 272"),
    (lambda q, k, v: (q[..., :8], k, v), "q has head dim 8, k 16"),
    (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 2)[..., ::2]), "v has stride 2"),
    (lambda q, k, v: (q[:, :, :3], k, v), "3 heads"),
    (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "4 heads, k and v 0"),
    (lambda q, k, v: (q, k, v[:, :, :1]), "v \\(2, 10, 1, 16\\)"),
    (lambda q, k, v: (q[:1], k, v), "batch 1"),
    (
        lambda q, k, v: (q, *(x[:, :1].expand(2, 2**29 + 1, 2, 16) for x in (k, v))),
        "k has 536870913 positions; at most",
    ),
]
OPTIONS = [
    (dict(relative_bias=floats(3, 4, 9)), "relative_bias has shape \\(3, 4, 9\\)"),
    (dict(relative_bias=floats(4, 0)), "with H = 4, R >= 1"),
    # options of a call, a part of the message
    (dict(impl="flash"), "impl='flash'"),
    (dict(impl="sdpa", softcap=3.0), "SDPA cannot express softcap"),
    (dict(causal=np.bool_(1)), "causal=.*Python bool.*item"),
    (dict(return_max_logit=1), "return_max_logit=1.*Python bool"),
    (dict(window=0), "window=0"),
    (dict(window=True), "window=True"),
    (dict(window=2**31), "window=2147483648"),
    (dict(window=np.int64(5)), "window=.*int64.*Python int"),
    (dict(scale=float("nan")), "scale=nan"),
    (dict(softcap=3e38), "softcap=3e\\+38.*1e-30.*1e30"),
    (dict(softcap=1e-42), "softcap=1e-42.*1e-30.*1e30"),
    (dict(dropout=1.0), "dropout=1.0"),
    (dict(dropout=-0.1), "dropout=-0.1"),
    (dict(seed=1.5), "seed=1.5"),
    (dict(seed=2**63), "seed=9223372036854775808"),
    (dict(seed=integers(1)), "seed is torch.int32"),
    (dict(seed=integers(1, 2).long()), "seed is torch.int64.*2 elements"),
    (dict(bias=[1.0]), "bias is list"),
    (dict(bias=integers(1)), "bias is torch.int32"),
    (dict(bias=floats(3, 10)), "bias has shape"),
    (dict(bias=floats(1, 1, 1, 10, 10)), "bias has shape \\(1, 1, 1, 10, 10\\)"),
    (dict(decay=floats(2, 10, 4).half()), "decay is torch.float16"),
    (dict(decay=floats(2, 10, 3)), "decay has shape"),
    (dict(decay=floats(2, 10, 4), causal=False), "causal=False"),
    (dict(sink=floats(2)), "sink has shape"),
    (dict(alibi_slopes=floats(4).half()), "alibi_slopes is torch.float16"),
    (dict(alibi_slopes=floats(2)), "alibi_slopes has shape \\(2,\\)"),
    (dict(alibi_slopes=floats(3, 4)), "alibi_slopes has shape \\(3, 4\\)"),
    (dict(alibi_slopes=floats(4).requires_grad_()), "alibi_slopes requires a gradient"),
    (dict(lengths=[1, 2]), "lengths is list"),
    (dict(lengths=integers(1)), "lengths has shape \\(1,\\).*row of q, \\(2,\\)"),
    (dict(lengths=integers(1, 2).long()), "lengths is torch.int64"),
    (dict(lengths=integers(1, 2), cu_seqlens=integers(0, 10)), "leave them out"),
    (dict(cu_seqlens=integers(0, 10)), "batch 2"),
    (dict(max_seqlen=5), "without cu_seqlens"),
    (dict(prefix_lengths=integers(1)), "prefix_lengths .*\\(1,\\).*\\(2,\\)"),
    (dict(prefix_lengths=integers(1, 2).long()), "prefix_lengths is torch.int64.*must be torch.int32"),
    (dict(prefix_lengths=integers(1, 2), causal=False), "prefix_lengths needs causal=True, without window"),
    (dict(prefix_lengths=integers(1, 2), window=3), "prefix_lengths needs causal=True, without window"),
    (dict(prefix_lengths=integers(1, 2), decay=floats(2, 10, 4)), "prefix_lengths needs causal=True, without window"),
]
ONE_ROW = [  # options of a call with packed sequences, a part of the message
    (dict(cu_seqlens=[0, 10]), "cu_seqlens is list"),
    (dict(cu_seqlens=integers(0, 10).long()), "cu_seqlens is torch.int64"),
    (dict(cu_seqlens=integers(0)), "cu_seqlens has shapes \\(1,\\) and \\(1,\\)"),
    (dict(cu_seqlens=(integers(0, 10), integers(0, 5, 10))), "\\(2,\\) and \\(3,\\)"),
    (dict(cu_seqlens=(integers(0, 10), integers(0, 10).long())), "cu_seqlens is torch.int64"),
    (dict(cu_seqlens=(None, integers(0, 10))), "cu_seqlens is NoneType"),
    (dict(cu_seqlens=3 * (integers(0, 10),)), "cu_seqlens=.*tuple of two"),
    (dict(cu_seqlens=2 * [integers(0, 10)]), "cu_seqlens is list"),
    (dict(cu_seqlens=integers(0, 10), max_seqlen=0), "max_seqlen=0"),
    (dict(cu_seqlens=integers(0, 10), max_seqlen=(10, -1)), "max_seqlen=-1"),
    (dict(cu_seqlens=integers(0, 10), max_seqlen=(1, 2, 3)), "max_seqlen=\\(1, 2, 3\\)"),
    (dict(cu_seqlens=integers(0, 10), max_seqlen=torch.tensor(10)), "max_seqlen=tensor\\(10\\).*Python int.*item"),
    (dict(cu_seqlens=integers(0, 5, 10), alibi_slopes=floats(1, 4)), "alibi_slopes has shape \\(1, 4\\).*\\(2, 4\\)"),
    (dict(cu_seqlens=integers(0, 10), prefix_lengths=integers(1)), "prefix_lengths needs causal=True, without window"),
]
BAD = [
    *((change, {}, message) for change, message in TENSORS),
    *((lambda q, k, v: (q, k, v), options, message) for options, message in OPTIONS),
    *((lambda q, k, v: (q[:1], k[:1], v[:1]), options, message) for options, message in ONE_ROW),
    (lambda q, k, v: (q[:1], k[:1, :8], v[:1, :8]), dict(cu_seqlens=integers(0, 8)), "q has 10 tokens, k 8"),
    (lambda q, k, v: (q.double(), k.double(), v.double()), dict(impl="triton"), "q is torch.float64"),
    (
        lambda q, k, v: (q, *(x[:1, :1, :1].expand(2, 2**24 + 1, 2, 16) for x in (k, v))),
        dict(alibi_slopes=floats(4)),
        "16777217 positions",
    ),
]


@pytest.mark.parametrize("change, options, message", BAD, ids=[message for *_, message in BAD])
def test_bad_input(change, options, message, device):
    q, k, v = (torch.randn(2, 10, 4 if i == 0 else 2, 16, device=device) for i in range(3))
    for impl in ("triton", "reference"):
        with pytest.raises(ValueError, match=message):
            attention(*change(q, k, v), **{"impl": impl} | options)


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_outermost_softcaps(softcap, device):
    """The smallest makes all scores nearly equal; the largest caps nothing."""
    q, k, v = (torch.randn(1, 20, 1, 64, device=device, requires_grad=True) for _ in range(3))
    other = dict(scale=1e-30) if softcap < 1 else {}
    found = []
    for options in (dict(softcap=softcap, impl="triton"), dict(softcap=softcap, impl="reference"), other):
        out = attention(q, k, v, **{"impl": "reference"} | options)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for ours, capped, without in zip(*found, strict=True):
        for x in (ours, capped):
            torch.testing.assert_close(x, without, rtol=1e-2, atol=1e-4)
