"""Measure how good a model is: its loss on a text, and its accuracy in tasks of EleutherAI's lm-evaluation-harness.

python evaluate.py                                            the newest run on all of its validation text
python evaluate.py runs/NAME --text book.txt --stride 128     another text, each token with more context
python evaluate.py runs/NAME --tasks hellaswag lambada_openai mine.yaml
"""

from errors import UserError, command, perhaps, require, start_command

if __name__ == "__main__":
    start_command("PyTorch")

import itertools
import json
import logging
import random
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from tqdm import tqdm

from data.build import encode_block
from data.chat import has_turns, turns_of
from data.corpus import open_corpus
from data.documents import RECORDS, Block, read_blocks, read_text, suffix_of
from data.shards import Tokens
from data.tokenizer import encode, end_of_text, never_merges
from flags import parse_flags
from generation import generate_batch
from generation.score import evaluate_text, score
from weights import load

UNITS = {"loss": "nats/token", "bits_per_byte": "bits/byte"}


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """python evaluate.py [RUN] [--option value ...]"""

    run: Annotated[str, tyro.conf.Positional] = ""
    """NAME of runs/NAME or a run's folder (its best.pt is preferred), checkpoint file, Hugging Face folder or its
    .safetensors file, or gpt2, gpt2-medium, gpt2-large, gpt2-xl (OpenAI's); the default is the newest run."""
    text: str = ""
    """A file to compute the loss on, read as for training: JSON lines and Parquet have a field text or, for a model of
    configs/chat.py, messages; any other file is one text. It may be compressed (.gz, .bz2, .xz or .zst)."""
    text_field: str = "text"
    """Field of JSON lines, or column of Parquet, with the text or messages of --text."""
    skip_bad: bool = False
    """Leave out lines and rows of --text that cannot be read."""
    split: Literal["val", "train"] | None = None
    """The part of the run's corpus to compute the loss on; without --text and --tasks it is val."""
    stride: int | None = None
    """Tokens from one window to the next. Each token is scored once; a smaller stride gives it more context. The
    default is block_size."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm_eval, your own .yaml files, or folders of them (see docs/guide.md)."""
    limit: int = 0
    """Number of items of each task, from the first on; 0 = all."""
    batch_size: int = 16
    """Contexts per forward pass."""
    json: bool = False
    """Print one JSON object."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps."""


def read_file(path, tokenizer, text_field="text", skip_bad=False):
    """The Tokens of a file, whose documents are read and separated as in training."""
    records = suffix_of(path) in RECORDS
    chat = records and has_turns(tokenizer)
    if records:
        blocks = list(read_blocks(path, text_field, skip_bad=skip_bad, chat=chat))
    else:  # read once, since it may be a pipe
        blocks = [Block([piece], 0) for piece in read_text(path, never_merges(tokenizer.name))]
    documents = sum(len(block.texts) for block in blocks) if records else 1
    cut = None if chat or documents > 1 else sys.maxsize  # nothing follows a single document
    try:
        how = dict(cut=cut, threshold=0, dtype="<u4", chat=chat)
        parts = [encode_block(tokenizer, how, block) for block in blocks]
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    tokens = np.concatenate([np.empty(0, "<u4"), *(ids["train"] for ids, _, _ in parts)])
    require(len(tokens) > 1, f"{path} has less than 2 tokens of text, and the first is only context; give a longer one")
    text_bytes = sum(size["train"] for _, _, size in parts)
    return Tokens((tokens,), documents, text_bytes, turns_of(tokenizer) if chat else None)


def read_split(contents, split):
    """The Tokens of a part, val or train, of the corpus of a checkpoint."""
    options, path = contents.get("config"), contents["path"]
    require(options, f"{path} names no corpus of its own; give --text FILE or --tasks")
    expected, tokenizer = contents["tokens_sha256"], options["tokenizer"]
    if tokenizer.startswith("run:"):
        tokenizer = f"run:{path}"  # the same tokenizer; its own run may be gone
    corpus = open_corpus(options["data"], tokenizer, options["input"] or None, sha256=expected)
    require(corpus.sha256 == expected, f"{corpus.folder} has other tokens than {path}; give the text with --text")
    return getattr(corpus, split)


def load_tasks(names):
    """The tasks that --tasks names, as lm_eval.evaluate() takes them."""
    for name in names:
        is_name = "/" not in name and not name.endswith(".yaml")
        require(is_name or Path(name).exists(), f"--tasks {name} does not exist; check its path")
    print("importing lm_eval and the names of its tasks, which takes up to half a minute", file=sys.stderr)
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("--tasks needs the package lm_eval; install it: pip install -e '.[eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    random.seed(0)  # as lm_eval's own command: some tasks shuffle their choices
    folders = [name for name in names if Path(name).is_dir()]
    manager = TaskManager(include_path=folders, include_defaults=not all(Path(name).exists() for name in names))
    tasks = []
    for name in names:
        if name in folders:
            tasks += TaskManager(include_path=name, include_defaults=False).all_subtasks
        else:
            known = name in manager.all_tasks or Path(name).exists()
            require(known, f"--tasks {name} is no task of lm_eval{perhaps(name, manager.all_tasks)}")
            tasks.append(name)
    try:
        loaded = manager.load(tasks)
    except Exception as error:  # of lm_eval, datasets, huggingface_hub and yaml, which have no common base class
        reason = " ".join(str(error).split())
        raise UserError(f"cannot load --tasks ({reason}); check the network and the files of your own tasks") from None
    require(loaded["tasks"], f"there are no tasks in {', '.join(names)}; see docs/guide.md")
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(1234)
    return loaded


def evaluate_tasks(model, tokenizer, tasks, limit, batch_size):
    """{name: {metric: value}} of the tasks of load_tasks(), and of groups. A context that is too long keeps its end."""
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class Model(TemplateLM):
        @property
        def eot_token_id(self):
            end = end_of_text(tokenizer)
            require(end is not None, f"a question has no context, and {tokenizer.name} no end of text to begin with")
            return end

        def tok_encode(self, string, add_special_tokens=None, **_):
            return encode(tokenizer, string).tolist()

        def _loglikelihood_tokens(self, requests, **_):
            texts = []
            for _, context, continuation in requests:
                context = context or [self.eot_token_id]
                texts.append((np.array(context + continuation), len(context)))
            return list(zip(*score(model, texts, batch_size), strict=True))

        def loglikelihood_rolling(self, requests, **_):
            texts = [(None, [], self.tok_encode(*request.args)) for request in requests]
            return [likelihood for likelihood, _ in self._loglikelihood_tokens(texts)]

        def generate_until(self, requests, **_):
            texts = []
            for options, group in itertools.groupby(requests, key=lambda request: request.args[1]):
                prompts, options = [request.args[0] for request in group], normalize_gen_kwargs(options)
                settings = dict(max_tokens=options["max_gen_toks"], stop=options["until"], top_k=0)
                settings["temperature"] = options.get("temperature", 0.0)
                for start in tqdm(range(0, len(prompts), batch_size), disable=None, leave=False):
                    texts += generate_batch(model, tokenizer, prompts[start : start + batch_size], **settings)
            return texts

    with redirect_stdout(sys.stderr):  # for what lm_eval prints
        found = lm_eval.evaluate(Model(), tasks, limit=limit or None, bootstrap_iters=1000, log_samples=False)
    results = {}
    for name, values in found["results"].items():
        if "sample_len" in values:  # a group need not have metrics of its own
            values["items"] = values.pop("sample_len")
            results[name] = {key.removesuffix(",none"): v for key, v in values.items() if not isinstance(v, str)}
    return results


def describe(name, result):
    """A result in one line."""
    values, counts = [], []
    for key, value in result.items():
        if isinstance(value, int):
            counts.append(f"{value:,} {key}")
        elif "_stderr" in key:
            values[-1] += f" ± {value:.4f}"
        else:
            values.append(f"{value:.4f} {UNITS[key]}" if key in UNITS else f"{key} {value:.4f}")
    return f"{name}: {', '.join(values)} ({', '.join(counts)})"


def main(argv):
    config = parse_flags(EvaluateConfig, argv)
    require(not (config.text and config.split), "--text and --split name two texts; choose one of them")
    require(config.batch_size >= 1, f"batch_size={config.batch_size} must be at least 1")
    require(config.limit >= 0, f"limit={config.limit} must be at least 0; 0 takes all items")
    rule = f"--text {config.text} does not exist; name a file of text, JSON lines or Parquet"
    require(not config.text or Path(config.text).exists(), rule)
    tasks = load_tasks(config.tasks) if config.tasks else None  # first, so that a mistake shows at once
    model, tokenizer, contents = load(config.run, config.device, "float32")
    print(f"{contents['path']} on {model.embed.weight.device}", file=sys.stderr)
    results, stride, block_size = {}, config.stride, model.config.block_size
    require(stride is None or 1 <= stride <= block_size, f"stride={stride} must be from 1 to block_size, {block_size}")
    how = dict(stride=stride, batch_size=config.batch_size)
    if config.text:
        tokens = read_file(Path(config.text), tokenizer, config.text_field, config.skip_bad)
        results[config.text] = evaluate_text(model, tokens, **how)
    elif config.split or not config.tasks:
        split = config.split or "val"
        results[split] = evaluate_text(model, read_split(contents, split), **how)
    if tasks:
        results |= evaluate_tasks(model, tokenizer, tasks, config.limit, config.batch_size)
    lines = "\n".join(map(describe, results, results.values()))
    print(json.dumps({"checkpoint": str(contents["path"]), "results": results}) if config.json else lines)


if __name__ == "__main__":
    # lm_eval imports Hugging Face's package "evaluate", which this file's name would hide
    sys.path.sort(key=lambda folder: folder == str(Path(__file__).parent))
    with command(out_of_memory="take a smaller --batch_size", needs_output=True):
        main(sys.argv[1:])
