"""The losses of runs: metrics.jsonl -> curves."""

import json
import logging
import sys
import warnings

from data.files import read_json

# options that do not change the losses, so that they may change when a run is resumed
NO_EFFECT = {
    "resume", "allow_changes", "verify", "keep", "max_bad_steps", "log_every", "sample_every", "wandb", "save_every",
    "parallel", "checkpoint_activations", "runs",
}  # fmt: skip
GONE = {"embed_scale": 1.0}  # options of earlier versions, with the value that all runs have now
COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98", "#117a65", "#5d6d7e", "#d35480")
STYLES = ("-", "--", ":", "-.")  # the next one after each eight runs
X_LABELS = {"step": "step", "tokens": "training tokens", "seconds": "time since training began (s)"}
FALL = 0.15  # of a run, which a picture of several runs may cut off at the top
LEGEND_WIDTH = 110  # characters
Y_LABELS = {"loss": "loss (nats per token)", "bpb": "loss (bits per byte)"}


def read_metrics(folder):
    """The records of a run's metrics.jsonl; damaged lines, such as one that a crash cut short, are left out."""
    path = folder / "metrics.jsonl"
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            int(record["step"])
            records.append(record)
        except (ValueError, TypeError, KeyError):
            print(f"warning: a line of {path} is damaged and left out", file=sys.stderr)
    return records


def read_options(path):
    """The options in a run's config.json, without those of GONE whose value all runs have now."""
    return {name: value for name, value in read_json(path).items() if (name, value) not in GONE.items()}


def best_of(records):
    """The record with the lowest validation loss after step 0; None if there is none."""
    evaluated = [record for record in records if record["step"] and record.get("val_loss") is not None]
    return min(evaluated, key=lambda record: record["val_loss"], default=None)


def in_words(record):
    """An evaluation, as in 2.9380 nats/token = 1.8839 bits/byte at step 400."""
    return f"{record['val_loss']:.4f} nats/token = {record['val_bpb']:.4f} bits/byte at step {record['step']}"


def bits_per_nat(records):
    """Bits per byte = this times nats per token, as in the records of a run; None before its first evaluation."""
    return next((record["val_bpb"] / record["val_loss"] for record in records if record.get("val_loss")), None)


def plot_losses(folder):
    """Draw loss.png from metrics.jsonl, unless there is no validation loss yet."""
    records = read_metrics(folder)
    if bits_per_nat(records):
        draw_losses(folder / "loss.png", [(folder.name, records)])


def draw_losses(path, runs, x="step", y="loss"):
    """Draw the losses of runs into an image: training thin, validation thick, the best evaluation as a ring.

    Args:
        path: of the image; its suffix says which kind.
        runs: list of (label, records of metrics.jsonl). A single run has its best loss in the title.
        x: step, tokens or seconds, a field of the records. y: loss or bpb.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it reports at length where it cannot keep a cache
    from matplotlib.figure import Figure  # takes a second, which the start of a run need not wait for
    from matplotlib.font_manager import fontManager

    runs = [(f"\u200b{label}", records) for label, records in runs]  # a legend leaves out names that begin with _
    alone = len(runs) == 1
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    title, late = "training (thin) and validation (thick); the ring is the best", []
    for number, (label, records) in enumerate(runs):
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        per_nat, best = bits_per_nat(records) if y == "bpb" else 1, best_of(records)
        train, val = (
            [(record[x], record[field] * per_nat) for record in records if record.get(field) is not None]
            for field in ("loss", "val_loss")
        )
        labels = ("training", "validation") if alone else (None, label) if val else (label, None)
        for points, name, width, alpha in ((train, labels[0], 0.8, 0.5), (val, labels[1], 1.8, 1)):
            dots = dict(marker="o", markersize=3 * width) if len(points) == 1 else {}  # which is no line
            look = dict(color=color, linestyle=style, linewidth=width, alpha=alpha)
            axis.plot(*zip(*points, strict=True), label=name, **look, **dots)
        if best:
            axis.scatter(best[x], best["val_loss"] * per_nat, 70, facecolors="none", edgecolors=color)
        if alone:
            title = f"{label}: best {in_words(best)}" if best else label
        end = max(record[x] for record in records)
        late += [loss for where, loss in train + val if where >= FALL * end]
    if not alone:
        axis.set_ylim(top=max(late))  # the first fall, alike in all runs, would press the rest together
    axis.set(xlabel=X_LABELS[x], ylabel=Y_LABELS[y])
    axis.grid(alpha=0.25)
    if alone and y == "loss" and (per_nat := bits_per_nat(runs[0][1])):
        right = axis.secondary_yaxis("right", functions=(lambda nats: nats * per_nat, lambda bits: bits / per_nat))
        right.set_ylabel("bits per byte")
    columns = max(1, LEGEND_WIDTH // (max(len(label) for label, _ in runs) + 6))
    legend = figure.legend(loc="outside lower left", frameon=False, fontsize="small", ncols=columns)
    fonts = ["DejaVu Sans", *sorted({font.name for font in fontManager.ttflist if "CJK" in font.name})]
    for text in [axis.set_title(title), *legend.get_texts()]:
        text.set_parse_math(False)  # a name may contain $
        text.set_family(fonts)  # or be Chinese, Japanese or Korean
        text.set_text(text.get_text().lstrip("\u200b"))
    with warnings.catch_warnings(action="ignore"):  # about characters that no font has
        figure.savefig(path, dpi=130)
