"""What attention() takes and refuses, which implementation it chooses, and what it remembers of a call."""

import re
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from test_attention import ON_GPU, floats, integers, make_problem
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import attention, explain, launch, ops
from attention.api import hopper_misses


def test_auto_says_once_what_it_took(device, capsys):
    from attention import api

    api._CHOICES.clear()
    api._DECIDED.clear()
    q, k, v = (torch.randn(1, 20, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v)
    attention(q, k, v)
    attention(q, k, v, window=5)
    printed = capsys.readouterr().err
    assert printed.count("attention ") == 1
    on_hopper = api.hopper_misses(torch.device(device, 0) if ON_GPU else torch.device(device)) is None
    assert ("hopper on" if on_hopper else "triton on" if ON_GPU else "sdpa on") in printed


def test_auto_survives_a_broken_kernel(device, monkeypatch):
    from attention import api

    def broken(device, dtype, ragged, impl):
        raise RuntimeError("no compiler")

    def choose(hopper=True):
        return api._choose_for(torch.device("cuda"), torch.bfloat16, hopper)

    monkeypatch.setattr(api, "_self_check", broken)
    assert choose().name == "sdpa" and choose().reason.count("no compiler") == 2
    monkeypatch.setattr(api, "_self_check", lambda *check: broken(*check) if check[-1] == "hopper" else 1e-3)
    assert choose(hopper=False) == ("triton", "self-check passed, relative error 1.0e-03")
    assert choose().name == "triton" and "hopper kernels failed" in choose().reason
    monkeypatch.setattr(api, "_self_check", lambda *check: float("nan"))
    assert choose().name == "sdpa"


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])  # of the allocator, and of the driver
def test_a_full_gpu_is_no_verdict(monkeypatch, error):
    """It is the caller's error, and the next call asks again."""
    from attention import api

    def full(*check):
        raise error("CUDA: out of memory")

    monkeypatch.setattr(api, "_self_check", full)
    with pytest.raises(error, match="out of memory"):
        api._choose_for(torch.device("cuda"), torch.bfloat16, True)


def fake(call, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(x)


def hooked(call, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: 1 / 0, lambda x: 1 / 0):
        call(x)


@torch.inference_mode()
def inferring(call, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        call(x)


def transformed(call, x):
    torch.vmap(torch.func.grad(call))(x)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.sum()

    @staticmethod
    def backward(ctx, dout):
        return ctx.call(torch.zeros(1, 2, device=dout.device)).expand(1, 2), None


def backward(call, x):
    InBackward.apply(x.requires_grad_(), call).backward()


def without_threads(call, x):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        inferring(call, x)


@pytest.mark.parametrize("within", [fake, hooked, inferring, transformed, backward, without_threads])
def test_self_check_in_any_context(within, device):
    """What the first call happens to stand in has no say in what serves all later ones."""
    from attention import api

    found = []

    def call(x):
        found.append(api._passes(torch.device(device), torch.float32, False, "triton"))
        return x.sum()

    within(call, torch.zeros(1, 2, device=device))
    assert found[0][0], found


BAD = {
    "dims": (lambda q, k, v: (q[0], k, v), {}, "q has shape"),
    "dtype": (lambda q, k, v: (q, k.half(), v), {}, "k is torch.float16"),
    "integer": (lambda q, k, v: (q.int(), k, v), {}, "cast it"),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), {}, "3 heads"),
    "batch": (lambda q, k, v: (q[:1], k, v), {}, "batch 1"),
    "head_dim": (lambda q, k, v: (q[..., :12], k[..., :12], v), {}, "head dim 12"),
    "big_head_dim": (lambda q, k, v: tuple(x.repeat(1, 1, 1, 17) for x in (q, k, v)), {}, "head dim 272"),
    "kv": (lambda q, k, v: (q, k[:, :5], v), {}, "k has shape"),
    "stride": (lambda q, k, v: (q.transpose(2, 3).contiguous().transpose(2, 3), k, v), {}, "stride"),
    "dropout": (lambda q, k, v: (q, k, v), dict(dropout=1.0), "dropout=1.0"),
    "device": (lambda q, k, v: (q, k.to("meta"), v), {}, "k is torch.float32 on meta"),
    "window": (lambda q, k, v: (q, k, v), dict(window=0), "window=0"),
    "negative_window": (lambda q, k, v: (q, k, v), dict(window=-3), "window=-3"),
    "softcap": (lambda q, k, v: (q, k, v), dict(softcap=-1.0), "softcap=-1.0"),
    "scale": (lambda q, k, v: (q, k, v), dict(scale=float("nan")), "scale=nan"),
    "impl": (lambda q, k, v: (q, k, v), dict(impl="flash"), "impl='flash'"),
    "sdpa": (lambda q, k, v: (q, k, v), dict(impl="sdpa", softcap=3.0), "SDPA cannot express softcap"),
    "bias": (lambda q, k, v: (q, k, v), dict(bias=floats(3, 10)), "bias has shape"),
    "integer_bias": (lambda q, k, v: (q, k, v), dict(bias=integers(1)), "bias is torch.int32"),
    "decay": (lambda q, k, v: (q, k, v), dict(decay=floats(2, 10, 3)), "decay has shape"),
    "decay_full": (lambda q, k, v: (q, k, v), dict(decay=floats(2, 10, 4), causal=False), "causal=False"),
    "sink": (lambda q, k, v: (q, k, v), dict(sink=floats(2)), "sink has shape"),
    "lengths": (lambda q, k, v: (q, k, v), dict(lengths=integers(1)), "lengths has 1 elements"),
    "long_lengths": (lambda q, k, v: (q, k, v), dict(lengths=integers(1, 2).long()), "lengths is torch.int64"),
    "packed_batch": (lambda q, k, v: (q, k, v), dict(cu_seqlens=integers(0, 10)), "batch 2"),
    "packed_pair": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=(integers(0, 10), integers(0, 5, 10))),
        "2 and 3 elements",
    ),
    "both": (lambda q, k, v: (q, k, v), dict(cu_seqlens=integers(0, 10), lengths=integers(1, 2)), "leave them out"),
    "max_seqlen": (lambda q, k, v: (q, k, v), dict(max_seqlen=5), "without cu_seqlens"),
    "max_seqlen_0": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10), max_seqlen=0),
        "max_seqlen=0",
    ),
    "list": (lambda q, k, v: (q.tolist(), k, v), {}, "q is list"),
    "no_key": (lambda q, k, v: (q, None, v), {}, "k is NoneType"),
    "causal": (lambda q, k, v: (q, k, v), dict(causal="no"), "causal='no'"),
    "float_window": (lambda q, k, v: (q, k, v), dict(window=2.5), "window=2.5"),
    "bool_window": (lambda q, k, v: (q, k, v), dict(window=True), "window=True"),
    "big_window": (lambda q, k, v: (q, k, v), dict(window=2**31), "window=2147483648"),
    "string_scale": (lambda q, k, v: (q, k, v), dict(scale="1"), "scale='1'"),
    "big_scale": (lambda q, k, v: (q, k, v), dict(scale=1e300), "scale=1e\\+300"),
    "string_softcap": (lambda q, k, v: (q, k, v), dict(softcap="1"), "softcap='1'"),
    "no_dropout": (lambda q, k, v: (q, k, v), dict(dropout=None), "dropout=None"),
    "float_seed": (lambda q, k, v: (q, k, v), dict(seed=1.5), "seed=1.5"),
    "big_seed": (lambda q, k, v: (q, k, v), dict(seed=2**63), "seed=9223372036854775808"),
    "seed_dtype": (lambda q, k, v: (q, k, v), dict(seed=integers(1)), "seed is torch.int32"),
    "half_decay": (lambda q, k, v: (q, k, v), dict(decay=floats(2, 10, 4).half()), "decay is torch.float16"),
    "list_bias": (lambda q, k, v: (q, k, v), dict(bias=[1.0]), "bias is list"),
    "list_lengths": (lambda q, k, v: (q, k, v), dict(lengths=[1, 2]), "lengths is list"),
    "packed_none": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=(None, None)),
        "cu_seqlens=\\(None, None\\)",
    ),
    "max_seqlen_3": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10), max_seqlen=(1, 2, 3)),
        "max_seqlen=\\(1, 2, 3\\) must be one int",
    ),
    "max_seqlen_bool": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10), max_seqlen=True),
        "max_seqlen=True",
    ),
    "value_dim": (lambda q, k, v: (q, k, v[..., :12]), {}, "v has head dim 12"),
    "no_head_dim": (lambda q, k, v: (q[..., :0], k[..., :0], v), {}, "head dim 0"),
    "query_dim": (lambda q, k, v: (q[..., :8], k, v), {}, "q has head dim 8, k 16"),
    "value_stride": (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 2)[..., ::2]), {}, "v has stride 2"),
    "kv_heads": (lambda q, k, v: (q, k, v[:, :, :1]), {}, "v \\(2, 10, 1, 16\\)"),
    "kv_batch": (lambda q, k, v: (q, k, v[:1]), {}, "v \\(1, 10, 2, 16\\)"),
    "no_key_heads": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), {}, "4 heads, k and v 0"),
    "double": (lambda q, k, v: (q.double(), k.double(), v.double()), dict(impl="triton"), "q is torch.float64"),
    "infinite_scale": (lambda q, k, v: (q, k, v), dict(scale=-float("inf")), "scale=-inf"),
    "bool_scale": (lambda q, k, v: (q, k, v), dict(scale=True), "scale=True"),
    "no_softcap": (lambda q, k, v: (q, k, v), dict(softcap=0.0), "softcap=0.0"),
    "infinite_softcap": (lambda q, k, v: (q, k, v), dict(softcap=float("inf")), "softcap=inf"),
    "negative_dropout": (lambda q, k, v: (q, k, v), dict(dropout=-0.1), "dropout=-0.1"),
    "nan_dropout": (lambda q, k, v: (q, k, v), dict(dropout=float("nan")), "dropout=nan"),
    "bool_dropout": (lambda q, k, v: (q, k, v), dict(dropout=False), "dropout=False"),
    "bool_seed": (lambda q, k, v: (q, k, v), dict(seed=True), "seed=True"),
    "small_seed": (lambda q, k, v: (q, k, v), dict(seed=-(2**63) - 1), "seed=-9223372036854775809"),
    "two_seeds": (lambda q, k, v: (q, k, v), dict(seed=integers(1, 2).long()), "seed is torch.int64 of 2 elements"),
    "seed_device": (
        lambda q, k, v: (q, k, v),
        dict(seed=integers(1).long().to("meta")),
        "seed is torch.int64 of 1 elements on meta",
    ),
    "bias_dims": (
        lambda q, k, v: (q, k, v),
        dict(bias=floats(1, 1, 1, 10, 10)),
        "bias has shape \\(1, 1, 1, 10, 10\\)",
    ),
    "bias_device": (lambda q, k, v: (q, k, v), dict(bias=floats(1).to("meta")), "bias is torch.float32 on meta"),
    "integer_decay": (lambda q, k, v: (q, k, v), dict(decay=integers(1)), "decay is torch.int32"),
    "sink_device": (lambda q, k, v: (q, k, v), dict(sink=floats(4).to("meta")), "sink is torch.float32 on meta"),
    "lengths_dims": (lambda q, k, v: (q, k, v), dict(lengths=integers(1, 2)[None]), "lengths is torch.int32 of 2 dims"),
    "lengths_device": (
        lambda q, k, v: (q, k, v),
        dict(lengths=integers(1, 2).to("meta")),
        "lengths is torch.int32 of 1 dims on meta",
    ),
    "lengths_stride": (lambda q, k, v: (q, k, v), dict(lengths=integers(1, 2, 3)[::2]), "lengths has stride 2"),
    "packed_list": (lambda q, k, v: (q[:1], k[:1], v[:1]), dict(cu_seqlens=[0, 10]), "cu_seqlens=\\[0, 10\\] must be"),
    "packed_dtype": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10).long()),
        "cu_seqlens is torch.int64",
    ),
    "packed_device": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10).to("meta")),
        "cu_seqlens is torch.int32 of 1 dims on meta",
    ),
    "packed_stride": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 5, 10)[::2]),
        "cu_seqlens has stride 2",
    ),
    "packed_keys": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=(integers(0, 10), integers(0, 10).long())),
        "cu_seqlens is torch.int64",
    ),
    "packed_half": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=(None, integers(0, 10))),
        "cu_seqlens=\\(None, tensor",
    ),
    "packed_3": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=3 * (integers(0, 10),)),
        "must be one tensor, or a tuple of two",
    ),
    "packed_nothing": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0)),
        "cu_seqlens has 1 and 1 elements",
    ),
    "packed_once": (
        lambda q, k, v: (q[:1], k[:1, :8], v[:1, :8]),
        dict(cu_seqlens=integers(0, 8)),
        "q has 10 tokens, k 8",
    ),
    "max_seqlen_of_keys": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10), max_seqlen=(10, -1)),
        "max_seqlen=-1",
    ),
    "packed_two_in_a_list": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=2 * [integers(0, 10)]),
        "must be one tensor, or a tuple of two, for queries and for keys",
    ),
    "max_seqlen_tensor": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10), max_seqlen=torch.tensor(10)),
        "max_seqlen=tensor\\(10\\) is Tensor; it must be a Python int: call .item\\(\\)",
    ),
    "max_seqlen_list": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10), max_seqlen=[10, 10]),
        "max_seqlen=\\[10, 10\\] must be one int, or a tuple of two, for queries and for keys",
    ),
    "numpy_window": (
        lambda q, k, v: (q, k, v),
        dict(window=np.int64(5)),
        "is int64; it must be a Python int: call",
    ),
    "numpy_scale": (
        lambda q, k, v: (q, k, v),
        dict(scale=np.float32(1)),
        "is float32; it must be a Python float:",
    ),
    "numpy_causal": (lambda q, k, v: (q, k, v), dict(causal=np.bool_(1)), "it must be a Python bool: call .item"),
    "return_lse": (lambda q, k, v: (q, k, v), dict(return_lse="x"), "return_lse='x' is str; it must be a Python bool"),
    "big_softcap": (lambda q, k, v: (q, k, v), dict(softcap=3e38), "softcap=3e\\+38 must be from 1e-30 to 1e30"),
    "small_softcap": (lambda q, k, v: (q, k, v), dict(softcap=1e-42), "softcap=1e-42 must be from 1e-30 to 1e30"),
    "big_max_seqlen": (
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        dict(cu_seqlens=integers(0, 10), max_seqlen=2**30),
        "max_seqlen=1073741824",
    ),
}


@pytest.mark.parametrize("change, options, message", BAD.values(), ids=BAD)
def test_bad_input(change, options, message, device):
    q, k, v = (torch.randn(2, 10, 4 if i == 0 else 2, 16, device=device) for i in range(3))
    for impl in ("triton", "reference"):
        with pytest.raises(ValueError, match=message):
            attention(*change(q, k, v), **{"impl": impl} | options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(cu_seqlens=[0, 7, 5]), "never decrease"),
        (dict(cu_seqlens=[1, 5]), "start at 0"),
        (dict(cu_seqlens=[0, 11]), "end at 10"),
        (dict(cu_seqlens=[0, 8], max_seqlen=4), "at least 8"),
        (dict(cu_seqlens=([0, 10], [0, 11])), "cu_seqlens=\\[0, 11\\] must .* end at 10"),
        (dict(cu_seqlens=([0, 5], [0, 8]), max_seqlen=(5, 7)), "max_seqlen=7 must be at least 8"),
        (dict(lengths=[11]), "from 0 to 10"),
        (dict(lengths=[-1]), "lengths run from -1 to -1"),
    ],
)
def test_contents_are_checked_on_request(options, message, device, monkeypatch):
    monkeypatch.setenv("ATTENTION_DEBUG", "1")
    q = torch.randn(1, 10, 2, 16, device=device)

    def tensors(x):
        return integers(*x) if isinstance(x, list) else tuple(map(tensors, x)) if isinstance(x, tuple) else x

    with pytest.raises(ValueError, match=message):
        attention(q, q, q, impl="triton", **{name: tensors(x) for name, x in options.items()})


@pytest.mark.parametrize(
    "options",
    [
        dict(lengths=[0, 70]),
        dict(packed=[0, 0, 20, 70]),
        dict(packed=([0, 70], [0, 50]), k_len=50),
    ],
    ids=str,
)
def test_right_contents_pass(options, device, monkeypatch):
    """The check of contents takes what is at the edge of its rules: 0, all of a row, the longest sequence."""
    monkeypatch.setenv("ATTENTION_DEBUG", "1")
    arguments, _, _ = make_problem(device, torch.float32, **options)
    attention(**arguments, impl="reference")


def test_kernels_need_a_gpu(monkeypatch):
    from attention import api

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(api, "_DECIDED", {})
    q = torch.randn(1, 10, 2, 16)
    with pytest.raises(ValueError, match="impl='triton' needs tensors on a CUDA GPU, got cpu"):
        attention(q, q, q, impl="triton")


def test_rules_hold_for_calls_seen_before(device):
    q = torch.randn(2, 10, 2, 16, device=device)
    attention(q, q, q, lengths=integers(10, 4))
    with pytest.raises(ValueError, match="lengths"):
        attention(q, q, q, lengths=integers(10))


def test_any_seed_is_one_decision(device, monkeypatch):
    """A seed of each step's own is not looked at for longer than its range takes."""
    from attention import api

    monkeypatch.setattr(api, "_DECIDED", {})
    q = torch.randn(1, 10, 1, 16, device=device)
    for seed in (0, 1, -(2**63), 2**63 - 1):
        attention(q, q, q, dropout=0.1, seed=seed, impl="reference")
    assert len(api._DECIDED) == 1
    for seed in (2**63, True, 1.0, np.int64(1)):
        with pytest.raises(ValueError, match="seed="):
            attention(q, q, q, dropout=0.1, seed=seed, impl="reference")
    attention(q, q, q, return_lse=True, impl="reference")
    with pytest.raises(ValueError, match="return_lse=1 is int"):
        attention(q, q, q, return_lse=1, impl="reference")
    q = q.double()
    assert explain(q, q, q, dropout=0.1).startswith("sdpa")
    assert explain(q, q, q, dropout=0.1, seed=1).startswith("reference")


def test_two_starts_that_are_one_tensor(device):
    """The queries are more than the keys, the rest of which belong to no sequence."""
    arguments, _, _ = make_problem(device, torch.float32, packed=[0, 5, 12], q_len=20, k_len=14)
    arguments["cu_seqlens"] = (arguments["cu_seqlens"],) * 2
    kernels, eager = (attention(**arguments, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(kernels, eager, rtol=1e-3 if ON_GPU else 1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_outermost_softcaps(softcap, device):
    """All scores are all but equal, or nothing is capped."""
    q, k, v = (torch.randn(1, 20, 1, 64, device=device, requires_grad=True) for _ in range(3))
    other = dict(scale=1e-30) if softcap < 1 else {}
    found = []
    for options in (dict(softcap=softcap, impl="triton"), dict(softcap=softcap, impl="reference"), other):
        out = attention(q, k, v, **{"impl": "reference"} | options)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for ours, capped, without in zip(*found, strict=True):
        for x in (ours, capped):
            torch.testing.assert_close(x, without, rtol=1e-2, atol=1e-4)


def strided(x):
    """The same tensor as a slice of one with twice the heads."""
    return torch.cat((x, -x), x.dim() - 2).narrow(x.dim() - 2, 0, x.shape[-2])


def odd(x):
    """The same tensor, not starting at 16 bytes."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x)


@contextmanager
def remembers(new, what):
    """Whether the block meets a problem that was not met before."""
    before = set(launch.PROBLEMS)
    yield
    assert (set(launch.PROBLEMS) > before) == new, what


@pytest.fixture(params=["triton", "hopper"])
def impl(request, device, monkeypatch):
    """An implementation that remembers nothing yet."""
    if request.param == "hopper" and hopper_misses(torch.device(device)):
        pytest.skip(hopper_misses(torch.device(device)))
    monkeypatch.setattr(launch, "PROBLEMS", {})
    return request.param


def small(device):
    """q, k, v and dout in bfloat16: in the interpreter two tiles of keys."""
    length, heads = (40, 4) if ON_GPU else (20, 2)
    return [torch.randn(2, length, n, 64, device=device).bfloat16() for n in (heads, heads // 2, heads // 2, heads)]


def test_calls_that_look_alike(impl, device):
    """What is remembered of a call serves no other: each differs from the first in one thing, and all come twice."""
    q, k, v, dout = small(device)
    length, heads = q.shape[1:3]
    packed = [dict(cu_seqlens=integers(*starts)) for starts in ((0, 7, 12), (0, 5, 12), (0, 3, 7, 12))]
    rows = dict(zip("qkv", (x[:1] for x in (q, k, v)), strict=True))
    calls = [  # of tensors and options, and whether it is a new problem
        ({}, True), (dict(q=strided(q)), True), (dict(k=strided(k)), True), (dict(v=strided(v)), True),
        (dict(q=odd(q)), False), (dict(scale=0.3), True), (dict(scale=-0.3), True), (dict(causal=False), True),
        (dict(window=7), True), (dict(softcap=2.0), True), (dict(softcap=3.0), True), (dict(sink=floats(heads)), True),
        (dict(sink=floats(2 * heads)[::2]), True), (dict(return_lse=True), True),
        (dict(lengths=integers(length, 7)), True), (dict(lengths=integers(3, length)), False),
        (rows | packed[0], True), (rows | packed[1], False), (rows | packed[2], True),
        (rows | packed[0] | dict(max_seqlen=9), impl == "triton"),
    ]  # fmt: skip
    if impl == "triton":
        bias = torch.randn(2, heads, length, length, device=device)
        whole, starts = [x.float() for x in (q, k, v)], packed[0]["cu_seqlens"]
        calls += [
            (dict(bias=bias), True), (dict(bias=bias[:1, :, :1]), True), (dict(bias=bias.bfloat16()), True),
            (dict(bias=bias.mT), True), (dict(decay=-floats(2, length, heads) - 0.1), True),
            (dict(dropout=0.1, seed=3), True), (dict(dropout=0.2, seed=3), True), (dict(dropout=0.2, seed=4), False),
            (dict(dropout=0.2, seed=torch.arange(4, device=device)[3:]), True),
            (rows | packed[0] | dict(max_seqlen=(9, length)), True), (dict(zip("qkv", whole, strict=True)), True),
            *((rows | dict(cu_seqlens=pair), True) for pair in ((starts, odd(starts)), (odd(starts), starts))),
        ]  # fmt: skip
    for call, new in [*calls, *((call, False) for call, _ in calls)]:
        found = []
        for other, dtype in ((impl, None), ("reference", torch.float64)):
            options = dict(q=q, k=k, v=v) | call
            leaves = [options.pop(name) for name in "qkv"]
            leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in leaves]
            with remembers(new and other == impl, call):
                out = attention(*leaves, **options, impl=other)
                outputs = out if isinstance(out, tuple) else (out,)
                gradients = [dout[: len(out)].to(outputs[0].dtype), *(torch.ones_like(lse) for lse in outputs[1:])]
                gradients = torch.autograd.grad(outputs, leaves, gradients)
            found.append([x.double() for x in (*outputs, *gradients)])
        for ours, truth in zip(*found, strict=True):
            assert (ours - truth).norm() < 0.02 * truth.norm(), call


def test_precisions_are_remembered_apart(device, monkeypatch):
    monkeypatch.setattr(launch, "PROBLEMS", {})
    q, matmul = torch.randn(1, 20, 1, 16, device=device), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            attention(q, q, q, impl="triton")
    finally:
        matmul.fp32_precision = before
    assert [problem.tile.precision for problem in launch.PROBLEMS.values()] == ["tf32", "ieee"]


def test_backwards_that_look_alike(impl, device):
    """The same of all that the backward reads, which autograd gives it in any strides."""
    q, k, v, dout = small(device)
    options = ops.Options(
        *[None] * ops.TENSOR_OPTIONS, *q.shape[1:2], *k.shape[1:2], True, 0, 0.0, 0.0, 0.1, impl == "hopper"
    )
    host = ops.host(impl == "hopper")
    out, lse2 = host.forward(q, k, v, options)
    tensors = dict(q=q, k=k, v=v, out=out, lse2=lse2, dout=dout, dlse=torch.randn_like(lse2))
    calls = [{}, *({name: strided(x)} for name, x in tensors.items())]
    calls += [dict(lse2=odd(lse2)), dict(dlse=odd(tensors["dlse"]))]
    expected = host.backward(*tensors.values(), False, options)[:3]
    for changed, new in [*((x, x != {}) for x in calls), *((x, False) for x in calls)]:
        with remembers(new, changed):
            found = host.backward(*(tensors | changed).values(), False, options)[:3]
        for ours, first in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, first)
    with remembers(True, "without dlse"):
        without = host.backward(*(tensors | dict(dlse=None)).values(), False, options)[:3]
    assert not torch.equal(without[0], expected[0])


@pytest.mark.parametrize(
    "lack, options",
    [
        ("softcap", dict(softcap=3.0)),
        ("decay", dict(decay=True)),
        ("sink", dict(sink=True)),
        ("cu_seqlens", dict(packed=[0, 8, 20], q_len=20)),
        ("return_lse", dict(return_lse=True)),
        ("dropout with a given seed", dict(dropout=0.1, seed=3)),
        ("causal attention of 9 queries to 8 keys (the first queries see no key)", dict(q_len=9, k_len=8)),
        ("a window with 9 queries and 8 keys", dict(q_len=9, k_len=8, window=5, causal=False)),
        ("lengths (queries past them see no key)", dict(lengths=[20, 7], q_len=20)),
    ],
    ids=str,
)
def test_sdpa_says_what_it_lacks(lack, options, device):
    """In float64, which no kernel serves: so auto asks SDPA on every machine."""
    arguments, _, _ = make_problem(device, torch.float64, **options)
    arguments["return_lse"] = "return_lse" in options
    said = f"SDPA cannot express {lack}"
    for call in (attention, explain):
        with pytest.raises(ValueError, match=re.escape(f"{said}; use impl='triton' or impl='reference'")):
            call(**arguments, impl="sdpa")
    assert explain(**arguments) == f"reference: the kernels do not compute in torch.float64; {said}"
