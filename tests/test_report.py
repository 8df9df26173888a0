"""Reports of a run: metrics.jsonl, the terminal, wandb; and plot.py: the curves, the legend, and errors."""

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import FAST, at_step, environment, finish, in_process, losses, metrics, run_script, start, wait_for_step
from matplotlib.figure import Figure
from wandb_server import serve

import train
from data.tokenizer import make_tokenizer
from model import GPT
from training import report
from training.config import Config
from training.curves import plot_losses
from training.report import Report, flops_per_token

SHORT = dict(steps=4, eval_every=2)


def test_metrics_of_a_run(folder, trains, monkeypatch):
    """The numbers fit together. Time that is spent on evaluation is no time of training."""
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *rest: time.sleep(0.2) or evaluate(*rest))
    trains(**SHORT)
    records = metrics(folder)
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3, 4, 4]
    trained, evaluated = ([r for r in records if name in r] for name in ("loss", "val_loss"))
    assert [record["step"] for record in trained] == [1, 2, 3, 4] and len(evaluated) == 3
    for record in evaluated:  # a token is a byte
        assert record["val_bpb"] == pytest.approx(record["val_loss"] / 0.6931472)
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds) and 0 < seconds[0]
    names = {"step", "seconds", "loss", "learning_rate", "grad_norm", "skipped_steps", "tokens_per_second", "tflops"}
    assert all(record.keys() - {"mfu", "peak_memory"} == names for record in trained)
    assert min(record["tokens_per_second"] for record in trained[1:]) > 8 * 32 / 0.2
    flops = [record["tflops"] / record["tokens_per_second"] * 1e12 for record in trained]
    model = GPT(Config(**FAST).gpt_config(make_tokenizer("bytes")))
    assert flops == pytest.approx([flops_per_token(model)] * 4)


@pytest.mark.parametrize("columns, has", [(30, "loss"), (80, "left"), (120, "lr")])
def test_lines_fit_the_terminal(folder, monkeypatch, capsys, columns, has):
    """A progress line never wraps, which would leave a piece of it behind."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    out = in_process(capsys, **FAST | SHORT).stdout
    lines = [text.split("\n")[0] for text in out.split("\r\x1b[K")]
    progress = [line for line in lines if re.match(r"step \d/4  loss", line)]
    assert len(progress) == 4 and all(has in line for line in progress)
    assert columns < 80 or ("? left" in progress[0] and "0:00:0" in progress[1])
    assert max(map(len, progress)) < columns


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_by_time(folder, monkeypatch, capsys, terminal):
    """A terminal shows the first step and then one every two seconds; all outputs tell how long a long run takes."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setattr(report, "PROGRESS_SECONDS", -1)
    monkeypatch.setattr(report, "LONG", 0)
    monkeypatch.setattr(report, "MEASURED", 0)
    out = in_process(capsys, **FAST | dict(steps=6, eval_every=6, log_every=4)).stdout
    shown = [int(step) for step in re.findall(r"step (\d)/6  loss", out)]
    assert shown == ([1, 2, 3, 4, 5, 6] if terminal else [4]) and len(losses(folder)) == 1
    assert out.count("more hours") == 1


@pytest.mark.parametrize(
    "device, world, printed",
    [
        ("cpu", 1, "cpu (1 thread), float32"),
        ("cpu", 2, "cpu (1 thread) x 2 with DDP, float32"),
        ("mps", 1, "mps (Apple M3), float32"),
        ("cuda", 1, "cuda (NVIDIA H200) x 1, bfloat16"),
    ],
)
def test_the_first_lines_name_the_chip(folder, monkeypatch, capsys, device, world, printed):
    describe = Report.describe

    def elsewhere(self, model, batches, ranks, micro_batch):
        describe(self, model, batches, ranks._replace(device=device, world=world), micro_batch)

    monkeypatch.setattr(Report, "describe", elsewhere)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert f"device     {printed}\n" in in_process(capsys, **FAST | SHORT).stdout


def test_resuming_drops_later_records_and_a_cut_line(folder, trains):
    """The rest is kept byte for byte, and the steps after the checkpoint are reported anew."""
    trains(**SHORT)
    path = folder / "runs/run/metrics.jsonl"
    before = path.read_text().splitlines(keepends=True)
    (folder / "runs/run/checkpoint.pt").unlink()  # back to step 2
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')
    err = trains("--resume")
    assert err.count("warning") == 1, err
    after = path.read_text().splitlines(keepends=True)
    assert after[:4] == before[:4] and len(after) == len(before)
    records = [json.loads(line) for line in after]
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3, 4, 4]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(records))  # it goes on from step 2


def test_the_end_of_a_resumed_run(folder, monkeypatch, capsys):
    """It has the time and the best step of its first part. What it tells a user to type is quoted."""
    validation = iter([5.0, 1.0, 1.2])
    monkeypatch.setattr(train, "evaluate", lambda *rest: next(validation))
    at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    out = in_process(capsys, **FAST | SHORT | dict(name="my $run")).stdout
    assert "stopped at step 3; resume with: python train.py --resume 'runs/my $run'\n" in out
    path = folder / "runs/my $run/metrics.jsonl"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": 360'))  # as if it had taken an hour
    out = in_process(capsys, "--resume").stdout
    assert "best val loss 1.0000 nats/token" in out and "at step 2 of 4" in out and "trained for 1:00:0" in out
    assert "runs/my $run/loss.png" in out and "python sample.py 'runs/my $run'\n" in out


@pytest.mark.slow
def test_wandb_stores_the_steps_that_a_resumed_run_repeats(folder):
    """As after a crash at step 8, whose newest checkpoint is of step 4. The id of the run stays."""
    with serve() as server:
        finish(start(folder, variables=server.variables, **FAST | dict(wandb="online", steps=8, eval_every=4)))
        (folder / "runs/run/checkpoint.pt").unlink()
        changes = ["--learning_rate", "2e-3", "--allow_changes"]
        finish(start(folder, "--resume", *changes, variables=server.variables))
    stored = [{name: record.get(name) for name in ("step", "loss", "val_loss")} for record in server.records]
    assert [record["step"] for record in stored] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 5, 6, 7, 8, 8]
    named = [{name: record.get(name) for name in ("step", "loss", "val_loss")} for record in metrics(folder)]
    assert stored[:6] + stored[11:] == named
    # run-TIME-ID, with "-1" after it if both began in the same second
    ids = [path.name.split("-")[2] for path in folder.glob("runs/run/wandb/run-*")]
    assert ids == 2 * [(folder / "runs/run/wandb_id").read_text()]


@pytest.mark.slow
def test_a_run_ends_although_wandb_has_gone_away(folder):
    with serve() as server:
        variables = server.variables | dict(WANDB_FINISH_TIMEOUT="2")
        process = start(folder, variables=variables, **FAST | dict(wandb="online", steps=200, eval_every=100))
        wait_for_step(folder, 3)
    _, err = finish(process)
    assert "wandb sync runs/run/wandb/latest-run" in err and len(losses(folder)) == 200, err


@pytest.mark.parametrize("server", ["fails", "is out of reach"])
def test_an_error_of_wandb_ends_only_its_logging(folder, monkeypatch, capsys, server):
    """Not every error has a message, or is an Exception. A sample is printed without control characters."""

    def log(values):
        if values["step"] == 3:
            raise TimeoutError

    def init(**options):
        if server == "is out of reach":
            raise SystemExit("TimeoutError")
        return SimpleNamespace(id="7", log=log, finish=log, define_metric=lambda *_, **options: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr("tiktoken.Encoding.decode", lambda *_: "a <b>\n\x1b[2Jc")
    result = in_process(capsys, **FAST | SHORT | dict(wandb="online", sample_every=2))
    assert result.returncode == 0 and len(losses(folder)) == 4
    assert result.stderr.count("warning: ") == 1 and "TimeoutError" in result.stderr, result.stderr
    assert re.search("sample after 2 steps.*:\na <b>\n\ufffd\\[2Jc\n", result.stdout)


RECORDS = [
    dict(step=0, seconds=0.5, val_loss=4.0, val_bpb=2.0),
    dict(step=10, seconds=2.0, loss=3.0),
    dict(step=20, seconds=4.0, loss=None),
    dict(step=30, seconds=6.5, loss=2.5),
    dict(step=30, seconds=7.0, val_loss=2.0, val_bpb=1.0),
    dict(step=40, seconds=9.0, val_loss=2.5, val_bpb=1.25),
]


@pytest.fixture
def figures(folder, monkeypatch):
    """The figures that this test has drawn."""
    figures, save = [], Figure.savefig

    def savefig(figure, path, **options):
        figures.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


@pytest.fixture
def call(figures, monkeypatch, capsys):
    """plot.py in this process: call(*flags) -> (exit code, out, err)."""
    return lambda *flags: run_script(monkeypatch, capsys, "plot.py", *flags)


def make_run(name, records=RECORDS, **options):
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    options = dict(name=name, tokenizer="char", batch_size=2, block_size=8, learning_rate=1e-3, keep=2) | options
    (folder / "config.json").write_text(json.dumps(options))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def curves(figure):
    """The points of each line."""
    return [line.get_xydata().tolist() for line in figure.axes[0].get_lines()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_loss_png(figures):
    """Both curves of one run, whose best evaluation has a ring and is in the title."""
    run = make_run("a$_中")
    plot_losses(Path(run))
    axis = figures[0].axes[0]
    [ring] = axis.collections
    assert curves(figures[0]) == [[[10, 3.0], [30, 2.5]], [[0, 4.0], [30, 2.0], [40, 2.5]]]
    assert legend(figures[0]) == ["training", "validation"] and ring.get_offsets().tolist() == [[30, 2.0]]
    assert axis.get_title() == "a$_中: best 2.0000 nats/token = 1.0000 bits/byte at step 30"
    assert Path(run, "loss.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs(call, figures):
    """Their curves over any x, and a legend with the options that differ, or folders where names are equal."""
    first = make_run("a", embed_scale=1.0)  # an option that is gone: all runs have this value
    second = make_run("_中$", keep=3, learning_rate=2)
    assert call(first, second) == (0, "losses.png\n", "") and Path("losses.png").exists()
    assert legend(figures[0]) == ["a: learning_rate=0.001", "_中$: learning_rate=2"]
    call(first, second, "--x", "tokens")
    call(first, second, "--x", "seconds", "--y", "bpb")
    tokens, bits = map(curves, figures[1:])
    assert tokens == 2 * [[[160, 3.0], [480, 2.5]], [[0, 4.0], [480, 2.0], [640, 2.5]]]
    assert bits == 2 * [[[2.0, 1.5], [6.5, 1.25]], [[0.5, 2.0], [7.0, 1.0], [9.0, 1.25]]]
    call(first, make_run("short", RECORDS[:2]))
    assert [line.get_marker() for line in figures[-1].axes[0].get_lines()] == ["None", "None", "o", "o"]  # of one point
    call(first, make_run("old/a"), "--out", "b.svg")
    assert legend(figures[-1]) == ["runs/a", "runs/old/a"] and Path("b.svg").exists()


def test_a_note_about_other_tokenizers(call):
    """Those of one name may differ too, because they were trained on different texts."""
    first, same, other = make_run("a"), make_run("same"), make_run("other", tokenizer="bytes")
    trained = make_run("trained", [*RECORDS[1:4], RECORDS[4] | dict(val_bpb=1.5)])
    for second, differ in ((same, False), (other, True), (trained, True)):
        assert ("--y bpb" in call(first, second)[2]) == differ
        assert call(first, second, "--y", "bpb")[2] == ""


def test_plot_imports_no_torch(folder):
    code = f"import sys, plot; plot.main([{make_run('a')!r}]); sys.exit('torch' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", code], env=environment(folder)).returncode


def test_mistakes_of_plot(call):
    run, foreign = make_run("run"), make_run("foreign")
    empty, young = make_run("empty", []), make_run("young", RECORDS[1:3])
    Path(foreign, "config.json").write_text('{"tokenizer": "char"}')
    for flags, words in (
        ([], "NAME"),
        (["runs/none", run], "runs/none"),
        (["runn"], "runn run"),
        (["gpt2"], "OpenAI's runs/gpt2"),
        (["./run"], str(Path("run").absolute())),  # as other commands, not runs/run
        ([empty], empty),
        ([empty, foreign], "note"),
        ([young, "--y", "bpb"], f"{young} --y"),
        ([run, "--out", "a.text"], "a.text --out"),
        ([foreign], f"{foreign} batch_size block_size"),
    ):
        code, *_ = call(*flags)
        assert code.startswith("error: ") and all(word in code for word in words.split()), code
    assert not list(Path().glob("*.png"))
    code, _, err = call(run, empty)
    assert code == 0 and f"note: {empty} has no losses" in err
