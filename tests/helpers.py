"""Runs of train.py for the tests, in this process or in others, and what they leave behind."""

import base64
import fcntl
import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

import train
from data import tokenizer
from data.tokenizer import to_state
from training.checkpoint import save_checkpoint
from training.ranks import rank_command
from training.report import Report
from weights import FORMAT

ROOT = Path(__file__).parents[1]
FAST = dict(
    data="text", input="corpus.txt", tokenizer="bytes", device="cpu", n_layer=2, n_head=2, n_embd=32, block_size=32,
    batch_size=8, steps=40, warmup_steps=2, learning_rate=5e-3, dropout=0.1, eval_every=20, eval_batches=4, log_every=1,
    attention="sdpa",
)  # fmt: skip
PATHS = dict(
    norm="rmsnorm", norm_weight=False, qk_norm=True, tie_head=False, embed_skip=True,
    value_residual=True, position="rope", key_offset=True, window=9,
)  # fmt: skip
ON_GPU = dict(device="cuda", dtype="bfloat16", attention="auto", n_embd=128, deterministic=True, compile="off")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BY_DEVICE = pytest.mark.parametrize("on", [pytest.param({}, id="cpu"), pytest.param(ON_GPU, id="cuda", marks=TWO_GPUS)])


def in_process(capsys, *argv, **options):
    """Call train.py in this process, because starting another takes seconds; returns a CompletedProcess."""
    capsys.readouterr()
    try:
        with rank_command(True, ""):
            train.main(flags(argv, options))
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    return subprocess.CompletedProcess(argv, code, *capsys.readouterr())


def run_script(monkeypatch, capsys, script, *argv):
    """Run a script of ours in this process, as starting another takes seconds; returns (exit code, out, err)."""
    script = str(ROOT / script)
    monkeypatch.setattr(sys, "argv", [script, *argv])
    capsys.readouterr()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
        sys.exit(0)
    signal.signal(signal.SIGINT, handler)  # the script's ends the process, and so would a later test's Ctrl-C
    return end.value.code, *capsys.readouterr()


def flags(argv, options):
    """The command line: argv, then the options. A resumed run has its options already and gets only argv."""
    resumes = any(argument.startswith("--resume") for argument in argv)
    return [*argv, *(part for name, value in options.items() if not resumes for part in (f"--{name}", str(value)))]


def rank_file(monkeypatch, tokens):
    """The contents of a file with these tokens in the format of GPT-2's, which is taken for that file."""
    contents = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    monkeypatch.setattr(tokenizer, "GPT2_SHA256", hashlib.sha256(contents).hexdigest())
    return contents


def make_gpt2_small(monkeypatch):
    """Give the tokenizer gpt2 only the 256 bytes and end-of-text, because its file is too large to keep here."""
    tokens = [bytes([value]) for value in range(256)]
    rank_file(monkeypatch, tokens)
    monkeypatch.setattr(tokenizer, "_gpt2_ranks", lambda path: tokens)
    monkeypatch.setattr(tokenizer, "GPT2_VOCABULARY", 257)


def at_step(monkeypatch, step, function):
    """Let runs in this process call a function after they have reported step number `step`."""
    original = Report.step

    def report_and_call(self, number, *rest):
        original(self, number, *rest)
        if number == step:
            function()

    monkeypatch.setattr(Report, "step", report_and_call)


started = []  # processes that the current test has started


def start(folder, *argv, ranks=1, script=ROOT / "train.py", variables=(), stdin=None, terminal=None, **options):
    """Start train.py, with torchrun if there are several ranks. It is killed when the test ends.

    terminal: its controlling terminal, from and to which it reads and writes; else it has pipes.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script), *flags(argv, options)]
    pipes = dict(stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if terminal is not None:
        pipes = dict(stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
        pipes["preexec_fn"] = partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0)
    process = subprocess.Popen(command, cwd=folder, env=environment(folder) | dict(variables), **pipes)
    started.append(process)
    return process


def environment(folder):
    """A user's environment: without the Triton interpreter that the kernel tests turn on, and this process's wandb."""
    ours = ("TRITON_INTERPRET", "WANDB_SERVICE")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    paths = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    return variables | {"GPT_DATA": str(folder / "prepared"), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def finish(process, code=0):
    """Wait for the end of a process; returns (standard output, standard error)."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


def children(pid):
    """Ids of the processes that a process has started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
            found += map(int, path.read_text().split())
    return found


def end_processes():
    """Kill the processes that a failed test left, and their children."""
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


def metrics(folder, run="run"):
    """All records of metrics.jsonl; a line without an end is still being written."""
    *lines, _ = (folder / "runs" / run / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]  # JSON has no NaN


def losses(folder, run="run"):
    return [record["loss"] for record in metrics(folder, run) if "loss" in record]


def wait_for_step(folder, step):
    """Wait until the run has reported step number `step`."""
    path = folder / "runs/run/metrics.jsonl"
    wait_for(lambda: path.exists() and any(record["step"] >= step for record in metrics(folder) if "loss" in record))


def wait_for(condition, seconds=300):
    """Wait until a function returns something true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def save_model(path, model, tokenizer):
    """Write a network, as the checkpoint of a run; returns its contents."""
    saved = dict(format=FORMAT, config={}, step=1, model=model.state_dict(), model_config=asdict(model.config))
    saved["tokenizer"] = to_state(tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, saved)
    return saved


def contents(path):
    return torch.load(path, weights_only=True)


def files_in(folder, pattern="runs/run/*"):
    """{name: contents} of the files that match a pattern."""
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def same(a, b):
    """Whether the contents of two checkpoints are equal bit for bit, apart from the run's options."""
    return equal(a | {"config": None}, b | {"config": None})


def assert_same_runs(folder, found="run", expected="whole"):
    """Two runs of these names have the same bits in their newest checkpoints, and the same losses."""
    assert same(*(contents(folder / f"runs/{name}/checkpoint.pt") for name in (found, expected)))
    assert losses(folder, found) == losses(folder, expected)


def assert_resumes_bit_exactly(folder, trains, steps, **options):
    """A run that has lost its last checkpoint goes on from the middle and equals an uninterrupted one."""
    trains(name="whole", steps=steps, eval_every=steps, **options)
    trains(steps=steps, eval_every=steps // 2, **options)
    (folder / "runs/run/checkpoint.pt").unlink()
    trains("--resume")
    assert_same_runs(folder)
    assert contents(folder / "runs/run/checkpoint.pt")["step"] == len(losses(folder)) == steps


def equal(a, b):
    """Bit for bit, in nested dicts and lists of tensors and plain values; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def one_sentence(err, *parts):
    """Assert that standard error has one error, of one line, that contains all parts, and no traceback."""
    assert "Traceback" not in err and err.count("error: ") == 1, err
    sentence = err.split("error: ")[1]
    assert sentence.count("\n") == 1, err
    for part in parts:
        assert part in sentence, sentence


def refused(result, *parts):
    """Assert that a run, (exit code, standard error), ended with code 1 and one sentence that contains all parts."""
    code, err = result
    assert code == 1, err
    one_sentence(err, *parts)
