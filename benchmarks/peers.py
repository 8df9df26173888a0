"""Run the tests that flash-attention and flash-linear-attention (fla) have for their attention on ours.

    python benchmarks/peers.py --flash_attention PATH --fla PATH    checkouts of theirs; one alone will do
    python benchmarks/all.py peers --flash_attention PATH --fla PATH    writes benchmarks/results/peers.csv

The tests import this module in place of those of theirs that hold kernels, and so they call attention(). The tests
themselves, their inputs, references and tolerances come from the checkouts (which need einops). At most --cases of a
test are run, drawn at random; the same ones for the same --seed. A case passes, fails, is skipped by the test itself,
or is outside of what attention() offers, for a reason in OUTSIDE.
"""

import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from harness import command_line, table

from attention import attention

FLASH = (
    "output varlen_output kvcache small_head_dim learnable_sink_backward_dtype varlen_learnable_sink_backward_with_lse"
)
TESTS = {  # checkout -> its tests that are run, each a row of the table
    "flash_attention": [f"tests/cute/test_flash_attn.py::test_flash_attn_{name}" for name in FLASH.split()],
    "fla": [f"tests/ops/test_{name}.py" for name in ("attn", "attn_sink", "forgetting_attn")],
}
OUTSIDE = {  # part of an error -> why the case is outside of what attention() offers
    "window=0": "window of 0 keys",
    "head dim 320": "values of 320",
    "page_table": "paged keys",
    "object at fla.ops": "a variable of fla's kernels",
    "attention() was not called": "no call of attention()",
}
calls, reports = [], []


@triton.jit
def within(score, q_pos, k_pos, head, sequence, bounds):
    """A score_mod that hides keys more than bounds[0] before the query or more than bounds[1] after it."""
    seen = (k_pos >= q_pos - tl.load(bounds)) & (k_pos <= q_pos + tl.load(bounds + 1))
    return tl.where(seen, score, float("-inf")), 1.0


def attend(q, k, v, scale=None, **options):
    """attention() with its LSE. Zeros fill the head dims up to a multiple of 8."""
    calls.append(options)
    padded = (F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v))
    out, lse = attention(*padded, scale=scale or q.shape[-1] ** -0.5, return_lse=True, **options)
    return out[..., : v.shape[-1]], lse


def pack(x, starts, lengths):
    """Pack padded rows; returns one row, where its sequences start, and which tokens of x it has (None: all)."""
    if starts is not None:
        return x, starts, None
    lengths = torch.full(x.shape[:1], x.shape[1], device=x.device) if lengths is None else lengths
    valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return x[valid], F.pad(lengths.cumsum(0), (1, 0)).int(), valid


# What flash-attention's tests import. Options that are left out choose kernels or plans, which change no result.


def flash_attn_func(q, k, v, causal=False, window_size=(None, None), softcap=0, learnable_sink=None, starts=None, **_):
    left, right = window_size
    right = 0 if causal else right
    if right in (0, left):
        mask = dict(causal=right == 0, window=None if left is None else left + 1)
    else:
        bounds = torch.tensor([2**30 if x is None else x for x in (left, right)], device=q.device)
        mask = dict(causal=False, score_mod=within, score_args=(bounds,))
    return attend(q, k, v, softcap=softcap or None, sink=learnable_sink, cu_seqlens=starts, **mask)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, page_table=None, **options
):
    if page_table is not None:
        raise ValueError("attention() has no page_table")
    q, q_starts, valid = pack(q, cu_seqlens_q, seqused_q)
    (k, k_starts, _), (v, *_) = (pack(x, cu_seqlens_k, seqused_k) for x in (k, v))
    out, lse = flash_attn_func(q[None], k[None], v[None], starts=(q_starts, k_starts), **options)
    if valid is None:
        return out[0], lse[0]
    padded = out.new_zeros(*valid.shape, *out.shape[2:])
    padded[valid] = out[0]
    return padded, lse[0]


def get_scheduler_metadata(**sizes):
    pass


_flash_attn_fwd = _flash_attn_bwd = _flash_attn_bwd_sparse_mla = JITCache = None  # for tests that are not run

# What fla's tests import.


def parallel_attn(q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, *, sink_bias=None):
    decay = None if g is None else g.float()
    return attend(q, k, v, scale, decay=decay, window=window_size, cu_seqlens=cu_seqlens, sink=sink_bias)[0]


def attn_decoding_one_step(q, k, v, g=None, scale=None, cu_seqlens=None, do_gate_scale=False, *, sink_bias=None):
    starts = torch.arange(q.shape[1] + 1, device=q.device, dtype=torch.int32)  # each sequence has one query
    g = g * scale if do_gate_scale else g
    return parallel_attn(q, k, v, g, scale, cu_seqlens=(starts, cu_seqlens), sink_bias=sink_bias)


parallel_forgetting_attn = parallel_attn

# What pytest calls, in each of its processes.


def pytest_addoption(parser):
    for name in (*TESTS, "cases", "seed"):
        parser.addoption(f"--{name}")


def pytest_configure(config):
    flash, fla = config.getoption("flash_attention"), config.getoption("fla")
    for name, root in (("flash_attn", flash), ("fla", fla), ("fla.ops", fla)):
        package = sys.modules[name] = ModuleType(name)  # without their __init__.py, which imports every kernel
        package.__path__, package.__version__ = [f"{root}/{name.replace('.', '/')}"], ""
    for name in ("flash_attn.cute.cache_utils", "flash_attn.cute.interface"):
        sys.modules[name] = sys.modules[__name__]
    for name in ("attn.parallel", "attn.decoding", "forgetting_attn.parallel"):
        sys.modules[f"fla.ops.{name}"] = sys.modules[__name__]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Draw cases after each decorator that multiplies them, because making all 415,122 takes a minute."""
    most, multiply = int(metafunc.config.getoption("cases")), metafunc.parametrize
    generator = random.Random(f"{metafunc.function.__name__} {metafunc.config.getoption('seed')}")

    def multiply_and_draw(*args, **kwargs):
        multiply(*args, **kwargs)
        metafunc._calls[:] = generator.sample(metafunc._calls, min(most, len(metafunc._calls)))

    metafunc.parametrize = multiply_and_draw
    metafunc.module.IS_SM90 = False  # on these chips the tests leave out what flash-attention's kernels lack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    calls.clear()
    try:
        yield
        if not calls:
            raise RuntimeError("attention() was not called")
    except Exception as error:
        for text, reason in OUTSIDE.items():
            if text in str(error):
                item.user_properties.append(("outside", reason))
                pytest.skip(reason)
        raise
    finally:
        torch.cuda.empty_cache()  # other processes need it


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        reports.append(report)


def rows(tests):
    for test in tests:
        some = [report for report in reports if test in report.nodeid]
        number = Counter(report.outcome for report in some)
        outside = Counter(reason for report in some for _, reason in report.user_properties)
        failed = (report.nodeid.split("::")[-1] for report in some if report.failed)
        reasons = ", ".join(f"{reason}: {outside[reason]}" for reason in sorted(outside))
        skipped = number["skipped"] - outside.total()
        yield [test.rpartition("test_")[2], number["passed"], number["failed"], skipped, reasons, "; ".join(failed)]


def main():
    parser = command_line(__doc__)
    for name in TESTS:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--cases", type=int, default=200, help="of a test, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numprocesses", type=int, default=12, help="that share the GPU")
    args = vars(parser.parse_args())
    tests = {f"{args[name]}/{test}": test for name in TESTS if args[name] for test in TESTS[name]}
    options = "-p benchmarks.peers -p no:cacheprovider --noconftest --import-mode=importlib --rootdir=/ -c /dev/null"
    given = (f"--{name}={value}" for name, value in args.items())
    code = pytest.main([*tests, *given, *options.split(), "-q", "--tb=line", "--disable-warnings"])
    table(["tests", "passed", "failed", "skipped", "outside", "failed cases"], rows(tests.values()))
    sys.exit(f"error: pytest ended with {code}" if code > 1 else 0)


if __name__ == "__main__":
    from benchmarks import peers  # the module that pytest knows as its plugin

    peers.main()
