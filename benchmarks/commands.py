"""Time what a user waits for beside training: the start of each script, and the preparation of a text.

    python benchmarks/commands.py start                 scripts on a run of two steps of shakespeare.py
    python benchmarks/commands.py prepare TEXT RANKS    a file, beside tiktoken, which only encodes it

Seconds, the least of three. Text is prepared with the tokenizer gpt2; RANKS is its r50k_base.tiktoken.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from harness import FOLDER, ROOT, seconds_of, table

from data.build import Options
from data.corpus import prepare
from data.tokenizer import make_tokenizer

COMMANDS = (
    "train.py --help",
    "train.py configs/shakespeare.py --data text --input data/play.txt --steps 2 --name NAME",
    "sample.py NAME --max_tokens 1",
    "evaluate.py NAME",
    "plot.py NAME --out runs/NAME/losses.png",
)


def time_start():
    for command in COMMANDS:
        argv = [sys.executable, *command.replace("NAME", FOLDER.name).split()]
        call = partial(subprocess.run, argv, cwd=ROOT, check=True, capture_output=True)
        yield [f"`{command}`", f"{min(seconds_of(call) for _ in range(3)):.1f}"]
    for folder in (FOLDER, *FOLDER.parent.glob(f"{FOLDER.name}-*")):  # a second run of this name is NAME-2
        shutil.rmtree(folder)


def time_prepare(text, ranks):
    spec, size = f"gpt2:{ranks.resolve()}", text.stat().st_size / 1e6
    paragraphs, tokenizer, threads = text.read_text().split("\n\n"), make_tokenizer(spec), len(os.sched_getaffinity(0))
    calls = {
        "`data.prepare`": lambda: shutil.rmtree(prepare("text", spec, text.resolve(), Options(), threads).folder),
        "tiktoken": lambda: tokenizer.encode_ordinary_batch(paragraphs, num_threads=threads),
    }
    for name, call in calls.items():
        seconds = min(seconds_of(call) for _ in range(3))
        yield [f"{name}, {size:.1f} MB of text, {threads} threads", f"{seconds:.2f}"]


if __name__ == "__main__":
    part, *paths = sys.argv[1:]
    table(["command", "s"], time_start() if part == "start" else time_prepare(*map(Path, paths)))
