"""kill -9 at random moments, resume, and compare with a run that was never killed: every tensor, every recorded loss.

    python tests/torture_resume.py [--kills 100] [--seed 0]

Each life is a process forked from this one, which has imported torch but never used it: so kills meet the training,
its evaluations and its writing, not the imports. A run that ends before its next kill is compared, and another begun.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import train
from checkpoint import check_file, checkpoints

OPTIONS = dict(
    data="text", input="corpus.txt", tokenizer="bytes", device="cpu", n_layer=2, n_head=2, n_embd=32, block_size=32,
    batch_size=8, steps=90, warmup_steps=2, learning_rate=5e-3, min_learning_rate=1e-3, dropout=0.1, eval_every=15,
    eval_batches=2, log_every=1, keep=3, skip_zscore=4.0,
)  # fmt: skip
BEGIN = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]


def live(argv):
    """Fork a process that trains; its id. What it says goes to log.txt."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        train.main(argv)
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        os._exit(code)


def die(pid, delay, writing=None):
    """SIGKILL a process after a delay in seconds, and then when it writes in the folder `writing`; whether it lived."""
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline or (writing and not any(writing.glob(".*.tmp"))):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def finish(argv):
    status = os.waitpid(live(argv), 0)[1]
    assert status == 0, f"{' '.join(argv)} ended with {status}:\n" + Path("log.txt").read_text()[-3000:]


def resume(run):
    """How to go on after a kill: with --resume alone, unless the run had not begun."""
    return ["--resume"] if run.exists() else [*BEGIN, "--name", run.name]


def check(run, seen):
    """What a kill may leave: whole lines, and checkpoints that are good or not there."""
    if (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_text().splitlines():
            json.loads(line)
    for path in run.glob("*.pt"):
        check_file(path)
    seen["kills"] += 1
    seen["met a file being written"] += any(run.glob(".*.tmp"))
    seen["came before the first checkpoint"] += not any(run.glob("checkpoint*.pt"))


def resumable(run):
    """(step of the newest checkpoint, lines of metrics.jsonl up to it): what a resumption must leave as it is."""
    paths = checkpoints(run)
    step = torch.load(paths[0], weights_only=True)["step"] if paths else 0
    return step, lines_up_to(run, step) if paths else []


def lines_up_to(run, step):
    """Byte for byte: they have the speed, which training over again would change."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return [line for line in lines if json.loads(line)["step"] <= step]


def check_resumed(run, before, seen):
    step, lines = before
    if step:
        assert lines_up_to(run, step) == lines, f"{run} was not resumed at step {step}: its records up to it changed"
        seen["restarts went on from a checkpoint"] += 1


def compare(whole, killed):
    for name in ("checkpoint.pt", "checkpoint-75.pt", "checkpoint-60.pt", "best.pt"):
        a, b = (torch.load(run / name, weights_only=True) for run in (whole, killed))
        a, b = (dict(contents, config=None) for contents in (a, b))
        assert equal(a, b), f"{name} of {killed} differs from that of {whole}"
    assert records(whole) == records(killed), f"metrics.jsonl of {killed} differs from that of {whole}"


def finished(run):
    path = run / "checkpoint.pt"
    return path.exists() and torch.load(path, weights_only=True)["step"] == OPTIONS["steps"]


def records(run):
    """Of metrics.jsonl all but the times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    times = ("tokens_per_second", "tflops", "start_seconds")
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]


def equal(a, b):
    """Bit for bit, in nested dicts and lists of tensors and plain values; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def torture(kills, seed):
    moments, seen = random.Random(seed), Counter()
    Path("corpus.txt").write_text("the sea keeps what the sea has taken. " * 200)
    began = time.monotonic()
    finish([*BEGIN, "--name", "whole"])
    whole, lasted = Path("runs/whole"), time.monotonic() - began
    runs = 0
    while seen["kills"] < kills:
        run = Path(f"runs/killed{runs}")
        killed = True
        while killed and seen["kills"] < kills:
            before = resumable(run)
            killed = die(live(resume(run)), moments.uniform(0, lasted / 2), run if moments.random() < 0.25 else None)
            check_resumed(run, before, seen)
            if killed:
                check(run, seen)
        if not finished(run):
            before = resumable(run)
            finish(resume(run))
            check_resumed(run, before, seen)
        compare(whole, run)
        runs += 1
    print(f"{kills} kills in {runs} runs, all equal to the run that was never killed")
    print(", ".join(f"{count} {what}" for what, count in seen.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPT_DATA"] = folder
        torture(arguments.kills, arguments.seed)
