"""Random problems, and the errors of attention() on them, which are held to those of eager PyTorch.

Tolerance: at most twice the error of eager PyTorch (the reference run in the same dtype) or of by_rounding(), whichever
is more, and never NaN.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import torch

from attention import attention, explain

ON_GPU = torch.cuda.is_available()

# name -> arguments of make_problem
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
    "bias_hides": dict(bias=(1, 1, 40, 40), hide=True, q_len=40),
    "decay": dict(decay=True),
    "decay_grouped": dict(decay=True, heads=4, kv_heads=2, q_len=30, k_len=50),
    "decay_more_queries": dict(decay=True, q_len=50, k_len=30),
    "sink": dict(sink=True),
    "sink_more_queries": dict(sink=True, q_len=50, k_len=30),
    "lengths": dict(lengths=[70, 23, 0], batch=3),
    "lengths_more_keys": dict(lengths=[60, 15, 41], batch=3, q_len=40, k_len=60),
    "lengths_bias": dict(lengths=[0, 40, 15], batch=3, bias=(1, 2, 1, 1), q_len=40),
    "lengths_full": dict(lengths=[50, 17], causal=False, q_len=50),
    "packed": dict(packed=[0, 20, 20, 53, 70]),
    "packed_with_rest": dict(packed=[0, 33, 60], causal=False),
    "packed_pair": dict(packed=([0, 20, 20, 50], [0, 30, 41, 60]), q_len=50, k_len=60),
    "packed_pair_without_queries": dict(packed=([0, 8, 8], [0, 8, 16]), q_len=8, k_len=16, window=1),
    "packed_pair_decay": dict(packed=([0, 20, 50], [0, 20, 60]), q_len=50, k_len=60, decay=True),
    "softcap_of_nearly_linear": dict(softcap=300.0),
    "packed_bias": dict(packed=[0, 20, 50], bias=(1, 2, 50, 50), q_len=50),
    "packed_bias_of_one": dict(packed=[0, 20, 50], bias=(2, 1, 1), q_len=50),
    "packed_window_decay": dict(packed=[0, 31, 50], window=12, decay=True, q_len=50),
    "all": dict(
        window=20, softcap=2.0, dropout=0.2, seed=1, batch=1, heads=3, kv_heads=1, q_len=45, k_len=60, bias=(3, 45, 60),
        decay=True, sink=True, lengths=[55],
    ),
    "all_packed": dict(
        window=20, softcap=2.0, dropout=0.2, seed=1, heads=4, kv_heads=2, q_len=60, bias=(4, 1, 60), decay=True,
        sink=True, packed=[0, 17, 17, 55], dim=24, value_dim=16,
    ),
}  # fmt: skip
DIFFERENTIABLE = ("q", "k", "v", "bias", "decay", "sink")


def make_problem(
    device, dtype, *, batch=2, q_len=70, k_len=None, heads=2, kv_heads=None, dim=16, value_dim=None, bias=None,
    hide=False, decay=False, sink=False, packed=None, longest=True, return_lse=True, **options,
):  # fmt: skip
    """Random arguments of attention(), by name, and the gradients of its output and LSE (None: not asked for).

    hide: a third of the bias is -inf, and all of it that one query has; longest: packed sequences come with max_seqlen.
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
    if sink:
        arguments["sink"] = randn(heads)
    if packed:
        pair = packed if isinstance(packed, tuple) else (packed, packed)
        if longest:
            options["max_seqlen"] = tuple(max(1, *(b - a for a, b in itertools.pairwise(starts))) for starts in pair)
        starts = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in pair)
        options["cu_seqlens"] = starts if isinstance(packed, tuple) else starts[0]
    if "lengths" in options:
        options["lengths"] = torch.tensor(options["lengths"], dtype=torch.int32, device=device)
    if options.get("seed") is None:
        options.pop("seed", None)
    else:
        options["seed"] = torch.tensor([options["seed"]], device=device)
    dout = randn(batch, q_len, heads, value_dim).to(dtype)
    return arguments | options, dout, randn(batch, heads, q_len) if return_lse else None


def results(function, problem, dtype):
    """Output, LSE if asked for (0 where there is none) and gradients, computed in dtype."""
    arguments, dout, dlse = problem
    leaves = {}
    for name in DIFFERENTIABLE:
        if name in arguments:
            x = arguments[name]
            x = x.double() if dtype == torch.float64 else x if name in ("decay", "sink") else x.to(dtype)
            leaves[name] = x.detach().requires_grad_()
    drawn = arguments.get("dropout", 0.0) > 0 and "seed" not in arguments
    q = arguments["q"]
    with torch.random.fork_rng(devices=[q.device] if q.is_cuda else [], enabled=drawn):
        if drawn:  # all functions shall draw the same
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


def kernels(**arguments):
    return attention(**arguments, impl="triton")


def reference(**arguments):
    return attention(**arguments, impl="reference")


def our_kernels(arguments):
    """The implementations that serve a call on this machine: the portable kernels, those for Hopper where they do."""
    try:
        explain(**arguments, impl="hopper")
    except ValueError:
        return ("triton",)
    return "triton", "hopper"


class Errors(NamedTuple):
    """What check() found, and of which implementations."""

    allowed: float  # the largest error as a multiple of what it is held to twice of
    over: set[str]  # results with errors of more than twice eager PyTorch's
    impls: tuple[str, ...]


def check(draw, dtype, impls=None, yardstick=None):
    """Fail if a result is found to err more than twice as much as eager PyTorch or by_rounding(), whichever is more.

    draw() makes a problem. Errors are norms over a whole result. Often a row or two with the fewest keys make most of
    one, so where it is too large, 8 draws decide, 32 or 128: the errors of all are added in square. Returns Errors.
    impls: None for all of our_kernels().

    Eager PyTorch computes in dtype, or in the dtype `yardstick`, of which the error counts twice: it rounds numbers
    where tensor cores cut float32 off to tf32.
    """
    squares = {}  # (implementation, result) -> sums over draws of squared errors: ours, eager's, by rounding
    for count in range(1, 129):
        problem = draw()
        impls = impls or our_kernels(problem[0])
        exact = results(reference, problem, torch.float64)
        eager = results(reference, problem, yardstick or dtype)
        rounding = by_rounding(problem, exact)
        for impl in impls:
            ours = results(partial(attention, impl=impl), problem, dtype)
            for name, truth in exact.items():
                assert ours[name].isfinite().all(), f"{name} of {impl} is not finite"
                errors = [(x[name].double() - truth).square().sum() for x in (ours, eager)]
                squares[impl, name] = squares.get((impl, name), 0) + torch.stack([*errors, rounding[name]])
        if count not in (1, 8, 32, 128):
            continue
        ratios = {}
        for key, sums in squares.items():
            error, of_eager, of_rounding = sums.sqrt().tolist()
            assert math.isfinite(of_eager + of_rounding), f"{key}: eager PyTorch overflows or gives NaN"
            allowed = max(of_eager * (1 if yardstick is None else 2), of_rounding)
            ratios[key] = [error / x if error else 0.0 for x in (allowed or 1e-30, of_eager or 1e-30)]
        worst = max(ratio for ratio, _ in ratios.values())
        if worst <= 2:
            return Errors(worst, {name for (_, name), (_, to_eager) in ratios.items() if to_eager > 2}, impls)
    (impl, name), ratio = max(ratios.items(), key=lambda item: item[1])
    raise AssertionError(
        f"{name} of {impl}: over {count} draws {ratio[1]:.3g} times eager's error, {ratio[0]:.3g} times that or "
        "rounding's, whichever is more; at most 2"
    )


def by_rounding(problem, exact):
    """Squared norm of the error that rounding alone makes of each result of the algorithm, on average.

    It is less than eager's, but where P dP and delta cancel (a row sees a few keys, or a bias is broadcast over them),
    where all scores are equal, and in float32, whose longer sums eager's library adds in blocks. Rounding errs by 0.4
    of the unit roundoff, a float32 sum of n random numbers, one by one, by 0.3 sqrt(n) of it. So err
    - scores, summed over the head dim, and with softcap a tanh by 2^x: an error acts as a bias does;
    - delta = dO.O - dlse, from the output as rounded to its dtype, after the weights were before they met V, which errs
      about as much: an error acts as one of dlse does; float32 sums in it and in dP = dO.V count as two errors of it;
    - the LSE, kept in base 2, and 2^x: an error, here of two unit roundoffs, scales all that a row adds to gradients;
    - the slope of the tanh, a difference from 1; dK and dV, summed over all queries;
    - dP, once more for gates, which learn from row sums of dS less column sums: two kernels make them, each from its
      own dP. In a row that sees one key the two cancel, and eager PyTorch, which has one dP, gets 0.
    """
    arguments, dout, dlse = problem
    half, single = (torch.finfo(dtype).eps / 2 for dtype in (dout.dtype, torch.float32))
    group, dim = dout.shape[2] // arguments["k"].shape[2], arguments["q"].shape[-1]
    q, k = arguments["q"].double(), arguments["k"].double().repeat_interleave(group, dim=2)
    scale = abs(dim**-0.5 if arguments.get("scale") is None else arguments["scale"])
    of_tanh = 1.5 * single if arguments.get("softcap") else 0.0

    scores = 0.3 * single * (dim * torch.einsum("bqhd,bkhd->bhqk", q**2, k**2)).sqrt() * scale
    scores = (scores + of_tanh * (arguments.get("softcap") or 0.0)) * torch.randn_like(scores)
    bias = arguments.get("bias")
    whole_bias = torch.zeros_like(scores) if bias is None else bias.expand_as(scores).double()
    moved = results(reference, (arguments | dict(bias=whole_bias + scores), dout, dlse), torch.float64)
    dscores = moved["dbias"]
    if bias is not None:
        moved["dbias"] = dscores.sum_to_size(bias.shape)
    squares = {name: (moved[name] - truth).square().sum() for name, truth in exact.items()}

    relative = (2 * (0.4 * half) ** 2 + 2 * (0.3 * single) ** 2 * dout.shape[-1]) ** 0.5
    delta = relative * (dout.double() * exact["out"]).norm(dim=-1).transpose(1, 2)
    delta, of_row = delta * torch.randn_like(delta), 2 * single * torch.randn_like(delta)
    if dlse is not None:
        delta = delta + of_row * dlse
    moved = results(reference, (arguments, of_row.transpose(1, 2)[..., None] * dout, delta), torch.float64)
    for name in squares.keys() - {"out", "lse"}:
        squares[name] += moved[name].square().sum()

    slopes = (2 * of_tanh * scale * dscores) ** 2
    squares["dq"] += torch.einsum("bhqk,bkhd->", slopes, k**2)
    squares["dk"] += torch.einsum("bhqk,bqhd->", slopes, q**2)
    for name in ("dk", "dv"):
        squares[name] += (0.3 * single) ** 2 * dout.shape[1] * group * exact[name].square().sum()
    if "ddecay" in squares:
        of_lse = arguments | dict(bias=whole_bias), torch.zeros_like(dout), torch.ones_like(scores[..., 0])
        weights = results(reference, of_lse, torch.float64)["dbias"]
        weights = weights * ((weights > 0).sum(-1, keepdim=True) == 1)
        v = arguments["v"].double().repeat_interleave(group, dim=2)
        dweights = (0.3 * single) ** 2 * v.shape[-1] * torch.einsum("bqhd,bkhd->bhqk", dout.double() ** 2, v**2)
        columns = (weights**2 * dweights).sum(2) / (1 - arguments.get("dropout", 0.0))
        # what a key adds, all gates up to it learn
        squares["ddecay"] += 2 * (columns * torch.arange(1, columns.shape[-1] + 1, device=columns.device)).sum()
    if dlse is not None:
        squares["lse"] += (single * (exact["lse"].abs() + 1)).square().sum()
    return squares


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda" if ON_GPU else "cpu")


def floats(*shape):
    return torch.zeros(shape, device="cuda" if ON_GPU else "cpu")
