"""The kernels against the reference in float64: output, log-sum-exp and every gradient, by check() of problems.py."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from problems import BACKEND, CASES, GRADIENTS, ON_GPU, check, make_problem, needs_gpu, results

from attention import attention, problem, table
from attention.portable import launch as portable
from attention.reference import drop_probability, keep_mask, reference_attention


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case, device, poisoned):
    check(partial(make_problem, device, torch.float32, **CASES[case]), torch.float32)


def test_gates_before_the_window(device):
    """Their gradient is the row sums of dS minus its column sums, computed by two kernels: it should be 0."""
    case = dict(decay=True, bias=(2, 70, 70), window=20, packed=([0, 1], [0, 70]))
    factor = 2 if ON_GPU else 0.01  # in the interpreter, both kernels get the same dS
    squares = torch.zeros(2, dtype=torch.float64)
    for _ in range(16 if ON_GPU else 4):
        problem = make_problem(device, torch.float32, **case)
        for i, impl in enumerate(("triton", "reference")):
            found = results(partial(attention, impl=impl), problem, torch.float32)["ddecay"]
            squares[i] += found[:, :50].double().square().sum().cpu()
    ours, eager = squares.sqrt().tolist()
    assert ours <= factor * eager, f"{ours:.3g}, {eager:.3g} in eager PyTorch"


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no tf32")
@pytest.mark.parametrize("case", ["causal", "grouped_full", "window", "all"])
def test_tf32(case, device, poisoned):
    """As exact as float16, which has as many bits. Eager tf32 is no yardstick: cuBLAS may not use it."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        check(partial(make_problem, device, torch.float32, **CASES[case]), torch.float32, yardstick=torch.float16)
    finally:
        torch.set_float32_matmul_precision(before)


def test_precision_by_either_api(device):
    """The precision of each call is right, also after PyTorch's newer API was used, where its older getter raises."""
    matmul, q = torch.backends.cuda.matmul, torch.randn(1, 20, 1, 16, device=device)
    before, asked, outputs = matmul.fp32_precision, torch.get_float32_matmul_precision(), {}
    try:
        for precision, expected in dict(highest="ieee", high="tf32", medium="tf32").items():
            torch.set_float32_matmul_precision(precision)
            assert table.float32_precision(torch.float32) == expected
        for precision in ("ieee", "tf32"):
            matmul.fp32_precision = precision
            assert table.float32_precision(torch.float32) == precision
            outputs[precision] = attention(q, q, q, impl="triton")
    finally:
        torch.set_float32_matmul_precision(asked)
        matmul.fp32_precision = before
    assert torch.equal(outputs["ieee"], outputs["tf32"]) != ON_GPU  # the interpreter has no tf32


DIMS = range(8, 257, 8) if ON_GPU else (8, 24, 64, 72, 128, 200, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(dim, device, poisoned):
    length = 150 if ON_GPU else 33
    for dtype in (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,):
        check(partial(make_problem, device, dtype, batch=1, q_len=length, heads=2, kv_heads=1, dim=dim), dtype)


@pytest.mark.parametrize("case", [{}, dict(packed=[0, 20, 40]), dict(lengths=[0, 40, 15], batch=3)], ids=str)
def test_many_programs_share_the_gradient_of_a_small_bias(case, device, poisoned, monkeypatch):
    monkeypatch.setattr(portable, "processors", lambda device: 1000)
    monkeypatch.setattr(problem, "PROBLEMS", {})
    check(partial(make_problem, device, torch.float32, q_len=40, bias=(40, 40), **case), torch.float32)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(dropout=0.1, seed=9)], ids=str)
def test_training_sizes(dtype, dim, options, device, poisoned):
    check(partial(make_problem, device, dtype, q_len=1000, heads=8, kv_heads=2, dim=dim, **options), dtype)


def test_strided_inputs(device):
    """Slices of a fused QKV projection, a transposed layout, a layout that must be copied, and an expanded sink."""
    qkv, sink = torch.randn(2, 40, 6, 16, device=device), torch.randn(1, device=device).expand(2)
    slices = qkv.split((2, 2, 2), dim=2)
    expected = attention(*(x.contiguous() for x in slices), sink=sink.contiguous(), impl="triton")
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in slices]
    for tensors in (slices, transposed, [F.pad(x, (1, 2))[..., 1:-2] for x in slices]):
        assert torch.equal(attention(*tensors, sink=sink, impl="triton"), expected)
    x = torch.randn(3, 1, 2, 16, device=device).as_strided((3, 1, 2, 16), (32, 2**23, 16, 1))
    assert torch.equal(attention(x, x, x, impl="triton"), x)  # the stride over the only token has no effect


def test_dropout_mask_is_fair_and_keyed_by_position(device):
    def mask(batch, heads, length, dropout=0.25, seed=7):
        rows = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        pos = torch.arange(length, device=device)
        seed = torch.tensor([seed], device=device)
        return keep_mask(seed, rows, heads, pos.view(1, 1, -1, 1), pos.view(1, 1, 1, -1), dropout)

    def uncorrelated(x, y, deviation):
        """Of two parts of a mask of which dropout=0.25; the mean of their product has that standard deviation."""
        return abs(((x.float() - 0.75) * (y.float() - 0.75)).mean().item()) < 5 * deviation / x.numel() ** 0.5

    large = mask(4, 4, 128)
    for dropout in (0.25, 0.01, 0.999):
        kept = mask(4, 4, 128, dropout)
        rounded = drop_probability(dropout)
        deviation = (rounded * (1 - rounded) / kept.numel()) ** 0.5
        assert abs(kept.float().mean().item() - (1 - rounded)) < 5 * deviation
    assert torch.equal(mask(1, 1, 16)[0, 0], large[0, 0, :16, :16])
    # the eight weights that share random bits, neighbours, heads, sequences and seeds
    words = large.unflatten(2, (8, 2, 8)).unflatten(5, (8, 2, 4, 2)).permute(3, 6, 8, 0, 1, 2, 4, 5, 7).flatten(0, 2)
    pairs = list(itertools.combinations(words, 2))
    pairs += [
        (large[..., 1:], large[..., :-1]),
        (large[..., 1:, :], large[..., :-1, :]),
        (large[..., :64, 64:], large.mT[..., :64, 64:]),
    ]
    pairs += [(large[:, i], large[:, i + 1]) for i in range(3)] + [(large[i], large[i + 1]) for i in range(3)]
    pairs += [(large, mask(4, 4, 128, seed=other)) for other in (8, 7 + 2**32, -7)]
    for x, y in pairs:
        assert uncorrelated(x, y, 0.25 * 0.75)


def test_dropout_is_rounded_to_8_bits(device):
    """Neither to 0 nor to 1; the factor of the weights that are kept has the rounded probability."""
    q, v = torch.zeros(1, 64, 1, 16, device=device), torch.ones(1, 64, 1, 16, device=device)
    for dropout, rounded in ((1e-6, 1 / 256), (0.3, 77 / 256), (1 - 1e-9, 255 / 256)):
        options = dict(dropout=dropout, seed=torch.tensor([1], device=device), causal=False)
        found = [attention(q, q, v, impl=impl, **options) for impl in ("triton", "reference")]
        counts = [x * 64 * (1 - rounded) for x in found]  # of the weights that are kept
        torch.testing.assert_close(*counts)
        torch.testing.assert_close(counts[1], counts[1].round(), rtol=0, atol=2e-2 if ON_GPU else 1e-3)


@pytest.mark.parametrize(
    "options",
    [
        dict(q_len=20, k_len=33),
        dict(q_len=1, k_len=33),
        dict(window=7, q_len=20, k_len=33),
        dict(heads=4, kv_heads=2),
        dict(scale=-0.3),
        dict(scale=0.0),
        dict(bias=(2, 1, 20, 20), q_len=20),
        dict(bias=(2, 1, 20, 33), q_len=20, k_len=33, window=7),
        dict(packed=[0, 5, 5, 90, 250, 260, 270], q_len=275),
        dict(packed=[3, 5, 40, 170], q_len=170, window=7, heads=4, kv_heads=2),
        dict(packed=[0, 0], q_len=3, causal=False),
        dict(packed=[2, 150, 290, 290], q_len=310, window=100, causal=False, heads=4, kv_heads=2, value_dim=24),
        dict(packed=[0, 400], q_len=400, scale=-0.3),
        dict(packed=[0, 100, 199, 330], q_len=330, causal=False),
    ],
    ids=str,
)
def test_sdpa_agrees(options, device):
    """Packed sequences in a graph too, where nothing is read of cu_seqlens."""
    arguments, dout, _ = make_problem(device, torch.float32, **options)
    calls = [partial(attention, impl="reference"), partial(attention, impl="sdpa")]
    if "packed" in options:
        calls.append(torch.compile(calls[1], fullgraph=True, backend=BACKEND))
        for x in (*map(arguments.get, "qkv"), dout):
            x[:, options["packed"][-1] :] = torch.nan  # in no sequence
    leaves = [arguments[name].requires_grad_() for name in GRADIENTS if name in arguments]
    expected, *found = ((out := call(**arguments), *torch.autograd.grad(out, leaves, dout)) for call in calls)
    for other in found:
        torch.testing.assert_close(other, expected, rtol=1e-2 if ON_GPU else 1e-4, atol=1e-3 if ON_GPU else 1e-5)


def test_reference_by_other_ways():
    """The specification itself: each feature gives the same as an equivalent computation without it."""
    q, k, v = (torch.randn(1, 12, 2, 8, dtype=torch.float64) for _ in range(3))
    plain, lse = reference_attention(q, k, v, return_lse=True)
    same = torch.testing.assert_close

    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    apart = [reference_attention(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in ((0, 5), (5, 12))]
    same(reference_attention(q, k, v, cu_seqlens=starts), torch.cat(apart, 1))

    found = reference_attention(q, k, v, lengths=torch.tensor([7], dtype=torch.int32))
    same(found[:, :7], reference_attention(q[:, :7], k[:, :7], v[:, :7]))
    assert not found[:, 7:].any()

    distance = torch.arange(12.0)[:, None] - torch.arange(12.0)
    prefix = torch.zeros(12, 10).masked_fill((distance[:, 2:] < 0) & (torch.arange(10) >= 5), float("-inf"))
    fewer = q, k[:, 2:], v[:, 2:]  # so that two queries stand before the first key, and see the prefix
    found = reference_attention(*fewer, prefix_lengths=torch.tensor([5], dtype=torch.int32))
    same(found, reference_attention(*fewer, causal=False, bias=prefix))
    assert found.all()

    slopes = torch.tensor([0.5, 0.1], dtype=torch.float64)
    alibi = reference_attention(q, k, v, bias=-slopes[:, None, None] * distance)
    same(reference_attention(q, k, v, decay=-slopes.expand(1, 12, 2)), alibi)
    same(reference_attention(q, k, v, alibi_slopes=slopes), alibi)
    full = reference_attention(q, k, v, causal=False, alibi_slopes=slopes[None])
    same(full, reference_attention(q, k, v, causal=False, bias=-slopes[:, None, None] * distance.abs()))
    of_each = torch.stack((slopes, slopes.flip(0), slopes))
    apart = [(q[:, a:b], k[:, a:b], v[:, a:b], of_each[n]) for n, a, b in ((0, 0, 5), (2, 5, 12))]
    apart = torch.cat([reference_attention(*x, alibi_slopes=its_own) for *x, its_own in apart], 1)
    same(reference_attention(q, k, v, cu_seqlens=starts, alibi_slopes=of_each), apart)
    gates = F.logsigmoid(torch.randn(1, 12, 2, dtype=torch.float64))
    summed = torch.stack([torch.stack([gates[0, j + 1 : i + 1].sum(0) for j in range(12)]) for i in range(12)])
    same(reference_attention(q, k, v, decay=gates), reference_attention(q, k, v, bias=summed.permute(2, 0, 1)))

    sink = torch.tensor([0.3, -2.0], dtype=torch.float64)
    share = torch.sigmoid(lse - sink[:, None]).transpose(1, 2)[..., None]  # what the sink leaves for the weights
    same(reference_attention(q, k, v, sink=sink), plain * share)

    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    scores = (1.5 * torch.tanh(scores / 1.5)).masked_fill(distance < 0, float("-inf"))
    same(reference_attention(q, k, v, softcap=1.5), torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v))
