"""Reports of a run: metrics.jsonl, the terminal, wandb; and plot.py: the curves, the legend, and errors."""

import itertools
import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import FAST, ROOT, at_step, finish, in_process, losses, metrics, run_script, start, wait_for_step
from matplotlib.figure import Figure
from wandb_server import serve

import train
from data.tokenizer import make_tokenizer
from model import GPT
from training.config import Config
from training.report import flops_per_token

SHORT = dict(steps=4, eval_every=2)


def test_metrics_of_a_run(folder, run, monkeypatch):
    """The numbers fit together. Time that is spent on evaluation is no time of training."""
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *rest: time.sleep(0.2) or evaluate(*rest))
    assert run(**SHORT)[0] == 0
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


def test_resuming_drops_later_records_and_a_cut_line(folder, run):
    """The rest is kept byte for byte, and the steps after the checkpoint are reported anew."""
    run(**SHORT)
    path = folder / "runs/run/metrics.jsonl"
    before = path.read_text().splitlines(keepends=True)
    (folder / "runs/run/checkpoint.pt").unlink()  # back to step 2
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')
    code, err = run("--resume")
    assert code == 0 and err.count("warning") == 1, err
    after = path.read_text().splitlines(keepends=True)
    assert after[:4] == before[:4] and len(after) == len(before)
    records = [json.loads(line) for line in after]
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3, 4, 4]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(records))  # it goes on from step 2


def test_printed_commands_are_quoted(folder, capsys, monkeypatch):
    name = "my $run"
    at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    stopped, ended = in_process(capsys, **FAST | SHORT | dict(name=name)).stdout, in_process(capsys, "--resume").stdout
    for out, words in ((stopped, "resume with: "), (ended, "sample from it: ")):
        (command,) = (line.split(words)[1] for line in out.splitlines() if words in line)
        assert shlex.split(command)[-1] == f"runs/{name}"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_wandb_id(folder, run):
    assert run(wandb="offline", **SHORT)[0] == 0
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume")[0] == 0
    # offline-run-TIME-ID, with "-1" after it if both runs began in the same second
    names = [path.name for path in folder.glob("runs/run/wandb/offline-run-*")]
    assert len(names) == 2 and {name.split("-")[3] for name in names} == {(folder / "runs/run/wandb_id").read_text()}


def test_the_end_of_a_resumed_run(folder, run, monkeypatch, capsys):
    """It has the time and the best step of its first part."""
    validation = iter([5.0, 1.0, 1.2])
    monkeypatch.setattr(train, "evaluate", lambda *rest: next(validation))
    at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    out = in_process(capsys, **FAST | SHORT).stdout
    assert "stopped at step 3; resume with: python train.py --resume runs/run" in out
    path = folder / "runs/run/metrics.jsonl"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": 360'))  # as if it had taken an hour
    out = in_process(capsys, "--resume").stdout
    assert "best val loss 1.0000 nats/token" in out and "at step 2 of 4" in out
    assert "trained for 1:00:0" in out and "runs/run/loss.png" in out and "python sample.py" in out


@pytest.mark.slow
def test_wandb_stores_the_steps_that_a_resumed_run_repeats(folder):
    """As after a crash at step 8, whose newest checkpoint is of step 4."""
    with serve() as server:
        finish(start(folder, variables=server.variables, **FAST | dict(wandb="online", steps=8, eval_every=4)))
        (folder / "runs/run/checkpoint.pt").unlink()
        changes = ["--learning_rate", "2e-3", "--allow_changes"]
        finish(start(folder, "--resume", *changes, variables=server.variables))
    stored = [{name: record.get(name) for name in ("step", "loss", "val_loss")} for record in server.records]
    assert [record["step"] for record in stored] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 5, 6, 7, 8, 8]
    named = [{name: record.get(name) for name in ("step", "loss", "val_loss")} for record in metrics(folder)]
    assert stored[:6] + stored[11:] == named


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
    assert "sample after 2 steps:\na <b>\n\ufffd[2Jc\n" in result.stdout


RECORDS = [
    dict(step=0, seconds=0.5, val_loss=4.0, val_bpb=2.0),
    dict(step=10, seconds=2.0, loss=3.0),
    dict(step=20, seconds=4.0, loss=None),
    dict(step=30, seconds=6.5, loss=2.5),
    dict(step=30, seconds=7.0, val_loss=2.0, val_bpb=1.0),
    dict(step=40, seconds=9.0, val_loss=2.5, val_bpb=1.25),
]
TRAIN, VAL = [[10, 30], [3.0, 2.5]], [[0, 30, 40], [4.0, 2.0, 2.5]]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """plot.py in this process: call(*flags) -> (exit code, standard error, figure)."""
    monkeypatch.chdir(tmp_path)
    figures, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)

    def call(*flags):
        code, _, err = run_script(monkeypatch, capsys, str(ROOT / "plot.py"), *flags)
        return code, err, figures.pop() if figures else None

    return call


def make_run(name, records=RECORDS, **options):
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    options = dict(name=name, tokenizer="char", batch_size=2, block_size=8, learning_rate=1e-3, keep=2) | options
    (folder / "config.json").write_text(json.dumps(options))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def lines(figure):
    return [[list(map(float, values)) for values in line.get_data()] for line in figure.axes[0].get_lines()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "flags, train, val, labels",
    [
        ([], TRAIN, VAL, ("step", "loss (nats per token)")),
        (["--x", "tokens"], [[160, 480], TRAIN[1]], [[0, 480, 640], VAL[1]], ("training tokens", "nats")),
        (
            ["--x", "seconds", "--y", "bpb"],
            [[2.0, 6.5], [1.5, 1.25]],
            [[0.5, 7.0, 9.0], [2.0, 1.0, 1.25]],
            ("(s)", "bits per byte"),
        ),
    ],
)
def test_curves(call, flags, train, val, labels):
    """The best evaluation is marked, in the title and by a ring."""
    code, err, figure = call(make_run("a$"), *flags)
    assert code == 0 and err == "" and Path("losses.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert lines(figure) == [train, val] and legend(figure) == ["training", "validation"]
    axis = figure.axes[0]
    assert labels[0] in axis.get_xlabel() and labels[1] in axis.get_ylabel()
    assert axis.get_title() == "a$: best 2.0000 nats/token = 1.0000 bits/byte at step 30"
    assert [ring.get_offsets().tolist() for ring in axis.collections] == [[[val[0][1], val[1][1]]]]


def test_legend(call):
    """Names, and the options that differ if there is room; folders where names are equal."""
    runs = [make_run("a"), make_run("b$", keep=3, learning_rate=2)]
    assert legend(call(*runs)[2]) == ["a: learning_rate=0.001", "b$: learning_rate=2"]
    runs.append(make_run("c", input="a text with a long name/" * 9))
    assert legend(call(*runs, "--out", "b.svg")[2]) == ["a", "b$", "c"] and Path("b.svg").exists()
    assert legend(call(runs[0], make_run("old/a", learning_rate=2))[2])[1].startswith("runs/old/a: ")
    code, err, figure = call(make_run("_中文"), runs[0])
    assert code == 0 and err == "" and legend(figure)[0].startswith("_中文")


def test_runs_without_validation_or_with_other_tokenizers(call):
    """Tokenizers of one name may differ, because they were trained on different texts."""
    young = make_run("young", RECORDS[1:3], tokenizer="bytes")
    run, same = make_run("a"), make_run("same")
    other = make_run("other", [record | {"val_bpb": 1.5} if "val_bpb" in record else record for record in RECORDS[1:]])
    for second, differ in [(young, True), (other, True), (same, False)]:
        code, err, figure = call(run, second)
        assert code == 0 and (err.startswith("note: ") and "--y bpb" in err) == differ
        assert len(lines(figure)) == (3 if second == young else 4)
    assert call(run, other, "--y", "bpb")[1] == ""
    assert call(young, "--y", "bpb")[0].startswith(f"error: {young} has no evaluation yet")


def test_mistakes_of_plot(call):
    empty, foreign, run = make_run("empty", []), make_run("foreign"), make_run("run")
    (Path(foreign) / "config.json").write_text('{"tokenizer": "char"}')
    for flags, words in [
        ([], ["at least one run"]),
        (["runs/none"], ["runs/none is no run", "config.json"]),
        (["gpt2"], ["OpenAI's", "runs/gpt2"]),
        (["./run"], [f"{Path('run').absolute()} is no run"]),  # as other commands, not runs/run
        ([run, empty], [f"{empty} has no losses"]),
        ([run, "--out", "a.text"], ["a.text", "--out"]),
        ([foreign], [f"{foreign}/config.json lacks batch_size and block_size"]),
    ]:
        code = call(*flags)[0]
        assert code.startswith("error: ") and all(word in code for word in words), code
    assert not list(Path().glob("*.png"))
