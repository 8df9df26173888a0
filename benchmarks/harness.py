"""What the benchmarks share: clocks, turns, tables, and what a run of train.py reported."""

import json
import math
import os
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, where attention.py and data.py have the names of packages
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def machine():
    """{chip, commit, torch, triton}: what to name with every figure. COMMIT names the code where there is no git."""
    measured = ["--", ".", ":!*.md", ":!*.csv", ":!*.svg"]  # pages and results do not change what is measured
    commit, changes = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", *measured])
    )
    commit = os.environ.get("COMMIT") or commit + "-dirty" * bool(changes)
    if not commit:
        sys.exit("error: this is no git checkout; name the code by the variable COMMIT")
    chip = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    return dict(chip=chip, commit=commit, torch=torch.__version__, triton=version("triton"))


def table(head, rows):
    """Print a Markdown table, each row as soon as it is there."""
    for cells in chain([head, ["---"] * len(head)], rows):
        print("|", " | ".join(map(str, cells)), "|", flush=True)


def take_turns(calls, rounds, seconds=math.inf):
    """{name: what its call returned in each round}. Turns, so that clocks and other work are the same for all.

    If they return milliseconds, a call that has had its `seconds` and three turns is left out.
    """
    found = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            if turn < 3 or seconds == math.inf or sum(found[name]) < 1000 * seconds:
                found[name].append(call())
    return found


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(function):
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def milliseconds(function):
    """Time of one call with a cold L2 cache. While it is flushed the CPU runs ahead, so launches are not timed."""
    if DEVICE == "cpu":
        return 1000 * seconds_of(function)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush_buffer().zero_()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@cache
def flush_buffer():
    return torch.empty(2**32, dtype=torch.int8, device="cuda")


def read_records(folder, field):
    """The records of a run's metrics.jsonl that have this field; not the line that is being written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if field in record]
