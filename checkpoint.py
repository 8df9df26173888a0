"""Run folders and checkpoints: one atomic file holds everything a run needs to go on."""

from dataclasses import asdict
from pathlib import Path

import torch

from data import atomic_file, from_state
from model import GPT, GPTConfig

RUNS = Path("runs")
FORMAT = 1


def new_run(name):
    """Make and return runs/NAME, or runs/NAME-2, -3, ... if that exists: a new run overwrites nothing."""
    number = 1
    while True:
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def newest_run():
    """The run folder whose checkpoint was written last."""
    checkpoints = sorted(RUNS.glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        raise ValueError(
            f"no run with a checkpoint in {RUNS}/; train one first: python train.py configs/shakespeare.py"
        )
    return checkpoints[-1].parent


def save_checkpoint(path, **contents):
    """Write contents (tensors, numbers, strings, lists, dicts) to a temporary name, flush to disk, rename to `path`."""
    with atomic_file(path) as file:
        torch.save({"format": FORMAT, **contents}, file)


def load_checkpoint(path, needed=()):
    """The contents of a checkpoint, on the CPU; nothing in the file is executed (weights_only).

    ValueError unless it holds a model, its tokenizer and all that is `needed` besides.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {path} does not exist; give a run folder or a checkpoint.pt in one")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen types for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"checkpoint {path} is damaged or not a checkpoint ({reason}); use another one") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} is not of this project's format {FORMAT}; train again or use another one")
    if missing := [name for name in ("model", "model_config", "tokenizer", *needed) if name not in contents]:
        raise ValueError(f"checkpoint {path} lacks {', '.join(missing)}; use a checkpoint.pt, or another one")
    return contents


def restore_model(contents, path):
    """The GPT of a loaded checkpoint, on the CPU, and its tokenizer; `path` is for the error message."""
    try:  # by whatever implementation this machine has
        model = GPT(GPTConfig(**contents["model_config"] | {"attention": "auto"}))
    except TypeError as error:
        raise ValueError(f"checkpoint {path} describes another model ({error}); use one of this version") from error
    load_weights(model, contents, path)
    tokenizer = from_state(contents["tokenizer"])
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(
            f"checkpoint {path} has a tokenizer of {tokenizer.n_vocab} tokens and a model of "
            f"{model.config.vocab_size}; it is damaged: use another one"
        )
    return model, tokenizer


def load_weights(model, contents, path):
    """Copy the weights of a loaded checkpoint into a model of the same configuration (but for dropout)."""
    stored = asdict(GPTConfig(**contents["model_config"]))
    for name, value in asdict(model.config).items():
        if stored[name] != value and name not in ("dropout", "attention"):
            raise ValueError(
                f"checkpoint {path} holds another model: its {name} is {stored[name]!r}, not {value!r}; change it back"
            )
    try:
        model.load_state_dict(contents["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        message = f"checkpoint {path} holds another model ({reason}); use the configuration it was trained with"
        raise ValueError(message) from None
