"""Draw the losses of several runs in one image: training thin, validation thick.

python plot.py runs/a runs/b                             by step, into losses.png
python plot.py runs/* --x seconds --y bpb --out a.png    bits per byte by the time since training began

The legend has the runs' names and, if there is room, the options in which they differ. Only bits per byte can be
compared between tokenizers.
"""

from errors import UserError, command, require, start_command

if __name__ == "__main__":
    start_command()

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data.files import find_run, writing
from flags import parse_flags
from training.curves import LEGEND_WIDTH, NO_EFFECT, bits_per_nat, draw_losses, read_metrics, read_options

SUFFIXES = (".png", ".svg", ".pdf")
LEGEND_LINES = 8  # up to which a line may have options


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """python plot.py RUN [RUN ...] [--option value ...]"""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs, or NAME of runs/NAME."""
    x: Literal["step", "tokens", "seconds"] = "step"
    y: Literal["loss", "bpb"] = "loss"
    """Nats per token, or bits per byte, which can be compared between tokenizers."""
    out: Path = Path("losses.png")
    """The image, whose suffix may also be .svg or .pdf."""


def read_run(folder, x, y):
    """(options, records) of a run; UserError if there is nothing to draw over x."""
    path = folder / "config.json"
    require(path.is_file(), f"{folder} is no run: it has no config.json")
    records = read_metrics(folder)
    drawn = [record for record in records if any(record.get(name) is not None for name in ("loss", "val_loss"))]
    options = read_options(path)
    lacks = [name for name in ("tokenizer", "batch_size", "block_size") if name not in options]
    require(not lacks, f"{path} lacks {' and '.join(lacks)}, so it is not of a run")
    require(drawn, f"{folder} has no losses in metrics.jsonl yet; train it for longer")
    if x == "seconds":
        timed = all(record.get("seconds") is not None for record in drawn)
        require(timed, f"{folder} was trained by a version that recorded no seconds; take --x step or tokens")
    no_bits = f"{folder} has no evaluation yet, from which bits per byte follow; take --y loss"
    require(y != "bpb" or bits_per_nat(drawn), no_bits)
    for record in drawn:
        record["tokens"] = record["step"] * options["batch_size"] * options["block_size"]
    return options, drawn


def labels_of(folders, options):
    """For each run, the name of its folder and, if there is room, the options in which the runs differ."""
    resolved = [folder.resolve() for folder in folders]
    names = [folder.name for folder in resolved]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    keys = sorted({name for run in options for name in run} - NO_EFFECT - {"name"})
    differing = [key for key in keys if len({json.dumps(run.get(key)) for run in options}) > 1]
    changes = [", ".join(f"{key}={run.get(key)}" for key in differing) for run in options]
    labels = [f"{name}: {change}" for name, change in zip(names, changes, strict=True)]
    room = differing and len(labels) <= LEGEND_LINES and max(map(len, labels)) <= LEGEND_WIDTH
    return labels if room else names


class Image(type(Path())):
    """Path of a picture, which a notebook shows if it is a PNG file."""

    def _repr_png_(self):
        return self.read_bytes() if self.suffix == ".png" else None


def main(argv):
    """Draw as a command line says; returns the image."""
    config = parse_flags(PlotConfig, argv)
    require(config.out.suffix in SUFFIXES, f"--out {config.out} must end in {', '.join(SUFFIXES)}")
    require(config.runs, "which runs? Type python plot.py NAME [NAME ...]; runs/* are all")
    runs = []
    for folder in map(find_run, config.runs):
        try:
            runs.append((folder, *read_run(folder, config.x, config.y)))
        except UserError as error:
            if len(config.runs) == 1:
                raise
            print(f"note: {error}; it is left out", file=sys.stderr)
    require(runs, "none of these folders has losses to draw; the notes say why")
    folders, options, records = zip(*runs, strict=True)
    # tokenizers with the same name may differ, but then so does the length of their tokens
    kinds = {(run["tokenizer"], f"{bits_per_nat(some) or 0:.9g}") for run, some in zip(options, records, strict=True)}
    if config.y == "loss" and len(kinds) > 1:
        print("note: tokenizers or texts differ, so nats per token do not compare; use --y bpb", file=sys.stderr)
    with writing(config.out):
        draw_losses(config.out, list(zip(labels_of(folders, options), records, strict=True)), config.x, config.y)
    print(config.out)
    return Image(config.out)


if __name__ == "__main__":
    with command():
        main(sys.argv[1:])
