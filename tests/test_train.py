"""Training end to end, as users start it: loss falls, runs resume, ranks agree, mistakes leave nothing behind."""

import json
import re
import socket
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from helpers import BY_DEVICE, ROOT, TINY, environment, in_process, launch, losses, metrics

import train
from distributed import Distributed
from model import GPT, GPTConfig


@pytest.fixture
def call(folder, capsys):
    """launch() in this process, for what does not need one of its own."""

    def call(*argv, **options):
        return in_process(capsys, *argv, **TINY | dict(input="corpus.txt") | options)

    return call


def test_loss_falls_and_everything_is_written(folder):
    result = launch(folder)
    assert result.returncode == 0, result.stderr
    assert losses(folder)[-1] < 0.6 * losses(folder)[0]
    files = {path.name for path in (folder / "runs" / "run").iterdir()}
    assert files == {
        "config.json", "metrics.jsonl", "checkpoint.pt", "checkpoint-20.pt", "best.pt", "loss.png", ".lock"
    }  # fmt: skip
    assert "attention  sdpa on cpu" in result.stderr or torch.cuda.is_available()
    for word in ("device", "parameters", "tokenizer bytes", "tokens/s", "bits/byte", "left"):
        assert word in result.stdout
    assert (folder / "runs" / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    start = next(record["start_seconds"] for record in metrics(folder) if "loss" in record)
    assert list(start) == ["imports", "data", "model", "evaluation", "first step"] and min(start.values()) >= 0
    assert re.search(r"^start      [\d.]+ s: [\d.]+ s imports, .* s first step$", result.stdout, re.MULTILINE)


def test_wandb_is_imported_only_if_used():
    code = "import sys, train; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_new_run_overwrites_nothing(folder, call):
    call(steps=2)
    before = (folder / "runs" / "run" / "metrics.jsonl").read_bytes()
    call(steps=2)
    assert (folder / "runs" / "run-2" / "metrics.jsonl").is_file()
    assert (folder / "runs" / "run" / "metrics.jsonl").read_bytes() == before


def test_killed_and_resumed_run_equals_the_uninterrupted_one(folder, call):
    """Bit for bit: weights, optimizer and the logged losses; dropout included, since it follows from the step."""
    options = dict(dropout=0.1, schedule="wsd", steps=120, eval_every=30)
    call(name="whole", **options)
    command = [sys.executable, str(ROOT / "train.py"), "--input", "corpus.txt", "--name", "killed"]
    command += [part for name, value in (TINY | options).items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=subprocess.DEVNULL)
    checkpoint = folder / "runs" / "killed" / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    stopped_at = torch.load(checkpoint, weights_only=True)["step"]
    assert stopped_at < 120, "the run ended before it could be killed"

    result = launch(folder, "--resume")
    assert result.returncode == 0, result.stderr
    whole, resumed = (
        torch.load(folder / "runs" / name / "checkpoint.pt", weights_only=True) for name in ("whole", "killed")
    )
    for name, weight in whole["model"].items():
        assert torch.equal(weight, resumed["model"][name]), name
    for index, state in whole["optimizer"]["state"].items():
        assert torch.equal(state["exp_avg_sq"], resumed["optimizer"]["state"][index]["exp_avg_sq"])
    assert losses(folder, "whole") == losses(folder, "killed")
    again = call("--resume", "runs/killed")
    assert again.returncode == 1 and "finished at step 120; give more --steps" in again.stderr


def test_micro_batches_and_ranks_train_the_same(folder, call):
    call(name="whole")
    call(name="micro", micro_batch=2)
    result = launch(folder, name="ranks", ranks=2, micro_batch=2)
    assert result.returncode == 0, result.stderr
    for name in ("micro", "ranks"):
        assert losses(folder, name) == pytest.approx(losses(folder, "whole"), rel=1e-4)
    final = [record["val_loss"] for name in ("whole", "ranks") for record in metrics(folder, name)[-1:]]
    assert final[0] == pytest.approx(final[1], rel=1e-4)


@BY_DEVICE
def test_a_sharded_optimizer_trains_the_same_and_its_checkpoint_is_in_one_piece(folder, call, on):
    """With two processes, resumed by one without shards, and on CPUs by three, which have other shares."""
    options = dict(steps=12, eval_every=4, batch_size=6, keep=3, bias=True, optimizer="muon")  # which has AdamW in it
    if on:
        options |= on | dict(dtype="float32", micro_batch=1)
    call(name="whole", **options)
    result = launch(folder, name="shards", ranks=2, shard_optimizer=True, **options)
    assert result.returncode == 0, result.stderr
    # on a GPU matmuls round to 10 bits, those of Muon to 8, and what differs in the last one grows
    close, close_loss = (5e-2, 1e-3) if on else (1e-4, 1e-4)
    assert losses(folder, "shards") == pytest.approx(losses(folder, "whole"), rel=close_loss)
    path = folder / "runs" / "shards" / "checkpoint.pt"
    paths = (folder / "runs" / "whole" / "checkpoint.pt", path)
    states = [torch.load(path, weights_only=True)["optimizer"] for path in paths]
    numbers = [[group["params"] for group in state["param_groups"]] for state in states]
    assert numbers[0] == numbers[1]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, whole in states[0]["state"].items():
        for name, state in whole.items():
            assert (states[1]["state"][number][name] - state).norm() <= close * state.norm(), (number, name)
    for ranks, flag in ((1, "False"), (2 if on else 3, "True")):
        path.unlink()
        argv = ("--resume", "runs/shards", "--shard_optimizer", flag)
        result = call(*argv) if ranks == 1 else launch(folder, *argv, ranks=ranks)
        assert result.returncode == 0, result.stderr
        assert losses(folder, "shards") == pytest.approx(losses(folder, "whole"), rel=close_loss)


def test_micro_batch_auto(folder, call):
    """Ranks agree on it, it is said and stored, and the global batch is what it was."""
    call(name="whole", batch_size=6, steps=4, eval_every=2)
    result = launch(folder, name="auto", batch_size=6, steps=4, eval_every=2, micro_batch="auto", ranks=2)
    assert result.returncode == 0 and "(6 sequences, 3 at a time)" in result.stdout, result.stderr
    path = folder / "runs" / "auto" / "checkpoint.pt"
    assert torch.load(path, weights_only=True)["micro_batch"] == 3
    assert losses(folder, "auto") == pytest.approx(losses(folder, "whole"), rel=1e-4)
    path.unlink()
    result = call("--resume", "runs/auto")  # one process, which would take 6
    assert result.returncode == 0 and "3 at a time" in result.stdout, result.stderr


def test_machines_with_other_tokens(folder):
    """Two processes stand for them, each the first of its machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = [part for name, value in (TINY | dict(input="corpus.txt")).items() for part in (f"--{name}", str(value))]
    processes = []
    for rank in range(2):
        machine = folder / f"machine{rank}"
        machine.mkdir()
        (machine / "corpus.txt").write_text("the sea keeps what the sea has taken. " * (200 + rank))
        places = dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        command = [sys.executable, str(ROOT / "train.py"), *flags]
        pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        processes.append(subprocess.Popen(command, cwd=machine, env=environment(machine) | places, **pipes))
    try:
        _, err = processes[1].communicate(timeout=120)
        assert processes[1].returncode == 1 and "are not those of the first machine" in err, err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(learning_rat=1), "did you mean --learning_rate?"),
        (dict(steps="many"), "must be int"),
        (dict(n_head=4, n_kv_head=3), "n_head=4 must be a multiple of n_kv_head=3"),
        (dict(block_size=100_000), "block_size=100000"),
        (dict(input="none.txt"), "none.txt does not exist"),
        (dict(input="empty.txt"), "empty.txt is empty"),
        (dict(input="latin.txt"), "not UTF-8"),
        (dict(batch_size=8, micro_batch=3), "micro_batch=3"),
        (dict(vocab_size=10), "vocab_size=10 is smaller"),
        (dict(attention="triton"), "CUDA GPU"),
    ],
    ids=str,
)
def test_mistakes_leave_nothing_behind(folder, call, options, message):
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("na\u00efve".encode("latin-1") * 100)
    # attention() remembers what served a call, and tests before may have had the same one interpreted
    result = launch(folder, **options) if "attention" in options else call(**options)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert message in result.stderr and result.stderr.count("error: ") == 1
    assert result.stderr.split("error: ")[1].count("\n") == 1
    assert not (folder / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_asked_for_and_absent(folder, call):
    result = call(device="cuda")
    assert result.returncode == 1 and "device='cuda' is not available" in result.stderr


def test_checkpoint_of_another_model(folder, call):
    call(steps=2)
    result = call("--resume", "runs/run", "--n_embd", "64", "--steps", "4", "--allow_changes", "True")
    assert result.returncode == 1 and "holds another model" in result.stderr and "Traceback" not in result.stderr


def test_model_of_the_same_shapes_that_computes_something_else(folder, call):
    call(steps=2)
    result = call("--resume", "runs/run", "--mlp", "relu2", "--steps", "4", "--allow_changes", "True")
    assert result.returncode == 1 and "its mlp is 'gelu', not 'relu2'" in result.stderr
    result = call("--resume", "runs/run", "--optimizer", "muon", "--steps", "4", "--allow_changes", "True")
    assert result.returncode == 1 and "has the state of another --optimizer" in result.stderr


def test_resume_keeps_the_flags_it_was_given(folder, call):
    call(steps=20)
    changes = ("--steps", "60", "--weight_decay", "0.5")
    result = call("--resume=runs/run", *changes)
    assert result.returncode == 1 and "--steps 60 would make runs/run another run: it now has 20" in result.stderr
    result = call("--resume=runs/run", *changes, "--allow_changes", "True")
    assert result.returncode == 0, result.stderr
    config = json.loads((folder / "runs/run/config.json").read_text())
    assert (config["steps"], config["weight_decay"], config["n_embd"]) == (60, 0.5, TINY["n_embd"])
    checkpoint = torch.load(folder / "runs/run/checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 60 and checkpoint["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


def test_resume_survives_a_cut_line(folder, call):
    call(steps=20)
    with open(folder / "runs/run/metrics.jsonl", "a") as file:
        file.write('{"step": 21, "lo')
    assert call("--resume", "--steps", "22", "--allow_changes", "True").returncode == 0
    assert [record["step"] for record in metrics(folder)][-1] == 22


def test_evaluation_is_dealt_out_to_the_ranks(monkeypatch):
    """Each batch to one of them; the sums of all make the loss that one process has, whatever the size of the last."""
    sums, seen = [], []
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(train.dist, "all_reduce", lambda x: sums.append(x.clone()))
    network = GPT(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=8, block_size=8, attention="sdpa"))
    network.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    batches = [[torch.randint(8, (rows, 8)) for _ in range(2)] for rows in (4, 4, 4, 4, 1)]
    whole = train.evaluate(network, batches, nullcontext(), Distributed(0, 1, "cpu"))
    seen.clear()
    for rank in (0, 1):
        train.evaluate(network, batches, nullcontext(), Distributed(rank, 2, "cpu"))
    assert seen == [4, 4, 1, 4, 4]
    total, tokens = sum(sums).tolist()
    assert tokens == 8 * 17 and total / tokens == pytest.approx(whole, rel=1e-6)


def test_a_rank_without_a_validation_batch(folder):
    """Rotary angles are buffers, which DDP would broadcast in a forward that only one rank makes."""
    result = launch(
        folder, ranks=2, steps=4, eval_every=2, eval_batches=1, micro_batch=4, position="rope", block_size=512
    )
    assert result.returncode == 0, result.stderr


def test_an_error_of_the_first_rank_ends_all(folder):
    result = launch(folder, ranks=2, input="none.txt")
    assert result.returncode != 0 and "none.txt does not exist" in result.stderr
    assert "[rank" not in result.stderr  # a traceback of another


def test_checkpoint_of_another_tokenizer(folder, call):
    call(steps=2)
    result = call("--resume", "runs/run", "--tokenizer", "char", "--steps", "4", "--allow_changes", "True")
    assert result.returncode == 1 and "another tokenizer" in result.stderr


def test_wandb_offline(folder):
    pytest.importorskip("wandb", reason="wandb is not installed")
    result = launch(folder, steps=3, wandb="offline")
    assert result.returncode == 0, result.stderr
    assert list((folder / "runs" / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_a_gpu(folder, dtype):
    result = launch(folder, device="cuda", dtype=dtype, dropout=0.1)
    assert result.returncode == 0, result.stderr
    assert "attention  triton on cuda" in result.stderr and losses(folder)[-1] < 0.6 * losses(folder)[0]
