"""The start of a run: kernels and network compiled ahead, and the line that says where the time went."""

import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import FAST, in_process, metrics

from data import make_tokenizer
from model import GPT
from training.config import Config
from training.distributed import Ranks
from training.start import KernelsAhead, StartClock, compile_network, process_age
from training.step import autocast

MODERN = dict(norm="rmsnorm", position="rope", qk_norm=True, n_kv_head=1, dropout=0.0)
LEAVE_AUTOCAST = """  # in a thread, as KernelsAhead does, while the main thread casts weights as torch.compile does
import faulthandler, threading, torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from training.step import autocast

finished = threading.Event()

def leave():
    while not finished.is_set():
        with autocast("bfloat16", "cpu"):
            pass

faulthandler.dump_traceback_later(60, exit=True)
threading.Thread(target=leave).start()
with FakeTensorMode(), enable_python_dispatcher():
    for _ in range(50):
        with autocast("bfloat16", "cpu"):
            for _ in range(40):
                torch.nn.functional.linear(torch.empty(4, 8), torch.nn.Parameter(torch.empty(8, 8)))
finished.set()
"""
PARTS = ["imports", "data", "model", "compilation", "evaluation", "first step"]


def make_config(**options):
    config = Config(**FAST | options)
    return config, config.model(make_tokenizer("bytes"))


@pytest.mark.parametrize("options", [dict(dropout=0.1), MODERN], ids=["gpt2", "modern"])
def test_kernels_ahead_are_those_of_a_step(device, options):
    """A step then meets no attention problem that is new. Without a GPU, in Triton's interpreter."""
    problem = pytest.importorskip("attention.problem", reason="Triton exists for Linux only")
    config, model_config = make_config(attention="auto", **options)
    problem.PROBLEMS.clear()
    with KernelsAhead(model_config, config, SimpleNamespace(device=device, on_gpu=True), 3):
        pass
    ahead = set(problem.PROBLEMS)
    assert {"kernels.cross_entropy", "attention.portable.launch"} <= set(sys.modules)
    model = GPT(model_config if device == "cuda" else replace(model_config, attention="triton")).to(device)
    tokens = torch.randint(256, (3, config.block_size), device=device)
    with autocast(config.dtype, device):
        model(tokens, tokens).backward()
    assert len(ahead) >= 2 and set(problem.PROBLEMS) == ahead  # forward and backward at least


def test_kernels_ahead_leave_torchs_random_state(device):
    """For the CPU it is the state of the weights' initialisation; that of a GPU is set anew by every step."""
    config, model_config = make_config(attention="auto", dropout=0.0)
    before = torch.get_rng_state()
    with KernelsAhead(model_config, config, SimpleNamespace(device=device, on_gpu=True), 3):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_the_network_is_compiled_once_and_stays_as_it_is():
    """The first step compiles nothing new."""
    config, model_config = make_config(compile="model")
    model = GPT(model_config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    torch.compiler.reset(), torch._dynamo.utils.counters.clear()
    network = torch.compile(model, backend="aot_eager")
    compile_network(network, config, Ranks(0, 1, "cpu"), config.batch_size)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())
    tokens, targets = torch.randint(256, (2, config.batch_size, config.block_size))
    network(tokens, targets).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 1


@pytest.mark.parametrize("error, ends", [(torch.OutOfMemoryError, False), (RuntimeError, True)])
def test_only_a_lack_of_memory_leaves_the_compilation_to_the_first_step(error, ends):
    """The threads that compile kernels take memory beside it."""
    config, _ = make_config(compile="model")

    def network(tokens, targets):
        raise error

    with pytest.raises(error) if ends else nullcontext():
        compile_network(network, config, Ranks(0, 1, "cpu"), config.batch_size)


def test_the_start_is_printed_by_part(folder, capsys):
    out = in_process(capsys, **FAST | dict(steps=4, eval_every=2)).stdout
    [line] = [line for line in out.splitlines() if line.startswith("start ")]
    total, *seconds = map(float, re.findall(r"([\d.]+) s", line))
    assert re.findall(r"s ([a-z ]+)", line) == PARTS
    assert abs(sum(seconds) - total) < 0.05 * len(PARTS) + 0.05  # they are rounded
    assert len(metrics(folder)) == 7  # the line is no record


def test_the_clock_starts_with_the_process():
    clock = StartClock()
    clock.end("data")
    assert clock.parts["imports"] == pytest.approx(process_age(), abs=1.0) and 0 <= clock.parts["data"] < 1
    assert clock.parts["imports"] > 0


def test_autocast_of_two_threads_does_not_stop_the_run():
    run = subprocess.run([sys.executable, "-c", LEAVE_AUTOCAST], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
