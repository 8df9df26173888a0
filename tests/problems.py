"""Random problems, and the errors of attention() on them, which are held to those of eager PyTorch.

Tolerance: at most twice the error of eager PyTorch (the reference run in the same dtype), or of a sum in float32 where
that is more, which is rare: see check(). And never NaN.
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


class Worst(NamedTuple):
    """What check() found."""

    ratio: float  # the largest error, as a multiple of what it is held to twice of
    precise: set[str]  # results held to a sum in float32, not to eager PyTorch
    impls: tuple[str, ...]  # that were asked


def check(draw, dtype, impls=None, yardstick=None):
    """Fail if a result errs more than twice as much as eager PyTorch, on average over draws; returns Worst.

    draw() makes a problem. Errors are norms over a whole result. Often a row or two with the fewest keys make most of
    one, so where it is too large, 8 draws decide, 32 or 128: the errors of all are added in square.
    impls: None for all of our_kernels().

    Eager PyTorch computes in dtype, or in the dtype `yardstick`, of which the error counts twice: it rounds numbers
    where tensor cores cut float32 off to tf32.

    No error is held to less than twice that of a sum in float32, by roundoff(): eager PyTorch is exact in the LSE of a
    single key with a scale of 0, and in the gradient that a bias of such a key takes from the LSE; for a single query
    it adds better than one by one. Which results need that, 128 draws decide, or 8 if eager is over 20 times as good.
    """
    squares = {}  # (implementation, result) -> sums over draws of squares: our errors, eager's, a float32 sum's
    for count in range(1, 129):
        problem = draw()
        impls = impls or our_kernels(problem[0])
        exact = results(reference, problem, torch.float64)
        eager = results(reference, problem, yardstick or dtype)
        for impl in impls:
            ours = results(partial(attention, impl=impl), problem, dtype)
            for name, truth in exact.items():
                assert ours[name].isfinite().all(), f"{name} of {impl} is not finite"
                errors = [(x[name].double() - truth).square().sum() for x in (ours, eager)]
                precision = truth.square().sum() * roundoff(name, problem) ** 2
                squares[impl, name] = squares.get((impl, name), 0) + torch.stack([*errors, precision])
        if count not in (1, 8, 32, 128):
            continue
        ratios, precise = {}, set()
        for key, sums in squares.items():
            error, of_eager, precision = sums.sqrt().tolist()
            assert math.isfinite(of_eager), f"{key}: eager PyTorch overflows or gives NaN"
            held_to = of_eager * (1 if yardstick is None else 2)
            if error > 2 * held_to and (count == 128 or (count > 1 and error > 20 * held_to)):
                precise.add(key[1])
                held_to = max(held_to, precision)
            ratios[key] = error / max(held_to, 1e-20)  # Hopper's forward takes a scale of 0 as 1e-30
        key = max(ratios, key=ratios.get)
        if ratios[key] <= 2:
            return Worst(ratios[key], precise, impls)
    raise AssertionError(f"{key[1]} of {key[0]} errs {ratios[key]:.3g} times as much as eager PyTorch: {count} draws")


def roundoff(name, problem):
    """By how much of its size a float32 sum over the head dim errs on average: 0.3 sqrt(n) roundoffs; for the LSE 1."""
    arguments, dout, _ = problem
    roundoffs = 1 if name == "lse" else 0.3 * max(dout.shape[-1], arguments["q"].shape[-1]) ** 0.5
    return roundoffs * torch.finfo(torch.float32).eps / 2


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda" if ON_GPU else "cpu")


def floats(*shape):
    return torch.zeros(shape, device="cuda" if ON_GPU else "cpu")
