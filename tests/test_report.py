"""Reports of a run: metrics.jsonl, loss.png, wandb."""

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import FAST, ROOT, launch, losses

from data import make_tokenizer
from model import GPT
from training import report
from training.config import Config
from training.distributed import Ranks
from training.report import Report, plot_losses, read_metrics

SHORT = dict(steps=4, eval_every=2)
NAN = float("nan")
BYTES = make_tokenizer("bytes")


def make_report(folder, start=0, rank=0, **options):
    """A Report of a small network; of the corpus it needs only the bytes per token."""
    config = Config(**FAST | SHORT | options)
    (folder / "config.json").touch()
    corpus = SimpleNamespace(bytes_per_token=2.0)
    return Report(folder, config, GPT(config.model(BYTES)), corpus, Ranks(rank, 2, "cpu"), start)


def record_step(report, step, loss=1.0, grad_norm=1.0, skipped=0.0):
    report.step(step, 1e-3, torch.tensor(loss), torch.tensor(grad_norm), torch.tensor(skipped))


def test_metrics_of_a_run(folder, run):
    """Every line is JSON, and the numbers fit together."""
    assert run(**SHORT)[0] == 0
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3, 4, 4]
    trained, evaluated = ([r for r in records if name in r] for name in ("loss", "val_loss"))
    assert [record["step"] for record in trained] == [1, 2, 3, 4] and len(evaluated) == 3
    for record in evaluated:  # a token is a byte
        assert record["val_bpb"] == pytest.approx(record["val_loss"] / 0.6931472)
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds) and 0 < seconds[0]
    names = {"step", "seconds", "loss", "learning_rate", "grad_norm", "skipped_steps", "tokens_per_second", "tflops"}
    assert all(
        record.keys() - {"mfu", "peak_memory"} == names and record["tokens_per_second"] > 0 for record in trained
    )
    model = GPT(Config(**FAST).model(BYTES))
    flops = [record["tflops"] / record["tokens_per_second"] * 1e12 for record in trained]
    assert flops == pytest.approx([model.flops_per_token()] * 4)


def test_nan_becomes_null(tmp_path, capsys):
    report = make_report(tmp_path)
    record_step(report, 1, loss=NAN, grad_norm=float("inf"), skipped=1.0)
    report.evaluation(2, NAN, is_best=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["loss"], first["grad_norm"], first["skipped_steps"]) == (None, None, 1)
    assert (second["step"], second["val_loss"], second["val_bpb"]) == (2, None, None)
    plot_losses(tmp_path, 1.0)  # draws nothing, because there is nothing to draw
    assert not (tmp_path / "loss.png").exists() and "1 skipped" in capsys.readouterr().out


def test_only_the_first_rank_reports(tmp_path, capsys):
    report = make_report(tmp_path, rank=1, wandb="offline")
    record_step(report, 1)
    report.evaluation(2, 1.0, is_best=True)
    report.close(4, 1.0)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"} and capsys.readouterr().out == ""


def test_pauses_do_not_count_as_training_time(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 91.0, 101.0]).__next__  # start, begin and end of a pause, step 4
    report = make_report(tmp_path)
    monkeypatch.setattr("training.report.time.perf_counter", clock)
    report.last_time = report.began = clock()
    with report.pause():
        pass
    record_step(report, 4)
    tokens = 4 * FAST["batch_size"] * FAST["block_size"]
    assert read_metrics(tmp_path)[0]["tokens_per_second"] == pytest.approx(tokens / 11)


@pytest.mark.parametrize("log_every, steps, seconds", [(4, 3, 6.0), (1, 1, 40.0)])
def test_the_first_step_does_not_count_in_the_pace(tmp_path, monkeypatch, capsys, log_every, steps, seconds):
    """It takes 40 s here, and the next three 2 s each. If every step has a line, the first step's is its own."""
    clock = iter([0.0, 40.0, 46.0] if log_every == 4 else [0.0, 40.0, 42.0]).__next__
    report = make_report(tmp_path, log_every=log_every)
    monkeypatch.setattr("training.report.time.perf_counter", clock)
    report.last_time = report.began = clock()
    report.start({"first step": 40.0})
    record_step(report, log_every)
    tokens = steps * FAST["batch_size"] * FAST["block_size"]
    assert read_metrics(tmp_path)[0]["tokens_per_second"] == pytest.approx(tokens / seconds)
    if log_every == 1:
        record_step(report, 2)
    step = max(log_every, 2)
    assert f"0:00:{2 * (report.config.steps - step):02d} left" in capsys.readouterr().out


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


@pytest.mark.parametrize("name", ["run", "a$b_$", r"a\$b_$c^$"])  # the last two are not formulas of matplotlib
def test_loss_png(folder, run, name):
    code, err = run(name=name, **SHORT)
    assert code == 0 and "warning" not in err, err
    assert (folder / "runs" / name / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_loss_png_is_drawn_during_a_run(tmp_path, monkeypatch):
    report_of_run = make_report(tmp_path)
    report_of_run.evaluation(0, 2.0, is_best=False)
    assert not (tmp_path / "loss.png").exists()
    monkeypatch.setattr(report, "PLOT_SECONDS", 0)
    report_of_run.evaluation(2, 1.0, is_best=True)
    assert (tmp_path / "loss.png").exists()


@pytest.mark.slow
def test_wandb_is_imported_only_if_used():
    code = "import sys, train; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_a_resumed_run_keeps_its_wandb_id(folder, run):
    assert run(wandb="offline", **SHORT)[0] == 0
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume")[0] == 0
    # offline-run-TIME-ID, with "-1" after it if both runs began in the same second
    names = [path.name for path in folder.glob("runs/run/wandb/offline-run-*")]
    assert len(names) == 2 and {name.split("-")[3] for name in names} == {(folder / "runs/run/wandb_id").read_text()}


@pytest.mark.slow
def test_a_wandb_server_out_of_reach_does_not_end_a_run(folder, monkeypatch):
    """In its own process, because wandb reads these variables only once."""
    variables = dict(WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40, WANDB_INIT_TIMEOUT="3")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = launch(folder, wandb="online", **SHORT)
    assert result.returncode == 0 and len(losses(folder)) == 4, result.stderr
    assert result.stderr.count("warning: starting wandb") == 1, result.stderr


def test_an_error_of_wandb_ends_only_its_logging(tmp_path, capsys):
    """Not every error has a message."""

    def fail(*args, **kwargs):
        raise TimeoutError

    report = make_report(tmp_path)
    report.wandb = SimpleNamespace(log=fail, finish=fail)
    record_step(report, 1), record_step(report, 2)
    report.close(4, 1.0)
    assert capsys.readouterr().err.count("TimeoutError") == 1 and len(read_metrics(tmp_path)) == 2


def test_a_sample_is_printed_and_logged_as_text(tmp_path, capsys):
    """Without control characters, which could change the terminal. A sample that fails does not end the run."""
    report, logged = make_report(tmp_path), []
    report.wandb = SimpleNamespace(log=lambda values, step: logged.append((values["sample"].html, step)))
    report.sample(7, lambda: "a <b>\n\x1b[2Jc")
    assert "sample after 7 steps:\na <b>\n\ufffd[2Jc\n" in capsys.readouterr().out
    [(text, step)] = logged
    assert step == 7 and "a &lt;b&gt;\n\ufffd[2Jc" in text

    def fail():
        raise ValueError("no memory")

    report.sample(8, fail)
    assert "warning: writing a sample failed (no memory)" in capsys.readouterr().err and len(logged) == 1
