"""Several ranks, with DDP and with FSDP, train the same as one, agree on signals, and end together.

Most slow tests run two gloo processes.
"""

import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from helpers import (
    BY_DEVICE,
    FAST,
    ON_GPU,
    PATHS,
    assert_same_runs,
    at_step,
    children,
    contents,
    equal,
    finish,
    losses,
    metrics,
    one_sentence,
    refused,
    start,
    wait_for,
    wait_for_step,
)

from weights import load

CHECKPOINT = "runs/run/checkpoint.pt"
UNEVEN = dict(n_layer=3, vocab_size=259, optimizer="muon", n_kv_head=1)  # rows and matrices that 2 or 4 do not divide
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL_STEPS = ON_GPU | dict(learning_rate=1e-3)  # large ones would amplify what bfloat16 rounds
ENDLESS = dict(steps=100_000, eval_every=100_000)
slow = pytest.mark.slow


def test_signals_save_and_stop_and_the_run_resumes_bit_exactly(folder, trains, monkeypatch):
    trains(name="whole")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may run under nohup
    stops = {7: signal.SIGTERM, 15: signal.SIGINT, 26: signal.SIGHUP}
    for step, number in stops.items():
        at_step(monkeypatch, step, lambda number=number: signal.raise_signal(number))
    for argv, step in zip(([], ["--resume"], ["--resume"]), stops, strict=True):
        trains(*argv)
        assert contents(CHECKPOINT)["step"] == step
    at_step(monkeypatch, 33, lambda: signal.raise_signal(signal.SIGUSR1))
    trains("--resume")
    assert contents("runs/run/checkpoint-33.pt")["step"] == 33
    assert_same_runs(folder)
    signal.signal(signal.SIGHUP, before)


def test_nohup_ignores_a_closed_terminal(folder, trains, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGHUP))
    trains(steps=4, eval_every=4)
    assert contents(CHECKPOINT)["step"] == 4
    signal.signal(signal.SIGHUP, before)


def test_processes_that_do_not_fit(run, monkeypatch):
    """Too many for the GPUs or for the batch: they end before they join, and the first one says why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("device.gpu_problem", lambda *gpu: None)
    for name, value in dict(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3").items():
        monkeypatch.setenv(name, value)
    refused(run(device="cuda", batch_size=8), "GPU", "--nproc_per_node=2")
    refused(run(batch_size=6), "batch_size=6", "a multiple of the 4 processes")
    refused(run(batch_size=8), "WORLD_SIZE=4", "MASTER_ADDR", "torchrun")


def places(world):
    """The environment that torchrun gives to each rank of a run whose hosts have one rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = dict(WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return [common | {"RANK": str(rank)} for rank in range(world)]


@pytest.fixture
def one_rank(monkeypatch):
    for name, value in places(1)[0].items():
        monkeypatch.setenv(name, value)


def assert_close_runs(folder, found="run", expected="whole", rel=1e-4):
    """Two runs of these names have the same losses and weights, up to rounding, and states of the same form."""
    for name in ("loss", "val_loss"):
        ours, theirs = ([r[name] for r in metrics(folder, run) if name in r] for run in (found, expected))
        assert ours == pytest.approx(theirs, rel=rel)
    ours, theirs = (contents(f"runs/{name}/checkpoint.pt") for name in (found, expected))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-4, atol=1e-4)
    states = [each["optimizer"]["state"] for each in (ours, theirs)]
    shapes = [{(n, k): (x.shape, x.dtype) for n, moments in s.items() for k, x in moments.items()} for s in states]
    assert shapes[0] == shapes[1]
    model, *_ = load(f"runs/{found}/checkpoint.pt", "cpu")  # as sample.py, evaluate.py and the export do
    assert equal(dict(model.state_dict()), ours["model"])


NO_THREADS_LEFT = """
from pathlib import Path

threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in threads), threads  # one that outlives Python can crash the process
"""


def resume_from_the_checkpoint_before(folder, resume):
    """Resume a copy of the run, "again", from an older checkpoint; it must equal the run bit for bit."""
    shutil.copytree(folder / "runs/run", folder / "runs/again")
    (folder / "runs/again/checkpoint.pt").unlink()
    resume()
    assert_same_runs(folder, "again", "run")


@slow
@pytest.mark.parametrize("ranks, parallel, micro_batch", [(2, "ddp", 2), (2, "fsdp", 2), (4, "fsdp", 0)])
def test_ranks_train_the_same_as_one_process(folder, trains, ranks, parallel, micro_batch):
    """And PyTorch prints no warning. A resumed run is bit-exact on as many ranks, and close on one."""
    options = UNEVEN | dict(dropout=0, steps=12, eval_every=6)
    trains(name="whole", **options)
    (folder / "trained.py").write_text(f"import sys, train\ntrain.main(sys.argv[1:])\n{NO_THREADS_LEFT}")
    options |= dict(parallel=parallel, micro_batch=micro_batch)
    out, err = finish(start(folder, ranks=ranks, script="trained.py", **FAST | options))
    assert "best val loss" in out and "Warning" not in err, err
    assert_close_runs(folder)
    if ranks == 2:
        resume_from_the_checkpoint_before(folder, lambda: finish(start(folder, "--resume", "runs/again", ranks=2)))
        (folder / "runs/again/checkpoint.pt").unlink()
        trains("--resume", "runs/again", "--parallel", "ddp")
        assert_close_runs(folder, "again", "run")


@pytest.mark.parametrize(
    "options, rel",
    [
        pytest.param({}, 1e-5, id="adamw"),
        pytest.param(dict(optimizer="muon", ema=0.5, **PATHS), 1e-5, id="recipe"),
        # up to the rounding of bfloat16, to which FSDP casts the weights of norms too
        pytest.param(SMALL_STEPS, 2e-2, id="gpu", marks=NEEDS_GPU),
        pytest.param(SMALL_STEPS | dict(optimizer="muon"), 2e-2, id="gpu muon", marks=NEEDS_GPU),
    ],
)
def test_one_rank_with_fsdp_equals_one_process(folder, trains, one_rank, options, rel):
    """The first weights are the same bits. A resumed run is bit-exact.

    After an evaluation of averages, a step must not compute with those that FSDP keeps gathered.
    """
    options = options | dict(steps=6, eval_every=2, save_every=3)
    trains(name="whole", **options)
    memory = dict(compile="model", checkpoint_activations="selective") if "device" in options else {}
    trains(parallel="fsdp", **options | memory)
    assert losses(folder)[0] == pytest.approx(losses(folder, "whole")[0], rel=rel if memory else 0)
    if memory:
        assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=rel)
    else:
        assert_close_runs(folder, rel=rel)
    resume_from_the_checkpoint_before(folder, lambda: trains("--resume", "runs/again"))


@slow
@pytest.mark.parametrize(
    "ranks, layers, options",
    [
        (1, 1, dict(tokenizer="bytes+eot", mask_documents=True, attention="auto")),
        (2, 1, {}),
        (2, 2, dict(parallel="fsdp", checkpoint_activations="selective")),
    ],
    ids=["one rank", "DDP", "FSDP"],
)
def test_compiled_training_equals_eager_training(folder, trains, ranks, layers, options):
    """--compile model compiles one graph in each rank, with FSDP one that all blocks share; also with micro-batches."""
    same = dict(n_layer=layers, steps=4, eval_every=2, dropout=0, micro_batch=2)
    trains(name="whole", **same | options | dict(parallel="ddp", checkpoint_activations="off"))
    compiled = FAST | same | options | dict(compile="model", sample_every=0 if "parallel" in options else 2)
    _, err = finish(start(folder, ranks=ranks, variables={"TORCH_LOGS": "graph_code"}, **compiled))
    traced = [line for line in err.splitlines() if "TRACED GRAPH" in line]
    assert len(traced) == ranks and "Warning" not in err, err
    for rank in range(ranks if ranks > 1 else 0):
        assert any(line.startswith(f"[rank{rank}]") for line in traced), traced
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-5)


def rank_processes(torchrun):
    """Process ids of torchrun's ranks, in order."""

    def rank(pid):
        return int(re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[1])

    ranks = [pid for pid in children(torchrun.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return sorted(ranks, key=rank)


@slow
@BY_DEVICE
@pytest.mark.parametrize("ranks, then", [(2, 1), (1, 2)])
def test_a_signal_to_one_rank_stops_all_and_another_number_resumes(folder, trains, on, ranks, then):
    """With dropout, whose masks do not depend on which rank has a sequence."""
    options = dict(steps=120, eval_every=60, eval_batches=1, micro_batch=4) | on
    trains(name="whole", **options)
    process = start(folder, ranks=ranks, **FAST | options)
    wait_for_step(folder, 3)
    os.kill(rank_processes(process)[-1] if ranks > 1 else process.pid, signal.SIGTERM)
    finish(process)
    assert contents(CHECKPOINT)["step"] < 120
    if then == 1:
        trains("--resume", "runs/run")
    else:
        finish(start(folder, "--resume", "runs/run", ranks=then))
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-3)


@slow
@BY_DEVICE
def test_a_signal_to_torchrun_stops_all_ranks(folder, on):
    """torchrun passes it on, waits for the ranks and then exits 1."""
    process = start(folder, ranks=2, **FAST | ENDLESS | on)
    wait_for_step(folder, 3)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process, code=1)
    stopped = int(re.search(r"stopped at step (\d+); resume with: torchrun", out)[1])
    assert contents(CHECKPOINT)["step"] == stopped


@slow
@BY_DEVICE
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_dies_takes_the_job_down_and_the_run_resumes(folder, on, parallel):
    process = start(folder, ranks=2, **FAST | ENDLESS | dict(save_every=4, parallel=parallel) | on)
    wait_for(lambda: (folder / CHECKPOINT).exists())
    victim = rank_processes(process)[1]
    os.kill(victim, signal.SIGKILL)
    _, err = finish(process, code=1)
    assert "local_rank: 1" in err and f"pid: {victim}" in err and "SIGKILL" in err, err[-3000:]
    saved = contents(CHECKPOINT)["step"]
    finish(start(folder, "--resume", "--steps", str(saved + 2), "--allow_changes", ranks=2))
    assert contents(CHECKPOINT)["step"] == saved + 2 and len(losses(folder)) == saved + 2


@slow
def test_an_error_of_rank_0_ends_all(folder):
    _, err = finish(start(folder, ranks=2, **FAST | dict(input="none.txt")), code=1)
    assert "none.txt" in err and "[rank" not in err, err  # a traceback of a rank


@slow
@pytest.mark.parametrize("differs", ["text", "run"])
def test_hosts_need_the_same_text_and_checkpoint(folder, trains, differs):
    """Two processes with a folder each stand for hosts with one rank each."""
    trains(steps=4, eval_every=2, micro_batch=4)
    folders, argv = [folder / "host0", folder / "host1"], []
    for host in folders:
        shutil.copytree(folder / "runs", host / "runs")
        shutil.copy("corpus.txt", host)
    if differs == "text":
        (folders[1] / "corpus.txt").write_text("the sea keeps what the sea has taken. " * 201)
    else:
        for path in (folders[1] / "runs/run").glob("*.pt"):
            path.unlink()
        argv = ["--resume", "runs/run", "--steps", "6", "--allow_changes"]
    hosts = [start(host, *argv, variables=place, **FAST) for host, place in zip(folders, places(2), strict=True)]
    _, err = finish(hosts[1], code=1)
    one_sentence(err.replace("error on rank 1: ", "error: "), "hosts")
    finish(hosts[0], code=1)


@slow
def test_micro_batch_auto_on_another_number_of_ranks(folder, trains):
    """A resumed run keeps it. The validation text has one window, so rank 1 has nothing to evaluate."""
    options = dict(micro_batch="auto", batch_size=6, position="rope", block_size=512, steps=4, eval_every=2)
    trains(name="whole", **options | dict(micro_batch=3))
    finish(start(folder, ranks=2, **FAST | options))
    os.remove(CHECKPOINT)
    trains("--resume", "runs/run")  # a new run of one rank would take 6
    assert contents(CHECKPOINT)["micro_batch"] == 3
    assert_close_runs(folder)


def test_options_that_fsdp_refuses(run, one_rank):
    refused(run(parallel="fsdp", dtype="float16"), "float16", "bfloat16")
    refused(run(parallel="fsdp", micro_batch="auto"), "micro_batch=auto")
    refused(run(parallel="fsdp", sample_every=2), "sample_every", "sample.py")


@pytest.mark.parametrize("kind", ["blocks", "selective"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(dropout=0.2, micro_batch=4), id="cpu"),
        pytest.param(ON_GPU | dict(dropout=0.2), id="cuda", marks=NEEDS_GPU),
        pytest.param(ON_GPU | dict(dropout=0.0), id="CUDA graph", marks=NEEDS_GPU),
    ],
)
def test_checkpointed_activations_do_not_change_training(folder, trains, kind, options):
    """Bit for bit, with dropout too."""
    options = options | dict(steps=8, eval_every=8)
    trains(name="whole", **options)
    trains(checkpoint_activations=kind, **options)
    assert_same_runs(folder)
