"""What the benchmarks share: command lines, the machine, clocks, tables and SDPA."""

import argparse
import csv
import os
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, where attention.py and data.py have the names of packages
FOLDER = ROOT / "runs" / f"bench-{os.getpid()}"  # of a run of train.py, removed after it
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


def command_line(doc):
    """For the command line of a script whose docstring is its --help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def table(head, rows):
    """Print the machine and a Markdown table, each row as soon as it is there."""
    print(*machine().values(), sep=", ")
    for cells in chain([head, ["---"] * len(head)], rows):
        print("|", " | ".join(map(str, cells)), "|", flush=True)


def save(rows, path):
    """Write a CSV file anew, with the columns of all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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


def sdpa(backend, q, k, v, causal=False):
    """PyTorch's attention of q, k, v [B, T, H, D] by one of its backends."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
