"""The kernels against the reference in float64: output, log-sum-exp and every gradient.

Tolerance: at most twice the error of eager PyTorch (the reference run in the same dtype), and never NaN.
"""

import itertools

import pytest
import torch

from attention import attention, launch
from attention.reference import keep_mask, reference_attention

ON_GPU = torch.cuda.is_available()

# name -> arguments of make_problem and attention
CASES = {
    "causal": {},
    "full": dict(causal=False),
    "more_keys": dict(q_len=37, k_len=90),
    "more_keys_full": dict(q_len=37, k_len=90, causal=False),
    "more_queries": dict(q_len=90, k_len=37),
    "grouped": dict(heads=4, kv_heads=2),
    "multi_query": dict(heads=3, kv_heads=1),
    "grouped_full": dict(heads=4, kv_heads=2, causal=False, q_len=50, k_len=70),
    "value_dim": dict(dim=16, value_dim=32),
    "scale": dict(scale=-0.3),
    "dropout": dict(dropout=0.3, seed=3),
    "dropout_grouped": dict(dropout=0.5, seed=2**61 + 5, heads=4, kv_heads=2, batch=1, q_len=40, k_len=50),
    "window": dict(window=20),
    "window_full": dict(window=9, causal=False, q_len=60, k_len=75),
    "softcap": dict(softcap=1.5),
    "all": dict(window=20, softcap=2.0, dropout=0.2, seed=1, batch=1, heads=3, kv_heads=1, q_len=45, k_len=60),
}


def make_problem(
    device, dtype, *, batch=2, q_len=70, k_len=None, heads=2, kv_heads=None, dim=16, value_dim=None, **options
):
    """Random q, k, v, the gradient of the output and of the LSE, and attention()'s options."""
    k_len, kv_heads, value_dim = k_len or q_len, kv_heads or heads, value_dim or dim
    shapes = [
        (q_len, heads, dim),
        (k_len, kv_heads, dim),
        (k_len, kv_heads, value_dim),
        (q_len, heads, value_dim),
    ]
    q, k, v, dout = (torch.randn(batch, *shape, device=device).to(dtype) for shape in shapes)
    dlse = torch.randn(batch, heads, q_len, device=device)
    if "seed" in options:
        options["seed"] = torch.tensor([options["seed"]], device=device)
    return q, k, v, dout, dlse, options


def results(function, problem, dtype):
    """Output, LSE (0 where there is none) and gradients, computed in dtype."""
    q, k, v, dout, dlse, options = problem
    leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves, return_lse=True, **options)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    gradients = torch.autograd.grad((out, lse), leaves, (dout.to(dtype), dlse.to(lse.dtype)))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients), strict=True))


def kernels(*args, **options):
    return attention(*args, impl="triton", **options)


def check(problem, dtype):
    exact = results(reference_attention, problem, torch.float64)
    eager = results(reference_attention, problem, dtype)
    ours = results(kernels, problem, dtype)
    for name, truth in exact.items():
        error, allowed = ((x[name].double() - truth).norm().item() for x in (ours, eager))
        if problem[1].shape[1] == 1:  # one key: weights are 1 and eager is exact by luck; allow the rounding of a sum
            allowed = max(allowed, torch.finfo(torch.float32).eps * (truth.numel() * problem[0].shape[1]) ** 0.5)
        assert error <= 2 * allowed, f"{name}: error {error:.2e}, allowed {2 * allowed:.2e}"
        assert ours[name].isfinite().all(), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients(case, device, poisoned):
    check(make_problem(device, torch.float32, **case), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["causal", "grouped_full", "dropout", "all"])
def test_half_precision(case, dtype, device, poisoned):
    check(make_problem(device, dtype, **CASES[case]), dtype)


DIMS = range(8, 257, 8) if ON_GPU else (8, 24, 64, 72, 128, 200, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(dim, device, poisoned):
    length = 150 if ON_GPU else 33
    for dtype in (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,):
        check(make_problem(device, dtype, batch=1, q_len=length, heads=2, kv_heads=1, dim=dim), dtype)


LENGTHS = (1, 2, 17, 63, 64, 65, 128, 129, 300) if ON_GPU else (1, 16, 33)


@pytest.mark.parametrize("q_len, k_len", list(itertools.product(LENGTHS, LENGTHS)))
def test_lengths(q_len, k_len, device, poisoned):
    for causal in (True, False):
        check(make_problem(device, torch.float16, batch=1, q_len=q_len, k_len=k_len, causal=causal), torch.float16)


@pytest.mark.parametrize("loops", [True, False], ids=["loop", "partials"])
@pytest.mark.parametrize("group", [2, 3, 8])
def test_group_strategies(loops, group, device, poisoned, monkeypatch):
    monkeypatch.setattr(launch, "loops_over_group", lambda programs, device: loops)
    check(make_problem(device, torch.float32, batch=1, q_len=50, heads=group, kv_heads=1), torch.float32)
    check(make_problem(device, torch.float16, batch=1, q_len=50, heads=2 * group, kv_heads=2), torch.float16)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: sizes of real training are slow in the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(dropout=0.1, seed=9)], ids=str)
def test_training_sizes(dtype, dim, options, device, poisoned):
    check(make_problem(device, dtype, q_len=1000, heads=8, kv_heads=2, dim=dim, **options), dtype)


def test_strided_inputs(device):
    """Slices of a fused QKV projection, and a batch-first transposed layout, need no copy."""
    qkv = torch.randn(2, 40, 6, 16, device=device)
    q, k, v = qkv.split((2, 2, 2), dim=2)
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), impl="triton")
    assert torch.equal(attention(q, k, v, impl="triton"), expected)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(attention(q, k, v, impl="triton"), expected)


def test_gradient_of_a_sum(device):
    """.sum().backward() hands the backward an expanded scalar, whose strides are all zero."""
    q, k, v = (torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(3))
    attention(q, k, v, impl="triton").sum().backward()
    expected = torch.autograd.grad(reference_attention(q, k, v).sum(), (q, k, v))
    for x, gradient in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-3 if ON_GPU else 1e-4, atol=1e-5)


def test_rows_without_keys(device):
    """Causal, more queries than keys: the first queries see nothing."""
    q, k, v = (torch.randn(1, n, 2, 16, device=device, requires_grad=True) for n in (50, 20, 20))
    out, lse = attention(q, k, v, return_lse=True, impl="triton")
    assert (out[:, :30] == 0).all() and (lse[:, :, :30] == float("-inf")).all() and lse[:, :, 30:].isfinite().all()
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    assert (dq[:, :30] == 0).all() and dq.isfinite().all()


def test_no_keys_or_no_batch(device):
    q = torch.randn(2, 5, 2, 16, device=device, requires_grad=True)
    none = torch.randn(2, 0, 2, 16, device=device, requires_grad=True)
    out = attention(q, none, none, impl="triton")
    out.sum().backward()
    assert (out == 0).all() and (q.grad == 0).all()
    assert attention(q[:0], q[:0], q[:0], impl="triton").shape == (0, 5, 2, 16)


def test_repeatable(device):
    length = 600 if ON_GPU else 40
    problem = make_problem(device, torch.float16, q_len=length, heads=4, kv_heads=2, dropout=0.2, seed=1)
    first = results(kernels, problem, torch.float16)
    for _ in range(50 if ON_GPU else 1):
        again = results(kernels, problem, torch.float16)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_dropout_mask_is_fair_and_keyed_by_position(device):
    seed = torch.tensor([7], device=device)
    mask = keep_mask(seed, (4, 4, 128, 128), 0.25)
    count = mask.numel()
    assert abs(mask.float().mean().item() - 0.75) < 5 * (0.25 * 0.75 / count) ** 0.5
    assert not torch.equal(mask[0], mask[1]) and not torch.equal(mask[:, 0], mask[:, 1])
    assert torch.equal(keep_mask(seed, (1, 1, 16, 16), 0.25)[0, 0], mask[0, 0, :16, :16])


def test_dropout_draws_a_seed_from_torch(device):
    q, k, v = (torch.randn(1, 32, 1, 16, device=device) for _ in range(3))

    def draw(seed):
        torch.manual_seed(seed)
        return attention(q, k, v, dropout=0.5, impl="triton")

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


def test_custom_ops(device):
    from attention import ops

    q, k, v = (torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(3))
    rule = (True, 0, 0.0, 0.0, 0.25)
    torch.library.opcheck(ops.forward, (q, k, v, None, *rule))
    out, lse2 = (x.detach() for x in ops.forward(q, k, v, None, *rule))
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(ops.backward, (q, k, v, out, lse2, torch.randn_like(out), None, None, *rule))


@pytest.mark.parametrize("impl", ["auto", "triton", "sdpa"])
def test_compiles_in_one_graph(impl, device):
    backend = "inductor" if ON_GPU else "aot_eager"  # Inductor's own CPU code is not what is tested
    q, k, v = (torch.randn(2, 33, 2, 16, device=device, requires_grad=True) for _ in range(3))

    def loss(q, k, v):
        return attention(q, k, v, impl=impl).square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for ours, eager in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=False),
        dict(q_len=20, k_len=33),
        dict(q_len=1, k_len=33),
        dict(window=7),
        dict(heads=4, kv_heads=2),
    ],
    ids=str,
)
def test_sdpa_agrees(options, device):
    q, k, v, dout, _, options = make_problem(device, torch.float32, **options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    gradients = []
    for impl in ("sdpa", "reference"):
        gradients.append(torch.autograd.grad(attention(*leaves, impl=impl, **options), leaves, dout))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-2 if ON_GPU else 1e-4, atol=1e-3 if ON_GPU else 1e-5)


def test_auto_says_once_what_it_took(device, capsys):
    from attention import api

    api._CHOICES.clear()
    q, k, v = (torch.randn(1, 20, 2, 16, device=device) for _ in range(3))
    attention(q, k, v)
    attention(q, k, v)
    printed = capsys.readouterr().err
    assert printed.count("attention ") == 1
    assert ("triton" if ON_GPU else "sdpa") in printed


def test_auto_survives_a_broken_kernel(device, monkeypatch):
    from attention import api

    def broken(device, dtype):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(api, "_self_check", broken)
    choice = api._choose(torch.device("cuda"))
    assert choice.name == "sdpa" and "no compiler" in choice.reason
    monkeypatch.setattr(api, "_self_check", lambda device, dtype: float("nan"))
    assert api._choose(torch.device("cuda")).name == "sdpa"


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
    "window": (lambda q, k, v: (q, k, v), dict(window=0), "window=0"),
    "softcap": (lambda q, k, v: (q, k, v), dict(softcap=-1.0), "softcap=-1.0"),
    "scale": (lambda q, k, v: (q, k, v), dict(scale=float("nan")), "scale=nan"),
    "impl": (lambda q, k, v: (q, k, v), dict(impl="flash"), "impl='flash'"),
    "sdpa": (lambda q, k, v: (q, k, v), dict(impl="sdpa", softcap=3.0), "SDPA cannot express softcap"),
}


@pytest.mark.parametrize("change, options, message", BAD.values(), ids=BAD)
def test_bad_input(change, options, message, device):
    q, k, v = (torch.randn(2, 10, 4 if i == 0 else 2, 16, device=device) for i in range(3))
    with pytest.raises(ValueError, match=message):
        attention(*change(q, k, v), **{"impl": "triton"} | options)


@pytest.mark.parametrize("name", ["bias", "decay", "sink", "lengths", "cu_seqlens", "max_seqlen"])
def test_what_is_not_built_says_so(name, device):
    q = torch.randn(1, 10, 2, 16, device=device)
    with pytest.raises(NotImplementedError, match=name):
        attention(q, q, q, **{name: torch.zeros(1)})
