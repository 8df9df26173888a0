"""Faults that a run must survive or name in one sentence; docs/reliability.md lists them all.

test_checkpoint.py has the damaged checkpoints, test_distributed.py the faults of several ranks.
"""

import errno
import json
import re
import resource
import shutil
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
    assert_resumes_bit_exactly,
    assert_same_runs,
    at_step,
    contents,
    environment,
    files_in,
    losses,
    metrics,
    refused,
    same,
    start,
    wait_for,
)

import train
from data.corpus import prepare
from data.loader import Batches

CHECKPOINT = "runs/run/checkpoint.pt"
TOKENS = "prepared/prepared/*/*"
TEN = dict(steps=10, eval_every=5)
slow = pytest.mark.slow


@slow
def test_kill_9_at_random_moments():
    command = [sys.executable, str(ROOT / "tests" / "torture_resume.py"), "--kills", "5"]
    result = subprocess.run(command, env=environment(ROOT), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("5 kills in"), result.stdout


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
    assert process.wait(timeout=300) == 130
    assert not (folder / CHECKPOINT).exists()


@pytest.fixture
def file_limit():
    """A function that limits the size of the files which this process can write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_warnings_and_training_goes_on(folder, trains, monkeypatch, file_limit):
    """The disk is full at the checkpoint of step 5 and has room again at that of step 10."""
    trains(name="whole", **TEN)
    full = lambda: file_limit((folder / "runs/run/metrics.jsonl").stat().st_size)  # noqa: E731
    at_step(monkeypatch, 3, full)
    at_step(monkeypatch, 8, lambda: file_limit(resource.RLIM_INFINITY))
    err = trains(**TEN)
    assert re.search("warning: .*checkpoint.* step 5 .*File too large", err), err
    assert same(contents(CHECKPOINT), contents("runs/whole/checkpoint.pt"))
    whole = losses(folder, "whole")
    assert losses(folder) == whole[:3] + whole[8:]  # the lines between had no room
    assert not list((folder / "runs/run").glob(".*.tmp"))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(folder, run, trains, monkeypatch, file_limit):
    trains(name="whole", **TEN)
    with monkeypatch.context() as patch:
        at_step(patch, 8, lambda: file_limit(100_000))
        result = run(**TEN)
    file_limit(resource.RLIM_INFINITY)
    refused(result, "step 10", "File too large", "make room")
    trains("--resume", "runs/run")  # from step 5
    assert_same_runs(folder)


def test_a_read_only_folder_is_one_sentence(folder, run, monkeypatch):
    (folder / "runs").symlink_to("/sys/kernel")  # in which even root cannot make a folder
    refused(run(steps=2), "runs/run", "--runs", "GPT_RUNS")
    refused(run(steps=2, runs="/sys/kernel/x"), "/sys/kernel/x", "--runs", "GPT_RUNS")
    with monkeypatch.context() as patch:
        patch.setenv("GPT_DATA", "/sys/kernel")
        refused(run(steps=2), "/sys/kernel/prepared", "GPT_DATA")
    (folder / "runs").unlink()
    (folder / "runs").symlink_to(folder / "gone")
    refused(run(steps=2), "runs", "a link to a folder that is gone")


def test_losses_that_are_not_finite_stop_the_run(folder, run, trains):
    """Skipped steps change nothing, and the sentence has a command that is accepted."""
    trains(**TEN)
    before = contents(CHECKPOINT)
    changes = dict(steps=60, learning_rate=1e30, min_learning_rate=1e30, max_bad_steps=5, allow_changes=True)
    code, err = run("--resume", *(f"--{name}={value}" for name, value in changes.items()))
    refused((code, err), "not finite in 5 steps", "batch ", "--resume runs/run")
    assert metrics(folder)[-1]["skipped_steps"] == 5 and metrics(folder)[-1]["loss"] is None
    assert same(contents(CHECKPOINT), before)
    _, advice = err.strip().split("lower rate: ")
    assert "not finite" in run(*advice.split())[1]  # the rate is still too high


@pytest.mark.parametrize("options", [{}, dict(norm="rmsnorm", mlp="relu2", ema=0.5)], ids=["layernorm", "rmsnorm"])
def test_a_run_that_diverges_keeps_its_good_checkpoints(folder, run, trains, options):
    """From step 14 on the rate is wrong. The first weights to be saved are huge, but no step has been skipped yet."""
    trains(steps=14, eval_every=7, **options)
    before = files_in(folder, "runs/run/*.pt")
    best = contents("runs/run/best.pt")["best"]
    changes = ["--learning_rate", "1e20", "--eval_every", "3", "--save_every", "2", "--allow_changes"]
    code, err = run("--resume", "--steps", "18", *changes)
    assert err.count("warning: no checkpoint of step") == 2, err
    refused((code, err), "step 18", "--resume runs/run --learning_rate LOWER --allow_changes")
    assert files_in(folder, "runs/run/*.pt") == before
    trains("--resume", "--steps", "18", "--learning_rate", "5e-3", "--allow_changes")
    assert contents(CHECKPOINT)["step"] == 18 and contents("runs/run/best.pt")["best"] < best


def test_changed_tokens_are_refused(folder, run, trains):
    """Without its text, or with a text that has only been edited, a run continues with its prepared tokens."""
    trains(steps=4, eval_every=2)
    whole, text, older = contents(CHECKPOINT), folder / "corpus.txt", folder / "runs/run/checkpoint-2.pt"
    edited, at_2 = text.read_text() + "and the sea keeps on. ", older.read_bytes()

    def resume(*argv):
        (folder / CHECKPOINT).unlink(missing_ok=True)
        older.write_bytes(at_2)
        return run("--resume", *argv)

    tokens = files_in(folder, TOKENS)
    for change in (lambda: text.write_text(edited), text.unlink):
        change()
        assert resume()[0] == 0 and same(contents(CHECKPOINT), whole)
        assert len(tokens) == 3 and files_in(folder, TOKENS) == tokens
    text.write_text(edited)
    prepare("text", "bytes", text)
    refused(resume(), "tokens", "--allow_changes")
    assert resume("--allow_changes")[0] == 0
    assert contents(CHECKPOINT)["tokens_sha256"] != whole["tokens_sha256"]


def test_a_resumed_run_trains_on_the_text_that_is_named(folder, run, trains):
    """Or is refused. Its own text may have another place, and be named although it was edited."""
    trains(steps=4, eval_every=4)
    before, text = contents(CHECKPOINT), (folder / "corpus.txt").read_text()
    (folder / "other.txt").write_text(text.replace("sea", "lake"))
    other = prepare("text", "bytes", "other.txt").sha256
    for named in (["--tokenizer", "bytes+eot"], ["--depth", "3"], ["--tokens", "10"], ["--name", "new"]):
        refused(run("--resume", "--steps", "6", "--allow_changes", *named), named[0].strip("-"))
        assert same(contents(CHECKPOINT), before)
    moved = (folder / "corpus.txt").rename(folder / "moved.txt")
    for steps, name, edited, expected in (
        (5, "moved.txt", text, before["tokens_sha256"]),
        (6, "moved.txt", text.replace("sea", "lake"), other),
        (7, "moved.txt", text, before["tokens_sha256"]),
        (8, "other.txt", text, other),
    ):
        moved.write_text(edited)
        trains("--resume", "--steps", str(steps), "--input", name, "--allow_changes")
        saved = contents(CHECKPOINT)
        assert (saved["tokens_sha256"], saved["config"]["input"]) == (expected, name)


def test_a_run_of_a_copy_of_shakespeare_resumes(folder, run, trains):
    """That a version recorded which gave --input this meaning. Without its tokens, its text can be named."""
    trains(steps=4, eval_every=4)
    before, old = contents(CHECKPOINT), dict(data="shakespeare")
    torch.save(before | dict(config=before["config"] | old), CHECKPOINT)
    (folder / "runs/run/config.json").write_text(json.dumps(before["config"] | old))
    trains("--resume", "--steps", "5", "--allow_changes")
    shutil.rmtree("prepared")
    refused(run("--resume", "--steps", "6", "--allow_changes"), "shakespeare", "--data text")
    trains("--resume", "--steps", "6", "--allow_changes", "--data", "text")
    assert contents(CHECKPOINT)["tokens_sha256"] == before["tokens_sha256"]


def out_of_memory(*_, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..")


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_resumed_run_that_fails_before_its_first_step_changes_nothing(folder, run, trains, monkeypatch, checkpoint):
    trains(steps=4, eval_every=2)
    (folder / CHECKPOINT).unlink()  # so that steps are repeated
    if not checkpoint:
        (folder / "runs/run/checkpoint-2.pt").unlink()
    before = files_in(folder)
    monkeypatch.setattr(train, "take_step", out_of_memory)
    refused(run("--resume", "--weight_decay", "0", "--wandb", "offline", "--allow_changes"), "out of memory")
    assert files_in(folder) == before


def test_an_error_while_a_batch_is_loaded_is_one_sentence(folder, run, monkeypatch):
    """It comes from the thread that loads ahead, and ends the run only after the steps before it."""
    original = Batches.batch

    def batch(self, step, rows=slice(None)):
        if step == 8:
            raise OSError(errno.ENOENT, "No such file", "train-0.bin")
        return original(self, step, rows)

    monkeypatch.setattr(Batches, "batch", batch)
    refused(run(**TEN), "train-0.bin")
    wait_for((folder / CHECKPOINT).exists)  # a thread writes it
    assert contents(CHECKPOINT)["step"] == 5 and len(losses(folder)) == 8


def test_a_gpu_without_memory_is_one_sentence(folder, run, monkeypatch):
    """Here the exception of one. A run that fails before its first step leaves no folder."""
    monkeypatch.setattr(train, "take_step", out_of_memory)
    refused(run(), "out of memory", "--micro_batch", "--checkpoint_activations blocks")
    assert not list((folder / "runs").iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile, dtype", [("off", "float32"), ("blocks", "float16"), ("model", "bfloat16")])
def test_deterministic_resume_on_a_gpu_is_bit_exact(folder, compile, dtype, trains):
    assert_resumes_bit_exactly(folder, trains, steps=40, **ON_GPU | dict(compile=compile, dtype=dtype, ema=0.9))
    assert losses(folder)[-1] < 0.6 * losses(folder)[0]
