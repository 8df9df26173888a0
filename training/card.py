"""README.md of an exported model."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

from training.checkpoint import empty_model
from training.config import Config
from training.report import read_metrics

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {}

Trained with Kestrel.

| | |
|---|---|
"""


def model_card(found, config):
    """The text of README.md for a Pretrained of a run; config: GPTConfig of the exported network."""
    contents, step = found.contents, found.contents["step"]
    parameters = sum(parameter.numel() for parameter in empty_model(config, "meta").parameters())
    rows = {
        "network": f"{parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
        f"context {config.block_size}",
        "tokenizer": f"{found.tokenizer.name}, {found.tokenizer.n_vocab:,} tokens",
    }
    if stored := contents.get("config"):
        defaults = {field.name: field.default for field in fields(Config)}
        options = {name: stored.get(name, default) for name, default in defaults.items()}  # older runs lack some
        changed = {name: value for name, value in options.items() if value != defaults[name] and name != "resume"}
        if options["init_from"] and options["tokenizer"].startswith("run:"):
            del changed["tokenizer"]  # that of the weights, which may name this run
        flags = [part for name, value in changed.items() for part in (f"--{name}", without_folders(value))]
        rows |= {
            "data": " ".join(filter(None, (options["data"], Path(options["input"]).name))),
            "began with": without_folders(options["init_from"]) or "random weights",
            "trained on": f"{step * options['batch_size'] * options['block_size']:,} tokens, {step:,} steps",
            "command": f"`{shlex.join(['python', 'train.py', *flags])}`",
        }
    records = [record for record in read_metrics(found.path.parent) if record["step"] <= step]
    for record in records:  # the last ones count
        if record.get("loss") is not None:
            rows["training loss"] = f"{record['loss']:.4f} nats per token"
        if record["step"] == step and record.get("val_loss") is not None:
            rows["validation loss"] = f"{record['val_loss']:.4f} nats per token"
            if record.get("val_bpb") is not None:
                rows["validation loss"] += f", {record['val_bpb']:.4f} bits per byte"
    lines = [f"| {name} | {value} |\n" for name, value in rows.items()]
    return HEAD.format(found.path.parent.name) + "".join(lines)


def without_folders(value):
    """An option's value without the folders of this machine."""
    return re.sub(r"(^|:)/.*/", r"\1", str(value))
