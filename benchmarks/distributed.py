"""Speed on several GPUs of one host, and of networks that barely fit on one; each row is a run of train.py.

    python benchmarks/distributed.py --gpus 1 2 4               tokens/s, share of linear scaling, memory per GPU
    python benchmarks/distributed.py --gpus 1 --parts largest   a network of 4.8B parameters on one GPU
    python benchmarks/distributed.py --gpus 1 2 --small         all of it on a CPU, with gloo and tiny networks

A run is killed after six reports; tokens/s is the median of the second half of them, and memory that of rank 0's GPU.
Text is data/play.txt, whose bytes are the tokens. Shares of linear scaling need 1 among --gpus. Equal losses, resuming
and kill -9 on several GPUs are checked by tests/test_distributed.py, also with NCCL.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import FOLDER, ROOT, command_line, table

from training.curves import read_metrics

REPORTS, SECONDS = 6, 200  # of a run, before it is killed
TEXT = dict(
    data="text", input=ROOT / "data/play.txt", tokenizer="bytes", vocab_size=50304, block_size=1024, warmup_steps=10,
    learning_rate=3e-4, min_learning_rate=3e-5, compile="blocks", steps=10**6, eval_every=10**6, eval_batches=1,
)  # fmt: skip
GPT2 = TEXT | dict(n_layer=12, n_head=12, n_embd=768, log_every=5)
BIG = TEXT | dict(
    n_layer=48, n_head=25, n_embd=1600, checkpoint_activations="selective", batch_size=16, micro_batch=16, log_every=2
)
DEEP = TEXT | dict(
    n_layer=22, n_head=32, n_embd=4096, position="rope", norm="rmsnorm", mlp="relu2", tie_head=False, parallel="fsdp",
    checkpoint_activations="blocks", batch_size=8, micro_batch=8, log_every=1,
)  # fmt: skip
PARTS = {
    "ddp": {
        "124M, DDP, 32 sequences": GPT2 | dict(batch_size=32, micro_batch=32),
        "124M, DDP, 4 x 32 sequences": GPT2 | dict(batch_size=128, micro_batch=32),
    },
    "xl": {f"1.5B, {parallel}": BIG | dict(parallel=parallel) for parallel in ("fsdp", "ddp")},
    "largest": {"22 layers of width 4096": DEEP},
}
SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256, device="cpu", compile="off")


def reports(gpus, **options):
    """The first reports of a run of train.py, which is killed then. torchrun starts it on several GPUs or with FSDP."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    launcher = torchrun if gpus > 1 or options.get("parallel") == "fsdp" else []
    argv = [f"--{name}={value}" for name, value in options.items()]
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, *launcher, "train.py", *argv, f"--name={FOLDER.name}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        end = time.monotonic() + SECONDS
        try:
            while len(found := [record for record in read_metrics(FOLDER) if "loss" in record]) < REPORTS:
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(f"train.py failed, or took over {SECONDS} s:\n{log.read()[-2000:]}")
                time.sleep(0.05)
        finally:
            kill(process, with_ranks=bool(launcher))
            shutil.rmtree(FOLDER, ignore_errors=True)
    return found


def kill(process, with_ranks):
    """Kill train.py; if torchrun started it, its ranks, which would outlive torchrun and whose end ends it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ranks = children.read_text().split() if with_ranks and process.poll() is None else []
    for rank in ranks:
        os.kill(int(rank), signal.SIGKILL)
    if not ranks:
        process.kill()
    process.wait()


def rows(args, cases):
    """A row for each case {name: options} and number of GPUs; batch_size is that of one GPU."""
    for name, options in cases.items():
        options, alone = options | (SMALL if args.small else {}), None
        for gpus in args.gpus:
            batch = options["batch_size"] * gpus
            records = reports(gpus, **options | dict(batch_size=batch))[REPORTS // 2 :]
            rate = median(record["tokens_per_second"] for record in records)
            alone = rate if gpus == 1 else alone
            yield [
                name, gpus, f"{1000 * batch * options['block_size'] / rate:.1f}", f"{rate:,.0f}",
                f"{rate / gpus / alone:.1%}" if alone else "-", f"{records[-1].get('peak_memory', 0) / 1e9:.1f}",
            ]  # fmt: skip


def main():
    parser = command_line(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true", help="tiny networks on a CPU, to try this script")
    args = parser.parse_args()
    for name in args.parts:
        table(["run", "GPUs", "ms a step", "tokens/s", "of linear", "GB per GPU"], rows(args, PARTS[name]))


if __name__ == "__main__":
    main()
