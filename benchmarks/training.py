"""Time train.py against nanoGPT: milliseconds per step, seconds to a target loss, and where a step's time goes.

    python benchmarks/training.py --text FILE --ranks FILE                        ours
    python benchmarks/training.py --text FILE --ranks FILE --nanogpt PATH         by turns with a checkout of nanoGPT
    python benchmarks/training.py --text FILE --ranks FILE --jobs gpt2 char --rounds 0 --profile   a step by its parts
    python benchmarks/training.py --text FILE --jobs char modern --rounds 5 --whole   best losses of five seeds
    python benchmarks/training.py --text FOLDER --ranks FILE --nanogpt PATH --jobs books --whole   100M tokens of GPT-2
    python benchmarks/training.py --text FILE --ranks FILE --jobs gpt2 fp8            what --fp8 saves
    python benchmarks/training.py --text DOCUMENTS --ranks FILE --jobs gpt2 documents   the cost of --mask_documents

FILE is tiny Shakespeare, --ranks GPT-2's r50k_base.tiktoken. Every run is a process of its own, and all train on the
same tokens. The time of a step is the median over the second half of the steps that the trainer reports. Seconds count
from the start of the process to the end of the first evaluation that reaches the target, with preparation, compilation
and evaluations; the run is stopped there, or goes on to its end with --whole.
"""

import argparse
import math
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

GPT2 = dict(block_size=1024, n_layer=12, n_head=12, n_embd=768)


class Job(NamedTuple):
    tokenizer: str
    tokens: int  # per step
    ours: list[str]
    nanogpt: list[str] | None
    target: float = 0.0  # validation loss at which the run is stopped
    unit: str = "nats/token"  # of the target


class Outcome(NamedTuple):
    """One run: milliseconds per step, lowest validation loss, seconds to the target (NaN: not reached) and in all."""

    ms: float
    loss: float
    to_target: float
    seconds: float


def jobs(ranks, small):
    """name -> Job. ranks: rank file of GPT-2's tokenizer. small: networks for a CPU, to try this script."""
    gpt2 = GPT2 | (dict(n_layer=2, n_head=2, n_embd=64, block_size=64) if small else {})
    char = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32"] if small else []
    steps = 10 if small else 100
    size = [f"--{name}={value}" for name, value in gpt2.items()]
    cpu = (["--device=cpu"], ["--device=cpu", "--compile=False", "--dtype=float32"]) if small else ([], [])
    ours = ["configs/gpt2.py", "--batch_size=32", "--micro_batch=32", *size, *cpu[0]]
    theirs = ["--batch_size=32", "--gradient_accumulation_steps=1", *size, *cpu[1]]
    timed = [f"--steps={steps}", f"--eval_every={steps}", "--eval_batches=1", "--log_every=1"]
    long = 20 if small else 3052  # 100M tokens
    gpt2_job = Job(
        f"gpt2:{ranks}",
        32 * gpt2["block_size"],
        [*ours, *timed],
        [*theirs, f"--max_iters={steps}", "--eval_interval=100000", "--eval_iters=1", "--log_interval=1"],
    )
    return {
        "gpt2": gpt2_job,
        "fp8": gpt2_job._replace(ours=[*gpt2_job.ours, "--fp8=True"], nanogpt=None),
        "documents": gpt2_job._replace(ours=[*gpt2_job.ours, "--mask_documents=True"], nanogpt=None),
        "books": gpt2_job._replace(
            ours=[*ours, f"--steps={long}", f"--eval_every={long // 8}", "--warmup_steps=200"],
            nanogpt=[*theirs, f"--max_iters={long}", f"--lr_decay_iters={long}", f"--eval_interval={long // 8}",
                     "--eval_iters=50", "--log_interval=10", "--warmup_iters=200"],
        ),
        "char": Job(
            "char",
            64 * (32 if small else 256),
            ["configs/shakespeare_char.py", "--batch_size=64", *char, *cpu[0]],
            ["config/train_shakespeare_char.py", "--log_interval=1", *char, *cpu[1]],
            4.0 if small else 1.4721,  # nanoGPT's best loss on an H200 (docs/results.md)
        ),
        "modern": Job(
            "bpe:384",
            16 * 128 if small else 16 * 1024,
            ["configs/shakespeare.py", *(["--device=cpu", "--steps=20", "--eval_every=10"] if small else [])],
            None,
            8.0 if small else 2.0,
            "bits/byte",
        ),
    }  # fmt: skip


def nanogpt_data(folder, corpus):
    """Write a Corpus in nanoGPT's format: train.bin and val.bin in 16 bits, and meta.pkl with the vocabulary size."""
    folder.mkdir(parents=True)
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        with open(folder / f"{name}.bin", "wb") as file:
            for shard in tokens.shards:
                file.write(shard.astype("uint16"))
    vocabulary = corpus.tokenizer.n_vocab
    if vocabulary < 50_000:  # without meta.pkl nanoGPT takes GPT-2's, padded to 50304
        (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=vocabulary)))


def run(command, folder, job, whole):
    """Outcome of a run of either trainer, read from its output. whole: do not stop it at the target."""
    start, steps, losses, to_target = time.perf_counter(), [], [], math.nan
    process = subprocess.Popen(
        [sys.executable, "-u", *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    number = r"([\d.]+|nan)"
    validation = f"val loss .* {number} bits/byte" if job.unit == "bits/byte" else f"val loss {number}"
    lines, stopped = [], False
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"([\d,]+) tokens/s", line):
            steps.append(1000 * job.tokens / int(found[1].replace(",", "")))
        elif found := re.search(r"^iter \d+: .* time ([\d.]+)ms", line):
            steps.append(float(found[1]))
        elif found := re.search(validation, line):
            losses.append(float(found[1]))
            if losses[-1] <= job.target and math.isnan(to_target):
                to_target = time.perf_counter() - start
                if stopped := not whole:
                    process.terminate()
                    break
    process.stdout.close()
    if process.wait() and not stopped:
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(lines[-20:])}")
    ms = statistics.median(steps[len(steps) // 2 :] or [math.nan])
    if whole:
        print("validation losses", *losses)
    return Outcome(ms, min(losses), to_target, time.perf_counter() - start)


def deviation(values):
    """Standard deviation, or NaN if a value is NaN (a run that did not reach the target)."""
    return math.nan if any(map(math.isnan, values)) else statistics.stdev(values)


def show(name, trainer, job, outcome, what=""):
    ms, loss, to_target, seconds = outcome
    reached = f"{to_target:5.1f} s to {job.target}  {loss:.4f} {job.unit} at best  " if job.target else ""
    print(f"{name:6} {trainer:7} {ms:7.2f} ms a step  {reached}{seconds:5.1f} s in all  {what}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, or other text for GPT-2")
    parser.add_argument("--ranks", type=Path, help="r50k_base.tiktoken, for the jobs of GPT-2")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, run by turns with ours")
    parser.add_argument("--jobs", nargs="+", default=["gpt2", "char", "modern"], choices=jobs("", False))
    parser.add_argument("--rounds", type=int, default=1, help="runs of each job; ours with a new seed each time")
    parser.add_argument("--whole", action="store_true", help="do not stop at the target")
    parser.add_argument("--profile", action="store_true", help="of a step, by benchmarks/step_parts.py")
    parser.add_argument("--small", action="store_true", help="networks that a CPU trains, to try this script")
    args = parser.parse_args()
    if not args.ranks and not {"char", "modern"}.issuperset(args.jobs):
        parser.error("the jobs of GPT-2 need --ranks; name other --jobs to do without")
    from data import open_corpus

    os.chdir(ROOT)
    text = args.text.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        for name, job in jobs(args.ranks and args.ranks.resolve(), args.small).items():
            if name not in args.jobs:
                continue
            data = ["--data=text", f"--input={text}", f"--tokenizer={job.tokenizer}"]
            trainers = {"ours": (["train.py", *job.ours, *data, f"--name=bench-{name}"], ROOT)}
            if args.nanogpt and job.nanogpt:
                folder = Path(scratch) / name
                shutil.copytree(args.nanogpt, folder, ignore=shutil.ignore_patterns(".git", "data", "out*"))
                nanogpt_data(folder / "data" / "bench", open_corpus("text", job.tokenizer, text))
                trainers["nanoGPT"] = (["train.py", *job.nanogpt, "--dataset=bench"], folder)
            outcomes = {trainer: [] for trainer in trainers}
            for number in range(args.rounds):
                for trainer, (command, folder) in trainers.items():
                    seed = [f"--seed={1337 + number}"] if trainer == "ours" else []  # nanoGPT's is fixed
                    outcome = run([*command, *seed], folder, job, args.whole)
                    outcomes[trainer].append(outcome)
                    show(name, trainer, job, outcome)
            if args.rounds > 1:
                for trainer, found in outcomes.items():
                    columns = list(zip(*found, strict=True))
                    show(name, trainer, job, Outcome(*map(statistics.mean, columns)), "mean")
                    show(name, trainer, job, Outcome(*map(deviation, columns)), "standard deviation")
            if args.profile:
                subprocess.run([sys.executable, "benchmarks/step_parts.py", *job.ours, *data], check=True)


if __name__ == "__main__":
    main()
