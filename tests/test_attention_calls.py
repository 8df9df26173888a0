"""Which implementation attention() chooses, its self-check, and what it caches for later calls."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import ON_GPU, floats, integers, make_problem, results
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import attention, choose, explain, ops, problem
from attention.choose import hopper_misses
from attention.portable import launch as portable


def test_auto_prints_its_choice_once(device, capsys):
    choose._CHOICES.clear()
    choose._DECIDED.clear()
    q, k, v = (torch.randn(1, 20, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v)
    attention(q, k, v)
    attention(q, k, v, window=5)
    printed = capsys.readouterr().err
    assert printed.count("attention ") == 1
    on_hopper = choose.hopper_misses(torch.device(device, 0) if ON_GPU else torch.device(device)) is None
    assert ("hopper on" if on_hopper else "triton on" if ON_GPU else "sdpa on") in printed


def test_auto_survives_a_broken_kernel(device, monkeypatch):
    def broken(device, dtype, ragged, impl):
        raise RuntimeError("no compiler")

    def choice(hopper=True):
        return choose._choose_for(torch.device("cuda"), torch.bfloat16, hopper)

    monkeypatch.setattr(choose, "_self_check", broken)
    assert choice().name == "sdpa" and choice().reason.count("no compiler") == 2
    monkeypatch.setattr(choose, "_self_check", lambda *check: broken(*check) if check[-1] == "hopper" else 1e-3)
    assert choice(hopper=False).name == "triton" and "1.0e-03" in choice(hopper=False).reason
    assert choice().name == "triton" and "hopper" in choice().reason
    monkeypatch.setattr(choose, "_self_check", lambda *check: float("nan"))
    assert choice().name == "sdpa"


def test_every_rank_prints_its_own_failure(monkeypatch, capsys):
    """Rank 0 prints what all choose; a rank whose GPU fails the self-check would otherwise be slower in silence."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for rank, error, printed in (
        ("0", 1e-3, "attention  triton on cuda:1, float16: self-check passed, relative error 1.0e-03\n"),
        ("1", 1e-3, ""),
        ("1", 0.5, "attention  sdpa on cuda:1, float16, rank 1: the triton kernels failed their self-check: "),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(choose, "_CHOICES", {})
        monkeypatch.setattr(choose, "_self_check", lambda *check, error=error: error)
        choose.implementation(torch.device("cuda", 1), torch.float16, False, False)
        err = capsys.readouterr().err
        assert err.startswith(printed) and bool(err) == bool(printed)


def test_threads_share_one_self_check(monkeypatch, capsys):
    """It leaves torch's deterministic mode as it is, also while it runs, since other threads may be computing."""
    modes = []

    def check(device, dtype, ragged, impl):
        time.sleep(0.05)
        modes.append(torch.get_deterministic_debug_mode())
        return 1e-3

    monkeypatch.setattr(choose, "_CHOICES", {})
    monkeypatch.setattr(choose, "_self_check", check)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call = partial(choose.implementation, torch.device("cuda", 0), torch.float16, False, False)
    try:
        torch.use_deterministic_algorithms(True)
        with ThreadPoolExecutor(4) as threads:
            choices = [x.result() for x in [threads.submit(call) for _ in range(4)]]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes == [2] and {x.name for x in choices} == {"triton"}
    assert capsys.readouterr().err.count("attention ") == 1


def test_self_check_tells_the_hopper_kernels(device, monkeypatch):
    """Their backward serves in the self-check, whatever torch is set to."""
    asked = []

    def backward(*args, deterministic=None):
        asked.append(deterministic)
        return portable.backward(*args)

    monkeypatch.setattr(ops, "host", lambda hopper: SimpleNamespace(forward=portable.forward, backward=backward))
    assert choose._passes(torch.device(device), torch.bfloat16, False, "hopper")[0] and asked == [False]


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])  # from the allocator, from the driver
def test_out_of_memory_is_raised(monkeypatch, error):
    """It says nothing about the kernels: the caller gets the error, and the next call checks again."""

    def full(*check):
        raise error("CUDA: out of memory")

    monkeypatch.setattr(choose, "_self_check", full)
    with pytest.raises(error, match="out of memory"):
        choose._choose_for(torch.device("cuda"), torch.bfloat16, True)


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


def rounded(call, x):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        call(x)
    finally:
        torch.set_default_dtype(before)


def without_threads(call, x):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        inferring(call, x)


@pytest.mark.parametrize("within", [fake, hooked, inferring, transformed, rounded, backward, without_threads])
def test_self_check_in_any_context(within, device):
    """The self-check passes in whatever context the first call happens, since its result is for all later calls."""
    found = []

    def call(x):
        found.append(choose._passes(torch.device(device), torch.float32, False, "triton"))
        return x.sum()

    within(call, torch.zeros(1, 2, device=device))
    passed, reason = found[0]
    assert passed and float(re.search("error (.*)", reason)[1]) < (2e-3 if ON_GPU else 1e-5), reason


def test_kernels_need_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(choose, "_DECIDED", {})
    q = torch.randn(1, 10, 2, 16)
    with pytest.raises(ValueError, match=r"impl='triton'.*GPU.*cpu"):
        attention(q, q, q, impl="triton")


def test_repeated_calls_are_checked_again(device):
    q = torch.randn(2, 10, 2, 16, device=device)
    attention(q, q, q, lengths=integers(10, 4))
    with pytest.raises(ValueError, match="lengths"):
        attention(q, q, q, lengths=integers(10))


def test_a_new_seed_is_no_new_decision(device, monkeypatch):
    """A new seed in each step does not grow the cache, but its type and range are checked each time."""
    monkeypatch.setattr(choose, "_DECIDED", {})
    q = torch.randn(1, 10, 1, 16, device=device)
    for seed in (0, 1, -(2**63), 2**63 - 1):
        attention(q, q, q, dropout=0.1, seed=seed, impl="reference")
    assert len(choose._DECIDED) == 1
    for seed in (2**63, True, 1.0, np.int64(1)):
        with pytest.raises(ValueError, match="seed="):
            attention(q, q, q, dropout=0.1, seed=seed, impl="reference")
    attention(q, q, q, return_lse=True, impl="reference")
    with pytest.raises(ValueError, match="return_lse=1"):
        attention(q, q, q, return_lse=1, impl="reference")
    q = q.double()
    assert explain(q, q, q, dropout=0.1).startswith("sdpa")
    assert explain(q, q, q, dropout=0.1, seed=1).startswith("reference")


def strided(x):
    """The same tensor as a slice of one with twice the heads."""
    return torch.cat((x, -x), x.dim() - 2).narrow(x.dim() - 2, 0, x.shape[-2])


def odd(x):
    """The same tensor, at an address that is no multiple of 16 bytes."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x)


@contextmanager
def adds_problem(new, call):
    """Check whether the block adds a problem to the cache; `new` says if it should."""
    before = set(problem.PROBLEMS)
    yield
    assert (set(problem.PROBLEMS) > before) == new, call


@pytest.fixture(params=["triton", "hopper"])
def impl(request, device, monkeypatch):
    """An implementation with an empty cache."""
    if request.param == "hopper" and hopper_misses(torch.device(device)):
        pytest.skip(hopper_misses(torch.device(device)))
    monkeypatch.setattr(problem, "PROBLEMS", {})
    return request.param


def small(device):
    """q, k, v and dout in bfloat16; in the interpreter they are two tiles of keys."""
    length, heads, dim = (40, 4, 64) if ON_GPU else (20, 2, 16)
    return [torch.randn(2, length, n, dim, device=device).bfloat16() for n in (heads, heads // 2, heads // 2, heads)]


@pytest.mark.slow
def test_calls_that_look_alike(impl, device):
    """A cached problem is not used for another call. Each call differs from the first in one way; some run twice."""
    q, k, v, dout = small(device)
    length, heads = q.shape[1:3]
    packed = [dict(cu_seqlens=integers(*starts)) for starts in ((0, 7, 12), (0, 5, 12), (0, 3, 7, 12))]
    rows = dict(zip("qkv", (x[:1] for x in (q, k, v)), strict=True))
    calls = [  # tensors and options, and whether they make a new problem
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
    again = calls if ON_GPU else calls[::3]
    for call, new in [*calls, *((call, False) for call, _ in again)]:
        found = []
        for other, dtype in ((impl, None), ("reference", torch.float64)):
            options = dict(q=q, k=k, v=v) | call
            leaves = [options.pop(name) for name in "qkv"]
            leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in leaves]
            with adds_problem(new and other == impl, call):
                out = attention(*leaves, **options, impl=other)
                outputs = out if isinstance(out, tuple) else (out,)
                gradients = [dout[: len(out)].to(outputs[0].dtype), *(torch.ones_like(lse) for lse in outputs[1:])]
                gradients = torch.autograd.grad(outputs, leaves, gradients)
            found.append([x.double() for x in (*outputs, *gradients)])
        for ours, truth in zip(*found, strict=True):
            assert (ours - truth).norm() < 0.02 * truth.norm(), call


@pytest.mark.parametrize(
    "farthest, options",  # the smallest window that hides no key
    [
        (20, {}),
        (20, dict(causal=False)),
        (20, dict(q_len=30, k_len=20)),
        (30, dict(q_len=30, k_len=20, causal=False)),
        (20, dict(lengths=[20, 9])),
        (13, dict(packed=[0, 7, 20])),
        (20, dict(packed=[0, 7, 20], longest=False)),
        (12, dict(packed=([0, 12, 20], [0, 9, 20]), causal=False)),
    ],
    ids=str,
)
def test_a_window_over_all_keys_is_none(farthest, options, impl, device):
    """It is no other kernel; one key less is a window."""
    if impl == "hopper" and "packed" in options:
        pytest.skip("these kernels do not know the longest sequence")
    dtype, dim = (torch.bfloat16, 64) if impl == "hopper" else (torch.float32, 16)
    call = partial(attention, impl=impl)
    draw = partial(make_problem, device, dtype, dim=dim, **dict(q_len=20) | options)
    arguments, dout, dlse = draw()
    found = [results(call, (arguments | dict(window=w), dout, dlse), dtype) for w in (None, farthest, farthest - 1)]
    assert [x.rule.window for x in problem.PROBLEMS.values()] == [0, 0, 0, 0, farthest - 1, farthest - 1]
    for name, truth in found[0].items():
        if (impl, name) == ("hopper", "dq"):  # summed in any order
            torch.testing.assert_close(found[1][name], truth)
        else:
            assert torch.equal(found[1][name], truth), name
    if options.get("longest", True):
        assert not torch.equal(found[2]["out"], found[0]["out"])


def test_precisions_are_cached_separately(device, monkeypatch):
    monkeypatch.setattr(problem, "PROBLEMS", {})
    q, matmul = torch.randn(1, 20, 1, 16, device=device), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            attention(q, q, q, impl="triton")
    finally:
        matmul.fp32_precision = before
    assert [x.tile.precision for x in problem.PROBLEMS.values()] == ["tf32", "ieee"]


@pytest.mark.slow
def test_backwards_that_look_alike(impl, device):
    """The same for all tensors that the backward reads; autograd may give them any strides."""
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
        with adds_problem(new, changed):
            found = host.backward(*(tensors | changed).values(), False, options)[:3]
        for ours, first in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, first)
    with adds_problem(True, "without dlse"):
        without = host.backward(*(tensors | dict(dlse=None)).values(), False, options)[:3]
    assert not torch.equal(without[0], expected[0])


@pytest.mark.parametrize(
    "lack, options",  # a part of the message
    [
        ("softcap", dict(softcap=3.0)),
        ("decay", dict(decay=True)),
        ("alibi_slopes", dict(alibi=1)),
        ("sink", dict(sink=True)),
        ("prefix_lengths", dict(prefix_lengths=[3, 0])),
        ("cu_seqlens", dict(packed=[0, 8, 20], q_len=20)),
        ("return_lse", dict(return_lse=True)),
        ("return_max_logit", dict(return_max_logit=True)),
        ("seed", dict(dropout=0.1, seed=3)),
        ("9 queries", dict(q_len=9, k_len=8)),
        ("window", dict(q_len=9, k_len=8, window=5, causal=False)),
        ("lengths", dict(lengths=[20, 7], q_len=20)),
    ],
    ids=str,
)
def test_sdpa_names_what_it_lacks(lack, options, device):
    """In float64, which no kernel supports, so auto tries SDPA on every machine."""
    arguments, _, _ = make_problem(device, torch.float64, **options)
    arguments["return_lse"] = "return_lse" in options
    for call in (attention, explain):
        with pytest.raises(ValueError, match=f"SDPA.*{lack}.*impl='reference'"):
            call(**arguments, impl="sdpa")
    reason = explain(**arguments)
    assert reason.startswith("reference") and "torch.float64" in reason and lack in reason
