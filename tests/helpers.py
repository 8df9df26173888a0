"""Runs of train.py in a process, in several, or in this one, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torture_resume import equal

import train

ROOT = Path(__file__).parents[1]
TINY = dict(
    data="text", tokenizer="bytes", device="cpu", n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=8, steps=40,
    warmup_steps=2, learning_rate=5e-3, eval_every=20, eval_batches=4, log_every=1,
)  # fmt: skip
FAST = TINY | dict(input="corpus.txt", attention="sdpa", dropout=0.1)
ON_GPU = dict(device="cuda", dtype="bfloat16", attention="auto", n_embd=128, deterministic=True, compile="off")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BY_DEVICE = pytest.mark.parametrize("on", [pytest.param({}, id="cpu"), pytest.param(ON_GPU, id="cuda", marks=TWO_GPUS)])


def environment(folder):
    """As a user's shell, without the interpreter that the kernel tests switch on."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return variables | {"GPT_DATA": str(folder / "prepared"), "OMP_NUM_THREADS": "1"}


def typed(argv, options):
    """What follows train.py: argv, then the options as flags, which a run that is resumed has already."""
    resumes = any(argument.startswith("--resume") for argument in argv)
    return [*argv, *(part for name, value in options.items() if not resumes for part in (f"--{name}", str(value)))]


started = []  # processes of a test, ended with it


def start(folder, *argv, ranks=1, **options):
    """train.py in a process, or torchrun's in several, which end with the test at the latest."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *typed(argv, options)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), **pipes)
    started.append(process)
    return process


def children(pid):
    """Process ids of those that a process, or any thread of it, has started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
            found += map(int, path.read_text().split())
    return found


def end_processes():
    """Kill what a failed test left, from the launcher down: its ranks are in sessions of their own."""
    while started:
        process = started.pop()
        if process.poll() is None:
            family = [process.pid]
            for pid in family:
                family += children(pid)
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=60)


def launch(folder, *argv, ranks=1, **options):
    """A run of TINY in processes of its own, to its end."""
    process = start(folder, *argv, ranks=ranks, **TINY | dict(input="corpus.txt") | options)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def in_process(capsys, *argv, **options):
    """What launch() of one rank gives, by a call in this process: to start one takes seconds."""
    capsys.readouterr()
    try:
        train.main(typed(argv, options))
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    return subprocess.CompletedProcess(argv, code, *capsys.readouterr())


def metrics(folder, run="run"):
    """All records; what follows the last end of a line is being written."""
    *lines, _ = (folder / "runs" / run / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines]


def losses(folder, run="run"):
    return [record["loss"] for record in metrics(folder, run) if "loss" in record]


def contents(path):
    return torch.load(path, weights_only=True)


def same(a, b):
    """All of two checkpoints but the flags that were typed, and the threads, which several processes do not keep."""
    return equal(a | {"config": None, "threads": None}, b | {"config": None, "threads": None})


def one_sentence(err, *parts):
    assert "Traceback" not in err and err.count("error: ") == 1, err
    sentence = err.split("error: ")[1]
    assert sentence.count("\n") == 1, err
    for part in parts:
        assert part in sentence, sentence


def wait_for(condition, seconds=300):
    """What the condition gives once that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def reached(folder, step, run="run"):
    path = folder / "runs" / run / "metrics.jsonl"
    return path.exists() and any(record["step"] >= step for record in metrics(folder, run) if "loss" in record)
