"""Machines that are not here: chips without kernels, GPUs that PyTorch does not see, Macs, Windows."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import FAST, ROOT, finish, start

import device
import threads
from attention import choose, gpu
from errors import UserError, sentence_of
from training.config import load_config


@pytest.fixture
def chip(monkeypatch):
    """chip(capability, *architectures): a GPU, and the architectures for which PyTorch has kernels."""

    def fake(capability, *architectures):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GeForce")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(architectures))

    device.note.cache_clear()
    return fake


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


@pytest.mark.parametrize("capability, kernels", [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_without_tensor_cores_in_triton_take_sdpa(chip, monkeypatch, capability, kernels):
    """One answer for attention, the loss, Muon and sampling."""
    chip(capability)
    monkeypatch.setattr(gpu, "HAS_TRITON", True)
    gpu._takes_kernels.cache_clear()
    place = torch.device("cuda", 0)
    monkeypatch.setattr(choose, "_passes", lambda *check: (True, "passed"))
    found, reason, _ = choose._choose_for(place, torch.float16, None)
    assert gpu.takes_kernels(place) == kernels and found == ("triton" if kernels else "sdpa")
    assert kernels or "8.0" in reason
    gpu._takes_kernels.cache_clear()


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

    sentence = sentence_of(AcceleratorError("CUDA error: an illegal address\nCUDA kernel errors might ..."), "")
    assert sentence.startswith("CUDA error: an illegal address; ") and "--device cpu" in sentence
    sentence = sentence_of(subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "")
    assert "/usr/bin/gcc" in sentence and "python3-dev" in sentence


def test_windows_is_sent_to_wsl():
    code = "import sys; sys.platform = 'win32'; import errors"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "WSL" in result.stderr and result.stderr.count("\n") == 1


def test_runs_may_lie_elsewhere(folder):
    finish(start(folder, variables=dict(GPT_RUNS=str(folder / "other/place")), **FAST | dict(steps=2, eval_every=2)))
    assert (folder / "other/place/run/checkpoint.pt").exists() and not (folder / "runs").exists()


@pytest.fixture
def cpu_threads(monkeypatch):
    """PyTorch's threads as where the environment says nothing of them."""
    for name in [name for name in os.environ if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))]:
        monkeypatch.delenv(name)
    before = torch.get_num_threads()
    yield threads.Threads()
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


def test_threads_that_the_user_chose_stay(cpu_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    cpu_threads.start()
    monkeypatch.setattr(threads, "times", lambda: (10.0, 1.0, 20.0))
    cpu_threads.share()
    assert torch.get_num_threads() == 3


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
