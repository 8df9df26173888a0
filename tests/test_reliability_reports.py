"""What breaks the reports of a run, made to happen: wandb, metrics.jsonl, loss.png."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from helpers import (
    FAST,
    children,
    contents,
    losses,
    metrics,
    reached,
    start,
    wait_for,
)

import report
import train


@pytest.fixture
def black_hole():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


@pytest.mark.parametrize("where", ["unreachable", "never answers"])
def test_wandb_out_of_reach_costs_nothing(folder, run, monkeypatch, black_hole, where):
    port = black_hole.getsockname()[1] if where == "never answers" else 9
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(report, "WANDB_SECONDS", 15)  # it takes so long to import and try
    since = time.monotonic()
    assert run(wandb="online")[0] == 0
    assert time.monotonic() - since < 30 and len(losses(folder)) == FAST["steps"]
    if where == "never answers":
        black_hole.accept()[0].close()  # BlockingIOError if it was never asked


def test_a_mirror_that_cannot_be_started(folder, run, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(report.subprocess, "Popen", fail)
    code, err = run(wandb="offline")
    assert code == 0 and len(losses(folder)) == FAST["steps"]
    assert "wandb: Resource temporarily unavailable; the training goes on, and python mirror.py runs/run sends" in err


def child(pid, name):
    """Process id of the one whose command line has `name`, started by any thread of another; waits until it is there.

    Never 0, which os.kill would take for this whole process group: pytest and the shell that runs it.
    """

    def found():
        for one in children(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if name.encode() in Path(f"/proc/{one}/cmdline").read_bytes():
                    return one

    return wait_for(found)


@pytest.mark.parametrize("victim", ["mirror.py", "wandb-core"])
def test_wandb_killed(folder, victim):
    """The process that reads the metrics, or wandb's own, of which the first then says so in one sentence."""
    process = start(folder, **FAST | dict(wandb="offline", steps=100_000, eval_every=100_000))
    wait_for(lambda: list(folder.glob("runs/run/wandb/offline-run-*")))
    mirror = child(process.pid, "mirror.py")
    os.kill(mirror if victim == "mirror.py" else child(mirror, victim), signal.SIGKILL)
    killed = len(losses(folder))
    wait_for(lambda: reached(folder, killed + 200))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert victim == "mirror.py" or err.count("the training goes on, and python mirror.py runs/run sends") == 1, err
    stopped = int(re.search(r"stopped at step (\d+)", out)[1])
    assert stopped > killed and [record["step"] for record in metrics(folder) if "loss" in record] == [
        *range(1, stopped + 1)
    ]


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


UNREADABLE = {
    "flipped bit": lambda line: bytes([line[0] ^ 0x80]) + line[1:],  # no UTF-8
    "cut": lambda line: line[: len(line) // 2],
    "zeros": lambda line: bytes(len(line)),
    "empty": lambda line: b"",
    "number": lambda line: b"7",
    "list": lambda line: b"[" + line + b"]",
    "no step": lambda line: line.replace(b'"step"', b'"stew"'),
    "step is text": lambda line: line.replace(b'"step": 1', b'"step": "1"'),
    "step is true": lambda line: line.replace(b'"step": 1', b'"step": true'),
    "too many digits": lambda line: line.replace(b'"step": 1', b'"step": ' + b"1" * 5000),
    "too deep": lambda line: b"[" * 100_000,
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_damaged_line_of_metrics_does_not_block_resuming(folder, run, kind):
    """It is left out with one warning, and the file is kept as it was."""
    path = folder / "runs/run/metrics.jsonl"
    run(steps=4, eval_every=2)
    before = losses(folder)
    (folder / "runs/run/checkpoint.pt").unlink()  # back to step 2
    lines = path.read_bytes().split(b"\n")
    lines[1] = UNREADABLE[kind](lines[1])  # that of step 1, after the evaluation of step 0
    damaged = b"\n".join(lines)
    path.write_bytes(damaged)
    report.plot_losses(path.parent, 1.0)  # as a run does whose file is damaged while it goes on
    code, err = run("--resume")
    assert code == 0 and err.count("warning: ") == 1 and "Traceback" not in err, err
    assert "warning: line 2 of runs/run/metrics.jsonl cannot be read" in err, err
    assert "the file as it was is runs/run/metrics.jsonl.damaged" in err, err
    assert (folder / "runs/run/metrics.jsonl.damaged").read_bytes() == damaged
    assert [record["step"] for record in metrics(folder)] == [0, 2, 2, 3, 4, 4]
    assert losses(folder) == before[1:]


def test_what_is_kept_of_a_damaged_metrics_file(tmp_path, capsys):
    """Each damaged file, under a name of its own; a cut last line is no damage; what is no number is not drawn."""
    path, copies = tmp_path / "metrics.jsonl", {}
    good = b'{"step": 1, "val_loss": 2.5}\n{"step": 2, "val_loss": "2.5"}\n{"step": 3, "loss": [7]}\n'
    config = train.load_config(["--wandb", "off"])
    for end, copy, said in (
        (b"", None, ""),
        (b'{"step": 4, "lo', None, ""),
        (b"\xff", None, ""),
        (b'{"step": 4, "lo\n', "metrics.jsonl.damaged", "warning: line 4 of"),
        (b"7\n8\n9", "metrics.jsonl-2.damaged", "warning: 2 lines, the first of them line 4, of"),
    ):
        path.write_bytes(good + end)
        if copy:
            copies[copy] = good + end
        report.Report(tmp_path, config, bits_per_nat=1.0, flops_per_step=1, peak=None, start=9)
        assert path.read_bytes() == good
        assert {path.name: path.read_bytes() for path in tmp_path.glob("*.damaged")} == copies
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == bool(copy)
    report.plot_losses(tmp_path, 1.0)
    assert (tmp_path / "loss.png").is_file()


@pytest.mark.parametrize("error", [ImportError(), MemoryError(), OSError(28, "disk full")])
def test_a_picture_that_cannot_be_drawn_costs_one_warning(folder, run, monkeypatch, error):
    """It is tried at each evaluation here, before the checkpoint is saved."""
    said, tried = [], []

    def fail(*_, **__):
        tried.append(1)
        raise error

    monkeypatch.setattr(report, "say", lambda text, *_, **__: said.append(text))
    monkeypatch.setattr(report, "DRAW_SECONDS", -1)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    if isinstance(error, ImportError):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as a broken installation
    code, err = run(steps=4, eval_every=2)
    assert code == 0 and "Traceback" not in err, err
    assert contents("runs/run/checkpoint.pt")["step"] == 4 and not (folder / "runs/run/loss.png").exists()
    (warning,) = [text for text in said if "warning" in text]
    reason = {ImportError: "matplotlib", MemoryError: "MemoryError", OSError: "disk full"}[type(error)]
    assert reason in warning and "cannot be drawn" in warning and "\n" not in warning, warning
    assert len(tried) == (0 if isinstance(error, ImportError) else 4)  # three evaluations and the end


@pytest.mark.parametrize("name", ["a$b_$", r"a\$b_$c^$"])
def test_a_name_that_looks_like_a_formula_is_drawn(folder, run, monkeypatch, name):
    said = []
    monkeypatch.setattr(report, "say", lambda text, *_, **__: said.append(text))
    code, err = run(name=name, steps=2, eval_every=2)
    assert code == 0 and (folder / "runs" / name / "loss.png").is_file(), err
    assert not [text for text in said if "warning" in text]
