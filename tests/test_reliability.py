"""What breaks a run, made to happen: docs/reliability.md has a line for each test here."""

import json
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch
from test_train import ROOT, environment, launch, losses, metrics
from test_train import TINY as SLOW_TO_START
from torture_resume import equal

import report
import sample
import train
from checkpoint import Saver, check_file, load_checkpoint, save_checkpoint
from guard import WINDOW, StepGuard
from model import GPT, GPTConfig

TINY = SLOW_TO_START | dict(input="corpus.txt", attention="sdpa", dropout=0.1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a corpus that is easy to learn."""
    (tmp_path / "corpus.txt").write_text("the sea keeps what the sea has taken. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPT_DATA", str(tmp_path / "prepared"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a user's shell; the loss kernel would be interpreted
    return tmp_path


@pytest.fixture
def run(folder, capsys):
    """Call train.py in this process: run(*argv, **options) -> (exit code, what it wrote to standard error)."""

    def run(*argv, **options):
        resumes = any(argument.startswith("--resume") for argument in argv)
        flags = [part for k, v in ({} if resumes else TINY | options).items() for part in (f"--{k}", str(v))]
        capsys.readouterr()
        try:
            train.main([*argv, *flags])
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            torch.use_deterministic_algorithms(False)
        return code, capsys.readouterr().err

    return run


def contents(path):
    return torch.load(path, weights_only=True)


def same(a, b):
    """All of two checkpoints but the flags that were typed."""
    return equal(a | {"config": None}, b | {"config": None})


def one_sentence(err, *parts):
    assert "Traceback" not in err and err.count("error: ") == 1, err
    sentence = err.split("error: ")[1]
    assert sentence.count("\n") == 1, err
    for part in parts:
        assert part in sentence, sentence


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def start(folder, *argv, ranks=1, **options):
    """train.py in a process, or torchrun's in several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *argv, *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=folder, env=environment(folder), **pipes)


def reached(folder, step, run="run"):
    path = folder / "runs" / run / "metrics.jsonl"
    return path.exists() and any(record["step"] >= step for record in metrics(folder, run) if "loss" in record)


def test_kill_9_at_random_moments():
    command = [sys.executable, str(ROOT / "tests" / "torture_resume.py"), "--kills", "3"]
    result = subprocess.run(command, env=environment(ROOT), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 kills in"), result.stdout


def test_signals_save_and_the_stopped_run_goes_on_bit_for_bit(folder, run):
    options = dict(steps=300, eval_every=200, eval_batches=1)
    assert run(name="whole", **options)[0] == 0
    process = start(folder, **TINY | options)
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


def test_second_ctrl_c_exits_at_once(folder):
    """In the middle of a step of many seconds."""
    slow = dict(batch_size=2048, n_embd=128, block_size=64, n_layer=4, eval_batches=1, micro_batch=8, eval_every=40)
    process = start(folder, **TINY | slow)
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
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    rank = lambda pid: int(re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[1])  # noqa: E731
    return sorted((int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()), key=rank)


def test_a_signal_to_one_rank_stops_all_and_fewer_ranks_go_on(folder, run):
    """With dropout: the mask of a row does not depend on the rank that has it."""
    options = dict(steps=200, eval_every=100, eval_batches=1, micro_batch=4)
    assert run(name="whole", **options)[0] == 0
    process = start(folder, ranks=2, **TINY | options)
    wait_for(lambda: reached(folder, 3))
    os.kill(workers(process)[1], signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopped at step" in out and contents("runs/run/checkpoint.pt")["step"] < 200
    assert run("--resume")[0] == 0
    assert losses(folder, "run") == pytest.approx(losses(folder, "whole"), rel=1e-3)


def test_a_run_with_dropout_keeps_its_micro_batches(folder, run):
    """One rank goes on with what two began; four, whose share is less than a micro-batch, are refused."""
    options = dict(micro_batch=0, batch_size=8, steps=20, eval_every=10)
    assert run(name="whole", **options | dict(micro_batch=4))[0] == 0
    process = start(folder, ranks=2, **TINY | options)
    assert process.wait(timeout=120) == 0
    (folder / "runs/run/checkpoint.pt").unlink()
    assert contents("runs/run/checkpoint-10.pt")["micro_batch"] == 4
    assert run("--resume", "runs/run")[0] == 0
    assert losses(folder, "run") == pytest.approx(losses(folder, "whole"), rel=1e-3)
    (folder / "runs/run/checkpoint.pt").unlink()
    process = start(folder, "--resume", "runs/run", ranks=4)
    assert process.wait(timeout=120) != 0 and "--micro_batch 2" in process.stderr.read()


def test_ranks_that_differ_in_what_they_resume():
    first = train.load_config(["--seed", "1"])
    other = SimpleNamespace(share=lambda value: asdict(first))
    train.check_agreement(first, other)
    with pytest.raises(ValueError, match=r"seed is 2 here and 1 on the first rank; name it by --seed"):
        train.check_agreement(train.load_config(["--seed", "2"]), other)


def test_a_rank_that_dies_takes_the_job_down(folder):
    process = start(folder, ranks=2, **TINY | dict(steps=100_000, eval_every=100_000))
    wait_for(lambda: reached(folder, 3))
    victim, killed = workers(process)[1], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - killed < 60
    assert "local_rank: 1" in err and f"pid: {victim}" in err and "SIGKILL" in err, err[-3000:]


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "gone"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, run, how):
    assert run()[0] == 0
    path = folder / "runs/run/checkpoint.pt"
    whole, before = contents(path), losses(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    changes = {"truncated": data[: len(data) // 2], "flipped": data, "empty": b""}
    path.unlink() if how == "gone" else path.write_bytes(changes[how])
    code, err = run("--resume")
    assert code == 0 and ("checkpoint.pt is damaged" in err or how == "gone"), err
    assert same(contents(path), whole) and losses(folder) == before
    if how != "gone":
        assert (folder / "runs/run/checkpoint.pt.damaged").read_bytes() == changes[how]


def test_no_good_checkpoint_left(folder, run):
    run(keep=1)
    path = folder / "runs/run/checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    code, err = run("--resume")
    assert code == 1 and path.stat().st_size == 1000
    one_sentence(err, "no good checkpoint is left in runs/run")


def test_no_checkpoint_left(folder, run):
    """The run begins again, and what is left of the old one stays, under other names."""
    run(steps=20)
    for old in (".old", "-2.old"):
        for path in folder.glob("runs/run/checkpoint*"):
            path.unlink()
        before = {name: (folder / "runs/run" / name).read_bytes() for name in ("metrics.jsonl", "best.pt")}
        assert run("--resume")[0] == 0
        assert {name: (folder / "runs/run" / (name + old)).read_bytes() for name in before} == before
        assert len(losses(folder)) == 20 and contents("runs/run/checkpoint.pt")["step"] == 20


def test_a_best_that_could_not_be_written_is_written_later(tmp_path, file_limit, capsys):
    saver = Saver(tmp_path, 2)
    weights = lambda step: {"step": step, "model": torch.full((1000,), float(step))}  # noqa: E731
    saver.save(weights(1), {}, True)
    saver.last_good()
    file_limit(2000)
    saver.save(weights(2), {}, True)
    saver.last_good()
    assert "best.pt is not the best one yet" in capsys.readouterr().err
    file_limit(resource.RLIM_INFINITY)
    assert contents(tmp_path / "best.pt")["step"] == 1
    saver.save(weights(3), {}, False)
    saver.close()
    assert contents(tmp_path / "best.pt")["step"] == 2 and contents(tmp_path / "checkpoint.pt")["step"] == 3


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(filelock.FileLock, "_acquire", lambda _: (_ for _ in ()).throw(NotImplementedError))
    with pytest.raises(OSError, match="has no locks"):
        Saver(tmp_path, 2)


def test_any_flipped_bit_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "checkpoint.pt"
    state = GPT(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=8, block_size=8)).state_dict()
    save_checkpoint(path, model=state, model_config={}, tokenizer={})
    data, expected = path.read_bytes(), load_checkpoint(path)
    places = torch.randint(8 * len(data), (400,)).tolist()
    noticed = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert equal(load_checkpoint(path), expected), f"bit {place} changes what is loaded"
        except ValueError:
            noticed += 1
    assert noticed > 40  # the rest is padding


def test_keep(folder, run):
    run(keep=1, eval_every=10)
    run(keep=3, eval_every=10)
    names = [{path.name for path in (folder / "runs" / name).glob("checkpoint*")} for name in ("run", "run-2")]
    assert names == [{"checkpoint.pt"}, {"checkpoint.pt", "checkpoint-30.pt", "checkpoint-20.pt"}]
    assert contents("runs/run-2/checkpoint-30.pt")["step"] == 30


@pytest.fixture
def file_limit():
    """No file may grow past so many bytes: what a full disk is to those that write it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_full(folder, run, file_limit):
    run()
    whole, before = contents("runs/run/checkpoint.pt"), losses(folder)
    (folder / "runs/run/checkpoint.pt").unlink()  # back to step 20
    file_limit(200_000)  # best.pt and the records fit, checkpoint.pt does not
    code, err = run("--resume")
    file_limit(resource.RLIM_INFINITY)
    assert code == 1 and err.count("warning: the checkpoint of step 40 cannot be written") == 1
    one_sentence(err, "File too large", "make room", "checkpoint-20.pt of step 20")
    check_file("runs/run/checkpoint-20.pt")
    assert not list((folder / "runs/run").glob(".*.tmp")) and losses(folder) == before
    assert run("--resume")[0] == 0
    assert same(contents("runs/run/checkpoint.pt"), whole)


def test_records_wait_for_a_full_disk(tmp_path, file_limit, capsys):
    config = train.load_config(["--wandb", "off"])
    tell = report.Report(tmp_path, config, bits_per_nat=1.0, flops_per_step=1, peak=None, start=0)
    for step in range(1, 9):
        if step == 3:
            file_limit((tmp_path / "metrics.jsonl").stat().st_size + 50)  # room for a part of the next line
        if step == 7:
            file_limit(resource.RLIM_INFINITY)
        tell.step(step, 1e-3, float("nan") if step == 2 else 1.0, 1.0, 0)
        assert len(report.read_metrics(tmp_path)) == len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in report.read_metrics(tmp_path)] == list(range(1, 9))
    assert report.read_metrics(tmp_path)[1]["loss"] is None and "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert capsys.readouterr().out.count("warning") == 1


@pytest.mark.parametrize("how", ["full disk", "closed pipe"])
def test_output_that_cannot_be_written(folder, how):
    """Both streams: a full disk behind them, or a pipe whose reader has gone. The run ends with its checkpoint."""
    flags = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    end = os.open("/dev/full", os.O_WRONLY)
    if how == "closed pipe":
        reader, end = os.pipe()
        os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    result = subprocess.run(command, cwd=folder, env=environment(folder), stdout=end, stderr=end, timeout=120)
    assert result.returncode == 0
    assert contents("runs/run/checkpoint.pt")["step"] == 40 and len(losses(folder)) == 40


def test_read_only_folder(folder):
    launch(folder, steps=4, eval_every=2)
    run = folder / "runs" / "run"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    run.chmod(0o555), run.parent.chmod(0o555), (run / ".lock").chmod(0o444)
    # root may write anywhere, unless its capability to (1) is dropped (24 is PR_CAPBSET_DROP)
    program = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1); os.execv(sys.executable, sys.argv[1:])"
    flags = [part for k, v in (SLOW_TO_START | {"input": "corpus.txt"}).items() for part in (f"--{k}", str(v))]
    for argv, message in (
        (["--resume", "runs/run"], "cannot write to runs/run"),
        (flags, "cannot make a folder in runs"),
    ):
        command = [sys.executable, "-c", program, sys.executable, str(ROOT / "train.py"), *argv]
        result = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
        assert result.returncode == 1
        one_sentence(result.stderr, message, "Permission denied")
    run.chmod(0o755), run.parent.chmod(0o755)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_token_file_changed_under_the_run(folder, run):
    run(steps=20, eval_every=10)
    (folder / "runs/run/checkpoint.pt").unlink()
    path = next(folder.glob("prepared/prepared/*/train.bin"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    code, err = run("--resume")
    assert code == 1 and contents("runs/run/checkpoint-10.pt")["step"] == 10
    one_sentence(
        err, "are not those that runs/run/checkpoint-10.pt was trained on (sha256 ", "prepare the same text again"
    )
    assert run("--resume", "--allow_changes", "True")[0] == 0


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


@pytest.mark.parametrize("poison", ["gradient", "loss", None])
def test_a_skipped_step_changes_nothing(poison):
    """Weights, moments and step count, by the optimizer of train.py itself."""
    model = GPT(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=8, block_size=8))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), fused=True)
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
    assert 0 < metrics(folder)[-2]["skipped_steps"] == whole["guard"]["skipped"] < TINY["steps"] / 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile", ["off", "blocks", "model"])
def test_resume_on_a_gpu_is_bit_for_bit_in_deterministic_mode(folder, run, compile):
    options = dict(device="cuda", dtype="bfloat16", attention="auto", n_embd=128, deterministic=True, compile=compile)
    assert run(**options)[0] == 0
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


@pytest.fixture
def black_hole():
    """Address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("where", ["unreachable", "never answers"])
def test_wandb_out_of_reach_costs_nothing(folder, run, monkeypatch, black_hole, where):
    monkeypatch.setenv("WANDB_BASE_URL", black_hole if where == "never answers" else "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(report, "WANDB_SECONDS", 1)
    since = time.monotonic()
    assert run(wandb="online")[0] == 0
    assert time.monotonic() - since < 30 and len(losses(folder)) == TINY["steps"]


def test_wandb_killed(folder):
    process = start(folder, **TINY | dict(wandb="offline", steps=400, eval_every=200))
    wait_for(lambda: list(folder.glob("runs/run/wandb/offline-run-*")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    mirror = [int(pid) for pid in children if b"mirror.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(mirror[0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(losses(folder)) == 400


def test_wandb_goes_on_with_its_run(folder, run):
    run(wandb="offline", steps=4, eval_every=2)
    (folder / "runs/run/checkpoint.pt").unlink()
    run("--resume")
    folders = [path.name for path in folder.glob("runs/run/wandb/offline-run-*")]
    assert len(folders) == 2 and {name.split("-")[-1] for name in folders} == {Path("runs/run/wandb_id").read_text()}


def test_every_record_is_one_line_of_json(folder, run):
    run()
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "val_loss" not in line] == list(range(1, 41))


def test_an_error_while_a_batch_is_fetched_is_one_sentence(folder, run, monkeypatch):
    """In the thread that fetches ahead; the last checkpoint is that of the steps that were taken."""
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
