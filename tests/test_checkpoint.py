"""Checkpoints: resuming is bit-exact, a damaged file is noticed, and loading one executes nothing."""

import json
import os
import pickle
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import filelock
import pytest
import torch
from helpers import (
    PATHS,
    assert_resumes_bit_exactly,
    assert_same_runs,
    at_step,
    contents,
    equal,
    files_in,
    metrics,
    refused,
)

import sample
from data.corpus import open_corpus
from data.loader import validation_batches
from errors import UserError
from model import GPT, GPTConfig
from train import evaluate
from training.checkpoint import save_checkpoint
from training.config import Config
from training.ranks import Ranks
from weights import FORMAT, load, load_checkpoint

CHECKPOINT = "runs/run/checkpoint.pt"
MORE = ("--resume", "--steps", "6", "--allow_changes")


@pytest.mark.parametrize(
    "options", [dict(optimizer="muon", n_kv_head=1), dict(optimizer="muon", ema=0.9, **PATHS)], ids=["muon", "recipe"]
)
def test_resume_is_bit_exact(folder, options, trains):
    """Weights, optimizer and losses, with dropout."""
    assert_resumes_bit_exactly(folder, trains, steps=6, **options)


def test_a_resumed_run_has_its_number_of_threads(folder, trains, monkeypatch):
    """And leaves the process's as it was."""
    before, found = torch.get_num_threads(), []
    at_step(monkeypatch, 3, lambda: found.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(2)
        trains(steps=2, eval_every=2, eval_batches=1)
        torch.set_num_threads(1)
        trains("--resume", "--steps", "3", "--allow_changes", log_every=1)
        assert found == [2] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_run_of_another_version(folder, run, trains):
    trains(steps=2, eval_every=2)
    saved, config = contents(CHECKPOINT), folder / "runs/run/config.json"
    torch.save(saved | dict(model_config=saved["model_config"] | dict(zero_init=True)), CHECKPOINT)
    with pytest.raises(UserError, match=r"another version.*zero_init"):
        load(CHECKPOINT, "cpu")
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(zero_init=True)))
    refused(run(*MORE), "runs/run", "this version lacks (zero_init)")


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_a_run_with_an_option_that_is_gone(folder, run, trains, scale):
    """It resumes if what it chose is what all runs have now."""
    trains(steps=2, eval_every=2)
    config = folder / "runs/run/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(embed_scale=scale)))
    result = run(*MORE)
    if scale == 1:
        assert result[0] == 0 and contents(CHECKPOINT)["step"] == 6
    else:
        refused(result, "runs/run", "this version lacks (embed_scale)")


def test_float16_resumes_with_its_scaler(folder, monkeypatch, trains):
    """The first scale is so large that the gradients of some steps overflow."""
    huge = 2.0**28
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=huge))
    assert_resumes_bit_exactly(folder, trains, steps=20, dtype="float16")
    counters = contents(CHECKPOINT)["counters"]
    assert 0 < counters["scaler"]["scale"] < huge
    skipped = [record["skipped_steps"] for record in metrics(folder) if "loss" in record][-1]
    assert 0 < skipped == counters["skipped"] < 15


def test_resume_remembers_the_best_loss(folder, trains):
    """best.pt, newer than the checkpoint, is kept if the resumed run is worse; a damaged or missing one is replaced."""
    trains(steps=8, eval_every=4)
    best, older = folder / "runs/run/best.pt", folder / "runs/run/checkpoint-4.pt"
    whole, at_4 = best.read_bytes(), older.read_bytes()
    for contents_of_best in (whole, whole[:1000], None):
        best.unlink()
        if contents_of_best:
            best.write_bytes(contents_of_best)
        (folder / CHECKPOINT).unlink()
        older.write_bytes(at_4)
        trains("--resume", "--learning_rate", "1e-3", "--min_learning_rate", "0", "--allow_changes")
        worse = metrics(folder)[-1]["val_loss"]
        if contents_of_best == whole:
            assert contents(best)["best"] < worse and best.read_bytes() == whole
        else:
            assert contents(best)["best"] == worse


def test_a_checkpoint_that_keep_deletes_frees_its_disk_space(folder, trains, monkeypatch):
    """A resumed run does not keep the file mapped into memory."""
    trains(steps=4, eval_every=2)
    mapped = []
    at_step(monkeypatch, 6, lambda: mapped.append(CHECKPOINT in Path("/proc/self/maps").read_text()))
    trains(*MORE)
    assert mapped == [False]


def test_best_weights_are_averages(folder, trains):
    """best.pt has the weights that were validated: the running averages of those in training. Without --ema they go."""
    trains(ema=0.8, dropout=0.0, steps=20, eval_every=10)
    best, newest = contents("runs/run/best.pt"), contents(CHECKPOINT)
    model, config = load("runs/run/best.pt", "cpu")[0], Config(**best["config"])
    val = open_corpus(config.data, config.tokenizer, config.input).val
    batches = validation_batches(val, config.block_size, config.batch_size, config.eval_batches)
    assert evaluate(model, batches, nullcontext(), Ranks(0, 1, "cpu")) == pytest.approx(metrics(folder)[-1]["val_loss"])
    assert not any(torch.equal(weight, newest["model"][name]) for name, weight in best["model"].items())
    trains("--resume", "--ema", "0", "--steps", "21", "--allow_changes")
    assert not any("average" in state for state in contents(CHECKPOINT)["optimizer"]["state"].values())


def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, trains):
    trains(name="whole", steps=4, eval_every=4)
    trains(steps=4, eval_every=2)
    path, older = folder / CHECKPOINT, folder / "runs/run/checkpoint-2.pt"
    data, at_2 = path.read_bytes(), older.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for damaged in (data[: len(data) // 2], flipped, b""):
        path.write_bytes(damaged)
        older.write_bytes(at_2)
        err = trains("--resume")
        assert err.count("warning: ") == 1 and CHECKPOINT in err, err
        assert_same_runs(folder)


def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(folder, run, trains):
    """Two are damaged. They stay until the resumed run has saved; then --keep counts only checkpoints that load."""
    trains(eval_every=5, keep=3, steps=20)
    damaged = [folder / CHECKPOINT, folder / "runs/run/checkpoint-15.pt"]
    for path in damaged:
        os.truncate(path, 1000)
    for _ in range(2):  # a run that has saved nothing falls back again
        code, err = run("--resume", "--steps", "10", "--allow_changes")
        assert code == 1 and err.count("warning: ") == 2 and "finished at step 10" in err, err
    err = trains("--resume", "--steps", "12", "--allow_changes")
    assert err.count("warning: ") == 2, err
    found = {path.name: contents(path)["step"] for path in (folder / "runs/run").glob("checkpoint*")}
    assert found == {"checkpoint.pt": 12, "checkpoint-10.pt": 10}


def test_without_a_checkpoint_a_run_begins_again(folder, run, trains, monkeypatch):
    options = dict(steps=8, eval_every=4)
    trains(name="whole", **options)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: sys.exit(9))
        assert run(**options)[0] == 9 and not os.path.exists(CHECKPOINT)
    trains("--resume")
    assert [record["step"] for record in metrics(folder)] == [record["step"] for record in metrics(folder, "whole")]
    assert_same_runs(folder)


def test_any_flipped_bit_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "checkpoint.pt"
    model = GPT(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=8, block_size=8))
    save_checkpoint(path, {"format": FORMAT, "model": model.state_dict()})
    data, expected = path.read_bytes(), load_checkpoint(path)["model"]
    noticed = 0
    for place in torch.randint(8 * len(data), (300,)).tolist():
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert equal(load_checkpoint(path)["model"], expected), f"bit {place} changes what is loaded"
        except ValueError:
            noticed += 1
    assert noticed > 30  # the other bits are padding


@pytest.mark.parametrize("keep, names", [(1, ["checkpoint.pt"]), (2, ["checkpoint-4.pt", "checkpoint.pt"])])
def test_keep(folder, trains, keep, names):
    trains(keep=keep, steps=6, eval_every=2)
    assert sorted(files_in(folder, "runs/run/checkpoint*")) == names


def test_a_run_that_another_process_trains_is_refused(folder, run, trains):
    trains(steps=4, eval_every=2)
    with filelock.FileLock("runs/run/.lock"):
        refused(run(*MORE), "another process")
    trains(*MORE)


class Evil:
    """Unpickling it creates the file `executed`."""

    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("write", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing))])
def test_a_malicious_checkpoint_executes_nothing(folder, run, trains, write):
    trains(steps=2, keep=1)
    for name in ("best.pt", "checkpoint.pt"):
        path = folder / "runs/run" / name
        write(contents(path) | {"model": Evil()}, path)
    before = files_in(folder)
    refused(run(*MORE), CHECKPOINT)
    assert files_in(folder) == before  # without a good checkpoint nothing changes
    for name in ("best.pt", "checkpoint.pt"):
        with pytest.raises(ValueError, match=name):
            sample.main([f"runs/run/{name}", "--device", "cpu"])
    assert not (folder / "executed").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert (folder / "executed").exists()  # it would have been
