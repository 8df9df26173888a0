"""Draw the losses of several runs in one image: training thin, validation thick.

python plot.py runs/a runs/b                             by step, into losses.png
python plot.py runs/* --x seconds --y bpb --out a.png    bits per byte by the time since training began

The legend has the options in which the runs differ. Only bits per byte can be compared between tokenizers.
"""

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data.files import read_json
from model import require
from training.config import FREE_ON_RESUME, parse_flags
from training.report import draw_losses, read_metrics

COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98", "#117a65", "#5d6d7e", "#d35480")
X_LABELS = {"step": "step", "tokens": "training tokens", "seconds": "time since training began (s)"}
Y_LABELS = {"loss": "loss (nats per token)", "bpb": "loss (bits per byte)"}
NOT_COMPARED = FREE_ON_RESUME - {"data", "input"} | {"name"}  # options that do not change a loss
LEGEND_WIDTH = 100  # characters


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Options of plot.py."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders."""
    x: Literal["step", "tokens", "seconds"] = "step"
    y: Literal["loss", "bpb"] = "loss"
    """Nats per token, or bits per byte, which can be compared between tokenizers."""
    out: Path = Path("losses.png")
    """The image, whose suffix may also be .svg or .pdf."""


def read_run(folder, x):
    """(options, records) of a run; ValueError if there is nothing to draw over x."""
    path = folder / "config.json"
    require(path.is_file(), f"{folder} is no run: it has no config.json; name folders such as runs/NAME")
    records = read_metrics(folder)
    drawn = [record for record in records if any(record.get(name) is not None for name in ("loss", "val_loss"))]
    options = read_json(path)
    lacks = [name for name in ("tokenizer", "batch_size", "block_size") if name not in options]
    require(not lacks, f"{path} lacks {' and '.join(lacks)}, so it is not of a run; leave {folder} out")
    require(drawn, f"{folder} has no losses in metrics.jsonl yet; leave it out, or train it for longer")
    if x == "seconds":
        timed = all(record.get("seconds") is not None for record in drawn)
        require(timed, f"{folder} was trained by a version that recorded no seconds; take --x step or tokens")
    return options, drawn


def bits_per_nat(folder, records):
    """Factor from nats per token to bits per byte of a run, from its records."""
    factors = [
        record["val_bpb"] / record["val_loss"] for record in records if record.get("val_loss") and record.get("val_bpb")
    ]
    require(factors, f"{folder} has no evaluation yet, from which bits per byte follow; take --y loss")
    return factors[0]


def labels_of(folders, options):
    """For each run, the options in which the runs differ, with its folder's name if they do not identify it."""
    names = sorted({name for run in options for name in run} - NOT_COMPARED)
    differing = [name for name in names if len({json.dumps(run.get(name)) for run in options}) > 1]
    labels = [", ".join(f"{name}={run.get(name)}" for name in differing) for run in options]
    return [
        label if labels.count(label) == 1 and label else f"{folder.resolve().name}: {label}".removesuffix(": ")
        for folder, label in zip(folders, labels, strict=True)
    ]


def main(config):
    from matplotlib.figure import Figure  # imported here, so that --help is fast

    require(config.out.suffix, f"--out {config.out} has no suffix; end it in .png, .svg or .pdf")
    require(config.runs, "plot.py needs at least one run folder, such as runs/NAME")
    options, records = zip(*(read_run(folder, config.x) for folder in config.runs), strict=True)
    if config.y == "loss" and len({run["tokenizer"] for run in options}) > 1:
        print("note: the runs' tokenizers may differ, and so their tokens; --y bpb compares them", file=sys.stderr)
    labels = ["\n".join(textwrap.wrap(label, LEGEND_WIDTH)) for label in labels_of(config.runs, options)]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 4.5 + 0.2 * lines), layout="constrained")
    axis = figure.subplots()
    for number, (folder, run, of_run, label) in enumerate(zip(config.runs, options, records, labels, strict=True)):
        color = COLORS[number % len(COLORS)]
        x, per_x = (config.x, 1) if config.x != "tokens" else ("step", run["batch_size"] * run["block_size"])
        per_nat = bits_per_nat(folder, of_run) if config.y == "bpb" else 1
        has_validation = any("val_loss" in record for record in of_run)
        shown = (None, label) if has_validation else (label, None)
        draw_losses(axis, of_run, (color, color), shown, x, per_x, per_nat)
    axis.set(xlabel=X_LABELS[config.x], ylabel=Y_LABELS[config.y], title="training (thin) and validation (thick)")
    legend = figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain $
    try:
        figure.savefig(config.out, dpi=130)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write {config.out} ({error}); choose another --out") from None
    print(config.out)


if __name__ == "__main__":
    try:
        main(parse_flags(PlotConfig, sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
