"""Faults that a run must survive or name in one sentence; docs/reliability.md lists them all.

test_checkpoint.py has the damaged checkpoints, test_distributed.py the faults of several ranks.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import (
    FAST,
    ON_GPU,
    ROOT,
    at_step,
    contents,
    environment,
    finish,
    flags,
    losses,
    metrics,
    one_sentence,
    reached,
    same,
    start,
    wait_for,
)

from data import Batches
from data.corpus import prepare
from training import step

CHECKPOINT = "runs/run/checkpoint.pt"
slow = pytest.mark.slow


@slow
def test_kill_9_at_random_moments():
    command = [sys.executable, str(ROOT / "tests" / "torture_resume.py"), "--kills", "5"]
    result = subprocess.run(command, env=environment(ROOT), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("5 kills in"), result.stdout


@slow
def test_sigusr1_saves_and_goes_on_and_a_second_process_is_refused(folder, run):
    """The run is then stopped with Ctrl-C, resumes, and equals an uninterrupted one."""
    options = dict(steps=300, eval_every=200, eval_batches=1)
    assert run(name="whole", **options)[0] == 0
    process = start(folder, **FAST | options)
    wait_for(lambda: reached(folder, 3))
    process.send_signal(signal.SIGUSR1)
    wait_for((folder / CHECKPOINT).exists)
    process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
    code, err = run("--resume", "runs/run")
    assert code == 1
    one_sentence(err, "another process")
    saved = contents(CHECKPOINT)["step"]
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    out, err = finish(process)
    assert "Ctrl-C again" in err, err
    stopped = int(re.search(r"stopped at step (\d+); resume with: python train.py --resume runs/run", out)[1])
    assert saved < contents(CHECKPOINT)["step"] == stopped < 300
    assert run("--resume", "runs/run")[0] == 0
    assert same(contents(CHECKPOINT), contents("runs/whole/checkpoint.pt"))
    assert losses(folder) == losses(folder, "whole")


@slow
def test_second_ctrl_c_exits_at_once(folder):
    """In the middle of a step that takes many seconds."""
    long_step = dict(batch_size=2048, n_embd=128, block_size=64, n_layer=4, eval_batches=1, micro_batch=8)
    process = start(folder, **FAST | long_step)
    wait_for((folder / "runs/run/metrics.jsonl").exists)
    wait_for(lambda: metrics(folder))  # the evaluation before the first step
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    while "stopping" not in (line := process.stderr.readline()):
        assert line, "the process has ended"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    assert not (folder / CHECKPOINT).exists()


@slow
def test_nohup_ignores_a_closed_terminal(folder):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does for its child
    try:
        process = start(folder, **FAST | dict(steps=100_000, eval_every=100_000))
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: reached(folder, 3))
    process.send_signal(signal.SIGHUP)
    sent_at = len(losses(folder))
    wait_for(lambda: reached(folder, sent_at + 50))
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert contents(CHECKPOINT)["step"] > sent_at + 50


@pytest.fixture
def file_limit():
    """A function that limits the size of the files which this process can write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_warnings_and_training_goes_on(folder, run, monkeypatch, file_limit):
    """The disk is full at the checkpoint of step 20 and has room again at that of step 40."""
    assert run(name="whole")[0] == 0
    full = lambda: file_limit((folder / "runs/run/metrics.jsonl").stat().st_size)  # noqa: E731
    at_step(monkeypatch, 15, full)
    at_step(monkeypatch, 35, lambda: file_limit(resource.RLIM_INFINITY))
    code, err = run()
    assert code == 0 and re.search("warning: .*checkpoint.* step 20 .*File too large", err), err
    assert same(contents(CHECKPOINT), contents("runs/whole/checkpoint.pt"))
    whole = losses(folder, "whole")
    assert losses(folder) == whole[:15] + whole[35:]  # the lines between had no room
    assert not list((folder / "runs/run").glob(".*.tmp"))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(folder, run, monkeypatch, file_limit):
    assert run(name="whole")[0] == 0
    with monkeypatch.context() as patch:
        at_step(patch, 35, lambda: file_limit(100_000))
        code, err = run()
    file_limit(resource.RLIM_INFINITY)
    assert code == 1
    one_sentence(err, "step 40", "File too large", "make room")
    assert run("--resume", "runs/run")[0] == 0  # from step 20
    assert same(contents(CHECKPOINT), contents("runs/whole/checkpoint.pt"))
    assert losses(folder) == losses(folder, "whole")


@slow
def test_a_read_only_folder_is_one_sentence(folder, run):
    run(steps=4, eval_every=2)
    own = folder / "runs/run"
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    own.chmod(0o555), own.parent.chmod(0o555), (own / ".lock").chmod(0o444)
    # root may write anywhere unless its capability CAP_DAC_OVERRIDE (1) is dropped with PR_CAPBSET_DROP (24)
    program = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1); os.execv(sys.executable, sys.argv[1:])"
    for argv in (["--resume", "runs/run", "--steps", "6", "--allow_changes"], []):
        command = [sys.executable, "-c", program, sys.executable, str(ROOT / "train.py"), *flags(argv, FAST)]
        result = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
        assert result.returncode == 1
        one_sentence(result.stderr, "runs", "Permission denied")
    own.chmod(0o755), own.parent.chmod(0o755)
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before


def test_losses_that_are_not_finite_stop_the_run(folder, run):
    assert run(steps=20, eval_every=10)[0] == 0
    before = contents(CHECKPOINT)
    changes = ["--steps", "60", "--learning_rate", "1e30", "--allow_changes", "--max_bad_steps", "5"]
    code, err = run("--resume", *changes)
    assert code == 1
    one_sentence(err, "not finite in 5 steps", "batch ", "--resume runs/run")
    assert metrics(folder)[-1]["skipped_steps"] == 5 and metrics(folder)[-1]["loss"] is None
    assert same(contents(CHECKPOINT), before)


def test_changed_tokens_are_refused(folder, run):
    """Without its text, or with a text that has only been edited, a run continues with its prepared tokens."""
    assert run(steps=20, eval_every=10)[0] == 0
    whole, text = contents(CHECKPOINT), folder / "corpus.txt"
    words = text.read_text()

    def resume(*argv):
        (folder / CHECKPOINT).unlink()
        (folder / "runs/run/checkpoint-10.pt").write_bytes(older)
        return run("--resume", *argv)

    older = (folder / "runs/run/checkpoint-10.pt").read_bytes()
    tokens = {path: path.read_bytes() for path in folder.glob("prepared/prepared/*/*")}
    for change in (
        lambda: [os.utime(path, (1, 1)) for path in (text, *tokens)],
        lambda: text.write_text(words + "and the sea keeps on. "),
        text.unlink,
    ):
        change()
        assert resume()[0] == 0 and same(contents(CHECKPOINT), whole)
        assert len(tokens) == 3 and {path: path.read_bytes() for path in tokens} == tokens
    text.write_text(words + "and the sea keeps on. ")
    prepare("text", "bytes", text)
    code, err = resume()
    assert code == 1
    one_sentence(err, "tokens", "--allow_changes")
    (folder / CHECKPOINT).write_bytes(older)  # what resume() removes
    assert resume("--allow_changes")[0] == 0
    assert contents(CHECKPOINT)["tokens_sha256"] != whole["tokens_sha256"]


def test_an_error_while_a_batch_is_loaded_is_one_sentence(folder, run, monkeypatch):
    """It comes from the thread that loads ahead, and ends the run only after the steps before it."""
    original = Batches.batch

    def batch(self, step, rows=slice(None)):
        if step == 30:
            raise OSError("the token file is gone")
        return original(self, step, rows)

    monkeypatch.setattr(Batches, "batch", batch)
    code, err = run()
    assert code == 1
    one_sentence(err, "the token file is gone")
    assert contents(CHECKPOINT)["step"] == 20 and len(losses(folder)) == 30


def test_a_gpu_without_memory_is_one_sentence(run, monkeypatch):
    """Without a GPU, the exception of one."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.001)
        try:
            code, err = run(**ON_GPU | dict(batch_size=4096))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:

        def fail(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..")

        monkeypatch.setattr(step.TrainStep, "__call__", fail)
        code, err = run()
    assert code == 1
    one_sentence(err, "out of memory", "--micro_batch", "--checkpoint_activations blocks")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", ["off", "blocks", "model"])
def test_deterministic_resume_on_a_gpu_is_bit_exact(folder, run, compile):
    assert run(**ON_GPU | dict(compile=compile, ema=0.9))[0] == 0
    whole, whole_losses = contents(CHECKPOINT), losses(folder)
    os.remove(CHECKPOINT)
    assert run("--resume")[0] == 0
    assert same(contents(CHECKPOINT), whole) and losses(folder) == whole_losses
