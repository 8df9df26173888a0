"""plot.py: what it draws of which records, the legend, and errors."""

import json
import runpy
import sys
from pathlib import Path

import matplotlib.figure
import pytest

from training.report import read_metrics

SCRIPT = str(Path(__file__).parents[1] / "plot.py")
RECORDS = [
    dict(step=0, seconds=0.5, val_loss=4.0, val_bpb=2.0),
    dict(step=10, seconds=2.0, loss=3.0),
    dict(step=20, seconds=4.0, loss=None),
    dict(step=30, seconds=6.5, loss=2.5),
    dict(step=30, seconds=7.0, val_loss=2.0, val_bpb=1.0),
]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """plot.py in this process: call(*flags) -> (exit code, standard error, figure)."""
    monkeypatch.chdir(tmp_path)
    figures, save = [], matplotlib.figure.Figure.savefig

    def savefig(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *flags])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(SCRIPT, run_name="__main__")
            sys.exit(0)
        return end.value.code, capsys.readouterr().err, figures.pop() if figures else None

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
        ([], [[10, 30], [3.0, 2.5]], [[0, 30], [4.0, 2.0]], ("step", "loss (nats per token)")),
        (["--x", "tokens"], [[160, 480], [3.0, 2.5]], [[0, 480], [4.0, 2.0]], ("training tokens", "nats")),
        (
            ["--x", "seconds", "--y", "bpb"],
            [[2.0, 6.5], [1.5, 1.25]],
            [[0.5, 7.0], [2.0, 1.0]],
            ("(s)", "bits per byte"),
        ),
    ],
)
def test_curves(call, flags, train, val, labels):
    code, err, figure = call(make_run("a"), *flags)
    assert code == 0 and err == "" and Path("losses.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert lines(figure) == [train, val] and legend(figure) == ["a"]
    axis = figure.axes[0]
    assert labels[0] in axis.get_xlabel() and labels[1] in axis.get_ylabel()
    thin, thick = axis.get_lines()
    assert thin.get_linewidth() < thick.get_linewidth() and thin.get_color() == thick.get_color()


def test_legend(call):
    """The options that differ; names where they do not tell two runs apart."""
    runs = [
        make_run(name, keep=number, learning_rate=rate) for number, (name, rate) in enumerate([("a", 1), ("b$", 2)])
    ]
    assert legend(call(*runs)[2]) == ["learning_rate=1", "learning_rate=2"]
    runs.append(make_run("c", learning_rate=2, new_option=True))
    runs.append(make_run("d", learning_rate=2))
    assert legend(call(*runs)[2]) == [
        "learning_rate=1, new_option=None",
        "b$: learning_rate=2, new_option=None",
        "learning_rate=2, new_option=True",
        "d: learning_rate=2, new_option=None",
    ]
    assert legend(call(runs[1], runs[3], "--out", "b.svg")[2]) == ["b$", "d"] and Path("b.svg").exists()


def test_runs_without_validation_or_with_other_tokenizers(call):
    young = make_run("young", RECORDS[1:3], tokenizer="bytes")
    code, err, figure = call(young, make_run("a"))
    assert code == 0 and err.startswith("note: ") and "--y bpb" in err
    assert legend(figure) == ["tokenizer=bytes", "tokenizer=char"] and len(lines(figure)) == 3
    assert call(young, "--y", "bpb")[0].startswith(f"error: {young} has no evaluation yet")


def test_damaged_records_are_left_out(call):
    run = make_run("a")
    with open(Path(run) / "metrics.jsonl", "ab") as file:
        file.write(b'3\n[]\n{"loss": 1.0}\n{"step": 40, "loss": "1"}\n{"step": "40", "loss": 1}\n{"st\xff\n')
    code, err, figure = call(run)
    assert code == 0 and err.count("is damaged and left out") == 6
    assert lines(figure) == [[[10, 30], [3.0, 2.5]], [[0, 30], [4.0, 2.0]]]


def test_a_run_of_train_py(folder, run, call):
    assert run(steps=4, eval_every=2)[0] == 0
    records = read_metrics(folder / "runs/run")
    code, _, figure = call(str(folder / "runs/run"), "--x", "seconds", "--y", "bpb")
    assert code == 0 and lines(figure)[1][1] == pytest.approx(
        [r["val_bpb"] for r in records if "val_bpb" in r], rel=1e-15, abs=0
    )


def test_mistakes(call):
    old = make_run("old", [{name: value for name, value in record.items() if name != "seconds"} for record in RECORDS])
    empty = make_run("empty", [])
    damaged, foreign = make_run("damaged"), make_run("foreign")
    (Path(damaged) / "config.json").write_text("{")
    (Path(foreign) / "config.json").write_text('{"tokenizer": "char"}')
    for flags, words in [
        ([], ["at least one run"]),
        (["runs/none"], ["runs/none is no run", "config.json"]),
        ([old, empty], [f"{empty} has no losses"]),
        ([old, "--x", "seconds"], [old, "no seconds", "--x step"]),
        ([old, "--out", "none/a.png"], ["none/a.png", "--out"]),
        ([old, "--out", "a.text"], ["a.text", "--out"]),
        ([old, "--out", "a"], ["--out a has no suffix", ".png"]),
        ([damaged], [f"{damaged}/config.json cannot be read"]),
        ([foreign], [f"{foreign}/config.json lacks batch_size and block_size"]),
    ]:
        code = call(*flags)[0]
        assert code.startswith("error: ") and all(word in code for word in words), code
    assert not list(Path().glob("*.png"))
