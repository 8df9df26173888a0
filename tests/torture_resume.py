"""kill -9 at random moments, resume, and compare with a run that was never killed: every tensor, every recorded loss.

    python tests/torture_resume.py [--kills 100] [--seed 0]

Each process is forked from this one, which has imported torch but never computed with it, so that the kills hit
training, evaluation and writing, not the imports. A run that ends before its next kill is compared, and a new one
starts.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib.figure  # noqa: F401 here, so that the forked processes need not import it
from helpers import contents, same

import train
from training.checkpoint import checkpoints, load_checkpoint

OPTIONS = dict(
    data="text", input="corpus.txt", tokenizer="bytes", device="cpu", n_layer=2, n_head=2, n_embd=32, block_size=32,
    batch_size=8, steps=90, warmup_steps=2, learning_rate=5e-3, min_learning_rate=1e-3, dropout=0.1, eval_every=15,
    eval_batches=2, log_every=1, keep=3,
)  # fmt: skip
BEGIN = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]


def begin_or_resume(run):
    """The command line that continues a run: --resume, or all options if it was killed before it wrote config.json."""
    if (run / "config.json").exists():
        return ["--resume"]
    shutil.rmtree(run, ignore_errors=True)
    return [*BEGIN, "--name", run.name]


def fork_run(argv):
    """Train in a forked process, which prints to log.txt; returns its id."""
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


def kill(pid, delay, writing=None):
    """SIGKILL a process after a delay in seconds; returns False if it ended before.

    writing: if given, wait after the delay until a file in this folder is being written.
    """
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline or (writing and not any(writing.glob(".*.tmp"))):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def finish(argv):
    status = os.waitpid(fork_run(argv), 0)[1]
    assert status == 0, f"{' '.join(argv)} ended with {status}:\n" + Path("log.txt").read_text()[-3000:]


def check_after_kill(run, seen):
    """A kill may leave whole lines of metrics.jsonl, and checkpoints that can be loaded or are not there."""
    if (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_text().splitlines():
            json.loads(line)
    for path in run.glob("*.pt"):
        load_checkpoint(path)
    seen["kills"] += 1
    seen["while a file was written"] += any(run.glob(".*.tmp"))
    seen["before the first checkpoint"] += not any(run.glob("checkpoint*.pt"))


def resumable(run):
    """(step of the newest checkpoint, lines of metrics.jsonl up to it), which resuming must not change."""
    paths = checkpoints(run)
    return (step := contents(paths[0])["step"], lines_up_to(run, step)) if paths else (0, [])


def lines_up_to(run, step):
    """Whole lines, because their tokens per second would change if these steps were trained again."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return [line for line in lines if json.loads(line)["step"] <= step]


def check_resumed(run, before, seen):
    step, lines = before
    if step:
        assert lines_up_to(run, step) == lines, f"{run} was not resumed at step {step}: its records up to it changed"
        seen["resumed from a checkpoint"] += 1


def compare(whole, killed):
    for name in ("checkpoint.pt", "checkpoint-75.pt", "checkpoint-60.pt", "best.pt"):
        assert same(contents(whole / name), contents(killed / name)), f"{name} of {killed} differs from that of {whole}"
    assert records(whole) == records(killed), f"metrics.jsonl of {killed} differs from that of {whole}"


def finished(run):
    return (run / "checkpoint.pt").exists() and contents(run / "checkpoint.pt")["step"] == OPTIONS["steps"]


def records(run):
    """metrics.jsonl without times and speeds."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    timed = ("seconds", "tokens_per_second", "tflops")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


def torture(kills, seed):
    moments, seen = random.Random(seed), Counter()
    Path("corpus.txt").write_text("the sea keeps what the sea has taken. " * 200)
    finish([*BEGIN, "--name", "whole"])
    whole, runs = Path("runs/whole"), 0
    config, last = (whole / name for name in ("config.json", "checkpoint.pt"))
    lasted = last.stat().st_mtime - config.stat().st_mtime  # seconds of training, without the drawing of loss.png
    while seen["kills"] < kills:
        run = Path(f"runs/killed{runs}")
        killed = True
        while killed and seen["kills"] < kills:
            before = resumable(run)
            pid = fork_run(begin_or_resume(run))
            killed = kill(pid, moments.uniform(0, lasted), run if moments.random() < 0.25 else None)
            check_resumed(run, before, seen)
            if killed:
                check_after_kill(run, seen)
        if not finished(run):
            before = resumable(run)
            finish(begin_or_resume(run))
            check_resumed(run, before, seen)
        compare(whole, run)
        runs += 1
    print(f"{kills} kills in {runs} runs, all equal to the run that was never killed")
    print(", ".join(f"{count} {kind}" for kind, count in seen.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPT_DATA"] = folder
        torture(arguments.kills, arguments.seed)
