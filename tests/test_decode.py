"""decode() against the reference in float64, row by row on the keys that the row has."""

from functools import partial

import pytest
import torch
from problems import ON_GPU, integers, needs_gpu, roundoff
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from attention import decode
from attention.features import Call
from attention.reference import reference_attention

kernel = pytest.importorskip("attention.decode_kernel", reason="Triton exists for Linux only")
SLOTS = 300 if ON_GPU else 40
SOME_LENGTHS = (0, 1, 2, 15, 16, 17, 31, 33, SLOTS)
CASES = {
    "plain": {},
    "grouped": dict(heads=4, kv_heads=2),
    "few_tokens": dict(q_len=3, heads=2),
    "more_rows_than_a_tile": dict(q_len=5, heads=14, kv_heads=1),
    "value_dim": dict(dim=24, value_dim=8, kv_heads=1),
    "scale": dict(scale=-0.3),
    "window": dict(window=7),
    "window_few_tokens": dict(window=20, q_len=3, heads=4, kv_heads=2),
    "softcap": dict(softcap=1.5),
    "sink_grouped": dict(sink=True, q_len=2, heads=3, kv_heads=1),
    "decay": dict(decay=True, heads=4, kv_heads=2),
    "alibi": dict(alibi=True, heads=4, kv_heads=2),
    "ring": dict(ring=12, window=12),
    "ring_larger_than_window": dict(ring=17, window=9, q_len=3, heads=4, kv_heads=2),
    "all": dict(window=20, softcap=2.0, sink=True, decay=True, alibi=True, heads=4, kv_heads=2, q_len=2, ring=24),
}


def make_call(device, dtype, lengths, *, q_len=1, heads=2, kv_heads=None, dim=16, value_dim=None, sink=False,
              decay=False, alibi=False, ring=0, slots=SLOTS, **options):  # fmt: skip
    """Random arguments of decode(), and those of reference_attention() for each row: the keys that it has.

    Slots that no query sees hold NaN.
    """
    kv_heads, value_dim, longest = kv_heads or heads, value_dim or dim, max(slots, *lengths)
    batch, slots = len(lengths), ring or slots

    def randn(*shape):
        return torch.randn(*shape, device=device)

    q = randn(batch, q_len, heads, dim).to(dtype)
    sources = {
        "k": randn(batch, longest, kv_heads, dim).to(dtype),
        "v": randn(batch, longest, kv_heads, value_dim).to(dtype),
    }
    if decay:
        sources["decay"] = torch.nn.functional.logsigmoid(2 * randn(batch, longest, heads)).double()
    if sink:
        options["sink"] = randn(heads)
    slopes = {"alibi_slopes": torch.rand(batch, heads, device=device)} if alibi else {}
    names = {"k": "k", "v": "v", "decay": "decay_sum"}
    caches = {names[name]: torch.full_like(x[:, :slots], float("nan")) for name, x in sources.items()}
    rows = []
    for row, length in enumerate(lengths):
        seen = range(max(0, length - q_len + 1 - options.get("window", length)), length)
        for name, x in sources.items():
            stored = x[row, :length].cumsum(0) if name == "decay" else x[row]
            for position in seen:
                caches[names[name]][row, position % slots] = stored[position]
        valid = {name: x[row : row + 1, :length] for name, x in sources.items()}
        of_row = {name: x[row : row + 1] for name, x in slopes.items()}
        rows.append(dict(q=q[row : row + 1], **valid, **of_row, **options))
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    return dict(q=q, lengths=counts, ring=ring > 0, **caches, **slopes, **options), rows


def without_nan(call):
    """q, k, v and lengths of a call, for what must not see the slots that hold NaN."""
    return [call[name].nan_to_num() for name in ("q", "k", "v", "lengths")]


def in_dtype(row, dtype):
    names = [name for name, x in row.items() if isinstance(x, torch.Tensor) and name != "decay"]
    return row | {
        name: row[name].to(dtype) for name in names if dtype == torch.float64 or name not in ("sink", "alibi_slopes")
    }


def check(device, dtype, lengths, **case):
    """Fail if the error is more than twice eager PyTorch's, or than that of a sum in float32 if this is more.

    Errors of one draw are noisy, so squared errors of 8 and then 64 draws are added up, as in problems.check().
    """
    squares = 0
    for draw in range(1, 65):
        call, rows = make_call(device, dtype, lengths, **case)
        ours = decode(**call, impl="triton")
        assert ours.isfinite().all() and ours.dtype == dtype
        truth, eager = (
            torch.cat([reference_attention(**in_dtype(row, kind)) for row in rows]) for kind in (torch.float64, dtype)
        )
        rounding = truth.square().sum() * roundoff("out", ({"q": call["q"]}, truth, None)) ** 2
        errors = [(x.double() - truth).square().sum() for x in (ours, eager)]
        squares += torch.stack([*errors, rounding]).cpu()
        if draw in (1, 8, 64):
            error, of_eager, rounding = squares.sqrt().tolist()
            if error <= 2 * (of_eager if draw == 1 else max(of_eager, rounding)):
                return
    raise AssertionError(f"error {error:.2e}, eager PyTorch {of_eager:.2e}, rounding {rounding:.2e}")


def test_slopes_far_into_a_ring(device):
    """Distances stay exact where float32 cannot hold the positions: past 2^24."""
    call, _ = make_call(device, torch.float32, [1000], ring=16, window=16, alibi=True)
    far = call | {"lengths": call["lengths"] + 16 * 2**23}
    assert torch.equal(decode(**far, impl="triton"), decode(**call, impl="triton"))


@pytest.fixture(params=[1, 4, *[64] * ON_GPU])
def split(request, monkeypatch):
    monkeypatch.setattr(kernel, "splits_for", lambda *args: request.param)
    if not ON_GPU:
        monkeypatch.setattr(kernel, "BLOCK_K", 16)  # so that a short row has several steps
        monkeypatch.setattr(kernel, "MOST_ROWS", 16)
        monkeypatch.setattr(kernel, "MERGED", kernel.tl.constexpr(2))  # so that four shares take two steps


@pytest.mark.parametrize("case", CASES)
def test_some_lengths(case, split, device, poisoned):
    check(device, torch.float32, SOME_LENGTHS, **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "grouped", "few_tokens", "all"] if ON_GPU else ["few_tokens", "all"])
def test_every_length(case, split, device, poisoned):
    check(device, torch.float32, range(SLOTS + 1), **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES if ON_GPU else ["plain", "grouped", "all"])
def test_half_precision(case, dtype, split, device, poisoned):
    check(device, dtype, SOME_LENGTHS, **CASES[case])


@pytest.mark.parametrize("dim", range(8, 257, 8) if ON_GPU else (8, 72, 128, 256))
def test_head_dims(dim, device, poisoned):
    for heads in (1, 2):
        check(device, torch.float32, (33, 70), dim=dim, heads=heads, kv_heads=1, slots=70)


@pytest.mark.parametrize("case", CASES)
def test_eager(case, device):
    """It serves CPUs and float64; rows of equal length need no mask."""
    for lengths in (SOME_LENGTHS, (33, 33), (1, 1), (0, 0)):
        call, rows = make_call(device, torch.float32, lengths, **CASES[case])
        expected = torch.cat([reference_attention(**row) for row in rows])
        torch.testing.assert_close(decode(**call, impl="eager"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_eager_does_not_wait_for_the_device(case):
    """As a CUDA graph needs; float64 on a GPU is served so. Meta tensors, which have no values, fail if one is read."""
    call, _ = make_call("cpu", torch.float64, (33, 7), **CASES[case])
    call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    assert decode(**call, impl="eager").shape == (*call["q"].shape[:3], call["v"].shape[-1])


def test_slices_of_a_fused_projection(device):
    """Queries and caches with other strides than their own shape's, one cache of all layers."""
    qkv = torch.randn(2, 1, 6, 16, device=device)
    caches = torch.randn(3, 2, 2, 40, 2, 16, device=device)  # layers, k and v, batch
    lengths = integers(40, 7)
    q, k, v = qkv[:, :, :2], caches[1, 0], caches[1, 1].transpose(1, 2).contiguous().transpose(1, 2)
    expected = decode(q.contiguous(), k.contiguous(), v.contiguous(), lengths, impl="triton")
    assert torch.equal(decode(q, k, v, lengths, impl="triton"), expected)


def test_empty_batches(device):
    for lengths, slots in (((), 8), ((0, 0), 0)):
        q, k = (torch.randn(len(lengths), n, 2, 16, device=device) for n in (1, slots))
        counts = integers(*lengths)
        for impl in ("triton", "eager"):
            assert torch.equal(decode(q, k, k, counts, impl=impl), torch.zeros_like(q))


def test_torch_compile_and_opcheck(device):
    call, _ = make_call(device, torch.float32, (40, 3), heads=4, kv_heads=2, alibi=True)
    call = {name: x.nan_to_num() if name in ("k", "v") else x for name, x in call.items()}
    eager = decode(**call)
    compiled = torch.compile(lambda call: decode(**call), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(call), eager)
    ring = call.pop("ring")
    arguments = Call(**call, scale=0.25, impl="triton" if ON_GPU else "eager").for_op
    torch.library.opcheck(torch.ops.attention.decode.default, (*arguments, ring))


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("options", [{}, dict(pre_dispatch=True), dict(tracing_mode="symbolic")], ids=str)
def test_a_traced_graph_serves_other_lengths(options, impl, device):
    calls = [make_call(device, torch.float32, lengths, slots=20)[0] for lengths in ((5, 20), (17, 3))]
    first, second = map(without_nan, calls)
    graph = make_fx(lambda *x: decode(*x, impl=impl), **options)(*first)
    torch.testing.assert_close(graph(*second), decode(*second, impl=impl))


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_fake_tensors_and_flops(impl, device):
    """Fake tensors start no kernels; PyTorch's counter counts all slots, as it does with its own attention."""
    call, _ = make_call(device, torch.float32, (5, 20), heads=4, kv_heads=2, slots=20, dim=24, value_dim=16)
    with FlopCounterMode(display=False) as counter:
        decode(**call, impl=impl)
    assert counter.get_total_flops() == 2 * 2 * 4 * 20 * (24 + 16)
    with FakeTensorMode() as mode:
        call = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        out = decode(**call, impl=impl)
    assert isinstance(out, FakeTensor) and out.shape == (2, 1, 4, 16)


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_vmap(impl, device):
    """Over every tensor, with different lengths, and over no example; derivatives raise in any order of transforms."""
    calls = [make_call(device, torch.float32, lengths, slots=8)[0] for lengths in ((5, 0), (8, 3))]
    calls = [*map(without_nan, calls)]
    call, stacked = partial(decode, impl=impl), [torch.stack(x) for x in zip(*calls, strict=True)]
    assert torch.equal(torch.vmap(call)(*stacked), torch.stack([call(*x) for x in calls]))
    assert torch.vmap(call)(*(x[:0] for x in stacked)).shape == (0, *calls[0][0].shape)
    q, *rest = calls[0]
    of_one = torch.vmap(lambda q: call(q, *rest).sum())
    for derive in (
        lambda: torch.func.grad(lambda q: of_one(q).sum())(q[None]),
        lambda: torch.vmap(torch.func.grad(lambda q: call(q, *rest).sum()))(q[None]),
        lambda: torch.func.jvp(of_one, (q[None],), (q[None],)),
        lambda: torch.func.jvp(lambda q: call(q, *rest), (q,), (q,)),
    ):
        with pytest.raises(ValueError, match="no gradient"):
            derive()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_one_graph_serves_all_lengths(dtype, device):
    """A CUDA graph that was recorded at one length replays at others; in float64, eager PyTorch serves."""
    call, _ = make_call(device, dtype, (SLOTS, SLOTS), heads=4, kv_heads=2)
    decode(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(**call)
    for length in (0, 1, 17, 64, SLOTS):
        call["lengths"].fill_(length)
        graph.replay()
        torch.testing.assert_close(out, decode(**call))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(lengths=torch.tensor([1, 2])), "lengths is torch.int64"),
        (dict(lengths=torch.ones(3, dtype=torch.int32)), "lengths has shape (3,); it must be [B] = (2,)"),
        (dict(ring=True), "at most 8"),
        (dict(ring=True, window=9), "at most 8"),
        (dict(window=0), "window=0"),
        (dict(sink=torch.ones(3)), "sink has shape (3,)"),
        (dict(decay_sum=torch.zeros(2, 8, 1)), "decay_sum has shape"),
        (dict(decay_sum=torch.zeros(2, 8, 2).half()), "torch.float16"),
        (dict(alibi_slopes=torch.zeros(2, 3)), "alibi_slopes has shape"),
        (dict(impl="sdpa"), "impl='sdpa'"),
        (dict(q=torch.zeros(2, 1, 2, 12)), "head dim 12"),
        (dict(q=torch.zeros(2, 1, 2, 16, requires_grad=True)), "no gradient"),
    ],
    ids=str,
)
def test_mistakes(change, words):
    k = torch.zeros(2, 8, 2, 16)
    arguments = dict(q=torch.zeros(2, 1, 2, 16), k=k, v=k, lengths=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError) as error:
        decode(**arguments | change)
    assert words in str(error.value)


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("options", [{}, dict(softcap=2.0), dict(window=5)], ids=str)
def test_autocast_changes_nothing(options, impl, device):
    """The caches have the dtype of q, and so has the result; lengths may be a column of a table."""
    q, k, v = (torch.randn(2, n, 2, 16, device=device) for n in (1, 20, 20))
    lengths = integers(20, 1, 9, 2).view(2, 2)
    expected = decode(q, k, v, lengths[:, 0].contiguous(), impl=impl, **options)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(decode(q, k, v, lengths[:, 0], impl=impl, **options), expected)
