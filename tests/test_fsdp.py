"""Networks that do not fit on one GPU: FSDP, host memory, checkpointed activations, saving apart from evaluation."""

import runpy
import shutil
import socket
from collections import Counter

import pytest
import torch
from helpers import FAST, ON_GPU, PATHS, ROOT, contents, equal, finish, losses, metrics, one_sentence, same, start
from torch.utils._python_dispatch import TorchDispatchMode

from data import make_tokenizer
from model import GPT
from training import network
from training.checkpoint import Run
from training.config import Config
from training.distributed import Ranks
from training.weights import load_model

CHECKPOINT = "runs/run/checkpoint.pt"
UNEVEN = dict(n_layer=3, vocab_size=259, optimizer="muon", n_kv_head=1)  # rows and matrices that 2 or 4 do not divide
slow = pytest.mark.slow
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def one_rank(monkeypatch):
    """The environment that torchrun gives to a run of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    for name, value in (place | dict(MASTER_PORT=port)).items():
        monkeypatch.setenv(name, value)


def assert_close(found, expected, rel=1e-4):
    """Assert that two runs of these names have equal weights, up to rounding, and states of the same form."""
    ours, theirs = (contents(f"runs/{name}/checkpoint.pt") for name in (found, expected))
    for name, weight in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], weight, rtol=rel, atol=rel)
    states = [each["optimizer"]["state"] for each in (ours, theirs)]
    shapes = [{(n, k): (x.shape, x.dtype) for n, moments in s.items() for k, x in moments.items()} for s in states]
    assert shapes[0] == shapes[1]
    model, *_ = load_model(f"runs/{found}/checkpoint.pt")  # as sample.py, evaluate.py and the export do
    assert equal(dict(model.state_dict()), ours["model"])


def assert_resumes_bit_exactly(run, folder):
    whole, whole_losses = contents(CHECKPOINT), losses(folder)
    (folder / CHECKPOINT).unlink()
    assert run("--resume", "runs/run")[0] == 0
    assert same(contents(CHECKPOINT), whole) and losses(folder) == whole_losses


@pytest.mark.parametrize(
    "options",
    [{}, dict(optimizer="muon"), dict(optimizer="muon", ema=0.9, **PATHS)],
    ids=["adamw", "muon", "recipe"],
)
def test_one_rank_with_fsdp_equals_one_process(folder, run, one_rank, options):
    """Also in host memory; the first weights are the same bits. A resumed run is bit-exact."""
    options |= dict(steps=6, eval_every=3)
    assert run(name="whole", **options)[0] == 0
    assert run(parallel="fsdp", cpu_offload=True, **options)[0] == 0
    assert losses(folder)[0] == losses(folder, "whole")[0]
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-5)
    assert_close("run", "whole")
    assert_resumes_bit_exactly(run, folder)


def test_validated_averages_do_not_stay_gathered(folder, run, one_rank, monkeypatch):
    """FSDP keeps some weights gathered after an evaluation; a step must not compute with those of the average."""
    monkeypatch.setattr(Run, "save", lambda *_, **__: None)  # it would gather others
    options = dict(ema=0.5, steps=6, eval_every=2, dropout=0.0)
    assert run(name="whole", **options)[0] == 0
    assert run(parallel="fsdp", **options)[0] == 0
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-5)


@NEEDS_GPU
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "memory",
    [{}, dict(cpu_offload=True), dict(compile="model", checkpoint_activations="selective")],
    ids=["eager", "in host memory", "compiled"],
)
def test_one_gpu_with_fsdp_equals_one_without(folder, run, one_rank, optimizer, memory):
    """Up to the rounding of bfloat16, to which FSDP casts the weights of norms too. A resumed run is bit-exact."""
    options = FAST | ON_GPU | dict(optimizer=optimizer, steps=12, eval_every=6)
    assert run(name="whole", **options)[0] == 0
    assert run(parallel="fsdp", **options | memory)[0] == 0
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=2e-2)
    assert_resumes_bit_exactly(run, folder)


NO_THREADS_LEFT = """
from pathlib import Path

threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in threads), threads  # one that outlives Python can crash the process
"""


@slow
@pytest.mark.parametrize("ranks, micro_batch", [(2, 2), (4, 0)])
def test_ranks_train_the_same_as_one_process(folder, run, ranks, micro_batch):
    options = UNEVEN | dict(dropout=0, steps=12, eval_every=6)
    assert run(name="whole", **options)[0] == 0
    (folder / "trained.py").write_text(f"import sys, train\ntrain.main(sys.argv[1:])\n{NO_THREADS_LEFT}")
    options |= dict(parallel="fsdp", micro_batch=micro_batch)
    _, err = finish(start(folder, ranks=ranks, script="trained.py", **FAST | options))
    assert "Warning" not in err, err
    assert losses(folder) == pytest.approx(losses(folder, "whole"), rel=1e-4)
    values = [[r["val_loss"] for r in metrics(folder, name) if "val_loss" in r] for name in ("run", "whole")]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert_close("run", "whole")


@slow
def test_a_resumed_run_is_bit_exact_on_the_same_number_of_ranks_and_close_on_others(folder, run):
    options = UNEVEN | dict(parallel="fsdp", steps=12, eval_every=6, micro_batch=2)
    finish(start(folder, ranks=2, **FAST | options))
    whole, whole_losses = contents(CHECKPOINT), losses(folder)
    (folder / CHECKPOINT).unlink()
    for name in ("four", "one"):
        shutil.copytree("runs/run", f"runs/{name}")
    finish(start(folder, "--resume", "runs/run", ranks=2))
    assert same(contents(CHECKPOINT), whole) and losses(folder) == whole_losses
    finish(start(folder, "--resume", "runs/four", ranks=4))
    assert run("--resume", "runs/one", "--parallel", "auto")[0] == 0  # without FSDP
    for name in ("four", "one"):
        assert losses(folder, name) == pytest.approx(whole_losses, rel=1e-4)
        assert_close(name, "run")


ON_WHOLE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from training.distributed import end_distributed
from training.fsdp import on_whole

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3,))
seen = []
for n, height in ((1, 8), (4, 2), (7, 9)):  # some ranks have no row, or no matrix
    whole = torch.arange(n * height * 5.0).view(n, height, 5)
    spread = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in whole]
    rows = torch.stack([matrix.to_local() for matrix in spread])
    found = on_whole(lambda x: seen.append(len(x)) or x.flip(1).cumsum(2), rows, spread[0])
    expected = [distribute_tensor(matrix, mesh, [Shard(0)]).to_local() for matrix in whole.flip(1).cumsum(2)]
    assert torch.equal(found, torch.stack(expected)), (n, height)
assert seen == [1, 2, 3], seen
end_distributed()
"""


@slow
def test_matrices_are_divided_over_the_ranks(folder):
    (folder / "whole.py").write_text(ON_WHOLE + NO_THREADS_LEFT)
    finish(start(folder, ranks=3, script="whole.py"))


@pytest.mark.parametrize(
    "options, parts",
    [
        (dict(dtype="float16"), ["float16", "bfloat16"]),
        (dict(micro_batch="auto"), ["micro_batch=auto"]),
        (dict(sample_every=2), ["sample_every", "sample.py"]),
        (dict(batch_size=9, micro_batch=2), ["batch_size=9", "multiple"]),
    ],
    ids=str,
)
def test_options_that_fsdp_refuses(run, one_rank, options, parts):
    code, err = run(parallel="fsdp", **options)
    assert code == 1
    one_sentence(err, *parts)


def test_fsdp_needs_torchrun(run):
    code, err = run(parallel="fsdp")
    assert code == 1
    one_sentence(err, "torchrun --nproc_per_node=1")
    with pytest.raises(ValueError, match="--parallel fsdp"):
        Config(cpu_offload=True)


def test_too_little_host_memory_for_a_checkpoint(run, monkeypatch):
    monkeypatch.setattr(network, "free_host_memory", lambda: 10**5)
    code, err = run()
    assert code == 1
    one_sentence(err, "host memory", "GB")


@pytest.mark.parametrize(
    "options, device, need",
    [
        ({}, "cpu", "25.9 GB"),
        ({}, "cuda", "36.1 GB"),  # pinned
        (dict(optimizer="adamw"), "cpu", "37.0 GB"),
        (dict(parallel="fsdp", cpu_offload=True), "cuda", "73.8 GB"),
    ],
    ids=str,
)
def test_memory_that_a_network_of_3_billion_parameters_needs(monkeypatch, options, device, need):
    """Muon keeps one moment for most of them; docs/distributed.md has the same figures."""
    monkeypatch.setattr(network, "free_host_memory", lambda: 10**9)
    settings = runpy.run_path(str(ROOT / "configs/modern_3b.py"))
    config = Config(**{name: settings[name] for name in settings.keys() & Config.__dataclass_fields__} | options)
    with pytest.raises(ValueError, match=f" {need} of host memory"):
        network.make_model(config, make_tokenizer("bytes"), Ranks(0, 1, device))


@pytest.mark.parametrize(
    "folder, limit, free",
    [
        ("", "max", 9000 * 1024),
        ("", 100, 45),  # of a container
        ("a/b", 100, 45),  # of a batch job
        ("a", 100, 45),
        ("c", 100, 9000 * 1024),
        ("memory/a", 100, 47),  # version 1
    ],
)
def test_a_limit_on_host_memory_counts(tmp_path, folder, limit, free):
    version_1 = folder.startswith("memory")
    names = ["memory.limit_in_bytes", "memory.usage_in_bytes"] if version_1 else ["memory.max", "memory.current"]
    files = {f"sys/fs/cgroup/{folder}/{name}": str(value) for name, value in zip(names, (limit, 60), strict=True)}
    files[f"sys/fs/cgroup/{folder}/memory.stat"] = "inactive_file 5\ntotal_inactive_file 7\n"
    files |= {"proc/meminfo": "MemFree: 1 kB\nMemAvailable:  9000 kB\n", "proc/self/cgroup": "4:memory:/a\n0::/a/b\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert network.free_host_memory(tmp_path) == free
    (tmp_path / f"sys/fs/cgroup/{folder}/memory.stat").write_text("anon 5\n")  # says nothing about cached files
    assert network.free_host_memory(tmp_path) == (free if free > 100 else 40)


def test_auto_takes_fsdp_if_the_state_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * 10**9))
    ranks = Ranks(0, 2, "cuda:0")
    assert not network.use_fsdp(64 * 10**9, Config(), ranks) and not capsys.readouterr().out
    assert network.use_fsdp(64 * 10**9 + 10**7, Config(), ranks)
    assert "FSDP" in (said := capsys.readouterr().out) and "64.0 GB" in said and "80.0 GB" in said
    assert not network.use_fsdp(10**12, Config(parallel="ddp"), ranks)
    assert network.use_fsdp(1, Config(parallel="fsdp"), ranks)
    assert not network.use_fsdp(10**12, Config(), Ranks(0, 1, "cuda:0"))  # one rank gains nothing


@pytest.mark.parametrize("kind", ["blocks", "selective"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(dropout=0.2, micro_batch=4), id="cpu"),
        pytest.param(ON_GPU | dict(dropout=0.2), id="cuda", marks=NEEDS_GPU),
        pytest.param(ON_GPU | dict(dropout=0.0), id="CUDA graph", marks=NEEDS_GPU),
    ],
)
def test_checkpointed_activations_do_not_change_training(folder, run, kind, options):
    """Bit for bit, with dropout too."""
    options = options | dict(steps=8, eval_every=4)
    assert run(name="kept", **options)[0] == 0
    assert run(checkpoint_activations=kind, **options)[0] == 0
    assert losses(folder) == losses(folder, "kept") and same(contents(CHECKPOINT), contents("runs/kept/checkpoint.pt"))


class Count(TorchDispatchMode):
    """Counts the calls of each op."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls[op.__name__.split(".")[0]] += 1
        return op(*args, **kwargs or {})


def test_ops_that_are_computed_twice(monkeypatch):
    """blocks: all of a block. selective: GELU, not the matmuls and attention."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    calls, tokens = {}, torch.zeros(2, 8, dtype=torch.int64)
    for kind in ("off", "blocks", "selective"):
        options = dict(vocab_size=16, n_layer=3, n_head=1, n_embd=8, block_size=8, attention="sdpa")
        config = Config(**options, checkpoint_activations=kind)
        model = GPT(config)
        if kind != "off":
            network.checkpoint_activations(model, config)
        with Count() as count:
            model(tokens, tokens).backward()
        calls[kind] = count.calls
    for op, factor in (("gelu", (1, 2, 2)), ("_scaled_dot_product_flash_attention_for_cpu", (1, 2, 1))):
        assert tuple(calls[kind][op] for kind in calls) == tuple(3 * number for number in factor), calls
    matmuls = {kind: found["mm"] + found["addmm"] for kind, found in calls.items()}
    # the last matmul of a block is not computed again, because only its inputs are needed
    assert matmuls["blocks"] - 3 * 3 == matmuls["selective"] == matmuls["off"], matmuls


def test_saving_apart_from_evaluation(folder, run):
    """best.pt is written at an evaluation, checkpoint.pt every save_every steps and at the end."""
    assert run(name="whole", steps=10, eval_every=4, dropout=0)[0] == 0
    assert run(steps=10, eval_every=4, save_every=3, keep=9, dropout=0)[0] == 0
    names = {path.name for path in (folder / "runs/run").glob("*.pt")}
    assert names == {"best.pt", "checkpoint.pt", "checkpoint-3.pt", "checkpoint-6.pt", "checkpoint-9.pt"}
    assert "optimizer" not in contents("runs/run/best.pt")
    records = [[(r["step"], r.get("val_loss")) for r in metrics(folder, name)] for name in ("run", "whole")]
    assert records[0] == records[1]
    whole = contents(CHECKPOINT)
    for name in ("checkpoint.pt", "checkpoint-9.pt"):
        (folder / "runs/run" / name).unlink()
    assert run("--resume")[0] == 0  # at step 6
    assert same(contents(CHECKPOINT), whole) and contents("runs/run/best.pt")["step"] == 10
