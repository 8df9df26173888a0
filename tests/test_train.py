"""Whole runs: the files they write, resuming, mistakes, and losses that must stay the same."""

import json
import random

import numpy as np
import pytest
import torch
from helpers import FAST, TINY, contents, finish, in_process, launch, losses, metrics, one_sentence, same, start

import train
from data import open_corpus
from model import GPT
from training.config import Config

CHECKPOINT = "runs/run/checkpoint.pt"
ALLOW = ("--steps", "6", "--allow_changes")
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
    ],
    ids=["gpt2", "modern"],
)
def test_losses_are_those_of_earlier_versions(folder, run, options, expected):
    """Training losses after 20, 40, ... steps and the last validation loss. If they change, so did the mathematics.

    Rounding (number of threads, instruction set, reference attention) changes them by 1e-7; bfloat16, or a weight decay
    of 0.09 instead of 0.1, by 3e-4.
    """
    draw, words = random.Random(0), WORDS.split()
    text = "".join(draw.choice(words) + draw.choice("    ,.\n") for _ in range(8000))
    (folder / "corpus.txt").write_text(text)
    assert run(**FIXED | options)[0] == 0
    found = [*losses(folder), metrics(folder)[-1]["val_loss"]]
    assert found == pytest.approx(expected, rel=1e-4)


def test_training_with_masked_documents(folder, run):
    """Loss falls, evaluation masks too, and a resumed run goes on bit by bit."""
    lines = [json.dumps({"text": "the sea keeps what the sea has taken. " * 3}) for _ in range(200)]
    (folder / "documents.jsonl").write_text("\n".join(f"{line[:-2]} {n}{line[-2:]}" for n, line in enumerate(lines)))
    options = dict(input="documents.jsonl", tokenizer="bytes+eot", mask_documents=True, attention="auto", steps=30)
    assert run(**options, eval_every=15)[0] == 0
    assert losses(folder)[-1] < 0.6 * losses(folder)[0]
    whole = contents(CHECKPOINT)
    (folder / CHECKPOINT).unlink()
    assert run("--resume")[0] == 0 and same(contents(CHECKPOINT), whole)
    code, err = run(name="char", **options | dict(tokenizer="char"))
    assert code == 1
    one_sentence(err, "mask_documents", "end-of-text", "char")


def test_training_on_tokens_of_nanogpt(folder, run):
    for part, text in (("train", "the sea keeps what the sea has taken. " * 100), ("val", "the sea has taken. " * 20)):
        np.frombuffer(text.encode(), np.uint8).astype("<u2").tofile(folder / f"{part}.bin")
    assert run(data="tokens", input=".", steps=20, eval_every=20)[0] == 0
    assert losses(folder)[-1] < losses(folder)[0]


def test_loss_falls_and_all_files_are_written(folder):
    result = launch(folder)
    assert result.returncode == 0, result.stderr
    assert len(losses(folder)) == 40 and losses(folder)[-1] < 0.6 * losses(folder)[0]
    files = {path.name for path in (folder / "runs/run").iterdir()}
    assert files == {
        "config.json", "metrics.jsonl", "checkpoint.pt", "checkpoint-20.pt", "best.pt", "loss.png", ".lock"
    }  # fmt: skip
    config = json.loads((folder / "runs/run/config.json").read_text())
    assert TINY.items() <= config.items() and contents(CHECKPOINT)["config"] == config
    evaluated = {record["step"]: record["val_loss"] for record in metrics(folder) if "val_loss" in record}
    assert evaluated.keys() == {0, 20, 40}
    best = contents("runs/run/best.pt")
    assert best["best"] == min(evaluated.values()) == evaluated[best["step"]]
    assert "best val loss" in result.stdout and "sample.py" in result.stdout


def test_a_new_run_overwrites_nothing(folder, run):
    assert run(steps=2)[0] == 0
    before = {path.name: path.read_bytes() for path in (folder / "runs/run").iterdir()}
    assert run(steps=2)[0] == 0
    assert {path.name: path.read_bytes() for path in (folder / "runs/run").iterdir()} == before
    assert {path.name for path in (folder / "runs/run-2").iterdir()} == before.keys()


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(learning_rat=1), "--learning_rate"),
        (dict(steps="many"), "--steps"),
        (dict(n_head=4, n_kv_head=3), "n_kv_head=3"),
        (dict(device="gpu"), "device='gpu'"),
        (dict(block_size=100_000), "block_size=100000"),
        (dict(input="none.txt"), "none.txt"),
        (dict(input="empty.txt"), "empty.txt"),
        (dict(input="latin.txt"), "UTF-8"),
        (dict(tokenizer="letters"), "letters"),
        (dict(micro_batch=3), "micro_batch=3"),
        (dict(vocab_size=10), "vocab_size=10"),
    ],
    ids=str,
)
def test_mistakes_leave_no_folder_behind(folder, run, options, word):
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("na\u00efve".encode("latin-1") * 100)
    code, err = run(**options)
    assert word in err and "Traceback" not in err and not (folder / "runs").exists(), err
    if code != 2:  # 2 is the exit code of tyro, which prints more than one line
        assert code == 1
        one_sentence(err, word)


def test_kernels_that_need_a_gpu_are_refused_on_a_cpu(folder):
    """In its own process, because attention() remembers which implementations ran before."""
    result = launch(folder, attention="triton")
    assert result.returncode == 1
    one_sentence(result.stderr, "triton", "GPU")


@pytest.mark.parametrize(
    "options, word",
    [(dict(n_embd=64), "n_embd"), (dict(mlp="relu2"), "mlp"), (dict(optimizer="muon"), "--optimizer"),
     (dict(tokenizer="char"), "tokenizer")],
    ids=["shape", "function", "optimizer", "tokenizer"],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(folder, run, options, word):
    """Even with --allow_changes."""
    assert run(steps=2)[0] == 0
    before = contents(CHECKPOINT)["step"], losses(folder)
    ((name, value),) = options.items()
    code, err = run("--resume", f"--{name}", str(value), *ALLOW)
    assert code == 1
    one_sentence(err, word)
    assert (contents(CHECKPOINT)["step"], losses(folder)) == before


def test_a_finished_run_resumes_only_with_more_steps(folder, run):
    assert run(steps=4, eval_every=2)[0] == 0
    code, err = run("--resume")
    assert code == 1
    one_sentence(err, "--steps", "--allow_changes")
    code, err = run("--resume", "--steps", "6")
    assert code == 1
    one_sentence(err, "--steps 6", "--allow_changes")
    assert run("--resume=runs/run", "--weight_decay", "0.5", *ALLOW)[0] == 0
    config, checkpoint = json.loads((folder / "runs/run/config.json").read_text()), contents(CHECKPOINT)
    assert (config["steps"], config["weight_decay"], config["n_embd"]) == (6, 0.5, FAST["n_embd"])
    assert checkpoint["step"] == 6 and checkpoint["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    assert [record["step"] for record in metrics(folder)] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_a_gpu(folder, dtype):
    result = launch(folder, device="cuda", dtype=dtype, dropout=0.1)
    assert result.returncode == 0, result.stderr
    assert "triton on cuda" in result.stderr and losses(folder)[-1] < 0.6 * losses(folder)[0]


@pytest.mark.parametrize("options", [{}, dict(tokenizer="char", compile="blocks", position="rope", optimizer="muon")])
def test_samples_do_not_change_training(folder, capsys, options):
    """Losses and checkpoints are equal bit for bit, with dropout. Nothing new is compiled for the samples."""
    counts, printed = {}, {}
    for name, every in (("without", 0), ("with", 7)):
        torch.compiler.reset(), torch._dynamo.utils.counters.clear()
        flags = FAST | dict(name=name, steps=20, eval_every=10, sample_every=every) | options
        result = in_process(capsys, **flags)
        assert result.returncode == 0, result.stderr
        counts[name], printed[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"], result.stdout
    assert losses(folder, "with") == losses(folder, "without") and len(losses(folder, "with")) == 20
    assert same(*(contents(f"runs/{name}/checkpoint.pt") for name in ("with", "without")))
    assert counts["with"] == counts["without"] and (counts["with"] > 0) == (options.get("compile") == "blocks")
    samples = printed["with"].split("sample after ")[1:]
    assert [sample.split()[0] for sample in samples] == ["7", "14"]
    assert "sample after" not in printed["without"]


def test_a_sample_leaves_model_and_random_state_as_they_were(folder):
    config = Config(**FAST)
    corpus = open_corpus("text", "bytes", "corpus.txt")
    model = GPT(config.model(corpus.tokenizer)).train()
    before = torch.get_rng_state()
    text = train.write_sample(model, corpus, config)
    assert torch.equal(torch.get_rng_state(), before) and model.training
    prompt = bytes(corpus.val.windows([0], train.SAMPLE_PROMPT)[0].tolist()).decode()
    assert text.startswith(prompt) and text == train.write_sample(model, corpus, config)


def test_torch_dynamo_is_imported_only_to_compile(folder):
    """It takes seconds. Neither optimizer imports it, nor evaluation, samples, or loading a checkpoint."""
    code = """import os, sys, train
train.main(sys.argv[1:])
os.remove("runs/run/checkpoint.pt")
train.main(["--resume"])
sys.exit("torch._dynamo" in sys.modules)
"""
    (folder / "twice.py").write_text(code)
    options = FAST | dict(steps=4, eval_every=2, sample_every=2, optimizer="muon")
    finish(start(folder, script=folder / "twice.py", **options))
    assert len(losses(folder)) == 4
