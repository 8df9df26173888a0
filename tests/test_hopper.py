"""The Hopper kernels against the reference in float64, on a Hopper GPU."""

import itertools
import random
from functools import partial

import pytest
import torch
from problems import check, integers, make_problem, on_hopper, out_and_gradients, results

from attention import attention

FULL = dict(causal=False)
MORE_KEYS = dict(q_len=300, k_len=410)
MORE_QUERIES = dict(q_len=333, k_len=70)
PARTS = dict(q_len=300, heads=8, kv_heads=2)  # one program of the backward for each query head
LOOPED = dict(batch=8, q_len=700, heads=32, kv_heads=8)  # one program of the backward loops over a group
PACKED = dict(packed=[0, 200, 200, 463, 590, 700], q_len=700)
PAIR = dict(packed=([0, 150, 400], [0, 64, 300]), q_len=500, k_len=340)
PAIR_WINDOW = dict(packed=([0, 60, 60, 300], [0, 260, 400, 700]), q_len=300, k_len=700, window=70)
LENGTHS = dict(lengths=[300, 250, 100, 17], batch=4, q_len=200, k_len=300)
GROUPED = dict(heads=4, kv_heads=2)
SINK_WINDOW = GROUPED | dict(window=120, sink=True)
DROPOUT = dict(dropout=0.2, seed=6)
ALL = SINK_WINDOW | DROPOUT | dict(q_len=200, k_len=300, alibi=2)

# name -> arguments of make_problem; the tiles are 64 to 192 queries by 64 or 128 keys
CASES = {
    "causal": dict(q_len=512),
    "full": FULL | dict(q_len=512),
    "one": dict(q_len=1),
    "ragged": dict(q_len=333),
    "ragged_full": FULL | dict(q_len=129),
    "more_keys": dict(q_len=100, k_len=333),
    "more_keys_full": FULL | dict(q_len=77, k_len=300),
    "more_queries": dict(q_len=333, k_len=100),
    "more_queries_full": FULL | MORE_QUERIES,
    "grouped_parts": PARTS,
    "grouped_looped": LOOPED,
    "multi_query_full": FULL | dict(batch=40, q_len=900, heads=3, kv_heads=1),
    "many_tiles": dict(batch=12, q_len=700, heads=4),
    "window": dict(q_len=700, window=100),
    "window_of_one": dict(q_len=300, window=1),
    "window_full": FULL | dict(q_len=700, k_len=600, window=200),
    "window_more_keys": dict(q_len=300, k_len=400, window=101),
    "softcap": dict(q_len=300, softcap=2.0),
    "softcap_window": FULL | dict(q_len=300, softcap=30.0, window=70),
    "scale": dict(q_len=300, scale=-0.2),
    "scale_softcap": dict(q_len=300, scale=-0.2, softcap=2.0),
    "no_scale": dict(q_len=300, scale=0.0),
    "sink": dict(q_len=333, k_len=200, sink=True),
    "alibi_full": FULL | MORE_KEYS | dict(alibi=2),
    "alibi_more_queries_full": FULL | MORE_QUERIES | dict(scale=0.0, alibi=1),
    "alibi_grouped_parts": PARTS | dict(q_len=512, alibi=1),
    "alibi_grouped_looped": LOOPED | dict(alibi=2),
    "alibi_window_softcap": dict(q_len=700, window=100, softcap=2.0, scale=-0.2, alibi=1),
    "alibi_packed": PACKED | GROUPED | dict(alibi=2),
    "alibi_packed_pair_full": FULL | PAIR | dict(alibi=2),
    "alibi_lengths": LENGTHS | dict(alibi=2),
    "decay": dict(q_len=512, decay=True),
    "decay_negative_scale": MORE_KEYS | dict(scale=-0.2, decay=True),
    "decay_more_queries": MORE_QUERIES | dict(decay=True),
    "decay_grouped_parts": PARTS | dict(q_len=512, decay=True),
    "decay_grouped_looped": LOOPED | dict(decay=True),
    "decay_all": ALL | dict(decay=True),
    "decay_packed": GROUPED | dict(packed=[30, 200, 200, 463, 590, 700], q_len=700, decay=True),
    "decay_packed_pair_window": PAIR_WINDOW | dict(decay=True),
    "decay_packed_pair_more_queries": dict(packed=([0, 100, 300], [0, 400, 470]), q_len=300, k_len=470, decay=True),
    "decay_packed_no_keys": dict(packed=([0, 20, 50], [0, 20, 20]), q_len=50, k_len=20, sink=True, decay=True),
    "decay_lengths": LENGTHS | dict(sink=True, decay=True),
    "relative": dict(q_len=512, relative=(100,)),
    "relative_full": FULL | MORE_KEYS | dict(relative=(2, 128)),
    "relative_more_queries_full": FULL | MORE_QUERIES | dict(scale=0.0, relative=(2, 20)),
    "relative_grouped_parts": PARTS | dict(q_len=512, relative=(600,)),
    "relative_grouped_looped": LOOPED | dict(relative=(2, 1)),
    "relative_packed": PACKED | GROUPED | dict(relative=(32,)),
    "relative_lengths": LENGTHS | dict(relative=(50,)),
    "relative_decay": MORE_KEYS | dict(scale=-0.2, decay=True, relative=(7,)),
    "relative_all": ALL | dict(softcap=3.0, relative=(30,)),
    "score_mod": MORE_KEYS | dict(score_mod="alibi"),
    "score_mod_hides_rows_of_inner_blocks": FULL | MORE_KEYS | dict(score_mod="dilated", score_args=(150,)),
    "score_mod_grouped_looped": LOOPED | dict(scale=-0.2, score_mod="soft_cap", softcap=5.0),
    "score_mod_more_queries_full": FULL | MORE_QUERIES | dict(score_mod="gaussian", alibi=2, relative=(2, 20)),
    "score_mod_packed": PACKED | GROUPED | dict(score_mod="alibi", window=100, sink=True),
    "score_mod_lengths": LENGTHS | dict(score_mod="gaussian", decay=True),
    "dropout": dict(q_len=333, dropout=0.3, seed=3),
    "dropout_full": FULL | MORE_KEYS | dict(dropout=0.7, seed=-1),
    "dropout_grouped_parts": PARTS | dict(dropout=0.1, seed=4),
    "dropout_grouped_looped": LOOPED | dict(dropout=0.2, seed=2**62),
    "dropout_of_one_key": dict(q_len=300, window=1, dropout=0.5, seed=5),
    "all": ALL | dict(softcap=3.0),
    "packed": dict(packed=[40, 200, 200, 463, 590, 700], q_len=700),
    "packed_full_with_rest": FULL | dict(packed=[0, 129, 330, 500], q_len=600),
    "packed_of_one": dict(packed=[0, 333], q_len=333),
    "packed_of_nothing": dict(packed=[0, 0, 0], q_len=100, sink=True),
    "packed_without_longest": dict(packed=[0, 64, 320, 384], q_len=400, longest=False),
    "packed_many": dict(packed=[0, *itertools.accumulate(i * 5 % 7 for i in range(300))], q_len=1000),
    "packed_many_tiles": dict(packed=[0, 100, 1800, 1801, 2048], q_len=2048, heads=34, kv_heads=17),
    "packed_pair": dict(packed=([30, 150, 150, 400, 450, 500], [50, 64, 200, 300, 620, 620]), q_len=500, k_len=640),
    "packed_pair_full": FULL | dict(packed=([0, 150, 150, 400], [0, 64, 200, 300]), q_len=500, k_len=340),
    "packed_grouped": PARTS | dict(packed=[70, 128, 400, 650], q_len=700),
    "packed_window": dict(packed=[0, 300, 650], q_len=700, window=100, softcap=5.0),
    "packed_window_full": FULL | dict(packed=[0, 300, 650], q_len=700, window=100),
    "packed_pair_window": PAIR_WINDOW,
    "packed_all": SINK_WINDOW | dict(packed=([0, 90, 200], [0, 250, 300]), q_len=230, k_len=300, softcap=3.0, alibi=2),
    "packed_dropout": SINK_WINDOW | dict(packed=[0, 100, 230, 230, 500], q_len=520, dropout=0.2, seed=1),
    "packed_pair_dropout": PAIR | dict(dropout=0.3, seed=1),
    "lengths_dropout": dict(lengths=[300, 250, 17], batch=3, q_len=200, k_len=300, dropout=0.2, seed=7),
    "packed_single_keys": FULL | dict(packed=([0, 100, 100, 300], [0, 1, 1, 2]), q_len=300, k_len=2),
    "lengths_of_one": dict(lengths=[1, 0, 1], batch=3, q_len=70),
    "lengths": dict(lengths=[333, 0, 64, 201], batch=4, q_len=333),
    "lengths_full": FULL | dict(lengths=[129, 5, 300], batch=3, q_len=300),
    "lengths_more_keys": LENGTHS,
    "lengths_more_queries": dict(lengths=[200, 10, 0], batch=3, q_len=300, k_len=200),
    "lengths_window": dict(lengths=[300, 290, 210, 30], batch=4, q_len=100, k_len=300, window=50),
    "lengths_grouped": PARTS | dict(lengths=[200, 100], q_len=200, scale=-0.2),
    "lengths_all": SINK_WINDOW | dict(lengths=[300, 150], batch=2, q_len=200, k_len=300, softcap=3.0),
}

# More tiles than programs that run at once on an H200 (132), so that the assignment of tiles to programs and their
# timing vary from pass to pass.
REPEATED = {name: CASES[name] for name in ("many_tiles", "multi_query_full", "packed_many_tiles")} | {
    "many_parts": PARTS | dict(q_len=2000),
    "many_dropout_looped": dict(batch=40, q_len=900, heads=3, kv_heads=1, dropout=0.2, seed=3),
    "many_all_parts": SINK_WINDOW | dict(batch=8, q_len=1000, softcap=3.0, alibi=2),
    "many_decay_looped": dict(batch=40, q_len=900, heads=3, kv_heads=1, decay=True),
    "many_lengths": dict(lengths=[700, 0, 64, 333, 699, 1, 512, 128, 700, 300, 65, 450], batch=12, q_len=700, heads=8),
    "many_lengths_full_parts": FULL | PARTS | dict(lengths=[2000, 1111], q_len=2000),
    "many_packed_parts": PARTS | dict(packed=[0, 128, 1400, 1400, 2950], q_len=3000),
    "many_packed_pair_full": FULL | dict(
        packed=([0, 900, 900, 2400], [0, 300, 400, 2000]), q_len=2500, k_len=2040, heads=16,
    ),
    "many_packed_all_parts": SINK_WINDOW | dict(
        packed=[0, 90, 1500, 2900], q_len=3000, heads=8, kv_heads=4, softcap=3.0,
    ),
}  # fmt: skip


hopper = partial(attention, impl="hopper")
# head dims of keys and values
DIMS = [(64, 64), (96, 96), (128, 128), (256, 256), (192, 128)]


def each(cases, dims):
    """Parameters (case, dim, value_dim), but for decay with values of another head dim, which is not served."""
    return [
        pytest.param(case, dim, value_dim, id=f"{name}-{dim}-{value_dim}")
        for name, case in cases.items()
        for dim, value_dim in dims
        if dim == value_dim or "decay" not in case
    ]


@on_hopper
@pytest.mark.parametrize("case, dim, value_dim", each(CASES, [(40, 40), (136, 72), *DIMS]))
def test_output_and_gradients(case, dim, value_dim, poisoned):
    for dtype in (torch.bfloat16, torch.float16):
        make = partial(make_problem, "cuda", dtype, dim=dim, value_dim=value_dim, **case)
        check(make, dtype, impls=["hopper"])


@on_hopper
@pytest.mark.parametrize("dim, value_dim", DIMS)
@pytest.mark.parametrize("bounds", ["packed", "packed_pair", "lengths"])
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window=70), dict(softcap=5.0)], ids=str)
def test_nan_stays_in_its_sequence(options, bounds, dim, value_dim, poisoned):
    """A tile may reach past its sequence: into a neighbour, rows of no sequence, or keys before every window."""

    def mask(count, *ranges):
        x = torch.zeros(count, dtype=torch.bool, device="cuda")
        for first, end in ranges:
            x[first:end] = True
        return x

    batch, q_len, k_len = (2, 400, 400) if bounds == "lengths" else (1, 400, 600 if bounds == "packed_pair" else 400)
    if bounds == "lengths":
        ragged = dict(lengths=integers(100, 230))
        queries = keys = mask(800, (0, 100), (400, 630))
        q_rest = k_rest = ~queries
    else:  # the second sequence is NaN
        starts = [0, 100, 230, 330], [0, 220, 300, 530] if bounds == "packed_pair" else [0, 100, 230, 330]
        q_starts, k_starts = (integers(*x) for x in starts)
        ragged = dict(cu_seqlens=(q_starts, k_starts) if bounds == "packed_pair" else q_starts)
        queries, keys = (mask(n, (x[0], x[1]), (x[2], x[3])) for n, x in zip((q_len, k_len), starts, strict=True))
        q_rest, k_rest = mask(q_len, (330, q_len)), mask(k_len, (starts[1][-1], k_len))
    seen = keys.clone()
    if bounds == "packed_pair" and "window" in options:  # 100 queries with a window of 70 see the last 169 keys
        seen[: 220 - 169] = seen[300 : 530 - 169] = False

    def run(dirty):
        torch.manual_seed(0)
        sizes = (q_len, dim), (k_len, dim), (k_len, value_dim), (q_len, value_dim)
        shapes = [(batch, n, 2, width) for n, width in sizes]
        inputs = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        if dirty:
            for x, alive in zip(inputs, (queries, seen, seen, queries), strict=True):
                x.flatten(0, 1)[~alive] = float("nan")
        *leaves, dout = inputs
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = attention(*leaves, impl="hopper", return_lse=True, **ragged, **options)
        found = [x.detach().flatten(0, 1) for x in (out, lse.transpose(1, 2), *torch.autograd.grad(out, leaves, dout))]
        for index, x in enumerate(found):
            assert (x[k_rest if index > 2 else q_rest] == (float("-inf") if index == 1 else 0)).all()
        return [x[keys if index > 2 else queries] for index, x in enumerate(found)]

    for name, ours, expected in zip(("out", "lse", "dq", "dk", "dv"), run(True), run(False), strict=True):
        assert expected.isfinite().all(), name
        if name == "dq":  # summed in any order
            torch.testing.assert_close(ours, expected, rtol=2e-2, atol=1e-2)
        else:
            assert torch.equal(ours, expected), name


@on_hopper
def test_ragged_inputs_of_any_strides():
    """Slices of a fused projection, and batch rows that are not contiguous in memory."""
    for x in (torch.randn(2, 300, 8, 64), torch.randn(300, 2, 8, 64).transpose(0, 1), torch.randn(2, 8, 300, 64)):
        x = x.transpose(1, 2) if x.shape[1] == 8 else x
        inputs = x.to("cuda", torch.bfloat16).split((4, 2, 2), 2)
        for row, ragged in ((slice(None), dict(lengths=[300, 120])), (slice(1), dict(cu_seqlens=[0, 100, 300]))):
            ragged = {name: integers(*x) for name, x in ragged.items()}
            strided = [x[row].requires_grad_() for x in inputs]
            plain = [x.detach().contiguous().requires_grad_() for x in strided]
            out, expected = (attention(*x, impl="hopper", **ragged) for x in (strided, plain))
            assert torch.equal(out, expected)
            gradients = torch.autograd.grad(out.sum(), strided), torch.autograd.grad(expected.sum(), plain)
            torch.testing.assert_close(*gradients, rtol=2e-2, atol=1e-2)


@on_hopper
def test_gates_before_a_sequence_cost_no_digits():
    """The second sequence, of more queries than keys, behind gates that add up to -4e5; and that sequence alone."""
    shapes = [(1, n, 2, 64) for n in (300, 470, 470)]
    q, k, v = (torch.randn(x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in shapes)
    decay = torch.nn.functional.logsigmoid(torch.randn(1, 470, 2, device="cuda"))
    decay[:, :400] = -1e3
    starts = integers(0, 100, 300), integers(0, 400, 470)
    out = attention(q, k, v, decay=decay, cu_seqlens=starts, max_seqlen=(200, 400), impl="hopper")[:, 100:]
    second = q[:, 100:], k[:, 400:], v[:, 400:]
    alone = attention(*second, decay=decay[:, 400:], impl="hopper")
    dout = torch.randn_like(out)
    found = [(x, *torch.autograd.grad(x, (q, k, v), dout)) for x in (out, alone)]
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


def close(ours, expected):
    """Whether each row is: a norm over the whole tensor would hide a single bad one."""
    error, size = (x.double().norm(dim=-1) for x in (ours.double() - expected.double(), expected))
    return bool((error <= 0.02 * (size + size.square().mean().sqrt())).all())


@on_hopper
@pytest.mark.parametrize("case, dim, value_dim", each(REPEATED, DIMS))
def test_forward_repeats_and_deterministic_backward_too(case, dim, value_dim):
    """The same bits in each of 50 passes, but for dq and ddecay without deterministic algorithms: sums in any order.

    A backward that was compiled for one mode is not used in the other: the layouts of their partial sums differ.
    """
    problem, firsts = make_problem("cuda", torch.bfloat16, dim=dim, value_dim=value_dim, **case), []
    for deterministic in (False, True, False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            first, differ = results(hopper, problem, torch.bfloat16), set()
            for _ in range(49):
                again = results(hopper, problem, torch.bfloat16)
                differ |= {name for name, x in first.items() if not torch.equal(x, again[name])}
        finally:
            torch.use_deterministic_algorithms(False)
        assert differ <= (set() if deterministic else {"dq", "ddecay"}), f"deterministic={deterministic}"
        firsts.append(first)
    for other in firsts[1:]:
        assert all(close(x, firsts[0][name]) for name, x in other.items())


@on_hopper
@pytest.mark.parametrize("ragged", [False, True])
def test_launches_back_to_back(ragged):
    """The programs of a kernel wait for each other; none may wait forever, whatever the shape.

    Calls are launched one after the other; then each is compared with the Triton kernels, alone.
    """
    generator = random.Random(ragged)
    choice, calls = generator.choice, []
    for _ in range(200):
        batch, heads, (dim, value_dim) = generator.randint(1, 3), choice((1, 2, 6)), choice(DIMS)
        q_len, k_len = (choice((1, 63, 64, 65, 500, 1000, 2049)) for _ in range(2))
        kv_heads, options = choice((1, heads)), dict(causal=choice((True, False)))
        if ragged:
            batch, kv_heads, count = 1, heads, choice((1, 3, 40))
            dim = value_dim = choice((64, 128))
            lengths = [[choice((0, 1, 63, 64, 65, 300)) for _ in range(count)] for _ in range(2)]
            starts = tuple(integers(0, *itertools.accumulate(x)) for x in lengths)
            q_len, k_len = (sum(x) + choice((1, 100)) for x in lengths)
            options = dict(window=choice((None, 50)), cu_seqlens=starts)
        shapes = (batch, q_len, heads, dim), (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, value_dim)
        leaves = [torch.randn(x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in shapes]
        dout = torch.randn(*shapes[0][:3], value_dim, device="cuda", dtype=torch.bfloat16)
        calls.append((partial(attention, **options), leaves, dout))
    found = [out_and_gradients(partial(call, impl="hopper"), *tensors) for call, *tensors in calls]
    for (call, *tensors), ours in zip(calls, found, strict=True):
        torch.cuda.synchronize()
        expected = out_and_gradients(partial(call, impl="triton"), *tensors)
        assert all(map(close, ours, expected)), [x.shape for x in ours]


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_cuda_graph_with_other_sequences(dim):
    """Replays read the starts of the day: other tiles, as many programs, nothing compiled."""
    q, k, v, dout = (torch.randn(1, 2000, 4, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    starts = integers(0, 700, 700, 1500, 2000, 2000)

    def run(impl):
        return out_and_gradients(partial(attention, cu_seqlens=starts, impl=impl), leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run("hopper")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run("hopper")
    for other in (starts.tolist(), [0, *[2000] * 5], [0, 1, 64, 65, 193, 300], [0] * 6):
        starts.copy_(integers(*other))
        graph.replay()
        assert all(map(close, found, run("triton")))


@on_hopper
def test_streams_and_graphs_count_their_tiles_apart():
    """Each forward leaves its counter at 0 for the next of the stream, whatever runs beside it."""
    calls = [[torch.randn(2, n, 4, dim, device="cuda").bfloat16() for _ in "qkv"] for n, dim in ((900, 64), (200, 128))]
    expected = [attention(*tensors) for tensors in calls]
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(3)]
    with torch.cuda.graph(graph):
        found = [attention(*tensors) for tensors in calls]
    wrong = torch.zeros(4, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for i in range(600):
        with torch.cuda.stream(streams[i % 3]):
            wrong[i % 3] += (attention(*calls[i % 2]) != expected[i % 2]).any()
        graph.replay()
        wrong[3] += sum((x != y).any() for x, y in zip(found, expected, strict=True))
    torch.cuda.synchronize()
    assert wrong.tolist() == [0] * 4
