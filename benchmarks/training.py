"""Time train.py against nanoGPT, or with an option against without it: milliseconds per step, seconds to a target loss.

    python benchmarks/training.py --text FILE --ranks FILE                          ours
    python benchmarks/training.py --text FILE --ranks FILE --nanogpt PATH           by turns with a checkout of nanoGPT
    python benchmarks/training.py --text FILE --ranks FILE --jobs gpt2 --with=--fp8    with and without --fp8
    python benchmarks/training.py --text FILE --small                               tiny networks, to try it on a CPU

FILE is tiny Shakespeare, --ranks GPT-2's r50k_base.tiktoken. Every run is a process of its own, and all train on the
same tokens. The time of a step is the median over the second half of the reports that a trainer prints. Seconds count
from the start of the process to the end of the first evaluation that reaches the target, with preparation, compilation
and evaluations; the run is stopped there, or goes on to its end with --whole, and the last of ours stays in
runs/bench-JOB. With --whole the table also has the best loss, the seconds of the whole process, and, of the last round,
step:seconds:loss of each evaluation.
"""

import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from harness import ROOT, command_line, table

from benchmarks.draw import mean_and_deviation
from data.corpus import open_corpus


class Job(NamedTuple):
    tokenizer: str
    ours: str  # options of train.py
    nanogpt: str = ""  # of nanoGPT's; without them it does not run
    target: float = 0.0  # validation loss at which the run is stopped
    unit: str = "nats/token"  # of the target


GPT2 = "configs/gpt2.py --batch_size 32 --micro_batch 32 "  # nanoGPT has GPT-2's sizes by default
THEIRS = "--batch_size=32 --gradient_accumulation_steps=1 "
JOBS = {
    "gpt2": Job(
        "gpt2", GPT2 + "--steps 100 --eval_every 100 --eval_batches 1 --log_every 1",
        THEIRS + "--max_iters=100 --eval_interval=100 --eval_iters=1 --log_interval=1",
    ),
    "books": Job(
        "gpt2", GPT2 + "--steps 3052 --eval_every 381 --eval_batches 50 --warmup_steps 200",
        THEIRS + "--max_iters=3052 --lr_decay_iters=3052 --eval_interval=381 --eval_iters=25 --log_interval=10 "
        "--warmup_iters=200",  # eval_iters batches of each text: 50 in all, as ours
    ),
    "char": Job(
        "char", "configs/shakespeare_char.py --batch_size 64",
        "config/train_shakespeare_char.py",
        1.4721,  # near nanoGPT's best; its README has 1.4697
    ),
    "shakespeare": Job("bpe:384", "configs/shakespeare.py", "", 2.0, "bits/byte"),
    "laptop": Job(
        "char", "configs/shakespeare_char.py --device cpu --eval_every 1000",
        "config/train_shakespeare_char.py --device=cpu --compile=False --eval_interval=1000 --eval_iters=20 "
        "--log_interval=10 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
        "--lr_decay_iters=2000 --dropout=0.0",  # its README's for a CPU, with fewer reports and evaluations
    ),
    "recipe": Job("gpt2", "configs/modern.py --tokens 36_000_000"),
}  # fmt: skip
SMALL = (
    "--device cpu --tokenizer bytes --vocab_size 256 --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 "
    "--steps 20 --eval_every 10 --batch_size 8 --micro_batch 8 --eval_batches 1 --log_every 1 --warmup_steps 2"
)


class Outcome(NamedTuple):
    ms: float  # per step
    to_target: float  # seconds; NaN: not reached
    loss: float  # the lowest of the validation
    seconds: float  # in all
    curve: str  # step:seconds:loss of each evaluation


def nanogpt_data(folder, corpus):
    """Write a Corpus in nanoGPT's format: train.bin and val.bin in 16 bits, and meta.pkl with the vocabulary size."""
    folder.mkdir(parents=True)
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        np.concatenate(tokens.shards).astype("uint16").tofile(folder / f"{name}.bin")
    vocabulary = corpus.tokenizer.n_vocab
    if vocabulary < 50_000:  # without meta.pkl nanoGPT takes GPT-2's, padded to 50304
        (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=vocabulary)))


def run(command, folder, job, whole, caches):
    """Outcome of a run of either trainer, read from what it prints.

    whole: do not stop early. caches: variables that name the folders of compiled kernels.
    """
    start, steps, losses, curve, to_target, lines = time.perf_counter(), [], [], [], math.nan, []
    report = None  # of nanoGPT: the step and when it was printed
    process = subprocess.Popen(
        [sys.executable, "-u", *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | caches,
    )  # fmt: skip
    loss = r".* ([\d.]+|nan) bits/byte" if job.unit == "bits/byte" else r" ([\d.]+|nan)"
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"^step +([\d,]+) tokens", line):
            tokens = int(found[1].replace(",", ""))  # of a step
        elif found := re.search(r"([\d,]+) tokens/s", line):
            steps.append(1000 * tokens / int(found[1].replace(",", "")))
        elif found := re.search(r"^iter (\d+): ", line):  # its own time leaves out what the GPU still has to do
            before, report = report, (int(found[1]), time.perf_counter())
            if before:
                steps.append(1000 * (report[1] - before[1]) / (report[0] - before[0]))
        elif found := re.search(r"step (\d+).* val loss" + loss, line):
            report = None
            losses.append(float(found[2]))
            curve.append(f"{found[1]}:{time.perf_counter() - start:.1f}:{losses[-1]}")
            if losses[-1] <= job.target and math.isnan(to_target):
                to_target = time.perf_counter() - start
                if not whole:
                    process.terminate()
                    break
    process.communicate()
    if process.returncode and (whole or math.isnan(to_target)):
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(lines[-20:])}")
    ms, seconds = median(steps[len(steps) // 2 :] or [math.nan]), time.perf_counter() - start
    return Outcome(ms, to_target, min(losses), seconds, " ".join(curve))


def commands(name, run_folder, args, scratch):
    """{trainer: (its command, the folder it runs in)} of a job; ours without the seed."""
    job, text, tokenizer = JOBS[name], args.text.resolve(), JOBS[name].tokenizer
    if tokenizer == "gpt2" and args.ranks:
        tokenizer = f"gpt2:{args.ranks.resolve()}"
    ours = [
        "train.py", *job.ours.split(), "--data=text", f"--input={text}", f"--tokenizer={tokenizer}",
        f"--name={run_folder.name}", *(SMALL.split() if args.small else []),
    ]  # fmt: skip
    trainers = {"Kestrel": (ours, ROOT)}
    if args.options:
        trainers[shlex.join(args.options)] = [*ours, *args.options], ROOT
    if args.nanogpt and job.nanogpt:
        folder = Path(scratch) / name
        shutil.copytree(args.nanogpt, folder, ignore=shutil.ignore_patterns(".git", "data", "out*"))
        nanogpt_data(folder / "data" / "bench", open_corpus("text", tokenizer, text))
        trainers["nanoGPT"] = ["train.py", *job.nanogpt.split(), "--dataset=bench"], folder
    return trainers


def job_rows(name, args, scratch):
    """Run a job's trainers by turns; yields their rows of the table."""
    job, run_folder = JOBS[name], ROOT / "runs" / f"bench-{'small' if args.small else name}"
    trainers = commands(name, run_folder, args, scratch)
    found = {trainer: [] for trainer in trainers}
    for number, (trainer, (command, folder)) in product(range(args.rounds), trainers.items()):
        if folder == ROOT:  # nanoGPT's seed is fixed
            command = [*command, f"--seed={1337 + number}"]
            shutil.rmtree(run_folder, ignore_errors=True)
        cache = tempfile.mkdtemp(dir=scratch)
        caches = dict(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=cache + "/triton") if args.cold else {}
        found[trainer].append(run(command, folder, job, args.whole, caches))
        print(name, trainer, found[trainer][-1], file=sys.stderr, flush=True)
    if not args.whole:
        shutil.rmtree(run_folder)
    for trainer, outcomes in found.items():
        numbers = [outcome[: 4 if args.whole else 2] for outcome in outcomes]
        cells = [mean_and_deviation(values) for values in zip(*numbers, strict=True)]
        if args.whole:
            cells.append(outcomes[-1].curve)
        target = f"{job.target} {job.unit}" if job.target else ""
        yield [name, trainer, "empty" if args.cold else "full", target, *cells]


def main():
    parser = command_line(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, or other text for GPT-2")
    parser.add_argument("--ranks", type=Path, help="r50k_base.tiktoken; without it, it is downloaded")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, run by turns with ours")
    parser.add_argument("--with", dest="options", type=shlex.split, help="options of train.py, by turns with the job")
    parser.add_argument("--jobs", nargs="+", default=["gpt2", "char", "shakespeare"], choices=JOBS)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each job; ours with a new seed each time")
    parser.add_argument("--whole", action="store_true", help="do not stop at the target")
    parser.add_argument("--cold", action="store_true", help="begin each run with empty caches of compiled kernels")
    parser.add_argument("--small", action="store_true", help="networks that a CPU trains, to try this script")
    args = parser.parse_args()
    whole = ["best loss", "s in all", "curve"] if args.whole else []
    head = ["job", "trainer", "caches", "target", "ms a step", "s to the target", *whole]
    with tempfile.TemporaryDirectory() as scratch:
        table(head, chain.from_iterable(job_rows(name, args, scratch) for name in args.jobs))


if __name__ == "__main__":
    main()
