"""Which implementation serves a call, its self-check, what the Hopper kernels support, and what is cached for later."""

import re
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from problems import MISSES, ON_GPU, by_impl, floats, integers, make_problem, on_hopper, results, sizes_of
from score_mods import soft_cap
from test_hopper import CASES as HOPPER_CASES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from attention import api, attention, check_score_mod, choose, decode, explain, launcher, problem
from attention.api import call_of


@pytest.fixture
def undecided(monkeypatch):
    """No call was made before."""
    monkeypatch.setattr(choose, "_CHOICES", {})
    monkeypatch.setattr(api, "ROUTES", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(choose, "takes_kernels", lambda device: device.type == "cuda")


def test_auto_survives_a_broken_kernel(undecided, monkeypatch):
    def broken(*check):
        raise RuntimeError("no compiler")

    def choice(dims=(64, 64)):
        return choose._choose_for(choose.Case(torch.device("cuda"), torch.bfloat16, dims))

    monkeypatch.setattr(choose, "_self_check", broken)
    name, reason, failed = choice()
    assert name == "sdpa" and reason.count("no compiler") == 2 and failed
    monkeypatch.setattr(choose, "_self_check", lambda *check: broken(*check) if check[-1] == "hopper" else 1e-3)
    assert choice(dims=None) == ("triton", "self-check passed, relative error 1.0e-03", False)
    name, reason, failed = choice()
    assert name == "triton" and "hopper" in reason and failed
    monkeypatch.setattr(choose, "_self_check", lambda *check: float("nan"))
    assert choice()[0] == "sdpa"


def test_every_rank_prints_its_own_failure(undecided, monkeypatch, capsys):
    """Rank 0 prints what all choose; a rank whose GPU fails the self-check would otherwise be slower in silence."""
    for number, (rank, error, printed) in enumerate((
        ("0", 1e-3, "attention  triton on cuda:0, float16: self-check passed, relative error 1.0e-03\n"),
        ("1", 1e-3, ""),
        ("1", 0.5, "attention  sdpa on cuda:2, float16, rank 1: the triton kernels failed their self-check: "),
    )):  # fmt: skip
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(choose, "_self_check", lambda *check, error=error: error)
        choose.implementation(None, torch.device("cuda", number), torch.float16)
        err = capsys.readouterr().err
        assert err.startswith(printed) and bool(err) == bool(printed)


def test_a_cpu_prints_once_that_the_reference_is_slow(undecided, capsys):
    q = torch.randn(1, 16, 2, 8)
    for _ in range(2):
        attention(q, q, q, dropout=0.1, cu_seqlens=torch.tensor([0, 5, 16], dtype=torch.int32))
        attention(q, q, q, sink=torch.zeros(2))
    [reference] = capsys.readouterr().err.splitlines()
    assert reference.startswith("attention  reference on cpu, float32: ") and "sink" in reference
    assert "many times slower" in reference


def test_packed_sequences_on_a_cpu_go_into_graphs(undecided):
    """Which hold no lengths that were read on the host: after a call with values, and with another default device."""
    q, starts, others = torch.randn(1, 300, 2, 8), integers(0, 200, 300).cpu(), integers(0, 60, 300).cpu()

    def packed(q, starts):
        return attention(q, q, q, cu_seqlens=starts)

    def by_sdpa(q, starts):
        return attention(q, q, q, cu_seqlens=starts, max_seqlen=250, impl="sdpa")

    expected = packed(q, others)
    with torch.device("meta"):
        torch.testing.assert_close(packed(q, others), expected)
    for call in (packed, by_sdpa):
        for options in ({}, dict(pre_dispatch=True)):
            torch.testing.assert_close(make_fx(call, **options)(q, starts)(q, others), expected)
        with FakeTensorMode() as mode:
            assert call(mode.from_tensor(q), mode.from_tensor(starts)).shape == q.shape


def test_each_setting_of_the_hopper_kernels_is_checked(undecided, monkeypatch):
    """By the first call whose head dims need it, with a case of those head dims and of the call's heads."""
    checked = []
    monkeypatch.setattr(choose, "_self_check", lambda case, impl: checked.append((case.dims, case.heads)) or 1e-3)
    monkeypatch.setattr(choose, "hopper_problem", lambda device: None)
    settings = {(40, 40): (64, 64), (72, 72): (128, 128), (256, 256): (256, 256), (192, 128): (256, 128)}
    for dim, value_dim in [*settings, (64, 64), (128, 128), (136, 136), (256, 72)]:
        with FakeTensorMode():
            q, v = (torch.empty(1, 20, 3, n, device="cuda:0", dtype=torch.bfloat16) for n in (dim, value_dim))
        assert explain(q, q, v).startswith("hopper: self-check passed")
    assert checked == [(dims, (3, 3)) for dims in settings.values()]


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])  # from the allocator, from the driver
def test_out_of_memory_is_raised(undecided, monkeypatch, error):
    """It says nothing about the kernels: the caller gets the error, and the next call checks again."""

    def full(*check):
        raise error("CUDA: out of memory")

    monkeypatch.setattr(choose, "_self_check", full)
    with pytest.raises(error, match="out of memory"):
        choose._choose_for(choose.Case(torch.device("cuda"), torch.bfloat16, (64, 64)))


@contextmanager
def bfloat16_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


CONTEXTS = {
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: 1 / 0, lambda x: 1 / 0),
    "inference": torch.inference_mode,
    "another dtype": bfloat16_by_default,
    "transforms": nullcontext,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_self_check_in_any_context(name, device):
    """The self-check passes in whatever context the first call happens, since its result is for all later calls."""
    found = []

    def call(x):
        found.append(choose._passes(choose.Case(torch.device(device), torch.float32), "triton"))
        return x.sum()

    x = torch.zeros(1, 2, device=device)
    with CONTEXTS[name]():
        if name == "transforms":
            torch.vmap(torch.func.grad(call))(x)
        else:
            call(x)
    passed, reason = found[0]
    assert passed and float(re.search("error (.*)", reason)[1]) < (2e-3 if ON_GPU else 1e-5), reason


@pytest.mark.parametrize(
    "impl, ragged", [("triton", True), *(pytest.param("hopper", x, marks=on_hopper) for x in (0, 1))]
)
def test_self_check_notices_a_kernel_that_fails_from_its_second_start_on(impl, ragged, device, poisoned, monkeypatch):
    """Then it is launched with other addresses. Each kernel in turn gets those of its first start again."""
    launch_of, interpret, firsts, damaged = launcher.launch_of, launcher.interpret, {}, None

    def launch_again(step, *given):
        start, name = launch_of(step, *given), step.kernel.fn.__name__

        def start_again(addresses, stream):
            first = firsts.setdefault((name, start), addresses)
            start(first if name == damaged else addresses, stream)

        return start_again

    def interpret_again(step):
        name = step.kernel.fn.__name__
        first = firsts.setdefault((name, step.constants), step)
        interpret(first if name == damaged else step)

    def check():
        monkeypatch.setattr(problem, "PROBLEMS", {})
        firsts.clear()
        dtype, dims = (torch.bfloat16, (64, 64)) if impl == "hopper" else (torch.float32, (16, 16))
        return choose._self_check(choose.Case(torch.device(device), dtype, dims, ragged), impl)

    monkeypatch.setattr(launcher, "launch_of", launch_again)
    monkeypatch.setattr(launcher, "interpret", interpret_again)
    assert check() < 2e-2
    names = {name for name, _ in firsts}
    assert len(names) >= 4
    for damaged in names - {"list_kernel"}:  # without whose list, others would access any memory
        assert not check() < 2e-2, damaged


@pytest.mark.parametrize("later", ["0", "1"])
def test_kernels_need_a_gpu(undecided, later, monkeypatch):
    """Or the interpreter from the start on: what TRITON_INTERPRET becomes later changes nothing."""
    monkeypatch.setattr("attention.gpu.INTERPRETED", False)
    monkeypatch.setenv("TRITON_INTERPRET", later)
    q = torch.randn(1, 10, 2, 16)
    with pytest.raises(ValueError, match=r"impl='triton'.*GPU.*cpu"):
        attention(q, q, q, impl="triton")
    with pytest.raises(ValueError, match="impl='auto'"):
        decode(q[:, :1], q, q, torch.ones(1, dtype=torch.int32), impl="triton")
    with pytest.raises(ValueError, match=r"soft_cap does not run on cpu.*CUDA GPU.*TRITON_INTERPRET"):
        check_score_mod(soft_cap, q[0, 0, 0], heads=2)


def test_explain_names_the_implementation(device):
    q = torch.randn(1, 16, 2, 64, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(16, 16, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"Hopper.*cpu"):
            attention(q, q, q, impl="hopper")
    elif MISSES is None:
        assert explain(q, q, q, window=5).startswith("hopper: ")
        assert explain(q, q, q, dropout=0.1).startswith("hopper: ")
        reason = explain(q, q, q, bias=bias)
        assert reason.startswith("triton: ") and "bias" in reason
        with pytest.raises(ValueError, match=r"Hopper.*bias.*impl='auto'"):
            attention(q, q, q, bias=bias, impl="hopper")
    with pytest.raises(ValueError, match="window"):
        explain(q, q, q, window=-1)
    with pytest.raises(TypeError, match="windows"):
        explain(q, q, q, windows=1)


@pytest.mark.parametrize(
    "lack, change",
    [
        ("torch.float32", dict(dtype=torch.float32)),
        ("head dim 32", dict(dim=32)),
        ("head dim 32", dict(value_dim=32)),
        ("head dim 64", dict(dim=192, value_dim=64)),
        ("empty", dict(batch=0)),
        ("decay with softcap", dict(decay=True, softcap=3.0)),
        ("decay with values of another head dim", dict(decay=True, dim=192, value_dim=128)),
        ("bias", dict(bias=(8, 8))),
        ("score_mod with dropout", dict(score_mod="gaussian", dropout=0.1)),
        ("score_mod with a window", dict(score_mod="gaussian", packed=([0, 8], [0, 8]), window=10)),
        ("prefix_lengths", dict(prefix_lengths=[3, 0])),
        ("window", dict(q_len=8, k_len=18, window=10)),
        ("dropout", dict(q_len=8, k_len=18, window=10, dropout=0.1, lengths=[18, 9])),
        ("dropout", dict(packed=([0, 8], [0, 8]), window=10, dropout=0.1)),
    ],
)
def test_unsupported_calls(lack, change):
    assert lack in lacks(**dict(q_len=8) | change)


def test_unsupported_sizes():
    q, k = (torch.empty(1, n, 1, 64, dtype=torch.bfloat16, device="meta") for n in (8, 2**20 + 1))
    for q_len, k_len, lack in (
        (8, 2**20, None), (8, 2**20 + 1, "1,048,576"), (8, 0, "empty"), (0, 8, "empty"),
    ):  # fmt: skip
        found = choose.call_problem(call_of(q[:, :q_len], k[:, :k_len], k[:, :k_len]))
        assert found is None if lack is None else lack in found


@pytest.mark.parametrize("case", HOPPER_CASES.values(), ids=HOPPER_CASES)
def test_supported_calls(case):
    assert lacks(**case) is None


def lacks(dtype=torch.bfloat16, dim=64, **problem):
    """call_problem() of a problem: why the Hopper kernels do not support it, or None."""
    arguments, _, _ = make_problem("cpu", dtype, dim=dim, **problem)
    q, k, v = map(arguments.pop, "qkv")
    return choose.call_problem(call_of(q, k, v, **arguments))


def test_bounds_of_queries_and_keys_apart_are_another_kind_of_call():
    """The choice for one tensor of bounds must not serve a pair: with a window and dropout it is another one."""
    q = torch.randn(1, 128, 2, 64, dtype=torch.bfloat16)
    starts = torch.tensor([0, 128], dtype=torch.int32)
    options = dict(window=16, dropout=0.1, seed=1, max_seqlen=128)
    alone, pair = (call_of(q, q, q, cu_seqlens=bounds, **options) for bounds in (starts, (starts, starts)))
    assert choose.call_problem(alone) != choose.call_problem(pair)
    assert api.signature_of(alone) != api.signature_of(pair)


def test_repeated_calls_are_checked_again(undecided, device):
    q, slopes, packed = torch.randn(1, 10, 2, 16, device=device), torch.ones(2, device=device), integers(0, 10)
    call = partial(attention, q, q, q, impl="reference")
    for right, wrong, said in (
        (dict(alibi_slopes=slopes), dict(alibi_slopes=slopes.clone().requires_grad_()), "alibi_slopes"),
        (dict(lengths=integers(4)), dict(lengths=integers(10, 4)), "lengths"),
        (dict(cu_seqlens=packed, max_seqlen=10), dict(cu_seqlens=packed, max_seqlen=(10, None)), "max_seqlen"),
        (dict(return_lse=True), dict(return_lse=1), "return_lse=1"),
        *((dict(dropout=0.1, seed=-(2**63)), dict(dropout=0.1, seed=seed), "seed=") for seed in (2**63, True, 1.0)),
    ):
        call(**right)
        with pytest.raises(ValueError, match=said):
            call(**wrong)
    q = q.double()
    assert explain(q, q, q, dropout=0.1).startswith("sdpa")
    assert explain(q, q, q, dropout=0.1, seed=1).startswith("reference")


def strided(x):
    """The same tensor as a slice of one with twice the heads."""
    return torch.cat((x, -x), x.dim() - 2).narrow(x.dim() - 2, 0, x.shape[-2])


def odd(x):
    """The same tensor, at an address that is no multiple of 16 bytes."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x)


def small(device):
    """q, k, v and dout in bfloat16; in the interpreter they are two tiles of keys."""
    length, heads, dim = (40, 4, 64) if ON_GPU else (20, 2, 16)
    return [torch.randn(2, length, n, dim, device=device).bfloat16() for n in (heads, heads // 2, heads // 2, heads)]


@pytest.mark.slow
@by_impl
def test_calls_that_look_alike(impl, device):
    """What is cached for a call is not used for another. Each differs from the first in one way; some run twice."""
    q, k, v, dout = small(device)
    length, heads = q.shape[1:3]
    packed = [dict(cu_seqlens=integers(*starts)) for starts in ((0, 7, 12), (0, 5, 12), (0, 3, 7, 12))]
    rows = dict(zip("qkv", (x[:1] for x in (q, k, v)), strict=True))
    calls = [
        {}, dict(q=strided(q)), dict(k=strided(k)), dict(v=strided(v)), dict(q=odd(q)), dict(scale=0.3),
        dict(scale=-0.3), dict(causal=False), dict(window=7), dict(softcap=2.0), dict(softcap=3.0),
        dict(sink=floats(heads)), dict(sink=floats(2 * heads)[::2]), dict(return_lse=True),
        dict(lengths=integers(length, 7)), dict(lengths=integers(3, length)),
        *(rows | starts for starts in packed), rows | packed[0] | dict(max_seqlen=9),
    ]  # fmt: skip
    if impl == "triton":
        bias = torch.randn(2, heads, length, length, device=device)
        whole, starts = [x.float() for x in (q, k, v)], packed[0]["cu_seqlens"]
        calls += [
            dict(bias=bias), dict(bias=bias[:1, :, :1]), dict(bias=bias.bfloat16()), dict(bias=bias.mT),
            dict(decay=-floats(2, length, heads) - 0.1), dict(dropout=0.1, seed=3), dict(dropout=0.2, seed=3),
            dict(dropout=0.2, seed=4), dict(dropout=0.2, seed=torch.arange(4, device=device)[3:]),
            rows | packed[0] | dict(max_seqlen=(9, length)), dict(zip("qkv", whole, strict=True)),
            *(rows | dict(cu_seqlens=pair) for pair in ((starts, odd(starts)), (odd(starts), starts))),
        ]  # fmt: skip
    for call in [*calls, *(calls if ON_GPU else calls[::3])]:
        found = []
        for other in (impl, "reference"):
            options = dict(q=q, k=k, v=v) | call
            leaves = [options.pop(name) for name in "qkv"]
            leaves = [(x if other == impl else x.double()).detach().requires_grad_() for x in leaves]
            out = attention(*leaves, **options, impl=other)
            outputs = out if isinstance(out, tuple) else (out,)
            gradients = [dout[: len(outputs[0])].to(outputs[0].dtype), *(torch.ones_like(lse) for lse in outputs[1:])]
            found.append([x.double() for x in (*outputs, *torch.autograd.grad(outputs, leaves, gradients))])
        for ours, truth in zip(*found, strict=True):
            assert (ours - truth).norm() < 0.02 * truth.norm(), call


@by_impl
def test_gradients_of_any_strides(impl, device):
    """Autograd may give the backward any, of output and LSE; an expanded scalar, from .sum(), has strides of zero."""
    q, k, v, dout = small(device)
    dlse, one = torch.randn(*q.shape[:3], device=device).transpose(1, 2).contiguous(), torch.ones((), device=device)
    changes = [
        (dout, dlse), (strided(dout), dlse), (odd(dout), dlse), (one.bfloat16().expand_as(dout), dlse),
        (dout, strided(dlse)), (dout, odd(dlse)), (dout, one.expand_as(dlse)), (dout, None),
    ]  # fmt: skip
    for gradients in [*changes, *changes]:
        plain = [x if x is None else x.clone(memory_format=torch.contiguous_format) for x in gradients]
        found = [
            results(partial(attention, impl=other), (dict(q=q, k=k, v=v), *given), torch.bfloat16)
            for other, given in ((impl, gradients), ("reference", plain))
        ]
        for name, truth in found[1].items():
            assert (found[0][name] - truth).norm() < 0.02 * truth.norm(), name


@by_impl
def test_a_window_over_all_keys_is_none(impl, device):
    """One key less is a window."""
    dtype, dim = sizes_of(impl)
    for sizes in (dict(k_len=20), dict(k_len=20, causal=False), dict(k_len=18), dict(k_len=18, causal=False)):
        arguments, _, _ = make_problem(device, dtype, dim=dim, q_len=20, **sizes)
        farthest = 18 if sizes == dict(k_len=18) else 20  # without causal, the first query looks ahead
        whole, widest, narrower = (attention(**arguments, window=w, impl=impl) for w in (None, farthest, farthest - 1))
        assert torch.equal(whole, widest) and not torch.equal(whole, narrower)


@pytest.mark.parametrize(
    "lack, options",  # a part of the message
    [
        ("softcap", dict(softcap=3.0)),
        ("prefix_lengths", dict(prefix_lengths=[3, 0])),
        ("cu_seqlens", dict(packed=([0, 8, 20], [0, 8, 20]), q_len=20)),
        ("return_lse", dict(return_lse=True)),
        ("return_max_logit", dict(return_max_logit=True)),
        ("seed", dict(dropout=0.1, seed=3)),
        ("more queries", dict(q_len=9, k_len=8)),
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
