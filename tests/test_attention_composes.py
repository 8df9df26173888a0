"""attention() with the rest of PyTorch: compile, autocast, CUDA graphs, checkpointing, streams, devices."""

import itertools
from functools import partial

import pytest
import torch
from problems import (
    BACKEND,
    CASES,
    ON_GPU,
    by_impl,
    from_qkv,
    identical,
    kernels,
    make_problem,
    named,
    needs_gpu,
    out_and_gradients,
    results,
    same,
)
from test_hopper import CASES as HOPPER_CASES
from torch._dynamo import compiled_autograd, lookup_backend
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attention import attention, attention_qkv, decode, ops
from attention.features import GRADIENTS

# All options that the portable kernels support, in problems of a tile or two
ALL = CASES["all"] | dict(q_len=15, k_len=20, window=9, bias=(3, 15, 20), lengths=[18])
PACKED = CASES["all_packed"] | dict(q_len=20, window=9, heads=2, kv_heads=1, bias=(2, 1, 20), packed=[0, 6, 6, 18])
PREFIX = CASES["prefix_all"] | dict(q_len=20, prefix_lengths=[9, 15, 3, 2], bias=(3, 20, 20), lengths=[18, 20, 0, 1])
WHOLE = {  # name -> implementation, dtype and problem: without options, or with all that the implementation supports
    "none": ("triton", torch.float32, dict(q_len=20)),
    "all": ("triton", torch.float32, ALL),
    "all_packed": ("triton", torch.float32, PACKED),
    "prefix_all": ("triton", torch.float32, PREFIX),
    "qkv_all": ("triton", torch.float32, ALL | dict(q_len=20, bias=(3, 20, 20))),
    "qkv_packed": ("triton", torch.float32, PACKED | dict(value_dim=24)),
    "hopper_none": ("hopper", torch.bfloat16, HOPPER_CASES["ragged"] | dict(dim=64)),
    "hopper_all": ("hopper", torch.bfloat16, HOPPER_CASES["all"] | dict(dim=64)),
    "hopper_lengths_all": ("hopper", torch.bfloat16, HOPPER_CASES["lengths_all"] | dict(dim=64)),
    "hopper_packed_all": ("hopper", torch.bfloat16, HOPPER_CASES["packed_all"] | dict(dim=64)),
    "hopper_qkv_lengths_all": ("hopper", torch.bfloat16, HOPPER_CASES["lengths_all"] | dict(dim=64, q_len=300)),
    "hopper_qkv_packed": ("hopper", torch.bfloat16, HOPPER_CASES["packed_grouped"] | dict(dim=64)),
}


def whole(name, device):
    """A problem of WHOLE: the function that computes it, its dtype, and the result of make_problem()."""
    impl, dtype, problem = WHOLE[name]
    function = from_qkv if "qkv" in name else attention
    return partial(function, impl=impl), dtype, make_problem(device, dtype, **problem)


def leaves(device, length=33, impl="triton"):
    """q, k and v. The Hopper kernels support neither float32 nor head dim 16."""
    dtype, dim = (torch.bfloat16, 64) if impl == "hopper" else (torch.float32, 16)
    return [torch.randn(2, length, 2, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", named(WHOLE))
def test_compiles_forward_and_backward(name, device):
    call, dtype, problem = whole(name, device)
    compiled = torch.compile(call, fullgraph=True, backend=BACKEND)
    torch.testing.assert_close(*(results(run, problem, dtype) for run in (compiled, call)))


def test_compiles_with_a_bias_once_sizes_are_dynamic(device):
    """Dynamo makes a symbol of a size that has changed, but a number of the same size in a new argument, the bias."""
    torch.compiler.reset()
    compiled = torch.compile(partial(attention, impl="triton"), fullgraph=True, backend=BACKEND)
    for length, bias in ((20, None), (24, None), (31, (31, 31))):
        q, k, v = leaves(device, length)
        bias = None if bias is None else torch.randn(bias, device=device)
        torch.testing.assert_close(compiled(q, k, v, bias=bias), attention(q, k, v, bias=bias, impl="triton"))


def halves(q, k, v, **options):
    """A packed row of two sequences."""
    starts = torch.arange(3, dtype=torch.int32, device=q.device) * (q.shape[1] // 2)
    return attention(*(x[:1] for x in (q, k, v)), cu_seqlens=starts, max_seqlen=q.shape[1] // 2, **options)


def all_results(q, k, v, impl):
    """Of attention(), in one tensor."""
    results = attention(q, k, v, return_lse=True, return_max_logit=True, impl=impl)
    return torch.cat([x.flatten().float() for x in results])


CALLS = {
    "auto": attention,
    "sdpa": partial(attention, impl="sdpa"),
    "plain": partial(attention, impl="triton"),
    "decay": lambda q, k, v: attention(q, k, v, window=7, decay=-q.abs().mean(-1), impl="triton"),
    "packed": partial(halves, impl="triton"),
    "sdpa_packed": partial(halves, impl="sdpa"),
    "qkv": partial(from_qkv, impl="triton"),
    "all_results": partial(all_results, impl="triton"),
    "hopper": partial(attention, window=7, impl="hopper"),
    "hopper_packed": partial(halves, impl="hopper"),
    "hopper_all_results": partial(all_results, impl="hopper"),
}


@pytest.mark.parametrize("name", named(CALLS))
def test_compiles_once_more_when_the_length_changes(name, device):
    """In one graph. The second length makes it dynamic; no later one compiles again."""
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return lookup_backend(BACKEND)(graph, inputs)

    def loss(q, k, v):
        return CALLS[name](q, k, v).float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend=count)
    for length in (20, 24, 57):
        tensors = leaves(device, length, name.split("_")[0])
        torch.testing.assert_close(*(out_and_gradients(run, tensors) for run in (compiled, loss)))
    assert len(graphs) == 2


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in ("prefix_all", "qkv_all") else x for x in named(WHOLE)]
)
def test_custom_ops(name, device):
    """A dispatch mode sees both ops, and they give the same results; torch.library.opcheck with their arguments."""
    calls = {}

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (ops.forward_op, ops.backward_op):
                calls[function] = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
            return function(*args, **kwargs or {})

    call, dtype, problem = whole(name, device)
    with Log():
        found = results(call, problem, dtype)
    same(found, results(call, problem, dtype), name)
    assert set(calls) == {ops.forward_op, ops.backward_op}
    for op, args in calls.items():
        tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
        if op is ops.forward_op:  # the backward op has no derivative to trace
            args = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
            tests.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(op, tuple(args), test_utils=tests)


@pytest.mark.parametrize("name", named(["none", "all", "qkv_packed", "hopper_packed_all"]))
def test_compiled_autograd(name, device):
    """Over a forward in eager mode, in one graph."""
    call, dtype, problem = whole(name, device)
    expected = results(call, problem, dtype)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        found = results(call, problem, dtype)
    torch.testing.assert_close(found, expected)


@by_impl
def test_a_graph_traced_before_autograd(impl, device):
    """It has the op, not its result."""
    q, k, v = (x.detach() for x in leaves(device, impl=impl))
    graph = make_fx(partial(attention, impl=impl), pre_dispatch=True)(q, k, v)
    torch.testing.assert_close(graph(k, v, q), attention(k, v, q, impl=impl))


@by_impl
def test_autocast(impl, device):
    q, k, v = (x.detach().float().requires_grad_() for x in leaves(device, impl=impl))
    qkv = torch.cat((q, k, v), 2).flatten(2)
    with torch.autocast(device, torch.bfloat16):
        out = attention(q, k.bfloat16(), v, impl=impl)
        joint = attention_qkv(qkv, 2, impl=impl)
    assert out.dtype == torch.bfloat16 and torch.equal(joint, out)
    assert torch.autograd.grad(joint.sum(), qkv, retain_graph=True)[0].dtype == torch.float32
    gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*low, impl=impl).float().sum(), low)
    identical(gradients, [x.float() for x in expected])


@by_impl
def test_activation_checkpointing(impl, device):
    """The same gradients and the same dropout mask, whose seed is drawn from torch's generator."""

    def loss(q, k, v):
        return attention(q, k, v, dropout=0.5, impl=impl).square().mean()

    tensors = leaves(device, impl=impl)
    torch.manual_seed(1)
    plain = out_and_gradients(loss, tensors)
    torch.manual_seed(1)
    identical(out_and_gradients(partial(checkpoint, loss, use_reentrant=False), tensors), plain)
    assert not torch.equal(loss(*tensors), plain[0])


@by_impl
@pytest.mark.parametrize(
    "options", [{}, dict(bias=(20, 20)), dict(decay=True), dict(sink=True), dict(relative=(9,))], ids=str
)
def test_gradients_of_some_inputs(options, impl, device):
    """All, all but one, and each alone, in both orders: on a GPU a kernel serves as it was compiled first."""
    if impl == "hopper" and "bias" in options:
        pytest.skip("not served")
    dtypes = [torch.float16] if impl == "hopper" else [torch.float32, torch.float16]  # delta is found in two ways
    for dtype, order in itertools.product(dtypes, (1, -1) if ON_GPU else (1,)):
        arguments, dout, _ = make_problem(device, dtype, batch=2 - order, q_len=20, heads=1, dim=64, **options)
        names = tuple(name for name in GRADIENTS if name in arguments)

        def gradients(needed, names=names, arguments=arguments, dout=dout):
            given = {name: arguments[name].detach().requires_grad_(name in needed) for name in names}
            return torch.autograd.grad(attention(**arguments | given, impl=impl), [given[x] for x in needed], dout)

        sets = [names, *itertools.combinations(names, len(names) - 1), *itertools.combinations(names, 1)]
        found = {needed: gradients(needed) for needed in sets[::order]}
        whole = dict(zip(names, found[names], strict=True))
        for needed, some in found.items():
            torch.testing.assert_close(some, [whole[name] for name in needed])


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", ["lengths", "cu_seqlens", "decode"])
def test_export_keeps_sizes_dynamic(name, impl, device):
    """Of the batch, and the number of packed sequences."""
    lengths = torch.tensor([9, 4, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3, 9, 9], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(3 if name != "cu_seqlens" else 1, 9, 2, 16, device=device) for _ in range(3))
    slopes = torch.rand(2, device=device)

    class Network(torch.nn.Module):
        def forward(self, q, k, v, x):
            if name == "decode":
                return decode(q[:, -1:], k, v, x, alibi_slopes=slopes, impl=impl.replace("reference", "eager"))
            return attention(q, k, v, alibi_slopes=slopes, **{name: x}, impl=impl)

    packed, dynamic = name == "cu_seqlens", {0: torch.export.Dim.DYNAMIC}
    shapes = dict.fromkeys("qkv", None if packed else dynamic) | dict(x=dynamic)
    args = q, k, v, starts if packed else lengths
    exported = torch.export.export(Network(), args, dynamic_shapes=shapes, strict=False).module()
    fewer = (q, k, v, starts[:3]) if packed else [x[:2] for x in args]
    torch.testing.assert_close(exported(*fewer), Network()(*fewer))


@pytest.mark.parametrize("case", named(["q", "decay", "hopper_q"]))
def test_forward_mode_raises(case, device):
    """It does not return zero. Calls inside a dual level without a tangent still work."""
    hopper = case.startswith("hopper")
    which = dict(dtype=torch.bfloat16, dim=64) if hopper else dict(dtype=torch.float32, decay=True)
    arguments, _, _ = make_problem(device, batch=1, q_len=10, **which)
    name = case.removeprefix("hopper_")
    x = arguments.pop(name)

    def call(x, impl="hopper" if hopper else "triton"):
        return attention(**arguments | {name: x}, impl=impl)

    with pytest.raises(RuntimeError, match=r"forward-mode.*impl='reference'"):
        torch.func.jvp(call, (x,), (x,))
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(torch.vmap(call), (x[None],), (x[None],))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="forward-mode"):
            call(dual)
        leaf = x.clone().requires_grad_()
        (plain,) = torch.autograd.grad(call(leaf).sum(), leaf)
        assert plain.any()
        with pytest.raises(RuntimeError, match="forward-mode"):
            out = call(leaf)
            torch.autograd.grad(out, leaf, forward_ad.make_dual(out.detach(), out.detach()))
        assert forward_ad.unpack_dual(call(dual, "reference")).tangent.any()
        assert torch.equal(torch.vmap(call)(x[None])[0], call(x))


@needs_gpu
@by_impl
def test_cuda_graph_and_another_stream(impl, device):
    """A captured graph replays on new inputs; dropout draws a new mask from torch's generator in each replay."""
    names = {"triton": ("all", "all_packed"), "hopper": ("hopper_all", "hopper_packed_all")}
    q, k, v = (x.detach().half() for x in leaves(device, 200, impl))
    q.requires_grad_()
    call = partial(attention, q, k, v, impl=impl)
    problems = [whole(name, device) for name in names[impl]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(dropout=0.5).sum().backward()
        call(return_max_logit=True)
        expected = [results(run, problem, dtype) for run, dtype, problem in problems]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [results(run, problem, dtype) for run, dtype, problem in problems]
        plain, largest = call(return_max_logit=True)
        seeded = call(dropout=0.5, seed=3)
        (dq,) = torch.autograd.grad(seeded.sum(), q)
        dropped = call(dropout=0.5)
    with torch.no_grad():
        q.mul_(0.25)  # so that the largest logits of the first run would be too large
    graph.replay()
    for ours, on_another_stream in zip(found, expected, strict=True):
        same(ours, on_another_stream, impl)
    expected = call(dropout=0.5, seed=3)
    assert all(map(torch.equal, (plain, largest, seeded), (*call(return_max_logit=True), expected)))
    torch.testing.assert_close(dq, torch.autograd.grad(expected.sum(), q)[0])
    first = dropped.clone()
    graph.replay()
    assert not torch.equal(first, dropped)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@by_impl
def test_second_gpu_while_the_first_is_current(impl):
    """The same bits, for the Hopper kernels too: the sum of two tiles of keys in dq does not depend on the order."""
    kernels = partial(attention, impl=impl)
    problem = make_problem("cuda:1", torch.float16, q_len=100, dim=64)
    found = results(kernels, problem, torch.float16)
    assert found["out"].device.index == 1 and torch.cuda.current_device() == 0
    arguments, dout, dlse = problem
    moved = {name: x.to("cuda:0") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    expected = results(kernels, (moved, dout.to("cuda:0"), dlse.to("cuda:0")), torch.float16)
    identical({name: x.to("cuda:0") for name, x in found.items()}, expected)


@needs_gpu
@by_impl
def test_offsets_past_2_to_the_31(impl, device):
    """A row of more than 2^31 elements, forward and backward: the tail of the last head equals a call on it alone."""
    torch.cuda.empty_cache()  # left by earlier tests
    if torch.cuda.mem_get_info()[0] < 50e9:
        pytest.skip("needs 50 GB of a GPU's memory")
    length, heads, dim, tail = 2**20, 17, 128, 300  # the Hopper kernels support at most 2^20 positions
    q, k, v, dout = (torch.randn(1, length, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, window=64, impl=impl)
    gradients = torch.autograd.grad(out, leaves, dout)
    part = [x[:, -tail:, -1:].detach().clone().requires_grad_() for x in (q, k, v)]
    expected = attention(*part, window=64, impl=impl)
    checked = slice(-tail + 63, None)  # earlier queries see keys that the part lacks
    torch.testing.assert_close(out[:, checked, -1:], expected[:, checked], rtol=1e-2, atol=1e-2)
    for ours, alone in zip(gradients, torch.autograd.grad(expected, part, dout[:, -tail:, -1:]), strict=True):
        inner = slice(-tail + 126, None)
        torch.testing.assert_close(ours[:, inner, -1:], alone[:, inner], rtol=2e-2, atol=2e-2)


@needs_gpu
def test_bias_past_2_to_the_31(device):
    """A bias of more than 2^31 elements and its gradient: the last queries equal a call on them alone."""
    length, tail = 46_400, 100
    q, k, v, dout = (torch.randn(1, length, 1, 16, device=device, dtype=torch.bfloat16) for _ in range(4))
    bias = torch.randn(1, 1, length, length, device=device, dtype=torch.bfloat16)
    assert bias.numel() > 2**31
    found = []
    for rows in (slice(None), slice(-tail, None)):
        leaves = [q[:, rows].clone().requires_grad_(), bias[:, :, rows].requires_grad_()]
        out = attention(leaves[0], k, v, bias=leaves[1], impl="triton")
        dq, dbias = torch.autograd.grad(out, leaves, dout[:, rows])
        found.append([out[:, -tail:], dq[:, -tail:], dbias[:, :, -tail:].clone()])
        del leaves, dbias
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-3)


@needs_gpu
def test_one_long_row_of_gates_repeats(device):
    """The same bits in each call, although PyTorch's cumsum of a single row varies in order."""
    problem = make_problem(device, torch.bfloat16, batch=1, q_len=20_000, heads=1, decay=True)
    first = results(kernels, problem, torch.bfloat16)
    for _ in range(50):
        same(results(kernels, problem, torch.bfloat16), first, "triton")


@needs_gpu
@by_impl
def test_memory_grows_with_the_length_only(impl, device):
    """Peak beyond the inputs at T = 65,536: output, LSE, gradients and delta; nothing of size T^2 (4.3e9 scores).

    The Hopper kernels also sum dq in float32, and copy the gradient of the output, which is one number expanded.
    """
    q, k, v = (torch.randn(1, 65_536, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, impl=impl).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak memory beyond the inputs: {peak / 2**20:.0f} MiB")
    assert peak < (8 if impl == "hopper" else 6) * q.numel() * q.element_size()
