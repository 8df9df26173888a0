"""Compare changes of a recipe: the losses of several runs of train.py, one after the other, with mean and spread.

    python benchmarks/recipes.py split classic-books-markdown books            training, development and test books
    python benchmarks/recipes.py configs/gpt2_books.py changes.txt --tokens 50M --seeds 1 2 --seconds 1500

Each line of changes.txt is `name: options of train.py`, or a comment that begins with #. A name alone is the config as
it is. Runs go through all names with the first seed, then with the next one, and each becomes a line of --csv. A run
that is there already is not repeated, so an interrupted series goes on where it was. A run that fails does not stop the
others; the exit code is then 1. Losses are those of the development books at the end of a run, which are the validation
part of books/train; only the final table may use --test. Seconds count from the start of the process to its end, with
compilation, evaluations and checkpoints.
"""

import csv
import hashlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from harness import FOLDER, ROOT, command_line, machine

from benchmarks.draw import markdown, means, rows_of
from errors import command, require
from training.config import load_config
from training.curves import read_metrics

SUFFIXES = (".txt", ".md")  # of books
TEST_SHARE = 0.04  # of the books


def split(books, folder, megabytes):
    """Divide a folder of books, by whole books, into folder/train and folder/test.txt.

    A hash of a book's path orders the books and says which are for the test, so adding books does not move the others.
    The data path takes the development books from folder/train, by a hash too. megabytes: take the first books in
    this order, up to this size.
    """
    paths = [path for path in books.rglob("*") if path.suffix.lower() in SUFFIXES and path.stat().st_size]
    places = {}
    for path in paths:
        name = path.relative_to(books).as_posix()
        places[path] = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    require(places, f"{books} has no books; their names must end in {' or '.join(SUFFIXES)}")
    (folder / "train").mkdir(parents=True)
    taken, room = {"train": [], "test": []}, megabytes * 1e6
    for path in sorted(paths, key=places.get):
        room -= path.stat().st_size
        if room < 0:
            break
        # the last digits do not depend on the first ones, which order the books
        taken["test" if places[path] % 1000 < 1000 * TEST_SHARE else "train"].append(path)
    for path in taken["train"]:
        shutil.copy(path, folder / "train" / f"{places[path]:020}{path.suffix}")
    (folder / "test.txt").write_text("\n\n".join(path.read_text(encoding="utf-8") for path in taken["test"]))
    for part, paths in taken.items():
        print(f"{part:5} {len(paths):4} books, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB")


def read_changes(path):
    """{name: list of options} of a file of changes."""
    lines = [line.strip() for line in Path(path).read_text().splitlines()]
    pairs = [line.partition(":") for line in lines if line and not line.startswith("#")]
    changes = {name.strip(): shlex.split(options) for name, _, options in pairs}
    require(len(changes) == len(pairs) > 0, f"{path} needs lines `name: options`, each with a name of its own")
    return changes


def printed_by(*command):
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def run(name, argv, seed, tokens, length, args):
    """One run of train.py, as a row of the CSV file.

    argv: config file and options. length: more options. args: of the series.
    """
    start, test_loss = time.perf_counter(), math.nan
    options = [f"--{key}={value}" for key, value in dict(length, seed=seed, keep=1, name=FOLDER.name).items()]
    try:
        printed_by("train.py", *argv, *options)
        seconds = time.perf_counter() - start
        records = read_metrics(FOLDER)
        losses, reports = ([r for r in records if field in r] for field in ("val_loss", "tokens_per_second"))
        if args.test:
            printed = printed_by("evaluate.py", FOLDER / "checkpoint.pt", f"--text={args.test}", "--json")
            test_loss = json.loads(printed)["results"][str(args.test)]["loss"]
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    rates = [record["tokens_per_second"] for record in reports]
    return dict(
        name=name,
        seed=seed,
        tokens=tokens,  # trained on
        loss=losses[-1]["val_loss"] or math.nan,  # nats per token on the development books, at the end
        bits=losses[-1]["val_bpb"] or math.nan,  # per byte, on the same
        test=test_loss,  # nats per token on the test books; NaN without --test
        seconds=seconds,  # of the whole process
        rate=statistics.median(rates[len(rates) // 2 :]),  # tokens per second
        gflops=reports[-1]["tflops"] / reports[-1]["tokens_per_second"] * 1e3,  # per token, forward and backward
        command=shlex.join(argv),  # options of train.py
        **machine(),
    )


def series(args):
    """All runs of a file of changes, or those for which --seconds leaves time, and their table."""
    require(args.test is None or args.test.exists(), f"--test {args.test} does not exist; name the text of a split")
    start, longest, shown, failed = time.perf_counter(), 0.0, [], []
    done = {}
    for row in rows_of(args.csv):
        if row["command"] and not (args.test and math.isnan(float(row["test"]))):
            done[row["name"], int(row["seed"]), int(row["tokens"]), row["command"]] = row
    for seed, (name, options) in product(args.seeds, args.changes.items()):
        argv = [args.base, *args.options, *options]
        config = load_config(argv)  # a mistake shows before the run
        require(not (args.test and config.ema), "--test reads checkpoint.pt, without the average; leave out --ema")
        if config.depth:  # steps follow from the tokens
            tokens = config.tokens or round(args.tokens)
            length = dict(tokens=tokens, eval_every=10**9)  # once at the start and once at the end
        else:
            steps = max(1, round(args.tokens / config.batch_size / config.block_size))
            tokens = steps * config.batch_size * config.block_size
            length = dict(steps=steps, eval_every=steps, log_every=max(1, steps // 100))
        row = done.get((name, seed, tokens, shlex.join(argv)))
        if row is None:
            if time.perf_counter() - start + longest > args.seconds:
                print(f"{name} seed {seed}: no time is left", flush=True)
                continue
            try:
                row = run(name, argv, seed, tokens, length, args)
            except subprocess.CalledProcessError as error:
                print(f"{name} seed {seed}: {error.stderr[-2000:]}", flush=True)
                failed.append(f"{name} seed {seed}")
                continue
            head = [] if args.csv.exists() else [row]
            with open(args.csv, "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([*head, row.values()])
            longest = max(longest, row["seconds"])
        shown.append(row)
        print(f"{name} seed {seed}: loss {float(row['loss']):.4f}, {float(row['seconds']):.1f} s", flush=True)
    if shown:
        print(f"\n{markdown(means(shown), [args.csv.stem])}")
    require(not failed, f"{', '.join(failed)} failed, as said above; the same command runs them again")


def main(argv):
    parser = command_line(__doc__)
    if argv[:1] == ["split"]:
        parser.add_argument("split")
        parser.add_argument("books", type=Path)
        parser.add_argument("folder", type=Path, help="a new folder")
        parser.add_argument("--megabytes", type=float, default=math.inf, help="of books to take")
        args = parser.parse_args(argv)
        split(args.books, args.folder, args.megabytes)
    else:
        parser.add_argument("base", help="a config file")
        parser.add_argument("changes", type=read_changes, help="a file with a line `name: options` for each change")
        parser.add_argument("--options", type=shlex.split, default=[], help="options of all runs, in one argument")
        parser.add_argument(
            "--tokens", default="50M", type=lambda text: float(text.removesuffix("M")) * 1e6,
            help="of a run, unless its options set --tokens and --depth",
        )  # fmt: skip
        parser.add_argument("--seeds", type=int, nargs="+", default=[1])
        parser.add_argument("--seconds", type=float, default=math.inf, help="start no run that would end after this")
        parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks" / "recipes.csv")
        parser.add_argument("--test", type=Path, help="a text to measure the last checkpoint on; for final tables only")
        args = parser.parse_args(argv)
        os.chdir(ROOT)
        series(args)


if __name__ == "__main__":
    with command():
        main(sys.argv[1:])
