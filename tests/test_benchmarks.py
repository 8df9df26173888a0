"""Benchmarks: flat.py, the control of attention.py, computes the same as the reference; sampling.py and recipes.py;
the parts of a training step in step_parts.py.
"""

import math
import re
import shlex
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, TINY
from problems import ON_GPU

from attention.reference import reference_attention
from benchmarks import distributed, recipes, sampling
from benchmarks.flat import flat_attention
from benchmarks.step_parts import PARTS, floors, parts_of, step_table
from model import GPTConfig
from training.checkpoint import empty_model
from training.config import load_config, to_flags

IN_PROC = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128 if ON_GPU else 16])  # loaded through pointers and by TMA
@pytest.mark.parametrize("causal", [True, False])
def test_flat_attention(causal, dim, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [torch.randn(2, 128, 2, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 128, 2, dim, device=device, dtype=dtype)
    found, expected = (function(*leaves, causal=causal) for function in (flat_attention, reference_attention))
    gradients = (torch.autograd.grad(out, leaves, dout) for out in (found, expected))
    tolerance = 3e-2 if device == "cuda" else 1e-5
    for ours, truth in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
        torch.testing.assert_close(ours, truth, rtol=tolerance, atol=tolerance)


def test_sampling(capsys):
    """Each row of the tables has a batch or context, and positive figures of ours."""
    sampling.main(["--small", "--parts", "text", "attention"])
    out = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    rates = [float(row[index].replace(",", "")) for row, index in ((rows[2], 1), (rows[3], 1), (rows[6], 3))]
    assert len(rows) == 2 + 2 + 2 + 3 * 2 * 2 and min(rates) > 0 and "failed" not in out


@IN_PROC
def test_distributed_runs_every_part_and_leaves_nothing_behind(capsys):
    """Though each has no time, or a command that fails; the program then ends with an error."""
    with pytest.raises(SystemExit, match="one losses kill"):
        distributed.main(["--small", "--gpus", "1", "--seconds", "0", "--parts", "one", "losses", "kill"])
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["one"] * 3 + ["losses", "kill"]
    assert all("no time is left" in line for line in out)


@IN_PROC
def test_distributed_ends_ranks_whose_launcher_has_ended(folder):
    subprocess.run(["sh", "-c", "setsid sleep 600 &"], check=True)
    assert len(distributed.runs_here()) == 1
    distributed.end_runs()
    assert not distributed.runs_here()


@pytest.mark.slow
@IN_PROC
def test_distributed(capsys):
    distributed.main(["--small", "--gpus", "1", "2", "--parts", "losses", "kill"])
    out = capsys.readouterr().out
    assert len(re.findall(r"2 GPUs  (ddp|fsdp)2 resumed +weights equal True", out)) == 2, out
    differences = [float(number) for number in re.findall(r"difference.* (\S+)\n", out)]
    assert len(differences) == 6 and max(differences) < 1e-4, out
    assert len(re.findall(r"kill.*resumed from \d+ +to \d+ +ended after [\d.]+ s", out)) == 2, out


BOOKS = {f"{name}/book {number}.md": f"{name} {number} " * 300 for name in ("Ann", "Bob") for number in range(30)}


@pytest.fixture
def books(folder):
    """Sixty books, split into folder/parts."""
    for name, text in BOOKS.items():
        path = folder / "books" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    recipes.main(["split", str(folder / "books"), str(folder / "parts")])
    return folder / "parts"


def test_books_are_split_as_wholes(books, folder):
    """Each is in one part, and in the same one if there are fewer or more of them."""
    train = {path.read_text() for path in (books / "train").iterdir()}
    test = (books / "test.txt").read_text().split("\n\n")
    assert 0 < len(test) < 12 and sorted([*train, *test]) == sorted(BOOKS.values())
    recipes.main(["split", str(folder / "books"), str(folder / "half"), "--megabytes", "0.07"])
    half = {path.read_text() for path in (folder / "half" / "train").iterdir()}
    assert half < train and {*(folder / "half" / "test.txt").read_text().split("\n\n"), ""} <= {*test, ""}
    assert 0.06e6 < sum(len(text) for text in half) <= 0.07e6
    with pytest.raises(ValueError, match="parts exists"):
        recipes.main(["split", str(folder / "books"), str(books)])


@pytest.mark.slow
def test_a_series_of_recipes(books, folder, capsys):
    """Each change and seed is run once, also over two calls; a failed run is reported and does not end the series."""
    options = TINY | dict(input=books / "train", attention="sdpa", warmup_steps=1)
    (folder / "changes.txt").write_text("# two that run\nplain:\nwide: --n_embd 48\nodd: --micro_batch 3\n")
    argv = ["configs/shakespeare_char.py", str(folder / "changes.txt"), "--options", shlex.join(to_flags(options))]
    argv += ["--tokens", "4096", "--evaluations", "3", "--csv", str(folder / "found.csv")]
    argv += ["--test", str(books / "test.txt"), "--seeds", "1"]
    recipes.main(argv)
    out = capsys.readouterr().out
    assert "odd seed 1: train.py failed" in out and "micro_batch=3" in out
    before = recipes.read_outcomes(folder / "found.csv")
    assert [outcome.name for outcome in before] == ["plain", "wide"]
    for outcome in before:
        assert outcome.tokens == 4096 and 1 < outcome.loss < 6 and 1 < outcome.test < 6 and outcome.rate > 0
        assert outcome.curve.count(":") == 2 * (3 + 1) and outcome.training < outcome.seconds
    assert before[1].gflops > before[0].gflops > 1e-4
    recipes.main([*argv, "2"])
    after = recipes.read_outcomes(folder / "found.csv")
    assert after[:2] == before and [(x.name, x.seed) for x in after[2:]] == [("plain", 2), ("wide", 2)]
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| plain")]
    assert [cell.strip() for cell in rows[0][1:4]] == ["plain", "0.0M", "2"]
    assert float(rows[0][4]) == pytest.approx((after[0].loss + after[2].loss) / 2, abs=1e-4)
    recipes.main([*argv, "3", "--seconds", "0"])
    assert "plain seed 3: no time is left" in capsys.readouterr().out


def test_changes_are_compared_at_equal_time(folder):
    """Half of the tokens per second cost what half of the tokens cost, here 0.4 ln 2."""
    runs = [("base", 1000, 5.0, 11.0), ("base", 2000, 5 - 0.4 * math.log(2), 9.0), ("better", 1005, 4.8, 10.0)]
    for name, tokens, loss, rate in [*runs, ("slow", 1000, 4.9, 5.0), ("slow", 1000, 5.1, 5.0)]:
        values = name, 1, tokens, loss, 1.0, math.nan, 9.0, 8.0, rate, 0.1, "", ""
        recipes.append(folder / "found.csv", recipes.Outcome(*values))
    compared = recipes.compare(recipes.read_outcomes(folder / "found.csv"), "base")
    assert compared.keys() == {"better", "slow"} and compared["better"] == pytest.approx((-0.2, -0.2))
    assert compared["slow"] == pytest.approx((0, 0.4 * math.log(2)))
    recipes.main(["chart", str(folder / "found.csv"), str(folder / "bars.png"), "--base", "base"])
    assert (folder / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="slow needs runs with 1,000 tokens"):
        recipes.main(["chart", str(folder / "found.csv"), str(folder / "bars.png"), "--base", "slow"])


KERNELS = """
optimizer and clipping: blend_kernel
optimizer and clipping: update_kernel
norms and elementwise: add_norm_kernel
norms and elementwise: add_norm_backward_kernel
matmuls: nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT
attention: hopper_forward_kernel
casts and copies: triton_poi_fused__to_copy_t_1
matmuls: matmul_kernel
norms and elementwise: triton_per_fused__to_copy_add_native_dropout_native_layer_norm_view_4
casts and copies: void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tens
head and cross-entropy: nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN
casts and copies: Memset (Device)
head and cross-entropy: cross_entropy_hopper_kernel
head and cross-entropy: nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT
head and cross-entropy: nvjet_sm90_tss_64x64_64x13_2x2_h_bz_splitK_NTT
head and cross-entropy: void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float
norms and elementwise: triton_per_fused__to_copy_linear_cross_entropy_native_layer_norm_backward_7
matmuls: nvjet_sm90_tst_128x128_64x6_1x4_h_bz_splitK_NTT
matmuls: void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float
norms and elementwise: void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper
other: void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub
optimizer and clipping: void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata
"""


def test_parts_of_a_step():
    expected, names = zip(*(line.split(": ", 1) for line in KERNELS.strip().splitlines()), strict=True)
    assert list(zip(parts_of(names), names, strict=True)) == list(zip(expected, names, strict=True))


def test_every_kernel_of_attention_is_known():
    """By its whole name: a kernel elsewhere may be called the same with something before it."""
    sources = [path.read_text() for path in (ROOT / "attention").rglob("*.py") if "decode" not in path.name]
    names = sorted(name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))
    assert len(names) > 10 and set(parts_of(names)) == {"attention"}
    assert "attention" not in parts_of([f"other_{name}" for name in names])


def test_floors_of_gpt2():
    """As counted by hand in milliseconds, for 32 x 1,024 tokens at 4.24 TB/s and 757 TFLOP/s."""
    config = GPTConfig(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, n_embd=768)
    found = floors(empty_model(config, "meta"), 32 * 1024, 4.24e12, 757e12)
    expected = {
        "attention": 2.86, "matmuls": 22.06, "head and cross-entropy": 10.03 + 1.555, "norms and elementwise": 2.28,
        "optimizer and clipping": 0.94, "casts and copies": 0.295,
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=0.01) and found.keys() < PARTS.keys()


@pytest.mark.slow
def test_table_of_a_step(folder):
    options = TINY | dict(input="corpus.txt", attention="sdpa")
    table = step_table(load_config([str(ROOT / "configs/shakespeare_char.py"), *to_flags(options)]))
    rows = {row[1].strip(): row[2:4] for row in (line.split("|") for line in table.splitlines()) if len(row) > 3}
    assert {*PARTS, "gaps", "whole step"} < set(rows) and float(rows["whole step"][0]) > 0
    assert "2 layers of width 32, 8 x 32 tokens" in table
