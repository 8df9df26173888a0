"""What breaks the files of a run, made to happen: checkpoints, full disks, tokens, config.json."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch
from helpers import FAST, ROOT, TINY, contents, environment, losses, metrics, one_sentence, same
from test_checkpoint import WEIGHTS
from torture_resume import equal

import report
import train
from checkpoint import Saver, check_file, load_checkpoint, save_checkpoint
from data.corpus import prepare
from model import GPT, GPTConfig


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


@pytest.mark.parametrize("name, value", [("step", "x"), ("best", None), ("threads", 10**6)])
def test_a_checkpoint_that_holds_nonsense(folder, run, name, value):
    run(keep=1)
    path = folder / "runs/run/checkpoint.pt"
    save_checkpoint(path, **contents(path) | {name: value})
    code, err = run("--resume", "--steps", "60", "--allow_changes", "True")
    assert code == 1
    one_sentence(err, "checkpoint runs/run/checkpoint.pt is damaged", "use another one")


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
    weights = lambda step: WEIGHTS | dict(step=step, model=torch.full((1000,), float(step)))  # noqa: E731
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
        if step == 5:
            file_limit(resource.RLIM_INFINITY)
        if step == 7:
            file_limit((tmp_path / "metrics.jsonl").stat().st_size)
        tell.step(step, 1e-3, float("nan") if step == 2 else 1.0, 1.0, 0)
        assert len(report.read_metrics(tmp_path)) == len((tmp_path / "metrics.jsonl").read_text().splitlines())
    file_limit(resource.RLIM_INFINITY)
    tell.close()
    assert [record["step"] for record in report.read_metrics(tmp_path)] == list(range(1, 9))
    assert report.read_metrics(tmp_path)[1]["loss"] is None and "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert capsys.readouterr().out.count("warning") == 2


@pytest.mark.parametrize("how", ["full disk", "closed pipe"])
def test_output_that_cannot_be_written(folder, how):
    """Both streams: a full disk behind them, or a pipe whose reader has gone. The run ends with its checkpoint."""
    flags = [part for name, value in FAST.items() for part in (f"--{name}", str(value))]
    end = os.open("/dev/full", os.O_WRONLY)
    if how == "closed pipe":
        reader, end = os.pipe()
        os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    result = subprocess.run(command, cwd=folder, env=environment(folder), stdout=end, stderr=end, timeout=120)
    assert result.returncode == 0
    assert contents("runs/run/checkpoint.pt")["step"] == 40 and len(losses(folder)) == 40


def test_read_only_folder(folder, run):
    run(steps=4, eval_every=2)
    run = folder / "runs" / "run"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    run.chmod(0o555), run.parent.chmod(0o555), (run / ".lock").chmod(0o444)
    # root may write anywhere, unless its capability to (1) is dropped (24 is PR_CAPBSET_DROP)
    program = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1); os.execv(sys.executable, sys.argv[1:])"
    flags = [part for k, v in (TINY | {"input": "corpus.txt"}).items() for part in (f"--{k}", str(v))]
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


def test_records_are_on_the_disk_before_a_checkpoint(folder, run, monkeypatch):
    """Else a power cut might leave a checkpoint of steps that nobody recorded."""
    said = []
    for owner, name in ((report.Report, "flush"), (Saver, "save")):
        function = getattr(owner, name)
        note = lambda *args, function=function, name=name: (said.append(name), function(*args))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, note)
    assert run(steps=4, eval_every=2)[0] == 0
    assert said == ["flush", "save", "flush", "save", "flush"]


@pytest.mark.parametrize("gone", [True, False])
def test_a_run_goes_on_without_its_text(folder, run, gone):
    """Whether it is gone or edited: with the tokens that were made of it, which stay."""
    assert run(steps=20, eval_every=10)[0] == 0
    whole, text = contents("runs/run/checkpoint.pt"), folder / "corpus.txt"
    tokens = {path: path.read_bytes() for path in folder.glob("prepared/prepared/*/*")}
    text.unlink() if gone else text.write_text(text.read_text() + "and the sea keeps on. ")
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume")[0] == 0
    assert same(contents("runs/run/checkpoint.pt"), whole)
    assert len(tokens) == 3 and {path: path.read_bytes() for path in tokens} == tokens
    edit(folder / "runs/run/config.json", keep=3)
    assert run("--resume", "--steps", "30", "--allow_changes", "True")[0] == 0
    assert {path: path.read_bytes() for path in tokens} == tokens
    if not gone:
        prepare("text", "bytes", text)  # who wants other tokens makes them
        assert run("--resume", "--steps", "40")[0] == 1
        assert run("--resume", "--steps", "40", "--allow_changes", "True")[0] == 0
        assert contents("runs/run/checkpoint.pt")["tokens_sha256"] != whole["tokens_sha256"]


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    with open(path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def replace(path):
    path.with_name("new").write_bytes(b"another")
    path.with_name("new").replace(path)


@pytest.mark.parametrize("harm", [cut, flip_a_bit, Path.touch, replace])
@pytest.mark.parametrize("part", ["train", "val"])
def test_token_file_changed_while_a_run_reads_it(folder, run, monkeypatch, harm, part):
    """Contents that change end the run, once it is saved; a new date does not, nor another file of the same name."""
    assert run(name="whole")[0] == 0
    step = report.Report.step

    def harm_and_step(self, number, *rest):
        if number == 25:
            harm(next(folder.glob(f"prepared/prepared/*/{part}.bin")))
        step(self, number, *rest)

    monkeypatch.setattr(report.Report, "step", harm_and_step)
    code, err = run()
    if harm in (Path.touch, replace):
        assert code == 0 and losses(folder) == losses(folder, "whole")
        return
    assert code == 1
    one_sentence(err, "it was cut short" if harm is cut else "were changed while they were in use", "remove ")
    stopped = contents("runs/run/checkpoint.pt")["step"]
    assert 25 <= stopped == len(losses(folder)) < 30 and f"stopped at step {stopped}; once the tokens are back" in err
    assert contents("runs/run/checkpoint-20.pt")["step"] == 20
    assert "go on with: python train.py --resume runs/run" in err
    assert run("--resume", "runs/run")[0] == 1  # not before its remedy
    shutil.rmtree(re.search("remove ([^ ]+) and prepare", err)[1])
    monkeypatch.setattr(report.Report, "step", step)
    assert run("--resume", "runs/run")[0] == 0
    assert same(contents("runs/run/checkpoint.pt"), contents("runs/whole/checkpoint.pt"))
    assert losses(folder) == losses(folder, "whole")


def test_token_file_changed_and_no_room_to_save(folder, run, monkeypatch):
    """It does not say that it stopped at a step which nobody can go on from."""
    step = report.Report.step

    def harm_and_step(self, number, *rest):
        if number == 25:
            flip_a_bit(next(folder.glob("prepared/prepared/*/train.bin")))
            monkeypatch.setattr("checkpoint.save_checkpoint", fail)
        step(self, number, *rest)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.Report, "step", harm_and_step)
    code, err = run()
    assert code == 1 and "stopped at step" not in err
    assert re.search(r"warning: the checkpoint of step 2\d cannot be written .*checkpoint.pt of step 20", err), err


def test_token_file_changed_while_it_is_evaluated(folder, run, monkeypatch):
    """The evaluation is made again, and counts."""
    assert run(name="whole", steps=20, eval_every=10)[0] == 0
    evaluate = train.evaluate

    def harm_and_evaluate(*args):
        if len(losses(folder)) == 20:
            flip_a_bit(next(folder.glob("prepared/prepared/*/val.bin")))
        return evaluate(*args)

    monkeypatch.setattr(train, "evaluate", harm_and_evaluate)
    code, err = run(steps=20, eval_every=10)
    assert code == 1 and contents("runs/run/checkpoint.pt")["step"] == 10
    monkeypatch.setattr(train, "evaluate", evaluate)
    shutil.rmtree(re.search("remove ([^ ]+) and prepare", err)[1])
    assert run("--resume", "runs/run")[0] == 0
    assert metrics(folder)[-1] == metrics(folder, "whole")[-1]


@pytest.mark.parametrize("how", ["gone", "cut", "a list", "brackets"])
def test_a_damaged_config_is_taken_from_the_newest_checkpoint(folder, run, how):
    assert run(steps=20, eval_every=10)[0] == 0
    whole, path = contents("runs/run/checkpoint.pt"), folder / "runs/run/config.json"
    (folder / "runs/run/checkpoint.pt").unlink()
    good = path.read_text()
    path.unlink()
    if how != "gone":
        path.write_text({"cut": good[:100], "a list": "[[1, 2]]", "brackets": "[" * 100_000}[how])
    code, err = run("--resume")
    assert code == 0 and err.count("warning: runs/run/config.json cannot be read") == 1, err
    assert same(contents("runs/run/checkpoint.pt"), whole) and json.loads(path.read_text())["steps"] == 20
    for checkpoint in folder.glob("runs/run/*.pt"):
        checkpoint.unlink()
    path.write_text("{")
    code, err = run("--resume", "runs/run")
    assert code == 1
    one_sentence(err, "runs/run/config.json cannot be read", "--resume needs the folder of a run")


def edit(path, **options):
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def test_a_config_edited_by_hand(folder, run):
    """What would make the run another one is named."""
    assert run(steps=20, eval_every=10)[0] == 0
    (folder / "runs/run/checkpoint.pt").unlink()
    path = folder / "runs/run/config.json"
    edit(path, learning_rate=0.001, keep=5)
    code, err = run("--resume")
    assert code == 1
    one_sentence(err, "learning_rate=0.001", "checkpoint-10.pt was trained with 0.005", "--allow_changes True")
    assert run("--resume", "--allow_changes", "True")[0] == 0
    assert contents("runs/run/checkpoint.pt")["config"]["learning_rate"] == 0.001
    (folder / "runs/run/checkpoint.pt").unlink()
    assert run("--resume")[0] == 0  # it is no edit any more, though the older checkpoint is without it
    (folder / "runs/run/checkpoint.pt").unlink()
    edit(path, keep=2)
    code, err = run("--resume")  # any edit makes the older checkpoint's options count again
    assert code == 1 and "learning_rate=0.001" in err
    edit(path, learning_rate=0.005, keep=1)
    assert run("--resume")[0] == 0


def test_what_was_allowed_once_stays_allowed(folder, run, monkeypatch):
    """Options and tokens, also after a kill before the first checkpoint with them; others than those do not."""
    assert run(steps=20, eval_every=10)[0] == 0
    (folder / "runs/run/checkpoint.pt").unlink()
    tokens = next(folder.glob("prepared/prepared/*/train.bin"))
    flip_a_bit(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", lambda *_: sys.exit(9))
        assert run("--resume", "--learning_rate", "0.001", "--allow_changes", "True")[0] == 9
    assert json.loads((folder / "runs/run/config.json").read_text())["learning_rate"] == 0.001
    good = tokens.read_bytes()
    cut(tokens)
    tokens.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    code, err = run("--resume")
    assert code == 1
    one_sentence(err, "are not those that runs/run/checkpoint-10.pt was trained on")
    tokens.write_bytes(good)
    assert run("--resume")[0] == 0
    assert contents("runs/run/checkpoint.pt")["config"]["learning_rate"] == 0.001
