"""Random problems for attention(), and the check that its errors are small.

Tolerance: at most twice the error of eager PyTorch (the reference run in the same dtype) or of a sum in float32,
whichever is larger; see check(). NaN and infinity always fail.
"""

import itertools
import math
from functools import partial

import pytest
import torch

from attention import attention, attention_qkv, explain
from attention.features import GRADIENTS
from attention.gpu import hopper_problem

ON_GPU = torch.cuda.is_available()
MISSES = hopper_problem(torch.device("cuda" if ON_GPU else "cpu"))  # what the Hopper kernels lack here, in words
BACKEND = "inductor" if ON_GPU else "aot_eager"  # on a CPU, Inductor would only add the time of its own compiler
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
on_hopper = pytest.mark.skipif(MISSES is not None, reason=f"this is {MISSES}")


def named(names):
    """Parameters of a test. Those of the Hopper kernels are skipped on other chips."""
    return [pytest.param(name, marks=on_hopper) if name.startswith("hopper") else name for name in names]


def sizes_of(impl):
    """(dtype, head dim) of small tensors. The Hopper kernels support neither float32 nor a head dim of 16."""
    return (torch.bfloat16, 64) if impl == "hopper" else (torch.float32, 16)


by_impl = pytest.mark.parametrize("impl", named(["triton", "hopper"]))
by_impl_or_reference = pytest.mark.parametrize("impl", named(["triton", "hopper", "reference"]))

# name -> arguments of make_problem
CASES = {
    "causal": {},
    "more_keys": dict(q_len=37, k_len=90),
    "more_keys_full": dict(q_len=37, k_len=90, causal=False),
    "more_queries": dict(q_len=90, k_len=37),
    "grouped_full": dict(heads=4, kv_heads=2, causal=False, q_len=50, k_len=70),
    "value_dim": dict(dim=16, value_dim=32),
    "scale": dict(scale=-0.3),
    "no_scale": dict(scale=0.0),
    "dropout": dict(dropout=0.3, seed=3),
    "dropout_grouped": dict(dropout=0.5, seed=2**61 + 5, heads=4, kv_heads=2, batch=1, q_len=40, k_len=50),
    "window": dict(window=20),
    "window_full": dict(window=9, causal=False, q_len=60, k_len=75),
    "softcap": dict(softcap=1.5),
    "bias": dict(bias=(2, 2, 50, 50), q_len=50),
    "bias_of_heads": dict(bias=(1, 2, 40, 45), q_len=40, k_len=45),
    "bias_of_keys": dict(bias=(2, 1, 1, 40), q_len=40),
    "bias_of_queries": dict(bias=(40, 1), q_len=40, causal=False),
    "bias_of_one": dict(bias=(1,), q_len=40),
    "bias_hides": dict(bias=(1, 1, 40, 40), hide=True, q_len=40, sink=True),
    "bias_hides_a_row_of_an_inner_tile": dict(bias=(70, 70), hide=True, causal=False, batch=1),
    "decay_grouped": dict(decay=True, heads=4, kv_heads=2, q_len=30, k_len=50),
    "decay_more_queries": dict(decay=True, q_len=50, k_len=30),
    "alibi_of_rows_full": dict(alibi=2, causal=False, heads=4, kv_heads=2, q_len=50, k_len=70),
    "alibi_packed_pair_full": dict(alibi=1, packed=([0, 20, 50], [0, 30, 60]), q_len=50, k_len=60, causal=False),
    "alibi_prefix": dict(alibi=1, prefix_lengths=[45, 0]),
    "sink": dict(sink=True, k_len=31),
    "relative_grouped_full": dict(relative=(2, 20), causal=False, heads=4, kv_heads=2, q_len=50),
    "relative_more_keys": dict(relative=(2, 40), q_len=40, k_len=63, causal=False, window=33, softcap=2.0),
    "relative_more_queries": dict(relative=(100,), q_len=70, k_len=31),
    "relative_of_one_lengths": dict(relative=(1,), lengths=[70, 23, 0], batch=3, sink=True),
    "relative_packed_pair": dict(relative=(2, 16), packed=([0, 20, 20, 50], [0, 30, 41, 60]), q_len=50, k_len=60),
    "lengths": dict(lengths=[70, 23, 0], batch=3),
    "lengths_more_keys": dict(lengths=[60, 15, 41], batch=3, q_len=40, k_len=60),
    "lengths_bias": dict(lengths=[0, 40, 15], batch=3, bias=(1, 2, 1, 1), q_len=40),
    "lengths_full": dict(lengths=[50, 17], causal=False, q_len=50),
    "packed": dict(packed=[0, 20, 20, 53, 70]),
    "packed_with_rest": dict(packed=[35, 40, 40, 60], causal=False),
    "packed_pair": dict(packed=([7, 20, 20, 50], [4, 30, 41, 60]), q_len=50, k_len=60),
    "packed_pair_without_queries": dict(packed=([0, 8, 8], [0, 8, 16]), q_len=8, k_len=16, window=1),
    "packed_pair_decay": dict(packed=([0, 20, 50], [0, 20, 60]), q_len=50, k_len=60, decay=True),
    "softcap_of_nearly_linear": dict(softcap=300.0),
    "packed_bias": dict(packed=[2, 20, 50], bias=(1, 2, 50, 50), q_len=50),
    "packed_bias_of_one": dict(packed=[0, 20, 50], bias=(2, 1, 1), q_len=50),
    "packed_window_decay": dict(packed=[0, 31, 50], window=12, decay=True, q_len=50),
    "prefix": dict(prefix_lengths=[45, 0], heads=4, kv_heads=2),
    "prefix_more_keys": dict(prefix_lengths=[80, 60], q_len=37, k_len=90),
    "prefix_more_queries": dict(prefix_lengths=[5, 37], q_len=90, k_len=37),
    "prefix_of_all": dict(prefix_lengths=[32, 70, 100], batch=3),
    "prefix_all": dict(
        q_len=40, prefix_lengths=[20, 35, 9, 2], lengths=[40, 25, 0, 1], batch=4, softcap=2.0, dropout=0.2, seed=1,
        heads=3, kv_heads=1, bias=(3, 40, 40), hide=True, sink=True, alibi=2, relative=(2, 30),
    ),
    "all": dict(
        window=20, softcap=2.0, dropout=0.2, seed=1, batch=1, heads=3, kv_heads=1, q_len=45, k_len=60, bias=(3, 45, 60),
        decay=True, alibi=1, sink=True, relative=(7,), lengths=[55],
    ),
    "all_packed": dict(
        window=20, softcap=2.0, dropout=0.2, seed=1, heads=4, kv_heads=2, q_len=60, bias=(4, 1, 60), decay=True,
        alibi=2, sink=True, packed=[3, 17, 17, 55], dim=24, value_dim=16,
    ),
}  # fmt: skip
FLOAT32 = GRADIENTS[4:]  # whatever the dtype of q: all but q, k, v and bias


def make_problem(
    device, dtype, *, batch=2, q_len=70, k_len=None, heads=2, kv_heads=None, dim=16, value_dim=None, bias=None,
    hide=False, decay=False, alibi=0, sink=False, relative=None, score_mod=None, packed=None, longest=True,
    return_lse=True, **options,
):  # fmt: skip
    """Random arguments of attention(), by name, and the gradients of its output and LSE (None if LSE is not returned).

    hide: set a third of the bias to -inf, and all of it for one query. alibi: 1 = a slope for each head, 2 = for
    each head of each sequence. relative: shape of relative_bias without its heads. score_mod: a name of SCORE_MODS; its
    example of score_args stands in for those not given. longest: give max_seqlen of packed sequences.
    """
    k_len, kv_heads, value_dim = k_len or q_len, kv_heads or heads, value_dim or dim
    batch = 1 if packed else batch

    def randn(*shape):
        return torch.randn(*shape, device=device)

    arguments = {
        "q": randn(batch, q_len, heads, dim).to(dtype),
        "k": randn(batch, k_len, kv_heads, dim).to(dtype),
        "v": randn(batch, k_len, kv_heads, value_dim).to(dtype),
    }
    if bias:
        arguments["bias"] = randn(*bias).to(dtype)
        if hide:
            arguments["bias"][torch.rand(bias, device=device) < 0.3] = float("-inf")
            if len(bias) > 1 and bias[-2] > 1:
                arguments["bias"][..., bias[-2] // 2, :] = float("-inf")
    if decay:
        arguments["decay"] = torch.nn.functional.logsigmoid(2 * randn(batch, k_len, heads))
    if alibi:
        rows = batch if packed is None else len(packed[0] if isinstance(packed, tuple) else packed) - 1
        options["alibi_slopes"] = torch.rand(*(rows, heads)[2 - alibi :], device=device) + 0.01
    if sink:
        arguments["sink"] = randn(heads)
    if relative:
        arguments["relative_bias"] = randn(*relative[:-1], heads, relative[-1])
    if score_mod:
        from score_mods import example  # imports Triton, which not every machine has

        options = example(score_mod, heads, device) | options
    if packed:
        pair = packed if isinstance(packed, tuple) else (packed, packed)
        if longest:
            options["max_seqlen"] = tuple(max(1, *(b - a for a, b in itertools.pairwise(starts))) for starts in pair)
        starts = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in pair)
        options["cu_seqlens"] = starts if isinstance(packed, tuple) else starts[0]
    for name in ("lengths", "prefix_lengths"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32, device=device)
    if options.get("seed") is None:
        options.pop("seed", None)
    else:
        options["seed"] = torch.tensor([options["seed"]], device=device)
    dout = randn(batch, q_len, heads, value_dim).to(dtype)
    return arguments | options, dout, randn(batch, heads, q_len) if return_lse else None


def results(function, problem, dtype):
    """Output, LSE if returned (0 in place of -inf) and gradients, computed in dtype."""
    arguments, dout, dlse = problem
    leaves = {}
    for name in GRADIENTS:
        if name in arguments:
            x = arguments[name]
            x = x.double() if dtype == torch.float64 else x if name in FLOAT32 else x.to(dtype)
            leaves[name] = x.detach().requires_grad_()
    drawn = arguments.get("dropout", 0.0) > 0 and "seed" not in arguments
    q = arguments["q"]
    with torch.random.fork_rng(devices=[q.device] if q.is_cuda else [], enabled=drawn):
        if drawn:  # every function draws the same dropout mask
            torch.manual_seed(5)
        found = function(**arguments | leaves, return_lse=dlse is not None)
    outputs, wanted = {"out": found}, [dout.to(dtype)]
    if dlse is not None:
        out, lse = found
        outputs = {"out": out, "lse": lse.masked_fill(lse == float("-inf"), 0.0)}
        wanted.append(dlse.to(lse.dtype))
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), wanted)
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    return {name: x.detach() for name, x in outputs.items()} | named


kernels, reference = partial(attention, impl="triton"), partial(attention, impl="reference")


def our_kernels(arguments):
    """The kernels that support a call on this machine: the portable ones, and the Hopper ones if they do."""
    try:
        explain(**arguments, impl="hopper")
    except ValueError:
        return ("triton",)
    return "triton", "hopper"


ROW_FACTOR = 4  # rows are noisier than norms: in the interpreter, their largest error is usually 3 to 5 times the share


def from_qkv(q, k, v, **options):
    """attention_qkv(), as a function of q, k and v."""
    qkv = torch.cat((q, k, v), 2).flatten(2)
    return attention_qkv(qkv, q.shape[2], k.shape[2], **options)


def check(draw, dtype, impls=None, yardstick=None):
    """Fail if the error of a result is more than twice that of eager PyTorch (docs/attention.md, section 12).

    draw() makes a random problem. impls: the implementations to check; None for all of our_kernels().

    Errors are norms over a whole result, and each row has a bound as well, twice ROW_FACTOR times its share: see
    worst_row(). If an error is too large after 1 draw, the squared errors of 8 draws are added up, then of 32, 128.

    Eager PyTorch computes in dtype or, if given, in the dtype `yardstick`. The bound is then four times its error:
    float16 rounds, while tensor cores truncate float32 to tf32.

    The bound is never below twice the error of a sum in float32, see roundoff(), because eager PyTorch is sometimes
    better than that. For a single key and a scale of 0, its LSE is exact, and so is the gradient of a bias that comes
    from this LSE. For a single query it sums more exactly than one by one. For the gradient of a bias, dbias = P dP - P
    delta, this float32 bound is relative to P dP: if a query sees one key, the two cancel exactly in eager PyTorch. In
    all gradients delta also has the error of the rounded output, see error_of_delta(). This bound applies only after
    128 draws, or after 8 if the error is over 20 times eager PyTorch's; for single rows it applies at once.
    """
    squares = {}  # (implementation, result) -> sums over draws, by row: errors of ours, eager's, a float32 sum's; truth
    for count in range(1, 129):
        problem = draw()
        impls = impls or our_kernels(problem[0])
        exact = results(reference, problem, torch.float64)
        eager = results(reference, problem, yardstick or dtype)
        sizes = exact | ({"dbias": exact["dbias"].abs() + minuend(problem)} if "dbias" in exact else {})
        of_delta = error_of_delta(problem, exact["out"].to(dtype) - exact["out"])
        for impl in impls:
            ours = results(partial(attention, impl=impl), problem, dtype)
            for name, truth in exact.items():
                assert ours[name].isfinite().all(), f"{name} of {impl} is not finite"
                precision = sizes[name].abs() * roundoff(name, problem)
                if name not in ("out", "lse"):
                    precision += of_delta[name].abs()
                rows = [ours[name].double() - truth, eager[name].double() - truth, precision, truth]
                rows = torch.stack([by_row(name, x.square()) for x in rows])
                squares[impl, name] = squares.get((impl, name), 0) + rows
        if count not in (1, 8, 32, 128):
            continue
        ratios, hopeless = {}, False
        for key, rows in squares.items():
            error, of_eager, precision, _ = rows.sum(1).sqrt().tolist()
            assert math.isfinite(of_eager), f"{key}: eager PyTorch overflows or returns NaN"
            held_to = of_eager * (1 if yardstick is None else 2)
            if error > 2 * held_to and (count == 128 or (count > 1 and error > 20 * held_to)):
                held_to = max(held_to, precision)
            held_to = max(held_to, 1e-20)  # Hopper's forward replaces a scale of 0 by 1e-30
            # ten times the bound: more draws would not help, unless one in which eager PyTorch is not exact
            hopeless |= of_eager > 0 and error > 20 * max(held_to, precision)
            ratios[key] = max(error / held_to, worst_row(rows, held_to) / ROW_FACTOR)
        key = max(ratios, key=ratios.get)
        if ratios[key] <= 2:
            return
        if hopeless:
            break
    raise AssertionError(f"{key[1]} of {key[0]}: {ratios[key]:.3g} times the error of eager PyTorch, {count} draws")


def by_row(name, squares):
    """Sums over the head dim, or over the keys of a bias; of other results each number is a row."""
    return (squares.sum(-1) if name in ("out", "dq", "dk", "dv", "dbias") else squares).flatten()


def worst_row(rows, held_to):
    """The largest error of a row, as a multiple of its share of held_to or, if more, of what check() allows in it.

    A row's share is in proportion to its norm, but at least that of a row of mean square.
    """
    error, of_eager, precision, truth = rows.sqrt()
    share = held_to * (truth / truth.norm().clamp(min=1e-300)).clamp(min=truth.numel() ** -0.5)
    return (error / share.maximum(of_eager).maximum(precision)).max().item()


def error_of_delta(problem, error):
    """Gradients' errors from `error`, that of the output, in delta = dO . O, where it acts as a gradient of the LSE."""
    arguments, dout, _ = problem
    dlse = (dout.double() * error).sum(-1).transpose(1, 2)
    return results(reference, (arguments, torch.zeros_like(dout), dlse), torch.float64)


def minuend(problem):
    """Size of P dP, summed as the gradient of a bias is, at the mean size of dP, with random signs.

    P is the gradient of the LSE. A sum of n random signs is the sum of the sizes divided by sqrt(n).
    """
    arguments, dout, _ = problem
    dp = dout.double().norm(dim=-1).transpose(1, 2) * arguments["v"].double().square().mean().sqrt()
    terms = dp.numel() * arguments["k"].shape[1] / arguments["bias"].numel()  # of each element
    return results(reference, (arguments, torch.zeros_like(dout), dp), torch.float64)["dbias"] / terms**0.5


def roundoff(name, problem):
    """Mean relative error of a float32 sum over the head dim n: 0.3 sqrt(n) roundoffs; of the LSE: 1 roundoff.

    The LSE of a single key is a score, so a sum over the head dim of q and k.
    """
    arguments, dout, _ = problem
    dim, value_dim = arguments["q"].shape[-1], dout.shape[-1]
    if name == "lse":
        roundoffs = 1 if arguments["k"].shape[1] > 1 else 0.3 * dim**0.5
    else:
        roundoffs = 0.3 * max(dim, value_dim) ** 0.5
    return roundoffs * torch.finfo(torch.float32).eps / 2


def out_and_gradients(function, leaves, dout=None):
    """The output of a function of tensors and their gradients; dout: that of the output, if it is no scalar."""
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


identical = partial(torch.testing.assert_close, rtol=0, atol=0)  # also for lists and dictionaries of tensors


def same(found, expected, impl):
    """Fail unless results are the same bits, but for the sums that Hopper kernels add up in any order."""
    for name, x in expected.items():
        if impl.startswith("hopper") and name in ("dq", "ddecay"):
            torch.testing.assert_close(found[name], x)
        else:
            assert torch.equal(found[name], x), name


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda" if ON_GPU else "cpu")


def floats(*shape):
    return torch.zeros(shape, device="cuda" if ON_GPU else "cpu")
