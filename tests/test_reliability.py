"""What breaks a run, made to happen: docs/reliability.md has a line for each test here and in the two files beside."""

import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    BY_DEVICE,
    FAST,
    ON_GPU,
    ROOT,
    children,
    contents,
    environment,
    losses,
    metrics,
    one_sentence,
    reached,
    same,
    start,
    wait_for,
)
from torture_resume import equal

import report
import sample
import train
from config import Config
from distributed import Distributed
from guard import WINDOW, StepGuard
from model import GPT, GPTConfig
from optimizer import make_optimizer


def test_kill_9_at_random_moments():
    command = [sys.executable, str(ROOT / "tests" / "torture_resume.py"), "--kills", "3"]
    result = subprocess.run(command, env=environment(ROOT), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 kills in"), result.stdout


def test_signals_save_and_the_stopped_run_goes_on_bit_for_bit(folder, run):
    options = dict(steps=300, eval_every=200, eval_batches=1)
    assert run(name="whole", **options)[0] == 0
    process = start(folder, **FAST | options)
    wait_for(lambda: reached(folder, 3))
    process.send_signal(signal.SIGUSR1)
    wait_for((folder / "runs/run/checkpoint.pt").exists)
    process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
    code, err = run("--resume", "runs/run")
    assert code == 1
    one_sentence(err, "another process is training runs/run", "name another run with --resume")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Ctrl-C exits at once" in err, err
    stopped = int(re.search(r"stopped at step (\d+); go on with: python train.py --resume runs/run", out)[1])
    assert contents("runs/run/checkpoint.pt")["step"] == stopped < 300

    assert run("--resume")[0] == 0
    assert equal(
        contents("runs/whole/checkpoint.pt") | {"config": 0}, contents("runs/run/checkpoint.pt") | {"config": 0}
    )
    assert losses(folder, "whole") == losses(folder, "run")


def test_a_run_with_muon_goes_on_bit_for_bit(folder, run):
    assert run(optimizer="muon", n_kv_head=1)[0] == 0
    whole, before = contents("runs/run/checkpoint.pt"), losses(folder)
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume")[0] == 0
    assert same(contents("runs/run/checkpoint.pt"), whole) and losses(folder) == before
    assert before[-1] < 0.6 * before[0]


def test_best_value_comes_back(folder, run):
    """A resumed run whose losses are worse leaves best.pt alone."""
    options = dict(steps=20, eval_every=10)
    assert run(name="run", **options)[0] == 0
    best = (folder / "runs/run/best.pt").read_bytes()
    assert run("--resume", "--steps", "30", "--learning_rate", "9", "--allow_changes", "True")[0] == 0
    val = [record["val_loss"] for record in metrics(folder) if "val_loss" in record]
    assert val[-1] > min(val[:-1]) and (folder / "runs/run/best.pt").read_bytes() == best


def test_the_number_of_threads_comes_back(folder, run):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert run(name="run", steps=2)[0] == 0
        torch.set_num_threads(1)
        assert run("--resume", "--steps", "4", "--allow_changes", "True")[0] == 0
        assert contents("runs/run/checkpoint.pt")["threads"] == 2
    finally:
        torch.set_num_threads(threads)


def test_a_best_past_the_checkpoint_stays(folder, run):
    """One that was found after the checkpoint to go on from, and is better than what comes then."""
    assert run(name="run", steps=20, eval_every=10)[0] == 0
    best = (folder / "runs/run/best.pt").read_bytes()
    assert contents("runs/run/best.pt")["step"] == 20
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume", "--learning_rate", "9", "--allow_changes", "True")[0] == 0
    assert contents("runs/run/checkpoint.pt")["best"] == contents("runs/run/best.pt")["best"]
    assert (folder / "runs/run/best.pt").read_bytes() == best


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes(folder, nohup):
    """A reason to save and stop, but for nohup, which lets SIGHUP be ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        process = start(folder, **FAST | dict(steps=100_000))
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: reached(folder, 3))
    process.send_signal(signal.SIGHUP)
    if nohup:
        heard = len(losses(folder))
        wait_for(lambda: reached(folder, heard + 100))
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (folder / "runs/run/checkpoint.pt").exists() and "stopped at step" in out


def test_a_checkpoint_asked_for_before_the_first_step_ends_nothing(folder):
    process = start(folder, **FAST | dict(steps=3))
    wait_for(lambda: (folder / "prepared").exists())
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "best val loss" in out, err


def test_how_to_go_on_is_said_before_anything_that_takes_long(folder, run, monkeypatch, capsys):
    """Torchrun, Slurm and others kill a run soon after its SIGTERM; loss.png and wandb may take longer."""
    step, said = report.Report.step, []

    def stop(self, number, *rest):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        step(self, number, *rest)

    monkeypatch.setattr(report.Report, "step", stop)
    monkeypatch.setattr(report, "plot_losses", lambda *_: said.append(capsys.readouterr().out))
    assert run()[0] == 0
    assert "stopped at step 3; go on with: python train.py --resume runs/run" in said[-1]


def test_second_ctrl_c_exits_at_once(folder):
    """In the middle of a step of many seconds."""
    slow = dict(batch_size=2048, n_embd=128, block_size=64, n_layer=4, eval_batches=1, micro_batch=8, eval_every=40)
    process = start(folder, **FAST | slow)
    wait_for((folder / "runs/run/metrics.jsonl").exists)
    wait_for(lambda: metrics(folder))  # the evaluation before the first step
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() and "stopping" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    assert not (folder / "runs/run/checkpoint.pt").exists()


def workers(process):
    """Process ids of torchrun's ranks, in their order."""
    rank = lambda pid: int(re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[1])  # noqa: E731
    ranks = (pid for pid in children(process.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return sorted(ranks, key=rank)


@BY_DEVICE
@pytest.mark.parametrize("ranks, then", [(2, 1), (1, 2)])
def test_a_signal_to_one_rank_stops_all_and_another_number_goes_on(folder, run, on, ranks, then):
    """With dropout: the mask of a row does not depend on the rank that has it."""
    options = dict(steps=200, eval_every=100, eval_batches=1, micro_batch=4) | on
    assert run(name="whole", **options)[0] == 0
    process = start(folder, ranks=ranks, **FAST | options)
    wait_for(lambda: reached(folder, 3))
    os.kill(workers(process)[-1] if ranks > 1 else process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "stopped at step" in out and contents("runs/run/checkpoint.pt")["step"] < 200
    _, err = (process := start(folder, "--resume", ranks=then)).communicate(timeout=300)
    assert process.returncode == 0, err
    assert losses(folder, "run") == pytest.approx(losses(folder, "whole"), rel=1e-3)


@BY_DEVICE
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_stops_all_ranks(folder, on, number):
    """It hands it on, waits for them, and then ends with an error of its own."""
    process = start(folder, ranks=2, **FAST | dict(steps=100_000, eval_every=100_000) | on)
    wait_for(lambda: reached(folder, 3))
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    stopped = int(re.search(r"stopped at step (\d+); go on with: torchrun ... train.py --resume runs/run", out)[1])
    assert contents("runs/run/checkpoint.pt")["step"] == stopped
    assert process.returncode == 1 and f"got signal: {int(number)}" in err, err


def test_a_run_with_dropout_keeps_its_micro_batches(folder, run):
    """One rank goes on with what two began; three, whose share is less than a micro-batch, are refused."""
    options = dict(micro_batch=0, batch_size=6, steps=10, eval_every=5)
    assert run(name="whole", **options | dict(micro_batch=3))[0] == 0
    process = start(folder, ranks=2, **FAST | options)
    assert process.wait(timeout=300) == 0
    (folder / "runs/run/checkpoint.pt").unlink()
    assert contents("runs/run/checkpoint-5.pt")["micro_batch"] == 3
    assert run("--resume", "runs/run")[0] == 0
    assert losses(folder, "run") == pytest.approx(losses(folder, "whole"), rel=1e-3)
    (folder / "runs/run/checkpoint.pt").unlink()
    process = start(folder, "--resume", "runs/run", ranks=3)
    assert process.wait(timeout=300) != 0 and "--micro_batch 2" in process.stderr.read()


def test_ranks_that_differ(folder):
    """As those do of which each finds another newest run."""
    (folder / "differ.py").write_text("seed = int(__import__('os').environ['RANK'])")
    process = start(folder, "differ.py", ranks=2, **FAST)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0 and "[rank" not in err, err
    assert "error on rank 1: seed is 1 here and 0 on the first rank; name it by --seed" in err


def test_the_first_rank_of_each_machine_says_what_is_wrong(folder, run, monkeypatch):
    """Before it has met the others, which say the same."""
    for name, value in dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    code, err = run("none.py")
    assert code == 1 and err.startswith("error on rank 3: config file none.py does not exist"), err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run("none.py") == (1, "")


def test_more_processes_than_gpus(folder, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in dict(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3").items():
        monkeypatch.setenv(name, value)
    code, err = run(device="cuda")
    assert code == 1
    one_sentence(err, "3 processes here want a GPU each, but there are 2; start as many as that by --nproc_per_node=2")


def test_a_gpu_without_memory_is_one_sentence(folder, run, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..")

    monkeypatch.setattr(train, "set_learning_rate", fail)
    code, err = run()
    assert code == 1
    one_sentence(err, "CUDA out of memory; take --micro_batch auto")


@BY_DEVICE
def test_a_rank_that_dies_takes_the_job_down(folder, on):
    process = start(folder, ranks=2, **FAST | dict(steps=100_000, eval_every=100_000) | on)
    wait_for(lambda: reached(folder, 3))
    victim, killed = workers(process)[1], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0 and time.monotonic() - killed < 60
    assert "local_rank: 1" in err and f"pid: {victim}" in err and "SIGKILL" in err, err[-3000:]


def test_a_loss_that_is_not_finite_stops_the_run(folder, run):
    run(steps=20, eval_every=10)
    before = contents("runs/run/checkpoint.pt")
    changes = ["--steps", "60", "--learning_rate", "1e30", "--allow_changes", "True", "--max_bad_steps", "5"]
    code, err = run("--resume", *changes)
    assert code == 1
    one_sentence(
        err, "no step from ", "windows ", "last good checkpoint is runs/run/checkpoint.pt of step 20", "--resume"
    )
    first, last = map(int, re.search(r"from (\d+) to (\d+) was", err).groups())
    assert last - first == 4 and f"batch {first - 1} of seed 1337" in err
    assert metrics(folder)[-1]["skipped_steps"] == 5 and metrics(folder)[-1]["loss"] is None
    assert equal(contents("runs/run/checkpoint.pt"), before)


def test_bad_steps_between_logs_are_noticed_at_an_evaluation(folder, run):
    changes = dict(learning_rate=1e30, min_learning_rate=0.0, log_every=1000, max_bad_steps=5, steps=60, eval_every=30)
    code, err = run(**changes)
    assert code == 1
    one_sentence(err, "to 30 was taken", "last good checkpoint is none")


def test_bad_steps_that_are_over_before_anyone_looks_are_noticed(folder, run, monkeypatch):
    clip, steps = train.clip_grad_norm_, itertools.count(1)
    monkeypatch.setattr(train, "clip_grad_norm_", lambda *args: clip(*args) / (not 6 <= next(steps) <= 10))
    code, err = run(log_every=30, max_bad_steps=5)
    assert code == 1
    one_sentence(err, "no step from 6 to 20 was taken", "last good checkpoint is none")
    steps = itertools.count(1)
    assert run(log_every=30, max_bad_steps=6, name="patient")[0] == 0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("poison", ["gradient", "loss", None])
def test_a_skipped_step_changes_nothing(poison, kind):
    """Weights, moments and step count, by the optimizer of train.py itself."""
    model = GPT(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=8, block_size=8))
    optimizer = make_optimizer(model, Config(optimizer=kind), Distributed(0, 1, "cpu"))
    guard = StepGuard()
    tokens = torch.randint(8, (2, 8))
    for step in range(3):
        loss = model(tokens, tokens)
        loss.backward()
        bad = poison is not None and step == 1
        if bad and poison == "gradient":
            model.norm.weight.grad[3] = float("inf")
        if bad and poison == "loss":
            loss = loss / 0
        before = {name: value.clone() for name, value in model.state_dict().items()}
        moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
        optimizer.found_inf = guard(loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        after = [value for state in optimizer.state.values() for value in state.values()]
        assert equal(before, model.state_dict()) == bad
        assert step == 0 or equal(moments, after) == bad
        assert guard.row == bad and guard.skipped == (poison is not None and step > 0)


def test_outliers_are_skipped_once_there_is_something_to_compare_with():
    guard = StepGuard(zscore=4.0)
    ordinary = 3 + 0.1 * torch.randn(2 * WINDOW)
    assert guard(torch.tensor(50.0), torch.tensor(1.0)) == 0  # the first step of all
    assert sum(guard(loss, loss) for loss in ordinary) == 0
    for loss, norm, skip in ((5.0, 3.0, 1), (3.0, 5.0, 1), (3.0, 3.0, 0), (1.0, 1.0, 0), (float("nan"), 3.0, 1)):
        assert guard(torch.tensor(loss), torch.tensor(norm)) == skip
    assert guard.skipped == 3 and guard.row == 1
    assert sum(guard(torch.tensor(6.0), torch.tensor(3.0)) for _ in range(WINDOW)) < WINDOW / 4  # a new level is learnt


def test_float16_and_its_scaler_resume(folder, run, monkeypatch):
    """Its overflows, of which a huge scale makes some, are steps that the guard skips."""
    huge = 2.0**28
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=huge))
    options = dict(dtype="float16", dropout=0.1)
    assert run(**options)[0] == 0
    whole, before = contents("runs/run/checkpoint.pt"), losses(folder)
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume")[0] == 0
    assert same(contents("runs/run/checkpoint.pt"), whole)
    assert losses(folder) == before and 0 < whole["scaler"]["scale"] < huge
    assert 0 < metrics(folder)[-2]["skipped_steps"] == whole["guard"]["skipped"] < FAST["steps"] / 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", ["off", "blocks", "model"])
def test_resume_on_a_gpu_is_bit_for_bit_in_deterministic_mode(folder, run, compile):
    assert run(**ON_GPU | dict(compile=compile))[0] == 0
    whole, before = contents("runs/run/checkpoint.pt"), losses(folder)
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume")[0] == 0
    assert same(contents("runs/run/checkpoint.pt"), whole) and losses(folder) == before


def test_attention_health_line(folder, run):
    assert run(log_attention=True, steps=4, eval_every=2)[0] == 0
    records = [record["attention_lse"] for record in metrics(folder) if "val_loss" in record]
    assert [len(record) for record in records] == [2, 2, 2] and records[0] != records[2]


class Evil:
    def __reduce__(self):
        return os.system, ("touch was_here",)


@pytest.mark.parametrize("write", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing))])
def test_a_malicious_checkpoint_runs_nothing(folder, run, write):
    run(steps=2)
    for name in ("best.pt", "checkpoint.pt"):
        good = contents(folder / "runs/run" / name)
        write(good | {"model": Evil()}, folder / "runs/run" / name)
    assert run("--resume")[0] == 1
    for name in ("best.pt", "checkpoint.pt", ""):
        if (folder / "runs/run" / name).exists():
            with pytest.raises(ValueError, match=r"damaged|not one of this project|no good checkpoint"):
                sample.main(sample.SampleConfig(run=f"runs/run/{name}", device="cpu"))
    assert not (folder / "was_here").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert (folder / "was_here").exists()  # it would have


def test_an_error_while_a_batch_is_fetched_is_one_sentence(folder, run, monkeypatch):
    """In the thread that fetches ahead, once the steps before it are taken. The last checkpoint stays."""
    original = train.Batches.batch

    def batch(self, step, rows=slice(None)):
        if step == 30:
            raise OSError("the token file is gone; prepare the corpus again")
        return original(self, step, rows)

    monkeypatch.setattr(train.Batches, "batch", batch)
    code, err = run()
    assert code == 1
    one_sentence(err, "the token file is gone")
    assert contents("runs/run/checkpoint.pt")["step"] == 20 and len(losses(folder)) == 30
