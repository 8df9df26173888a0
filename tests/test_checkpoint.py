"""Checkpoints: resuming is bit-exact, a damaged file is noticed, and loading one executes nothing."""

import os
import pickle
import sys
from functools import partial

import filelock
import pytest
import torch
from helpers import FAST, PATHS, at_step, contents, equal, losses, metrics, one_sentence, same

import sample
from data import open_corpus, validation_batches
from model import GPT, GPTConfig
from training.checkpoint import FORMAT, empty_model, load_checkpoint, save_checkpoint, to_host
from training.config import Config
from training.distributed import Ranks
from training.step import evaluate
from training.weights import load_model

CHECKPOINT = "runs/run/checkpoint.pt"


@pytest.mark.parametrize(
    "options, threads",
    [
        ({}, 1),
        (dict(steps=4, eval_every=2), 2),
        (dict(optimizer="muon", n_kv_head=1), 1),
        (dict(optimizer="muon", ema=0.9, **PATHS), 1),
    ],
    ids=["adamw", "2 threads", "muon", "recipe"],
)
def test_resume_is_bit_exact(folder, run, options, threads):
    """Weights, optimizer and losses, with dropout; the run gets its own number of threads back."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert run(**options)[0] == 0
        whole, whole_losses = contents(CHECKPOINT), losses(folder)
        os.remove(CHECKPOINT)  # resume from the one before
        torch.set_num_threads(1)
        assert run("--resume")[0] == 0
    finally:
        torch.set_num_threads(before)
    assert same(contents(CHECKPOINT), whole) and losses(folder) == whole_losses
    assert whole["step"] == len(whole_losses) and whole["threads"] == threads


def test_a_checkpoint_with_options_that_are_gone(folder, run):
    """It can be read and resumed if they had no effect on the trained network."""
    assert run()[0] == 0
    saved = contents(CHECKPOINT)
    torch.save(saved | dict(model_config=saved["model_config"] | dict(value_embeds=3)), CHECKPOINT)
    with pytest.raises(ValueError, match=r"another version.*value_embeds"):
        load_model(CHECKPOINT)
    torch.save(saved | dict(model_config=saved["model_config"] | dict(value_embeds=0, zero_init=True)), CHECKPOINT)
    load_model(CHECKPOINT)
    assert run("--resume", "--allow_changes", "--steps", "41")[0] == 0


def test_float16_resumes_with_its_scaler(folder, run, monkeypatch):
    """The first scale is so large that the gradients of some steps overflow."""
    huge = 2.0**28
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=huge))
    assert run(dtype="float16")[0] == 0
    whole, whole_losses = contents(CHECKPOINT), losses(folder)
    os.remove(CHECKPOINT)
    assert run("--resume")[0] == 0
    assert same(contents(CHECKPOINT), whole) and losses(folder) == whole_losses
    assert 0 < whole["take_step"]["scaler"]["scale"] < huge
    skipped = [record["skipped_steps"] for record in metrics(folder) if "loss" in record][-1]
    assert 0 < skipped == whole["take_step"]["skipped"] < FAST["steps"] / 2


def test_resume_remembers_the_best_loss(folder, run):
    """A resumed run whose losses are worse leaves best.pt alone."""
    assert run(steps=20, eval_every=10)[0] == 0
    best = (folder / "runs/run/best.pt").read_bytes()
    assert run("--resume", "--steps", "30", "--learning_rate", "9", "--allow_changes")[0] == 0
    assert metrics(folder)[-1]["val_loss"] > contents("runs/run/best.pt")["best"]
    assert (folder / "runs/run/best.pt").read_bytes() == best


def test_best_weights_are_averages(folder, run):
    """best.pt has the weights that were validated: the running averages of those in training. Without --ema they go."""
    assert run(ema=0.8, dropout=0.0)[0] == 0
    best, newest = contents("runs/run/best.pt"), contents(CHECKPOINT)
    model, config = GPT(GPTConfig(**best["model_config"])), Config(**best["config"])
    model.load_state_dict(best["model"])
    val = open_corpus(config.data, config.tokenizer, config.input).val
    batches = validation_batches(val, config.block_size, config.batch_size, config.eval_batches)
    assert evaluate(model, batches, config, Ranks(0, 1, "cpu")) == pytest.approx(metrics(folder)[-1]["val_loss"])
    averages = [state["average"] for state in newest["optimizer"]["state"].values()]
    for name, weight in best["model"].items():
        assert any(torch.equal(weight, average) for average in averages), name
        assert not torch.equal(weight, newest["model"][name]), name
    assert run("--resume", "--ema", "0", "--steps", str(FAST["steps"] + 1), "--allow_changes")[0] == 0
    assert not any("average" in state for state in contents(CHECKPOINT)["optimizer"]["state"].values())


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "empty"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, run, damage):
    assert run()[0] == 0
    path = folder / CHECKPOINT
    whole, whole_losses = contents(path), losses(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = {"truncated": data[: len(data) // 2], "flipped bit": data, "empty": b""}[damage]
    path.write_bytes(damaged)
    code, err = run("--resume")
    assert code == 0 and err.count("warning: ") == 1 and CHECKPOINT in err, err
    assert same(contents(path), whole) and losses(folder) == whole_losses
    assert (folder / f"{CHECKPOINT}.damaged").read_bytes() == damaged


def test_without_a_checkpoint_a_run_begins_again(folder, run, monkeypatch):
    assert run(name="whole")[0] == 0
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda: sys.exit(9))
        assert run()[0] == 9 and not os.path.exists(CHECKPOINT)
    assert run("--resume")[0] == 0
    assert [record["step"] for record in metrics(folder)] == [record["step"] for record in metrics(folder, "whole")]
    assert same(contents(CHECKPOINT), contents("runs/whole/checkpoint.pt"))


def test_without_a_good_checkpoint_nothing_changes(folder, run):
    run(keep=1, steps=4, eval_every=2)
    os.truncate(CHECKPOINT, 1000)
    before = {path.name: path.read_bytes() for path in (folder / "runs/run").iterdir()}
    code, err = run("--resume")
    assert code == 1
    one_sentence(err, CHECKPOINT)
    assert {path.name: path.read_bytes() for path in (folder / "runs/run").iterdir()} == before


def test_any_flipped_bit_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "checkpoint.pt"
    model = GPT(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=8, block_size=8))
    save_checkpoint(path, {"format": FORMAT, "model": model.state_dict()})
    data, expected = path.read_bytes(), load_checkpoint(path)["model"]
    noticed = 0
    for place in torch.randint(8 * len(data), (400,)).tolist():
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert equal(load_checkpoint(path)["model"], expected), f"bit {place} changes what is loaded"
        except ValueError:
            noticed += 1
    assert noticed > 40  # the other bits are padding


def test_keep(folder, run):
    for keep in (1, 3):
        assert run(keep=keep, eval_every=10, name=f"keep{keep}")[0] == 0
    names = [{path.name for path in (folder / f"runs/keep{keep}").glob("checkpoint*")} for keep in (1, 3)]
    assert names == [{"checkpoint.pt"}, {"checkpoint.pt", "checkpoint-30.pt", "checkpoint-20.pt"}]
    assert contents("runs/keep3/checkpoint-30.pt")["step"] == 30


def test_a_run_that_another_process_trains_is_refused(folder, run):
    run(steps=4, eval_every=2)
    with filelock.FileLock("runs/run/.lock"):
        code, err = run("--resume", "--steps", "6", "--allow_changes")
        assert code == 1
        one_sentence(err, "another process")
    assert run("--resume", "--steps", "6", "--allow_changes")[0] == 0


def test_the_copy_for_a_checkpoint_is_independent(device):
    """The next step must not change it, and tied weights must not take twice the room."""
    weight, step = torch.ones(3, device=device), torch.tensor(7.0)
    copied = to_host({"embed": weight, "head": [weight], "step": step, "name": "run"})
    if weight.is_cuda:
        torch.cuda.synchronize()
    weight.zero_(), step.zero_()
    assert copied["embed"] is copied["head"][0] and copied["name"] == "run"
    assert equal(copied["embed"], torch.ones(3)) and copied["step"] == 7


class Evil:
    """Unpickling it creates the file `executed`."""

    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("write", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing))])
def test_a_malicious_checkpoint_executes_nothing(folder, run, write):
    run(steps=2, keep=1)
    for name in ("best.pt", "checkpoint.pt"):
        path = folder / "runs/run" / name
        write(contents(path) | {"model": Evil()}, path)
    code, err = run("--resume", "--steps", "4", "--allow_changes")
    assert code == 1
    one_sentence(err, CHECKPOINT)
    for name in ("best.pt", "checkpoint.pt"):
        with pytest.raises(ValueError, match=name):
            sample.main(sample.SampleConfig(run=f"runs/run/{name}", device="cpu"))
    assert not (folder / "executed").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert (folder / "executed").exists()  # it would have been


@pytest.mark.parametrize(
    "options", [{}, dict(position="rope", norm="rmsnorm", mlp="swiglu")], ids=["classic", "modern"]
)
def test_an_empty_model_is_not_initialised_but_complete(options, monkeypatch):
    model = GPT(GPTConfig(vocab_size=8, block_size=8, n_layer=1, n_head=2, n_embd=16, **options))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *args, **kwargs: pytest.fail("a weight is initialised"))
    empty = empty_model(model.config)
    for parameter in empty.parameters():
        parameter.data.fill_(float("nan"))
    empty.load_state_dict(model.state_dict())
    values = [
        {name: x.detach() for name, x in (*net.named_parameters(), *net.named_buffers())} for net in (model, empty)
    ]
    assert equal(*values) and (empty.head.weight is empty.embed.weight) == (model.head.weight is model.embed.weight)
    meta = empty_model(model.config, "meta")
    assert {name: x.shape for name, x in meta.state_dict().items()} == {
        k: x.shape for k, x in model.state_dict().items()
    }
