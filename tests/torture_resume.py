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
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib.figure  # noqa: F401 here, so that the forked processes need not import it
from helpers import FAST, contents, flags, metrics, same

import train
from training.ranks import rank_command
from weights import checkpoints, load_checkpoint

STEPS = 90
BEGIN = flags([], FAST | dict(steps=STEPS, eval_every=15, eval_batches=2, keep=3))
HERE = Path()


def fork_run(name):
    """Begin or resume a run in a forked process, which prints to log.txt; returns its id."""
    run = HERE / "runs" / name
    if (run / "config.json").exists():
        argv = ["--resume", str(run)]
    else:  # it was killed too early
        shutil.rmtree(run, ignore_errors=True)
        argv = [*BEGIN, "--name", name]
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        with rank_command(True, ""):
            train.main(argv)
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        os._exit(code)


def assert_ended_well(status):
    assert status == 0, f"a run ended with {status}:\n" + Path("log.txt").read_text()[-3000:]


def kill(pid, delay, writing=None):
    """SIGKILL a process after a delay in seconds; returns False if it ended before.

    writing: if given, wait after the delay until a file in this folder is being written.
    """
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline or (writing and not any(writing.glob(".*.tmp"))):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert_ended_well(status)
            return False
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def finished(run):
    return (run / "checkpoint.pt").exists() and contents(run / "checkpoint.pt")["step"] == STEPS


def records_to_keep(run):
    """Lines of metrics.jsonl up to the newest checkpoint. Trained again, they would have other tokens per second."""
    paths = checkpoints(run)
    if not paths:
        return []
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["step"] <= contents(paths[0])["step"]]


def check_after_kill(run):
    """A kill may leave whole lines of metrics.jsonl, and checkpoints that can be loaded or are not there."""
    if (run / "metrics.jsonl").exists():
        metrics(HERE, run.name)
    for path in run.glob("*.pt"):
        load_checkpoint(path)


def compare(found, expected):
    for name in ("checkpoint.pt", "checkpoint-75.pt", "checkpoint-60.pt", "best.pt"):
        assert same(*(contents(run / name) for run in (found, expected))), f"{name} of {found} differs"
    timed = {"seconds": 0, "tokens_per_second": 0, "tflops": 0}
    ours, theirs = ([record | timed for record in metrics(HERE, run.name)] for run in (found, expected))
    assert ours == theirs, f"metrics.jsonl of {found} differs"


def torture(kills, seed):
    moments, count, runs, resumed = random.Random(seed), 0, 0, 0
    Path("corpus.txt").write_text("the sea keeps what the sea has taken. " * 200)
    assert_ended_well(os.waitpid(fork_run("whole"), 0)[1])
    whole = HERE / "runs/whole"
    config, last = (whole / name for name in ("config.json", "checkpoint.pt"))
    lasted = last.stat().st_mtime - config.stat().st_mtime  # seconds of training, without the drawing of loss.png
    while count < kills:
        run = HERE / f"runs/killed{runs}"
        while not finished(run):
            kept = records_to_keep(run)
            pid = fork_run(run.name)
            if count == kills:
                assert_ended_well(os.waitpid(pid, 0)[1])
            else:
                count += kill(pid, moments.uniform(0, lasted), run if moments.random() < 0.25 else None)
            lines = (run / "metrics.jsonl").read_text().splitlines() if kept else []
            assert lines[: len(kept)] == kept, f"{run} was not resumed at its checkpoint: records up to it changed"
            resumed += bool(kept)
            check_after_kill(run)
        compare(run, whole)
        runs += 1
    print(f"{kills} kills in {runs} runs, {resumed} resumed from a checkpoint; all equal the run that was never killed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPT_DATA"] = folder
        torture(arguments.kills, arguments.seed)
