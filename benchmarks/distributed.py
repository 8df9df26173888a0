"""Runs on several GPUs of one host, and of networks that barely fit on one; prints a table, each row once it is known.

    python benchmarks/distributed.py --gpus 1 2 4 --parts ddp xl       tokens/s, share of linear scaling, memory per GPU
    python benchmarks/distributed.py --gpus 2 4 --parts losses kill    equal losses, resuming, kill -9 of a rank
    python benchmarks/distributed.py --gpus 4 --parts muon             time of a step with Muon and with AdamW, FSDP
    python benchmarks/distributed.py --gpus 1 --parts one largest      1.5B on one GPU; the largest network that trains
    python benchmarks/distributed.py --gpus 1 2 --small                all of it on a CPU, with gloo and tiny networks

Each row is a run of train.py. Where only its speed counts it writes no checkpoint and is killed after a number of
reports; tokens/s is the median of the second half of them. "host" is how far the host's free memory fell meanwhile.
Text is data/play.txt, whose bytes are the tokens, so nothing needs to be prepared. A part ends after --seconds, and
its rows that are missing by then fail; the next part is run all the same. ddp and xl need 1 among --gpus for shares.
"""

import argparse
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from training.checkpoint import load_checkpoint  # noqa: E402
from training.network import free_host_memory  # noqa: E402
from training.report import read_metrics  # noqa: E402

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256, device="cpu", attention="sdpa")
SEQUENCES = 32  # of a GPU and step, for GPT-2 124M
STATE, SAVED = 16, 12  # bytes of a parameter, with AdamW: in training, and in a checkpoint (docs/distributed.md)
LOG = Path("log.txt")  # of the run that was started last


class Failed(Exception):
    """A run ended with an error, or its part has no time left."""


class Part:
    """A part of the table: starts runs, one at a time, and ends them at the latest when its `seconds` are over."""

    def __init__(self, name, seconds):
        self.name, self.deadline, self.failed = name, time.monotonic() + seconds, False

    def start(self, gpus, *argv, **options):
        """Start train.py in this folder, with torchrun if it has several ranks or uses FSDP."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
        argv = [*argv, *(f"--{name}={value}" for name, value in options.items())]
        alone = gpus == 1 and "--parallel=fsdp" not in argv
        with open(LOG, "w") as log:
            command = [sys.executable, *([] if alone else launcher), str(ROOT / "train.py"), *argv]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, process, until=None):
        """Wait until a function is true, or for the end of the run; Failed if it has an error, or time is over."""
        while not (until and until()):
            if process.poll() == 0 and not until:
                return
            if process.poll() is not None:
                raise Failed(reason())
            if time.monotonic() > self.deadline:
                raise Failed("no time is left")
            time.sleep(0.2)

    def finish(self, gpus, *argv, **options):
        """A run from start to end."""
        try:
            self.wait(self.start(gpus, *argv, **options))
        finally:
            end_runs()

    def measure(self, gpus, count=6, every=2, **options):
        """{tokens/s, ms per step, GB per GPU, MFU, GB of the host} of a run, after `count` reports."""
        shutil.rmtree(Path("runs") / self.name, ignore_errors=True)
        before, free = free_host_memory(), math.inf

        def reported():
            nonlocal free
            free = min(free, free_host_memory())
            return len(reports(self.name)) >= count

        often = dict(steps=100_000, eval_every=100_000, eval_batches=1, log_every=every)
        try:
            self.wait(self.start(gpus, name=self.name, **options | often), reported)
        except Failed as error:
            self.failed = True
            return dict(failed=error)
        finally:
            end_runs()
        second_half = reports(self.name)[count // 2 :]
        rate = statistics.median(record["tokens_per_second"] for record in second_half)
        milliseconds = 1000 * options["batch_size"] * options["block_size"] / rate
        row = {"ms": f"{milliseconds:.1f}", "tokens/s": f"{rate:,.0f}", "rate": rate}
        if "peak_memory" in second_half[-1]:
            share = statistics.median(record.get("mfu", 0) for record in second_half)
            row |= {"GB": f"{second_half[-1]['peak_memory'] / 1e9:.1f}", "MFU": f"{share:.1%}"}
        return row | {"host": f"{(before - free) / 1e9:.1f} GB"}

    def show(self, gpus, what, row):
        values = "  ".join(f"{key} {value}" for key, value in row.items() if key != "rate")
        print(f"{self.name:8} {gpus} GPUs  {what:36} {values}", flush=True)

    def scaling(self, gpus, what, first, **options):
        """One row of tokens/s with the share of linear scaling; first: a dict that keeps the rate of one GPU."""
        row = self.measure(gpus, **options)
        if gpus == 1:
            first[what] = row.get("rate")
        if "rate" in row and first.get(what):
            row["share"] = f"{row['rate'] / gpus / first[what]:.1%}"
        self.show(gpus, what, row)


def runs_here():
    """Ids of the processes that work in this folder: runs, their ranks, also those whose launcher has ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.readlink(path / "cwd") == os.getcwd() and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def end_runs():
    """Kill all runs in this folder and wait until they are gone, so that the next one finds the GPUs' memory free."""
    until = time.monotonic() + 30
    while found := runs_here():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise Failed(f"processes {found} did not end within 30 s of SIGKILL")
        time.sleep(0.1)


def last_rank():
    """Process id of the run's last rank."""
    ranks = {}
    for pid in runs_here():
        process = Path(f"/proc/{pid}")
        with suppress(OSError):  # it has ended
            found = re.search(rb"\0RANK=(\d+)", process.joinpath("environ").read_bytes())
            if found and b"train.py" in process.joinpath("cmdline").read_bytes():
                ranks[int(found[1])] = pid
    if not ranks:
        raise Failed(reason())
    return ranks[max(ranks)]


def reason():
    """The line of the log that says best why the run failed."""
    lines = LOG.read_text().strip().splitlines() or ["nothing is printed"]
    ours = [line for line in lines if line.startswith("error")]
    return [*ours, *(line for line in lines if re.search(r"Error\b", line)), lines[-1]][0][:200]


def reports(name):
    return [record for record in read_metrics(Path("runs") / name) if "loss" in record]


def losses_of(name):
    """Losses of a run's steps, in float64; NaN where one was not finite."""
    return np.array([record["loss"] for record in reports(name)], float)


def compare(losses, others):
    """The largest difference in words, and the steps in which a loss was not finite."""
    bad = (np.flatnonzero(~np.isfinite(losses + others)) + 1).tolist()
    return f"{np.nanmax(np.abs(losses - others)):.1e}" + (f", not finite in steps {bad}" if bad else "")


def ddp(part, all_gpus, gpt2, **_):
    first = {}
    for times in (1, 4):
        for gpus in all_gpus:
            batch = SEQUENCES * times * gpus
            part.scaling(gpus, f"124M, ddp, {times} x {SEQUENCES} sequences", first, every=5,
                         **gpt2 | dict(batch_size=batch, micro_batch=SEQUENCES, parallel="ddp"))  # fmt: skip


def xl(part, all_gpus, big, **_):
    first = {}
    for parallel in ("fsdp", "ddp"):
        for gpus in all_gpus:
            options = dict(batch_size=16 * gpus, micro_batch=16, parallel=parallel)
            part.scaling(gpus, f"1.5B, {parallel}", first, **big | options)


def muon(part, all_gpus, big, **_):
    for gpus in all_gpus:
        for optimizer in ("adamw", "muon"):
            options = big | dict(batch_size=8 * gpus, optimizer=optimizer, parallel="fsdp")
            part.show(gpus, f"1.5B, fsdp, {optimizer}", part.measure(gpus, **options))


def one(part, big, **_):
    for again in ("selective", "off", "blocks"):
        options = big | dict(batch_size=8, checkpoint_activations=again)
        part.show(1, f"1.5B, 8 sequences, {again}", part.measure(1, **options))


def largest(part, deep, small, **_):
    """Layers of width 4096, 0.2B parameters each: as many as fit into a share of the GPU, or with offload of the host.

    Of the GPU, shares are tried from the largest on until one trains.
    """
    layer, rest = 12 * deep["n_embd"] ** 2, 2 * deep["vocab_size"] * deep["n_embd"]
    host = free_host_memory()
    gpu = 0 if small else gpu_memory()
    for offload, shares in ((False, (0.94, 0.9, 0.84)), (True, (0.9, 0.8))):
        for share in shares:
            fits = min(share * gpu / STATE, 0.9 * host / SAVED)
            layers = int(((share * host / (STATE + SAVED) if offload else fits) - rest) / layer)
            memory = dict(parallel="fsdp", cpu_offload=offload, checkpoint_activations="blocks")
            options = deep | memory | dict(n_layer=2 if small else layers, batch_size=8, micro_batch=8)
            row = part.measure(1, count=3, **options)
            size = (options["n_layer"] * layer + rest) / 1e9
            part.show(1, f"{options['n_layer']} layers, {size:.2f}B, offload {offload}", row)
            if "failed" not in row:
                break


def gpu_memory():
    """Bytes of memory of the first GPU, without using any of it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def losses(part, all_gpus, plain, small, **_):
    """Losses of 200 steps for each number of GPUs, with one batch; bit-exact resuming; resuming on half the GPUs."""
    steps = 20 if small else 200
    options = plain | dict(batch_size=16, micro_batch=16 // max(all_gpus), steps=steps, log_every=1, eval_every=steps,
                           save_every=steps * 3 // 4, eval_batches=1, deterministic=True)  # fmt: skip
    part.finish(1, name="alone", **options)
    alone = losses_of("alone")
    for parallel in ("ddp", "fsdp"):
        for gpus in sorted({*all_gpus} - {1}) or [1]:
            name = f"{parallel}{gpus}"
            part.finish(gpus, name=name, parallel=parallel, **options)
            found = losses_of(name)
            part.show(gpus, f"{parallel}, {steps} steps", {"largest difference from 1 GPU": compare(alone, found)})
        whole = load_checkpoint(f"runs/{name}/checkpoint.pt")["model"]
        for then in sorted({gpus, max(gpus // 2, 1)}, reverse=True):
            again = Path(f"runs/{name}-on-{then}")
            shutil.copytree(f"runs/{name}", again)
            (again / "checkpoint.pt").unlink()
            part.finish(then, "--resume", again, f"--parallel={parallel}")
            weights = load_checkpoint(again / "checkpoint.pt")["model"]
            equal = all(torch.equal(weights[key], whole[key]) for key in whole)
            differ = compare(losses_of(again.name), found)
            part.show(then, f"{name} resumed", {"weights equal": equal, "largest difference": differ})


def kill(part, all_gpus, plain, **_):
    gpus = max(*all_gpus, 2)
    often = dict(steps=100_000, eval_every=100_000, save_every=20, eval_batches=1, log_every=1, batch_size=16)
    for parallel in ("ddp", "fsdp"):
        run = Path(f"runs/kill-{parallel}")
        try:
            process = part.start(gpus, name=run.name, parallel=parallel, **plain | often)
            part.wait(process, (run / "checkpoint.pt").exists)
            since = time.monotonic()
            os.kill(last_rank(), signal.SIGKILL)
            while (process.poll() is None or runs_here()) and time.monotonic() < since + 60:
                time.sleep(0.1)
            seconds = time.monotonic() - since
            row = {"ended after": f"{seconds:.1f} s" if seconds < 60 else "more than 60 s"}
        finally:
            end_runs()
        row["said"] = [line[:80] for line in LOG.read_text().splitlines() if line.startswith("error")][:1]
        step = load_checkpoint(run / "checkpoint.pt")["step"]
        part.finish(gpus, "--resume", run, "--allow_changes", f"--steps={step + 5}")
        part.show(gpus, parallel, {"resumed from": step, "to": reports(run.name)[-1]["step"]} | row)


PARTS = dict(ddp=ddp, xl=xl, losses=losses, kill=kill, muon=muon, one=one, largest=largest)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=200, help="limit of each part")
    parser.add_argument("--small", action="store_true", help="tiny networks on a CPU, to try this script")
    args = parser.parse_args(argv)
    text = dict(data="text", input=ROOT / "data/play.txt", tokenizer="bytes", warmup_steps=10, learning_rate=3e-4)
    text |= dict(min_learning_rate=3e-5, vocab_size=50304, block_size=1024, compile="blocks")
    networks = dict(
        gpt2=text | dict(n_layer=12, n_head=12, n_embd=768),
        plain=text | dict(n_layer=12, n_head=12, n_embd=768, vocab_size=512, compile="off"),
        big=text | dict(n_layer=48, n_head=25, n_embd=1600, micro_batch=8, checkpoint_activations="selective"),
        deep=text | dict(n_head=32, n_embd=4096, position="rope", norm="rmsnorm", mlp="relu2", tie_head=False),
    )
    if args.small:
        networks = {name: options | SMALL | dict(compile="off") for name, options in networks.items()}
    failed, here = [], os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPT_DATA"] = folder
        try:
            for name in args.parts:
                part = Part(name, args.seconds)
                try:
                    PARTS[name](part, all_gpus=args.gpus, small=args.small, **networks)
                except Exception as error:  # of any kind: the parts after this one are worth having
                    part.failed = True
                    print(f"{name:8} failed: {type(error).__name__}: {error}", flush=True)
                failed += [name] * part.failed
        finally:
            end_runs()
            os.chdir(here)
    if failed:
        sys.exit(f"error: these parts have rows that failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
