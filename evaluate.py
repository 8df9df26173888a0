"""Measure how good a model is: its loss on a text, and its accuracy in multiple choice and in LAMBADA.

python evaluate.py                                            the newest run on all of its validation text
python evaluate.py runs/NAME --text book.txt --stride 128     another text, each token with more context
python evaluate.py runs/NAME --tasks hellaswag lambada mine.jsonl

training/tasks.py lists the formats of a task's lines, and how they are scored.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from tqdm import tqdm

from data import open_corpus
from data.documents import read_text
from data.files import require_file
from data.tokenizer import encode
from model import require
from sample import load
from training.config import parse_flags
from training.score import score, windows
from training.tasks import evaluate_task, read_task

PIECE = 2**20  # tokens of a corpus that are read at once


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Options of evaluate.py."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ""
    """Run folder (its best.pt is preferred), checkpoint file, Hugging Face folder or its .safetensors file, or gpt2,
    gpt2-medium, gpt2-large, gpt2-xl; the default is the newest run."""
    text: str = ""
    """A UTF-8 file to compute the loss on."""
    split: str = ""
    """val or train: the part of the run's corpus to compute the loss on. val if there is no --text and no --tasks."""
    stride: int | None = None
    """Tokens from one window to the next: each token is scored once, after at least block_size - stride others. The
    default is block_size."""
    tasks: tuple[str, ...] = ()
    """hellaswag, lambada, and files of JSON lines or Parquet; OWNER/NAME:PATH is a file of a data set on the hub."""
    limit: int = 0
    """Items of each task, from its first on; 0 = all."""
    batch_size: int = 16
    """Contexts per forward pass."""
    json: bool = False
    """Print one JSON object."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps."""


def evaluate_text(model, pieces, text_bytes, stride, batch_size):
    """Nats per token, perplexity and bits per byte of a text of text_bytes bytes; pieces as for windows()."""
    total, scored = 0.0, 0
    with tqdm(unit=" tokens", unit_scale=True, disable=None, leave=False) as bar:
        for likelihood, _, count in score(model, windows(pieces, model.config.block_size, stride), batch_size):
            total, scored = total + likelihood, scored + count
            bar.update(count)
    require(scored, "the text has less than 2 tokens, of which the first is only context; give a longer one")
    loss, tokens = -total / scored, scored + 1
    bits = loss / math.log(2) * tokens / text_bytes  # as Corpus.bytes_per_token counts
    return dict(loss=loss, perplexity=float(np.exp(loss)), bits_per_byte=bits, tokens=tokens, bytes=text_bytes)


def evaluate_file(model, tokenizer, path, stride, batch_size):
    """evaluate_text() of a file, which need not fit into memory."""
    require_file(path, "--text needs a UTF-8 file")
    text_bytes = sum(len(piece.encode()) for piece in read_text(path))
    try:
        pieces = (encode(tokenizer, piece) for piece in read_text(path))
        return evaluate_text(model, pieces, text_bytes, stride, batch_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def evaluate_split(model, contents, split, stride, batch_size):
    """evaluate_text() of a part, val or train, of the corpus that a checkpoint was trained on."""
    options = contents.get("config")
    require(options, f"{contents['path']} names no corpus of its own; give --text FILE or --tasks")
    expected, tokenizer = contents["tokens_sha256"], options["tokenizer"]
    if tokenizer.startswith("run:"):
        tokenizer = f"run:{contents['path']}"  # the same tokenizer; its own run may be gone
    corpus = open_corpus(options["data"], tokenizer, options["input"] or None, sha256=expected)
    require(
        corpus.sha256 == expected,
        f"the tokens in {corpus.folder} (sha256 {corpus.sha256[:12]}) are not those that {contents['path']} was "
        f"trained on ({expected[:12]}); prepare the same text again, or give a text with --text",
    )
    tokens = getattr(corpus, split)
    pieces = (shard[at : at + PIECE] for shard in tokens.shards for at in range(0, len(shard), PIECE))
    return evaluate_text(model, pieces, tokens.text_bytes, stride, batch_size)


def describe(name, result):
    """A result in one line."""
    if "loss" in result:
        return (
            f"{name}: loss {result['loss']:.4f} nats/token, perplexity {result['perplexity']:.2f}, "
            f"{result['bits_per_byte']:.4f} bits/byte ({result['tokens']:,} tokens, {result['bytes']:,} bytes)"
        )
    parts = [f"{key} {result[key]:.4f} ± {result[f'{key}_stderr']:.4f}" for key in ("acc", "acc_norm") if key in result]
    parts += [f"perplexity {result['perplexity']:.2f}"] if "perplexity" in result else []
    return f"{name}: {', '.join(parts)} ({result['items']:,} items)"


def main(config):
    require(config.split in ("", "val", "train"), f"split={config.split!r} must be val or train")
    require(not (config.text and config.split), "--text and --split name two texts; choose one of them")
    require(config.batch_size >= 1, f"batch_size={config.batch_size} must be at least 1")
    require(config.limit >= 0, f"limit={config.limit} must be at least 0; 0 takes all items")
    tasks = [(name, *read_task(name, config.limit)) for name in config.tasks]  # first, so that a mistake shows at once
    model, tokenizer, contents = load(config.run, config.device, "float32")
    print(f"{contents['path']} on {model.embed.weight.device}", file=sys.stderr)
    results, block_size = {}, model.config.block_size
    stride = block_size if config.stride is None else config.stride
    require(1 <= stride <= block_size, f"stride={stride} must be from 1 to the model's block_size, {block_size}")

    def report(name, result):
        results[name] = {k: v if math.isfinite(v) else None for k, v in result.items()}  # JSON has no NaN
        if not config.json:
            print(describe(name, result), flush=True)

    if config.text:
        report(config.text, evaluate_file(model, tokenizer, Path(config.text), stride, config.batch_size))
    elif config.split or not config.tasks:
        split = config.split or "val"
        report(split, evaluate_split(model, contents, split, stride, config.batch_size))
    for name, kind, items in tasks:
        report(name, evaluate_task(model, tokenizer, name, kind, items, config.batch_size))
    if config.json:
        print(json.dumps({"checkpoint": str(contents["path"]), "results": results}))


if __name__ == "__main__":
    try:
        main(parse_flags(EvaluateConfig, sys.argv[1:]))
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {str(error).split('. ')[0]}; take a smaller --batch_size")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
