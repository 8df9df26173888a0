"""The rules of checks.py and features.py: for each, the values that it rejects and accepts."""

import numpy as np
import pytest
import torch
from problems import floats, integers

from attention import attention

# option -> values that it must not have
WRONG = {
    "impl": ["flash"],
    "causal": [np.bool_(1)],
    "return_max_logit": [1],
    "window": [0, True, 2**31, np.int64(5)],
    "scale": [float("nan")],
    "softcap": [3e38, 1e-42],
    "dropout": [1.0, -0.1],
    "seed": [1.5, 2**63, integers(1), integers(1, 2).long()],
    "bias": [[1.0], integers(1), floats(3, 10), floats(1, 1, 1, 10, 10)],
    "relative_bias": [floats(3, 4, 9), floats(4, 0)],
    "decay": [floats(2, 10, 4).half(), floats(2, 10, 3)],
    "sink": [floats(2)],
    "alibi_slopes": [floats(4).half(), floats(2), floats(3, 4)],
    "lengths": [[1, 2], integers(1), integers(1, 2).long()],
    "prefix_lengths": [integers(1), integers(1, 2).long()],
}
PREFIX, STARTS = integers(1, 2), integers(0, 10)
# options of a call with two rows, a part of the message
TOGETHER = [
    (dict(impl="sdpa", softcap=3.0), "SDPA cannot express softcap"),
    (dict(decay=floats(2, 10, 4), causal=False), "causal=False"),
    (dict(alibi_slopes=floats(4).requires_grad_()), "alibi_slopes requires a gradient"),
    (dict(lengths=integers(1, 2), cu_seqlens=STARTS), "lengths and cu_seqlens"),
    (dict(cu_seqlens=STARTS), "batch 2"),
    (dict(max_seqlen=5), "max_seqlen=5"),
    (dict(prefix_lengths=PREFIX, causal=False), "prefix_lengths needs causal=True"),
    (dict(prefix_lengths=PREFIX, window=3), "prefix_lengths needs causal=True, without window"),
    (dict(prefix_lengths=PREFIX, decay=floats(2, 10, 4)), "prefix_lengths needs causal=True, without window, decay"),
]
# options of a call with one row of packed sequences, a part of the message
PACKED = [
    (dict(cu_seqlens=[0, 10]), "cu_seqlens is list"),
    (dict(cu_seqlens=STARTS.long()), "cu_seqlens is torch.int64"),
    (dict(cu_seqlens=integers(0)), "cu_seqlens has shapes (1,) and (1,)"),
    (dict(cu_seqlens=(STARTS, integers(0, 5, 10))), "cu_seqlens has shapes (2,) and (3,)"),
    (dict(cu_seqlens=(STARTS, STARTS.long())), "cu_seqlens is torch.int64"),
    (dict(cu_seqlens=(None, STARTS)), "cu_seqlens is NoneType"),
    (dict(cu_seqlens=3 * (STARTS,)), "cu_seqlens="),
    (dict(cu_seqlens=2 * [STARTS]), "cu_seqlens is list"),
    (dict(cu_seqlens=STARTS, max_seqlen=0), "max_seqlen=0"),
    (dict(cu_seqlens=STARTS, max_seqlen=(10, -1)), "max_seqlen=-1"),
    (dict(cu_seqlens=STARTS, max_seqlen=(10, None)), "max_seqlen=None"),
    (dict(cu_seqlens=STARTS, max_seqlen=(1, 2, 3)), "max_seqlen=(1, 2, 3)"),
    (dict(cu_seqlens=STARTS, max_seqlen=torch.tensor(10)), "max_seqlen=tensor(10)"),
    (dict(cu_seqlens=integers(0, 5, 10), alibi_slopes=floats(1, 4)), "alibi_slopes has shape (1, 4)"),
    (dict(cu_seqlens=STARTS, prefix_lengths=integers(1)), "prefix_lengths needs causal=True, without"),
]
# q, k and v in place of those below, and options, a part of the message
TENSORS = [
    (lambda q, k, v: (q[0], k, v), {}, "q has shape"),
    (lambda q, k, v: (q, k.half(), v), {}, "k is torch.float16"),
    (lambda q, k, v: (q.int(), k, v), {}, "q is torch.int32"),
    (lambda q, k, v: (q, k.to("meta"), v), {}, "k is torch.float32 on meta"),
    (lambda q, k, v: (q.tolist(), k, v), {}, "q is list"),
    (lambda q, k, v: (q[..., :12], k[..., :12], v), {}, "head dim 12"),
    (lambda q, k, v: (q[..., :0], k[..., :0], v), {}, "head dim 0"),
    (lambda q, k, v: tuple(x.repeat(1, 1, 1, 17) for x in (q, k, v)), {}, "head dim 272"),
    (lambda q, k, v: (q[..., :8], k, v), {}, "q has head dim 8, k 16"),
    (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 2)[..., ::2]), {}, "v has stride 2"),
    (lambda q, k, v: (q[:, :, :3], k, v), {}, "3 heads"),
    (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), {}, "4 heads, k and v 0"),
    (lambda q, k, v: (q, k, v[:, :, :1]), {}, "v (2, 10, 1, 16)"),
    (lambda q, k, v: (q[:1], k, v), {}, "batch 1"),
    (lambda q, k, v: (q, *longer(k, v, 2**29 + 1)), {}, "k has 536870913 positions"),
    (lambda q, k, v: (q, *longer(k, v, 2**24 + 1)), dict(alibi_slopes=floats(4)), "16777217 positions"),
    (lambda q, k, v: (q[:1], k[:1, :8], v[:1, :8]), dict(cu_seqlens=integers(0, 8)), "q has 10 tokens, k 8"),
    (lambda q, k, v: (q.double(), k.double(), v.double()), dict(impl="triton"), "q is torch.float64"),
    *((lambda *qkv: qkv, *row) for row in TOGETHER),
    *((lambda *qkv: [x[:1] for x in qkv], *row) for row in PACKED),
]


def longer(k, v, length):
    return [x[:, :1].expand(-1, length, -1, -1) for x in (k, v)]


@pytest.fixture
def said(device):
    """What two implementations say about a call; change: what is made of q, k and v."""
    q, k, v = (torch.randn(2, 10, heads, 16, device=device) for heads in (4, 2, 2))

    def said(options, change=lambda *qkv: qkv):
        for impl in ("triton", "reference"):
            with pytest.raises(ValueError) as error:
                attention(*change(q, k, v), **{"impl": impl} | options)
            yield str(error.value)

    return said


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_value(name, value, said):
    """The message has the value, or else its type, or the dtype or shape of a tensor."""
    properties = [f"{name}={value!r}", f"{name} is {type(value).__name__}"]
    if isinstance(value, torch.Tensor):
        properties = [f"{name} is {value.dtype}", f"{name} has shape {tuple(value.shape)}"]
    for message in said({name: value}):
        assert any(x in message for x in properties), message


@pytest.mark.parametrize("change, options, part", TENSORS, ids=[part for *_, part in TENSORS])
def test_values_that_do_not_fit(change, options, part, said):
    for message in said(options, change):
        assert part in message, message


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_outermost_softcaps(softcap, device):
    """The smallest makes all scores nearly equal; the largest caps nothing."""
    q, k, v = (torch.randn(1, 20, 1, 64, device=device, requires_grad=True) for _ in range(3))
    other = dict(scale=1e-30) if softcap < 1 else {}
    found = []
    for options in (dict(softcap=softcap, impl="triton"), dict(softcap=softcap, impl="reference"), other):
        out = attention(q, k, v, **{"impl": "reference"} | options)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for capped in found[:2]:
        torch.testing.assert_close(capped, found[2], rtol=1e-2, atol=1e-4)
