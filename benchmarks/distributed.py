"""Runs on several GPUs of one host, and of networks that barely fit on one; prints one table, row by row.

    python benchmarks/distributed.py --gpus 1 2 4 --parts ddp xl       tokens/s, share of linear scaling, memory per GPU
    python benchmarks/distributed.py --gpus 2 4 --parts losses kill    equal losses, resuming, kill -9 of a rank
    python benchmarks/distributed.py --gpus 4 --parts muon             time of a step with Muon and with AdamW, FSDP
    python benchmarks/distributed.py --gpus 1 --parts one largest      1.5B on one GPU; the largest network that trains
    python benchmarks/distributed.py --gpus 1 2 --small                all of it on a CPU, with gloo and tiny networks

Each row is a run of train.py, which is killed after a number of reports and writes no checkpoint where only its speed
counts. tokens/s is the median of the second half of the reports. Text is data/play.txt, whose bytes are the tokens of
a vocabulary of GPT-2's size, so nothing needs to be prepared. ddp and xl need 1 among --gpus to give shares.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from training.checkpoint import load_checkpoint  # noqa: E402
from training.report import read_metrics  # noqa: E402

PARTS = ("ddp", "xl", "losses", "kill", "muon", "one", "largest")
SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256, device="cpu", attention="sdpa")
SEQUENCES = 32  # of a GPU and step, for GPT-2 124M


def command(gpus, options):
    """The command line of a run; torchrun starts it if it has several ranks or uses FSDP."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    argv = options.get("argv", [])
    alone = gpus == 1 and options.get("parallel") != "fsdp" and "--parallel=fsdp" not in argv
    flags = [f"--{name}={value}" for name, value in options.items() if name != "argv"]
    return [sys.executable, *([] if alone else launcher), str(ROOT / "train.py"), *argv, *flags]


def start(gpus, **options):
    with open("log.txt", "w") as log:
        return subprocess.Popen(command(gpus, options), stdout=log, stderr=subprocess.STDOUT)


def family(pid):
    """A process and all that it has started, directly or not."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def ranks_of(process):
    """Process ids of the ranks that torchrun has started."""
    return [pid for pid in family(process.pid)[1:] if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def finish(process, seconds=400):
    """Wait for the end of a run; returns its output."""
    code = process.wait(timeout=seconds)
    output = Path("log.txt").read_text()
    if code:
        raise RuntimeError(f"a run ended with {code}:\n{output[-3000:]}")
    return output


def reports(name):
    return [record for record in read_metrics(Path("runs") / name) if "loss" in record]


def measure(gpus, name, count=10, **options):
    """{tokens/s, ms per step, GB per GPU, MFU} of a run that is killed after `count` reports, one every two steps."""
    shutil.rmtree(Path("runs") / name, ignore_errors=True)
    often = dict(steps=100_000, eval_every=100_000, eval_batches=1, log_every=2)
    process = start(gpus, name=name, **options | often)
    while process.poll() is None and len(reports(name)) < count:
        time.sleep(0.2)
    running = process.poll() is None
    for pid in family(process.pid) if running else []:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    if not running:
        lines = [line for line in Path("log.txt").read_text().splitlines() if "error" in line.lower()]
        return dict(failed=(lines or ["no error is printed"])[0][:120])
    second_half = reports(name)[count // 2 :]
    rate = statistics.median(record["tokens_per_second"] for record in second_half)
    row = {"tokens/s": f"{rate:,.0f}", "ms": 1000 * options["batch_size"] * options["block_size"] / rate, "rate": rate}
    if "peak_memory" in second_half[-1]:
        row |= {"GB": f"{second_half[-1]['peak_memory'] / 1e9:.1f}", "MFU": f"{second_half[-1].get('mfu', 0):.1%}"}
    return row


def show(part, gpus, what, row):
    values = "  ".join(f"{key} {value}" for key, value in row.items() if key not in ("rate", "ms"))
    step = f"{row['ms']:.1f} ms a step  " if "ms" in row else ""
    print(f"{part:8} {gpus} GPUs  {what:42} {step}{values}", flush=True)


def scaling(part, gpus, what, first, **options):
    """One row of tokens/s with the share of linear scaling; first: a dict that keeps the row of one GPU."""
    row = measure(gpus, part, **options)
    if "rate" in row:
        rate = first.setdefault(what, row["rate"] / gpus)
        row["share"] = f"{row['rate'] / gpus / rate:.1%}"
    show(part, gpus, what, row)


def ddp(all_gpus, gpt2, **_):
    first = {}
    for times in (1, 4):
        for gpus in all_gpus:
            batch = SEQUENCES * times * gpus
            scaling("ddp", gpus, f"124M, {times} x {SEQUENCES} sequences", first,
                    **gpt2 | dict(batch_size=batch, micro_batch=SEQUENCES, parallel="ddp"))  # fmt: skip


def xl(all_gpus, big, **_):
    first = {}
    for parallel in ("fsdp", "ddp"):
        for gpus in all_gpus:
            scaling("xl", gpus, f"1.5B, {parallel}", first, **big | dict(batch_size=16 * gpus, parallel=parallel))


def muon(all_gpus, big, **_):
    for gpus in all_gpus:
        for optimizer in ("adamw", "muon"):
            options = big | dict(batch_size=8 * gpus, optimizer=optimizer, parallel="fsdp")
            show("muon", gpus, f"1.5B, fsdp, {optimizer}", measure(gpus, "muon", **options))


def one(big, **_):
    for again in ("off", "selective", "blocks"):
        for micro_batch in (8, 16):
            options = big | dict(batch_size=micro_batch, micro_batch=micro_batch, checkpoint_activations=again)
            show("one", 1, f"1.5B, {micro_batch} sequences, {again}", measure(1, "one", **options))


def largest(deep, small, **_):
    """Layers of width 4096, 0.2B parameters each, until it fails; without and with CPU offload."""
    for offload in (False, True):
        for layers in (2, 3) if small else (16, 24) if offload else (24, 32, 36, 40):
            memory = dict(parallel="fsdp", cpu_offload=offload, checkpoint_activations="blocks")
            options = deep | memory | dict(n_layer=layers, batch_size=8, micro_batch=8)
            row = measure(1, "largest", count=3, **options)
            count = options["n_embd"] ** 2 * 12 * layers + 2 * options["vocab_size"] * options["n_embd"]
            show("largest", 1, f"{layers} layers, {count / 1e9:.2f}B, offload {offload}", row)
            if "failed" in row:
                break


def losses(all_gpus, gpt2, small, **_):
    """Losses of 200 steps for each number of GPUs, with one batch; bit-exact resuming; resuming on half the GPUs."""
    steps = 20 if small else 200
    options = gpt2 | dict(batch_size=SEQUENCES, micro_batch=SEQUENCES // max(all_gpus), steps=steps, log_every=1,
                          eval_every=steps, save_every=steps // 2, eval_batches=1, deterministic=True)  # fmt: skip
    for parallel in ("ddp", "fsdp"):
        found = {}
        for gpus in sorted({1, *all_gpus}):
            name = f"{parallel}{gpus}"
            finish(start(gpus, name=name, parallel=parallel, **options))
            found[gpus] = [record["loss"] for record in reports(name)]
            differ = max(abs(a - b) for a, b in zip(found[1], found[gpus], strict=True))
            show("losses", gpus, f"124M, {parallel}, {steps} steps", {"largest difference from 1 GPU": f"{differ:.1e}"})
        name, whole = f"{parallel}{gpus}", load_checkpoint(f"runs/{parallel}{gpus}/checkpoint.pt")["model"]
        for then in (gpus, gpus // 2):
            shutil.copytree(f"runs/{name}", f"runs/{name}-{then}")
            Path(f"runs/{name}-{then}/checkpoint.pt").unlink()
            finish(start(then, argv=["--resume", f"runs/{name}-{then}", f"--parallel={parallel}"]))
            weights = load_checkpoint(f"runs/{name}-{then}/checkpoint.pt")["model"]
            equal = all(torch.equal(weights[key], whole[key]) for key in whole)
            pairs = zip(reports(f"{name}-{then}"), found[gpus], strict=True)
            differ = max(abs(record["loss"] - loss) for record, loss in pairs)
            show("losses", then, f"{name} resumed", {"weights equal": equal, "largest difference": f"{differ:.1e}"})


def kill(all_gpus, gpt2, **_):
    gpus = max(all_gpus)
    for parallel in ("ddp", "fsdp"):
        name = f"kill-{parallel}"
        often = dict(steps=100_000, eval_every=100_000, save_every=20, eval_batches=1, log_every=1)
        process = start(gpus, name=name, parallel=parallel, batch_size=SEQUENCES, **gpt2 | often)
        while not Path(f"runs/{name}/checkpoint.pt").exists():
            time.sleep(0.2)
        since = time.monotonic()
        os.kill(ranks_of(process)[-1], signal.SIGKILL)
        process.wait()
        seconds = time.monotonic() - since
        sentences = [line for line in Path("log.txt").read_text().splitlines() if line.startswith("error")]
        step = load_checkpoint(f"runs/{name}/checkpoint.pt")["step"]
        finish(start(gpus, argv=["--resume", f"runs/{name}", "--allow_changes", f"--steps={step + 5}"]))
        row = {"ended after": f"{seconds:.1f} s", "resumed from": step, "to": reports(name)[-1]["step"]}
        show("kill", gpus, f"124M, {parallel}", row | {"said": [line[:80] for line in sentences[:1]]})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true", help="tiny networks on a CPU, to try this script")
    args = parser.parse_args()
    text = dict(data="text", input=ROOT / "data/play.txt", tokenizer="bytes", warmup_steps=10, learning_rate=3e-4)
    text |= dict(min_learning_rate=3e-5, vocab_size=50304, block_size=1024, compile="blocks")
    gpt2 = text | dict(n_layer=12, n_head=12, n_embd=768)
    big = text | dict(n_layer=48, n_head=25, n_embd=1600, micro_batch=8, checkpoint_activations="selective")
    deep = text | dict(n_head=32, n_embd=4096, position="rope", norm="rmsnorm", mlp="relu2", tie_head=False)
    if args.small:
        gpt2, big, deep = (options | SMALL | dict(compile="off") for options in (gpt2, big, deep))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPT_DATA"] = folder
        for part in args.parts:
            globals()[part](all_gpus=args.gpus, gpt2=gpt2, big=big, deep=deep, small=args.small)


if __name__ == "__main__":
    main()
