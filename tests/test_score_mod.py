"""score_mod: a user's Triton function in the scores. Every pair with other arguments is in test_attention_pairs.py."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from problems import (
    BACKEND,
    CASES,
    by_impl,
    by_impl_or_reference,
    check,
    floats,
    identical,
    make_problem,
    on_hopper,
    out_and_gradients,
    sizes_of,
)
from score_mods import SCORE_MODS, alibi, dilated, example, gaussian
from torch._dynamo.testing import CompileCounterWithBackend

from attention import attention, attention_qkv, check_score_mod, explain, score_mod
from attention.score import Rule
from attention.score_mod import label_of

COMBINED = dict(zip(SCORE_MODS, ("all", "packed_pair", "more_queries", "prefix_all"), strict=True))


@pytest.mark.parametrize("name, case", COMBINED.items())
def test_output_and_gradients(name, case, device, poisoned):
    check(partial(make_problem, device, torch.float32, **CASES[case], score_mod=name), torch.float32)


@triton.jit
def far(score, q_pos, k_pos, head, sequence, factors):
    return score * tl.load(factors + head) - 0.1 * (q_pos - k_pos).to(tl.float64), tl.load(factors + head)


far.eager = lambda score, q_pos, k_pos, head, sequence, factors: score * factors[head] - 0.1 * (q_pos - k_pos)


@by_impl
def test_a_rule_in_float64(impl, device):
    """NumPy's tables are; scores stay float32. The interpreter takes any dtype, the compiler does not."""
    factors = torch.rand(2, dtype=torch.float64, device=device)
    dtype, dim = sizes_of(impl)

    def draw():
        arguments, *gradients = make_problem(device, dtype, q_len=33, heads=2, dim=dim)
        return arguments | dict(score_mod=far, score_args=(factors,)), *gradients

    check(draw, dtype, [impl])


def test_hidden_keys_may_hold_nan(device):
    """A key that a score of -inf hides from all queries; its gradients are 0."""

    def call(impl):
        q, k, v = (torch.ones(1, 64, 1, 16, device=device) for _ in range(3))
        k[:, 1::2], v[:, 1::2] = float("nan"), float("nan")
        leaves = [x.requires_grad_() for x in (q[:, ::2].contiguous(), k, v)]
        attend = partial(attention, causal=False, score_mod=even_keys, impl=impl)
        return out_and_gradients(attend, leaves, torch.ones_like(leaves[0]))

    torch.testing.assert_close(call("triton"), call("reference"), rtol=1e-3, atol=1e-5)


@triton.jit
def even_keys(score, q_pos, k_pos, head, sequence):
    return tl.where(k_pos % 2 == 0, score, float("-inf")), 1.0


even_keys.eager = lambda score, q_pos, k_pos, head, sequence: score.masked_fill(k_pos % 2 != 0, float("-inf"))


@triton.jit
def of_sequence(score, q_pos, k_pos, head, sequence, factors):
    factor = tl.load(factors + sequence)
    return score * factor, factor


of_sequence.eager = lambda score, q_pos, k_pos, head, sequence, factors: score * factors[sequence]


@by_impl
def test_a_number_for_each_packed_sequence(impl, device):
    dtype, dim = sizes_of(impl)
    rule = dict(score_mod=of_sequence, score_args=(torch.tensor([1.0, 0.3, -2.0], device=device),))

    def draw():
        arguments, *gradients = make_problem(device, dtype, packed=[0, 10, 15, 30], q_len=30, dim=dim)
        return arguments | rule, *gradients

    check(draw, dtype, [impl])


@by_impl_or_reference
def test_compiles(impl, device):
    """fullgraph, with another number and another function; attention_qkv() takes it too."""
    dtype, dim = sizes_of(impl)
    qkv = torch.randn(1, 33, 6 * dim, device=device, dtype=dtype, requires_grad=True)

    def forward(function, number):
        return attention_qkv(qkv, 2, score_mod=function, score_args=(number,), impl=impl)

    compiled = torch.compile(forward, fullgraph=True, backend=BACKEND)
    for function, number in ((gaussian, 3.0), (gaussian, 5.0), (dilated, 3)):
        outs = [call(function, number) for call in (compiled, forward)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), qkv)[0] for out in outs))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_graphs_of_a_number_that_changes(impl, device):
    """One if it is a tensor of one element, as docs/attention.md says; ints are two."""
    q = torch.randn(1, 12, 1, 16, device=device)
    slopes = [torch.tensor([number / 9], device=device) for number in range(12)]
    for rule, numbers, most in ((alibi, slopes, 1), (dilated, range(2, 14), 2)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        attend = partial(attention, q, q, q, score_mod=rule, impl=impl)
        compiled = torch.compile(lambda x, attend=attend: attend(score_args=(x,)), fullgraph=True, backend=counter)
        for number in numbers:
            torch.testing.assert_close(compiled(number), attend(score_args=(number,)))
        assert counter.frame_count <= most


def test_functions_are_forgotten(device, monkeypatch):
    """But those of compiled graphs, and of a backward that is still to come."""
    monkeypatch.setattr(score_mod, "MOST", 3)
    q = torch.randn(1, 12, 1, 16, device=device, requires_grad=True)
    attend = partial(attention, score_mod=twice(), impl="triton")
    compiled = torch.compile(lambda q: attend(q, q, q), fullgraph=True, backend=BACKEND, dynamic=True)
    compiled(q)
    made = [twice() for _ in range(9)]
    pending = attention(q, q, q, score_mod=made[0], impl="triton")
    for function in made:
        out = attention(q, q, q, score_mod=function, impl="triton")
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), q)[0] for x in (pending, out)))
    assert not {id(x) for x in made[1:-3]} & set(map(id, score_mod.FUNCTIONS.values()))
    longer = torch.randn(1, 17, 1, 16, device=device, requires_grad=True)
    grads = [torch.autograd.grad(f(longer).sum(), longer)[0] for f in (compiled, lambda x: attend(x, x, x))]
    torch.testing.assert_close(*grads)


def test_kernels_depend_on_the_source(device):
    """Of two functions of one name each is computed, by kernels whose key names the source."""
    q = torch.randn(1, 20, 1, 16, device=device)
    found = []
    for function in (twice(), negated(), None):
        found.append(attention(q, q, q, score_mod=function, impl="triton"))
    assert not any(torch.equal(a, b) for a, b in ((found[0], found[1]), (found[0], found[2]), (found[1], found[2])))
    labels = [label_of(function()) for function in (twice, negated)]
    assert labels[0] != labels[1]
    assert all(x in str(Rule(True, 0, 0.0, False, False, score_label=x)) for x in labels)


def twice():
    @triton.jit
    def function(score, q_pos, k_pos, head, sequence):
        return score * 2, 2.0

    return function


def negated():
    @triton.jit
    def function(score, q_pos, k_pos, head, sequence):
        return -score, -1.0

    return function


@triton.jit
def wrong_derivative(score, q_pos, k_pos, head, sequence):
    return score * 0.9, 1.0


@triton.jit
def other_twin(score, q_pos, k_pos, head, sequence):
    return tl.maximum(score, 0.0), tl.where(score > 0, 1.0, 0.0)  # its kink is no error


@triton.jit
def number(score, q_pos, k_pos, head, sequence):
    return 0.0, 0.0


@triton.jit
def endless(score, q_pos, k_pos, head, sequence):
    return score + float("inf"), 1.0


@triton.jit
def score_alone(score, q_pos, k_pos, head, sequence):
    return score * 2


@triton.jit
def few_arguments(score, q_pos):
    return score * 2, 2.0


@triton.jit
def with_full(score, q_pos, k_pos, head, sequence, slopes, number):
    return score - tl.load(slopes + head) * number * tl.abs(q_pos - k_pos), tl.full(score.shape, 1.0, tl.float32)


@on_hopper
def test_a_rule_that_gluon_does_not_compile():
    """impl="auto" leaves it to the portable kernels, in torch.compile too."""
    q = torch.randn(1, 33, 2, 64, device="cuda", dtype=torch.bfloat16)
    rule = dict(score_mod=with_full, score_args=(torch.rand(2, device="cuda"), 2))
    assert "triton: the Hopper kernels do not serve" in explain(q, q, q, **rule)
    compiled = torch.compile(partial(attention, **rule), fullgraph=True)
    identical(compiled(q, q, q), attention(q, q, q, **rule))
    assert explain(q, q, q, score_mod=alibi, score_args=rule["score_args"][:1]).startswith("hopper")


@pytest.mark.parametrize("function", [score_alone, few_arguments])
def test_a_rule_that_does_not_run(function, device):
    name = function.fn.__name__
    with pytest.raises(ValueError, match=rf"{name} does not run .*must return the new score and its derivative"):
        check_score_mod(function, heads=2)


def test_check_score_mod(device):
    for name in SCORE_MODS:
        arguments = example(name, 4, device)
        check_score_mod(arguments["score_mod"], *arguments["score_args"], heads=4)
    check_score_mod(number, heads=4)
    check_score_mod(other_twin, heads=4)
    other_twin.eager = lambda score, *positions: score
    with pytest.raises(ValueError, match=r"other_twin returns the score 0 at.*`eager` give -"):
        check_score_mod(other_twin, heads=4)
    with pytest.raises(ValueError, match=r"wrong_derivative returns the derivative 1 at.*new scores give 0\.9"):
        check_score_mod(wrong_derivative, heads=4)
    with pytest.raises(ValueError, match=r"endless returns the derivative"):
        check_score_mod(endless, heads=4)


BAD = [
    (dict(score_mod=lambda *x: x), "no Triton function; decorate it"),
    (dict(score_args=(1,)), "without score_mod"),
    (dict(score_mod=gaussian, score_args=[1.0]), "must be a tuple"),
    (dict(score_mod=gaussian, score_args=("a",)), r"score_args\[0\]='a' is str"),
    (dict(score_mod=gaussian, score_args=(True,)), r"score_args\[0\]=True is bool"),
    (dict(score_mod=alibi, score_args=(floats(4)[::2],)), r"score_args\[0\] has strides.*contiguous"),
    (dict(score_mod=alibi, score_args=(floats(2).to("meta"),)), "on meta"),
    (dict(score_mod=alibi, score_args=(floats(2).requires_grad_(),)), r"score_args\[0\] requires a gradient.*detach"),
    (dict(score_mod=gaussian, score_args=(1.0,), impl="sdpa"), "SDPA cannot express score_mod"),
    (dict(score_mod=wrong_derivative, impl="reference"), "wrong_derivative has no attribute `eager`"),
]


@pytest.mark.parametrize("options, message", BAD, ids=[message for _, message in BAD])
def test_bad_input(options, message, device):
    q = torch.randn(1, 10, 2, 16, device=device)
    attention(q, q, q, impl="triton")  # is remembered
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, **{"impl": "triton"} | options)


@by_impl
def test_a_rule_that_returns_a_number(impl, device):
    """All keys weigh the same."""
    dtype, dim = sizes_of(impl)
    q, k, v = (torch.randn(1, 10, 2, dim, device=device, dtype=dtype) for _ in range(3))
    out = attention(q, k, v, causal=False, score_mod=number, impl=impl)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))
