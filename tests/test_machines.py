"""Machines that are not here: chips without kernels, GPUs that PyTorch does not see, Macs, Windows."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from helpers import FAST, ROOT, finish, flags, in_process, refused, run_script, start
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import device
import threads
from attention import attention, choose, explain, gpu
from errors import UserError, sentence_of
from generation import choose as sampling
from generation import engine
from kernels.dropout import Dropout
from kernels.fp8 import require_fp8
from kernels.loss import head_loss
from kernels.mlp import fused
from model import SkipInitialisation
from training import optimizer
from training.config import load_config


@pytest.fixture
def chip(monkeypatch):
    """chip(capability, *architectures): a GPU, and the architectures for which PyTorch has kernels. hip: for AMD's."""

    def fake(capability, *architectures, hip=None):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(gpu, "INTERPRETED", False)
        monkeypatch.setattr(gpu, "HAS_TRITON", True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GeForce")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(architectures))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def forget():
        for known in (device.note, *vars(gpu).values()):
            getattr(known, "cache_clear", int)()

    forget()
    yield fake
    forget()


@pytest.mark.parametrize(
    "capability, architectures, works",
    [
        ((7, 5), ["sm_75", "sm_90"], True),
        ((8, 6), ["sm_75", "sm_80"], True),  # of one generation
        ((12, 0), ["sm_80", "compute_90"], True),  # PTX is compiled for later chips
        ((6, 1), ["sm_75", "sm_90", "compute_120"], False),
        ((10, 0), ["sm_75", "sm_90"], False),
    ],
)
def test_a_chip_needs_kernels_of_pytorch(chip, capsys, capability, architectures, works):
    chip(capability, *architectures)
    assert device.resolve_device("auto") == ("cuda" if works else "cpu")
    err = capsys.readouterr().err
    if works:
        assert err == "" and device.resolve_device("cuda:0") == "cuda:0"
        return
    number = "sm_{}{}".format(*capability)
    assert err.count("note: ") == 1 and number in err
    with pytest.raises(UserError, match=f"{number}.*--device cpu"):
        device.resolve_device("cuda")


@pytest.mark.parametrize(
    "capability, hip, kernels",
    [((7, 0), None, False), ((7, 5), None, False), ((8, 0), None, True), ((12, 0), None, True), ((9, 0), "7", False)],
)
def test_gpus_without_tensor_cores_in_triton_and_amds_take_pytorch(chip, monkeypatch, capsys, capability, hip, kernels):
    """For attention, the loss, the MLP, Muon and sampling; an MI200 of AMD's has the numbers of a Hopper GPU."""
    for name in ("generation.fused", "generation.top_k", "kernels.cross_entropy", "kernels.matmul", "kernels.muon"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
        package, module = name.split(".")
        monkeypatch.delattr(import_module(package), module, raising=False)  # of an earlier import
    for module in (optimizer, sampling):
        monkeypatch.setattr(module, "may_launch", lambda *tensors: True)
    monkeypatch.setattr(engine, "Cache", MagicMock(side_effect=NotImplementedError))  # which it needs after its kernels
    monkeypatch.setattr(choose, "_passes", lambda *check: (True, "passed"))
    monkeypatch.setattr(choose, "_CHOICES", {})
    with FakeTensorMode(), torch.device("cuda:0"), SkipInitialisation(), torch.no_grad():
        x, tokens, head = torch.empty(16, 32), torch.empty(16, dtype=torch.int64), nn.Linear(32, 300)
        changed = MagicMock(is_cuda=True, device=x.device)  # fake tensors on a GPU cannot be changed in place
        model = MagicMock(training=False)
        model.embed.weight = x.bfloat16()
        chip(capability, hip=hip)
        for call in (
            lambda: head_loss(x, head, tokens, None),
            lambda: optimizer.blend(changed, changed, changed, 0.1, None, None),
            lambda: optimizer.update(changed, changed, 0.1, 0.1, 0.1, None),
            lambda: sampling.limits(head(x), sampling.Sampling()),
            lambda: engine.Engine(model, 300),
        ):
            with pytest.raises(ImportError) if kernels else suppress(NotImplementedError):
                call()
        assert not fused(x, torch.bfloat16, head.weight)  # the MLP has kernels for Hopper's GPUs only
        for _ in range(2):
            found, *_ = choose.implementation(None, x.device, torch.float16)
    err = capsys.readouterr().err
    assert found == ("triton" if kernels else "sdpa") and err.count("attention  ") == 1 and ("8.0" in err) != kernels
    assert gpu.can_overlap(x.device) is False and gpu.hopper_problem(x.device)
    assert device.resolve_dtype("auto", "cuda") == (torch.bfloat16 if kernels or hip else torch.float16)
    if hip:
        with pytest.raises(UserError, match="--fp8"):
            require_fp8("cuda", torch.bfloat16)


def test_shared_memory_is_the_drivers(chip, monkeypatch):
    chip((7, 5))
    t4 = SimpleNamespace(shared_memory_per_block_optin=65_536)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: t4)
    assert gpu.shared_memory(torch.device("cuda", 0)) == 65_536


@pytest.mark.parametrize("where", ["cuda", "mps", "cpu"])
def test_packed_documents_take_sdpa_where_no_kernels_run(chip, where):
    """On a T4, an AMD GPU and a Mac, and in graphs, where the host reads no values."""
    chip((7, 5))
    with FakeTensorMode():
        q, starts = torch.empty(1, 64, 2, 16, device=where), torch.empty(9, dtype=torch.int32, device=where)
    assert explain(q, q, q, cu_seqlens=starts, max_seqlen=32, dropout=0.1).startswith("sdpa: ")
    assert explain(q, q, q, cu_seqlens=starts).startswith("reference: ")


PACKED = dict(cu_seqlens=torch.tensor([0, 30, 64], dtype=torch.int32), max_seqlen=34)


@pytest.mark.parametrize("options", [dict(window=20), dict(causal=False), PACKED], ids=["window", "full", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_attention_on_a_cpu(dtype, options):
    """Values of a unit matrix return the weights: dropped ones are 0, the others grow, and gradients follow them."""
    batch = 1 if options is PACKED else 8
    q, k = (torch.randn(batch, 64, heads, 16, dtype=dtype) for heads in (4, 2))
    v = torch.eye(64, dtype=dtype)[:, None].expand(batch, 64, 2, 64).contiguous().requires_grad_()
    whole = attention(q, k, v, impl="sdpa", **options).detach()
    out = attention(q, k, v, impl="sdpa", dropout=0.25, **options)
    seen, kept = whole != 0, out != 0
    torch.testing.assert_close(out[kept], whole[kept] / 0.75, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    count = seen.sum()
    assert not kept[~seen].any() and abs(kept.sum() - 0.75 * count) < 5 * (0.75 * 0.25 * count) ** 0.5
    dout = torch.randn_like(out)
    dv = torch.einsum("bqhk,bqhd->bkhd", out.float(), dout.float()).unflatten(2, (2, 2)).sum(3)
    out.backward(dout)
    torch.testing.assert_close(v.grad.float(), dv, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=0.02)


def test_dropout_of_a_branch_on_a_cpu():
    drop, x = Dropout(0.3), torch.randn(257, 33, requires_grad=True)
    y = drop(x)
    kept = y != 0
    torch.testing.assert_close(y, x * kept / 0.7, rtol=1e-4, atol=0)
    assert abs(kept.sum() - 0.7 * kept.numel()) < 5 * (0.7 * 0.3 * kept.numel()) ** 0.5
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.7, rtol=1e-4, atol=0)
    assert not torch.equal(drop(x), y) and drop.eval()(x) is x


def test_a_gpu_that_pytorch_does_not_see(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device.Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    device.note.cache_clear()
    assert device.resolve_device("auto") == device.resolve_device("auto") == "cpu"
    assert capsys.readouterr().err.count("/dev/nvidia0") == 1
    with pytest.raises(UserError, match=r"device='cuda'.*/dev/nvidia0"):
        device.resolve_device("cuda")


def test_a_mac_takes_the_options_for_cpus(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    (tmp_path / "mine.py").write_text("n_embd = 768\nn_head = 12\ncpu = dict(n_embd=64, n_head=2)")
    config = load_config([str(tmp_path / "mine.py")])
    assert (config.n_embd, config.n_head) == (64, 2)


def test_errors_of_a_driver_and_of_a_compiler_are_sentences():
    class AcceleratorError(RuntimeError):
        pass

    class OutOfResources(Exception):
        pass

    sentence = sentence_of(OutOfResources("out of resource: shared memory, Required: 81920. Reducing ..."), "")
    assert "81920" in sentence and "--attention sdpa" in sentence
    sentence = sentence_of(AcceleratorError("CUDA error: an illegal address\nCUDA kernel errors might ..."), "")
    assert sentence.startswith("CUDA error: an illegal address; ") and "--device cpu" in sentence
    sentence = sentence_of(subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "")
    assert "/usr/bin/gcc" in sentence and "python3-dev" in sentence


def test_windows_is_sent_to_wsl():
    code = "import sys; sys.platform = 'win32'; import errors"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "WSL" in result.stderr and result.stderr.count("\n") == 1


def test_runs_may_lie_elsewhere(folder, trains):
    options = dict(steps=2, eval_every=2)
    finish(start(folder, variables=dict(GPT_RUNS=str(folder / "other/place")), **FAST | options))
    assert (folder / "other/place/run/checkpoint.pt").exists() and not (folder / "runs").exists()
    trains(runs="third", **options)
    Path("third/run/checkpoint.pt").unlink()
    for run in ([], ["run"], ["third/run"]):
        trains("--resume", *run, "--runs", "third", "--steps", "2")
        Path("third/run/checkpoint.pt").unlink()
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_read_only_checkout(folder):
    """All commands work there if the folders that they write are elsewhere, without a home and as any user."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for name in names:
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "checkout" / name)
    subprocess.run(["chmod", "-R", "a-w", "checkout"], check=True)
    moved = dict(GPT_RUNS=str(folder / "runs"), GPT_DATA=str(folder / "data"))

    def call(*command, **variables):
        as_others = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
        command = [*as_others, sys.executable, *command]
        variables = os.environ | dict(HOME="/nonexistent", OMP_NUM_THREADS="1") | variables
        variables = {name: value for name, value in variables.items() if value is not None}
        result = subprocess.run(command, cwd="checkout", env=variables, capture_output=True, text=True)
        return result.returncode, result.stderr

    train = ["train.py", *flags((), FAST | dict(input=str(folder / "corpus.txt"), steps=2, eval_every=2))]
    refused(call(*train, GPT_DATA=None), "checkout/data/prepared", "GPT_DATA")
    refused(call(*train), "runs", "--runs", "GPT_RUNS")
    for command in (train, ["sample.py"], ["evaluate.py", "run"], ["plot.py", "run", "--out", str(folder / "a.png")]):
        code, err = call(*command, **moved)
        assert code == 0 and "atplotlib" not in err, err
    assert Path("a.png").exists() and Path("runs/run/loss.png").exists()


@pytest.fixture
def cpu_threads(monkeypatch):
    """PyTorch's threads as where the environment says nothing of them."""
    for name in [name for name in os.environ if name.startswith(threads.VARIABLES)]:
        monkeypatch.delenv(name)
    before = torch.get_num_threads()
    yield threads.Threads()
    threads.cpu_threads.stop()  # a script's: started here, it would give a later test's run this test's number
    torch.set_num_threads(before)


def test_threads_leave_cores_to_other_work(cpu_threads):
    """Other processes really run here."""
    torch.set_num_threads(4)
    cpu_threads.start(most=4)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(threads.usable_cores())]
    try:
        x, end = torch.randn(300, 300), time.monotonic() + 60
        while torch.get_num_threads() == 4:
            assert time.monotonic() < end
            (x @ x).relu().sum()
            cpu_threads.share()
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("script", ["train.py", "evaluate.py", "sample.py"])
def test_each_loop_shares_cores(cpu_threads, folder, monkeypatch, capsys, script):
    """Linux says at each look that half of the time was spent waiting."""
    assert in_process(capsys, **FAST | dict(steps=2, eval_every=2)).returncode == 0
    looks = itertools.count()
    monkeypatch.setattr(threads, "times", lambda: (next(looks) - 1e6, next(looks) / 2, next(looks) / 2))
    torch.set_num_threads(2)
    device.note.cache_clear()
    argv = flags((), FAST | dict(steps=2)) if script == "train.py" else ["run", "--device", "cpu"]
    code, _, err = run_script(monkeypatch, capsys, script, *argv)
    assert not code and "1 of 2" in err, err


def test_threads_follow_what_linux_tells(cpu_threads, monkeypatch):
    """All come back when the cores are free, later each time; work of this process's own changes nothing."""
    clock = [0.0, 0.0, 0.0]
    monkeypatch.setattr(threads, "times", lambda: tuple(clock))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])

    def after(seconds, ran, waited):
        for index, change in enumerate((seconds, ran * seconds, waited * seconds)):
            clock[index] += change
        cpu_threads.share()
        return torch.get_num_threads()

    torch.set_num_threads(4)
    cpu_threads.start(most=4)
    assert after(2, ran=3.9, waited=0.1) == 4
    assert after(2, ran=4, waited=2) == 4  # of this process's own threads, as when it writes a checkpoint
    assert after(0.1, ran=1, waited=3) == 4  # too short to tell
    assert after(2, ran=2.5, waited=1.5) == 2
    assert after(2, ran=1.3, waited=0.7) == 1
    assert after(2, ran=0.6, waited=0.4) == 1
    seconds = 0
    while after(2, ran=1, waited=0) == 1:
        seconds += 2
    assert torch.get_num_threads() == 4 and 4 < seconds < 60
    assert after(2, ran=2, waited=2) == 2
    assert sum(after(2, ran=2, waited=0) == 2 for _ in range(60)) * 2 > seconds
    assert after(2, ran=1, waited=1) == 1
    cpu_threads.stop()  # the next run of a notebook has all
    assert after(2, ran=1, waited=3) == 4


@pytest.mark.parametrize("by", ["the environment", "a checkpoint", "--deterministic"])
def test_threads_that_the_user_chose_stay(cpu_threads, monkeypatch, by):
    if by == "the environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    cpu_threads.start(most=3 if by == "a checkpoint" else None, fixed=by != "the environment")
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "times", lambda: (1e9, 1.0, 1e9))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: 1e9)
    cpu_threads.share()
    assert torch.get_num_threads() == before and (by == "--deterministic" or before == 3)


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_cores_of_a_quota(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(5), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert threads.usable_cores(tmp_path) == (cores or 5)
