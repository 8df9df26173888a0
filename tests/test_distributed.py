"""Several ranks train the same as one, agree on signals, and end together. Most tests here run two gloo processes."""

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    BY_DEVICE,
    FAST,
    at_step,
    children,
    contents,
    finish,
    launch,
    losses,
    metrics,
    one_sentence,
    reached,
    same,
    start,
    wait_for,
)

from training.export import export

CHECKPOINT = "runs/run/checkpoint.pt"
slow = pytest.mark.slow


def test_signals_save_and_stop_and_the_run_resumes_bit_exactly(folder, run, monkeypatch):
    assert run(name="whole")[0] == 0
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may run under nohup
    stops = {7: signal.SIGTERM, 15: signal.SIGINT, 26: signal.SIGHUP}
    for step, number in stops.items():
        at_step(monkeypatch, step, lambda number=number: signal.raise_signal(number))
    for argv, step in zip(([], ["--resume"], ["--resume"]), stops, strict=True):
        assert run(*argv)[0] == 0 and contents(CHECKPOINT)["step"] == step
    at_step(monkeypatch, 33, lambda: signal.raise_signal(signal.SIGUSR1))
    assert run("--resume")[0] == 0 and contents("runs/run/checkpoint-33.pt")["step"] == 33
    assert same(contents(CHECKPOINT), contents("runs/whole/checkpoint.pt"))
    assert losses(folder) == losses(folder, "whole")
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(device="cuda", batch_size=8), ["GPU", "--nproc_per_node=2"]),
        (dict(device="cuda:0", batch_size=8), ["GPU", "--nproc_per_node=2"]),
        (dict(batch_size=6), ["batch_size=6", "a multiple of the 4 processes"]),
    ],
    ids=str,
)
def test_processes_that_do_not_fit(run, monkeypatch, options, words):
    """Too many for the GPUs or for the batch: they end before they join, and the first one says why."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in dict(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3").items():
        monkeypatch.setenv(name, value)
    code, err = run(**options)
    assert code == 1
    one_sentence(err, *words)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_normal_run_prints_no_warning(folder, run, ranks):
    """Two or four ranks with micro-batches of two train the same as one rank with the whole batch."""
    out, err = finish(start(folder, ranks=ranks, **FAST | dict(dropout=0, micro_batch=0 if ranks == 1 else 2)))
    assert "best val loss" in out and "Warning" not in err, err
    if ranks > 1:
        assert run(name="whole", dropout=0)[0] == 0
        assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-4)
        values = [metrics(folder, name)[-1]["val_loss"] for name in ("run", "whole")]
        assert values[0] == pytest.approx(values[1], rel=1e-4)


@slow
@pytest.mark.parametrize(
    "ranks, layers, memory",
    [(1, 1, {}), (2, 1, {}), (2, 2, dict(parallel="fsdp", checkpoint_activations="selective"))],
    ids=["one rank", "DDP", "FSDP"],
)
def test_compiled_training_equals_eager_training(folder, run, ranks, layers, memory):
    """--compile model compiles one graph in each rank, with FSDP one that all blocks share; also with micro-batches."""
    options = dict(n_layer=layers, steps=6, eval_every=3, dropout=0, micro_batch=2)
    assert run(name="eager", **options)[0] == 0
    variables, options = {"TORCH_LOGS": "graph_code"}, options | memory
    _, err = finish(start(folder, ranks=ranks, variables=variables, **FAST | options | {"compile": "model"}))
    traced = [line for line in err.splitlines() if "TRACED GRAPH" in line]
    assert len(traced) == ranks and "Warning" not in err, err
    for rank in range(ranks if ranks > 1 else 0):
        assert any(line.startswith(f"[rank{rank}]") for line in traced), traced
    assert losses(folder) == pytest.approx(losses(folder, "eager"), rel=1e-5)


def rank_processes(torchrun):
    """Process ids of torchrun's ranks, in order."""

    def rank(pid):
        return int(re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[1])

    ranks = [pid for pid in children(torchrun.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return sorted(ranks, key=rank)


@slow
@BY_DEVICE
@pytest.mark.parametrize("ranks, then", [(2, 1), (1, 2)])
def test_a_signal_to_one_rank_stops_all_and_another_number_resumes(folder, run, on, ranks, then):
    """With dropout, whose masks do not depend on which rank has a sequence."""
    options = dict(steps=200, eval_every=100, eval_batches=1, micro_batch=4) | on
    assert run(name="whole", **options)[0] == 0
    process = start(folder, ranks=ranks, **FAST | options)
    wait_for(lambda: reached(folder, 3))
    os.kill(rank_processes(process)[-1] if ranks > 1 else process.pid, signal.SIGTERM)
    finish(process)
    assert contents(CHECKPOINT)["step"] < 200
    finish(start(folder, "--resume", ranks=then))
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-3)


@slow
@BY_DEVICE
def test_a_signal_to_torchrun_stops_all_ranks(folder, on):
    """torchrun passes it on, waits for the ranks and then exits 1."""
    process = start(folder, ranks=2, **FAST | dict(steps=100_000, eval_every=100_000) | on)
    wait_for(lambda: reached(folder, 3))
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process, code=1)
    stopped = int(re.search(r"stopped at step (\d+); resume with: torchrun", out)[1])
    assert contents(CHECKPOINT)["step"] == stopped


@slow
@BY_DEVICE
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_dies_takes_the_job_down_and_the_run_resumes(folder, on, parallel):
    options = dict(steps=100_000, eval_every=100_000, save_every=4, parallel=parallel)
    process = start(folder, ranks=2, **FAST | options | on)
    wait_for(lambda: (folder / CHECKPOINT).exists())
    victim, killed = rank_processes(process)[1], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, err = finish(process, code=1)
    assert time.monotonic() - killed < 60
    assert "local_rank: 1" in err and f"pid: {victim}" in err and "SIGKILL" in err, err[-3000:]
    saved = contents(CHECKPOINT)["step"]
    finish(start(folder, "--resume", "--steps", str(saved + 2), "--allow_changes", ranks=2))
    assert contents(CHECKPOINT)["step"] == saved + 2 and len(losses(folder)) == saved + 2


@slow
def test_a_rank_that_waits_for_a_dead_one_says_so_and_ends(folder):
    """SIGSTOP here does what a killed rank does to NCCL: the other waits in C++, where Python handles no signal."""
    process = start(folder, ranks=2, **FAST | dict(steps=100_000, eval_every=100_000))
    wait_for(lambda: reached(folder, 3))
    waits, stopped = rank_processes(process)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(1)  # until the other waits for it
    os.kill(waits, signal.SIGTERM)
    try:
        wait_for(lambda: waits not in children(process.pid), seconds=60)
    finally:
        os.kill(stopped, signal.SIGKILL)
    _, err = finish(process, code=1)
    assert re.search(r"^error: rank 0 was asked to stop, but has waited \d+ s for another rank", err, re.M), err[-3000:]


@slow
def test_an_error_of_rank_0_ends_all(folder):
    result = launch(folder, ranks=2, input="none.txt")
    assert result.returncode != 0 and "none.txt" in result.stderr
    assert "[rank" not in result.stderr, result.stderr  # a traceback of a rank


def start_on_hosts(folders, *argv, **options):
    """Processes with a folder each, which stand for hosts with one rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = dict(WORLD_SIZE=str(len(folders)), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return [
        start(folder, *argv, variables=place | {"RANK": str(rank)}, **options) for rank, folder in enumerate(folders)
    ]


@slow
@pytest.mark.parametrize("differs", ["text", "run"])
def test_hosts_need_the_same_text_but_not_the_checkpoint(folder, run, differs):
    """The first one reads the checkpoint for both."""
    assert run(steps=4, eval_every=2, micro_batch=4)[0] == 0
    folders = [folder / "host0", folder / "host1"]
    for host in folders:
        shutil.copytree(folder / "runs", host / "runs")
        shutil.copy("corpus.txt", host)
    if differs == "text":
        (folders[1] / "corpus.txt").write_text("the sea keeps what the sea has taken. " * 201)
        argv = []
    else:
        for path in (folders[1] / "runs/run").glob("*.pt"):
            path.unlink()
        argv = ["--resume", "runs/run", "--steps", "6", "--allow_changes"]
    hosts = start_on_hosts(folders, *argv, **FAST)
    if differs == "run":
        finish(hosts[0]), finish(hosts[1])
        assert contents(folders[0] / CHECKPOINT)["step"] == 6
        return
    _, err = finish(hosts[1], code=1)
    one_sentence(err.replace("error on rank 1: ", "error: "), "rank 0", "hosts")
    finish(hosts[0], code=1)


@slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_only_rank_0_reads_the_weights_that_a_run_begins_with(folder, run, parallel):
    """On the other host their file is empty."""
    assert run(name="first")[0] == 0
    export("runs/first", "out")
    hosts = [folder / "host0", folder / "host1"]
    for host in hosts:
        shutil.copytree("out", host / "out")
        shutil.copy("corpus.txt", host)
    (hosts[1] / "out/model.safetensors").write_bytes(b"")
    options = dict(init_from="out", steps=2, eval_every=2, dropout=0, block_size=16)
    assert run(name="whole", **options)[0] == 0
    for process in start_on_hosts(hosts, **FAST | options | dict(parallel=parallel)):
        finish(process)
    assert losses(hosts[0]) == pytest.approx(losses(folder, "whole"), rel=1e-5)


@slow
def test_a_rank_without_a_validation_batch(folder):
    """The validation text has one window, so rank 1 has nothing to evaluate."""
    result = launch(folder, ranks=2, steps=4, eval_every=2, micro_batch=4, position="rope", block_size=512)
    assert result.returncode == 0 and len(losses(folder)) == 4, result.stderr


AGREE = """
import sys
import torch.distributed as dist
from training import step
from training.config import load_config
from training.distributed import start_distributed

def choose(config):
    ranks = start_distributed(config)
    step.fits = lambda model, rows, config, ranks: rows <= (2, 4)[ranks.rank]  # the GPUs have different room
    chosen = step.choose_micro_batch(None, config, ranks._replace(device="cuda"), None)
    print(f"chosen {chosen}")  # one string, because both ranks print at once

choose(load_config(sys.argv[1:]))
dist.destroy_process_group()
"""


@slow
def test_ranks_agree_on_micro_batch_auto(folder, run):
    """A run keeps it when another number of ranks resumes."""
    (folder / "agree.py").write_text(AGREE)
    out, _ = finish(start(folder, ranks=2, script="agree.py", **FAST | dict(micro_batch="auto")))
    assert out.count("chosen 2") == 2, out

    options = dict(micro_batch="auto", batch_size=6, steps=4, eval_every=2)
    assert run(name="whole", **options | dict(micro_batch=3))[0] == 0
    finish(start(folder, ranks=2, **FAST | options))
    os.remove(CHECKPOINT)
    assert run("--resume", "runs/run")[0] == 0  # a new run of one rank would take 6
    assert contents(CHECKPOINT)["take_step"]["micro_batch"] == 3
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-4)
