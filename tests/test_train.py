"""Whole runs: the files they write, resuming, mistakes, and losses that must stay the same."""

import json
import random
import re

import pytest
from helpers import (
    FAST,
    PATHS,
    assert_resumes_bit_exactly,
    assert_same_runs,
    contents,
    files_in,
    finish,
    losses,
    metrics,
    refused,
    start,
)

CHECKPOINT = "runs/run/checkpoint.pt"
WORDS = "the sea keeps what it has taken and gives back a little foam at every turn of tide"
FIXED = dict(
    n_layer=3, n_head=4, n_embd=64, block_size=64, steps=100, warmup_steps=10, learning_rate=3e-3,
    min_learning_rate=3e-4, eval_every=100, eval_batches=0, log_every=20, seed=1, dropout=0.0,
)  # fmt: skip
MODERN = dict(
    norm="rmsnorm", position="rope", mlp="relu2", qk_norm=True, n_kv_head=2, logit_softcap=15, optimizer="muon",
    cooldown=0.3,
)  # fmt: skip


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(bias=True), [2.95629, 2.22756, 1.82164, 1.73679, 1.64164, 1.69436]),
        (MODERN, [2.89166, 2.07699, 1.31417, 0.99402, 0.93535, 0.96565]),
        (MODERN | PATHS | dict(steps=40, ema=0.9), [2.73198, 1.49304, 1.55712]),
        (MODERN | PATHS | dict(steps=40, ema=0.9, tie_head=True), [2.90745, 2.17136, 2.19668]),
    ],
    ids=["gpt2", "modern", "recipe", "recipe, one table"],
)
def test_losses_are_those_of_earlier_versions(folder, trains, options, expected):
    """Training losses after 20, 40, ... steps and the last validation loss. If they change, so did the mathematics.

    Rounding (number of threads, instruction set, reference attention) changes them by 1e-7; bfloat16, or a weight decay
    of 0.09 instead of 0.1, by 3e-4.
    """
    draw, words = random.Random(0), WORDS.split()
    text = "".join(draw.choice(words) + draw.choice("    ,.\n") for _ in range(8000))
    (folder / "corpus.txt").write_text(text)
    trains(**FIXED | options)
    found = [*losses(folder), metrics(folder)[-1]["val_loss"]]
    assert found == pytest.approx(expected, rel=1e-4)


TWICE = """import os, sys, train
train.main(sys.argv[1:])
os.remove("runs/run/checkpoint.pt")
train.main(["--resume"])
assert "wandb" not in sys.modules
"""


def test_all_files_are_written(folder):
    """wandb, whose import takes a second, is imported only by runs that use it."""
    (folder / "twice.py").write_text(TWICE)
    options = FAST | dict(steps=4, eval_every=2, sample_every=2, optimizer="muon")
    out, err = finish(start(folder, script="twice.py", **options))
    assert len(losses(folder)) == 4
    checkpoints = {"checkpoint.pt", "checkpoint-2.pt", "best.pt"}
    others = {"config.json", "kestrel.json", "metrics.jsonl", "loss.png", ".lock"}
    assert files_in(folder).keys() == checkpoints | others
    config = json.loads((folder / "runs/run/config.json").read_text())
    assert options.items() <= config.items() and contents(CHECKPOINT)["config"] == config
    evaluated = {record["step"]: record["val_loss"] for record in metrics(folder) if "val_loss" in record}
    best = contents("runs/run/best.pt")
    assert evaluated.keys() == {0, 2, 4} and best["best"] == min(evaluated.values()) == evaluated[best["step"]]
    assert "best val loss" in out and "sample.py" in out and "sample after 2 steps" in out and "Warning" not in err


def test_training_with_masked_documents(folder, run, trains):
    """Loss falls, evaluation masks too, and a resumed run goes on bit by bit."""
    lines = [json.dumps({"text": f"the sea keeps what the sea has taken. {number}" * 3}) for number in range(200)]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    options = dict(input="documents.jsonl", tokenizer="bytes+eot", mask_documents=True, attention="auto")
    assert_resumes_bit_exactly(folder, trains, steps=30, **options)
    assert losses(folder)[-1] < 0.6 * losses(folder)[0]
    refused(run(**options | dict(tokenizer="char")), "mask_documents", "end-of-text", "char")


def test_a_new_run_overwrites_nothing(folder, trains):
    trains(steps=2)
    before = files_in(folder)
    trains(steps=2)
    assert files_in(folder) == before and files_in(folder, "runs/run-2/*").keys() == before.keys()


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(device="gpu"), "device='gpu'"),
        (dict(input="none.txt"), "none.txt"),
        (dict(micro_batch=3), "micro_batch=3"),
        (dict(parallel="fsdp"), "torchrun --nproc_per_node=1"),
    ],
    ids=str,
)
def test_mistakes_leave_no_folder_behind(folder, run, options, word):
    refused(run(**options), word)
    assert not (folder / "runs").exists()


def test_what_a_finished_run_allows(folder, run, trains):
    """More steps, and changes that fit its checkpoint; both only with --allow_changes."""
    trains(steps=4, eval_every=2, cooldown=0.5)
    refused(run("--resume"), "--steps", "--allow_changes")
    refused(run("--resume", "--steps", "6"), "--steps 6", "--allow_changes")
    more = ("--steps", "6", "--allow_changes")
    for name, value in dict(n_embd=64, mlp="relu2", optimizer="muon", tokenizer="char").items():
        refused(run("--resume", f"--{name}", str(value), *more), name)
    assert contents(CHECKPOINT)["step"] == 4 == len(losses(folder))
    err = trains("--resume=runs/run", "--weight_decay", "0.5", *more)
    assert re.search(r"note: .*learning rate .*\b0\.0001 .*\b0\.0034", err), err  # the cooldown moved
    config, checkpoint = json.loads((folder / "runs/run/config.json").read_text()), contents(CHECKPOINT)
    assert (config["steps"], config["weight_decay"], config["n_embd"]) == (6, 0.5, FAST["n_embd"])
    assert checkpoint["step"] == 6 and checkpoint["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    assert [record["step"] for record in metrics(folder)] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_samples_and_saves_do_not_change_training(folder, trains):
    """Bit by bit, with dropout. best.pt is written at an evaluation, checkpoint.pt every save_every steps."""
    options = dict(steps=10, eval_every=4)
    trains(name="whole", **options)
    trains(sample_every=3, save_every=3, keep=9, **options)
    assert_same_runs(folder)
    records = [[(r["step"], r.get("val_loss")) for r in metrics(folder, name)] for name in ("run", "whole")]
    assert records[0] == records[1]
    names = files_in(folder, "runs/run/*.pt").keys()
    assert names == {"best.pt", "checkpoint.pt", "checkpoint-3.pt", "checkpoint-6.pt", "checkpoint-9.pt"}
    assert "optimizer" not in contents("runs/run/best.pt")
    for name in ("checkpoint.pt", "checkpoint-9.pt"):
        (folder / "runs/run" / name).unlink()
    trains("--resume")  # at step 6
    assert_same_runs(folder)
