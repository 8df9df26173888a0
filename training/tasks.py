"""Multiple choice and LAMBADA, from JSON lines, Parquet files or the Hugging Face hub.

Contexts, choices, acc, acc_norm and the perplexity of LAMBADA are those of EleutherAI's lm-evaluation-harness (its
tasks hellaswag and lambada_openai).

The fields of the first line, or row, tell which kind of task a file has:

    {"context" or "query": text, "choices": [text, ...], "label" or "gold": index}      multiple choice
    {"activity_label", "ctx_a", "ctx_b": text, "endings": [text, ...], "label": index}  HellaSwag, multiple choice too
    {"question": text, "choices": {"text", "label": [text, ...]}, "answerKey": label}   ARC, multiple choice too
    {"text": text}                                                        LAMBADA: predict the last word
"""

import json
import math
import re
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data import end_of_text
from data.documents import JSON_LINES, PARQUET, read_blocks
from data.files import data_folder, optional, require_file
from data.hub import find_file
from model import require
from training.score import score

ON_THE_HUB = {  # OWNER/NAME:PATH, a file of a data set, by the name of the task
    "hellaswag": "Rowan/hellaswag:data/validation-00000-of-00001.parquet",
    "lambada": "EleutherAI/lambada_openai:data/lambada_test.jsonl",
}


class Item(NamedTuple):
    """A question: which choice follows the context (and a space)?"""

    context: str
    choices: list[str]
    gold: int  # index of the right choice
    place: str  # its file and line, for errors


def evaluate_task(model, tokenizer, name, kind, items, batch_size):
    """acc and its standard error; also acc_norm for multiple choice, or the last words' perplexity for LAMBADA.

    name: of the task, for the progress bar. kind, items: of read_task().
    """
    block_size = model.config.block_size
    choices = [requests for item in items for requests in requests_of(item, tokenizer, block_size)]
    requests = [(number, request) for number, requests in enumerate(choices) for request in requests]
    requests.sort(key=lambda pair: -len(pair[1][0]))  # so that a batch has little padding
    likelihood, greedy = np.zeros(len(choices)), np.ones(len(choices), dtype=bool)
    results = score(model, (request for _, request in requests), batch_size)
    bar = tqdm(results, desc=name, total=len(requests), disable=None, leave=False)
    for (number, _), (one_likelihood, is_greedy, _) in zip(requests, bar, strict=True):
        likelihood[number] += one_likelihood
        greedy[number] &= is_greedy
    if kind == "last word":
        return accuracy("acc", greedy) | dict(perplexity=float(np.exp(-likelihood.mean())), items=len(items))
    ends = np.cumsum([len(item.choices) for item in items])[:-1]
    lengths = np.array([len(choice) for item in items for choice in item.choices])  # characters
    gold = np.array([item.gold for item in items])

    def right(scores):
        return np.array([of_item.argmax() for of_item in np.split(scores, ends)]) == gold

    return (
        accuracy("acc", right(likelihood)) | accuracy("acc_norm", right(likelihood / lengths)) | dict(items=len(items))
    )


def accuracy(name, right):
    """The share of items that are right [items], and its standard error."""
    share = float(right.mean())
    return {name: share, f"{name}_stderr": math.sqrt(share * (1 - share) / max(1, len(right) - 1))}


def requests_of(item, tokenizer, block_size):
    """A list of requests for score() for each choice of an item. A context that is too long keeps its end."""
    for choice in item.choices:
        try:
            ids = tokenizer.encode_ordinary(f"{item.context} {choice}")
            context = tokenizer.encode_ordinary(item.context.rstrip())  # spaces may belong to the choice's first token
        except ValueError as error:
            raise ValueError(f"{item.place}: {error}") from None
        if not context:
            end = end_of_text(tokenizer)
            require(end is not None, f"{item.place} has no context, and {tokenizer.name} no end of text to begin with")
            context, ids = [end], [end, *ids]
        ids, count, requests = np.array(ids), len(ids) - len(context), []
        while count > 0:
            requests.append((ids[-block_size - 1 :], min(count, block_size)))
            ids, count = ids[:-block_size], count - block_size
        yield requests


def read_task(name, limit=0):
    """(kind, list of Items) of a task; the kind is "choice" or "last word".

    Args:
        name: hellaswag, lambada, a file, or OWNER/NAME:PATH of a file on the hub. limit: items to read; 0 = all.

    Raises:
        ValueError: there is no such file, it has no items, or a line is wrong. OSError: the hub cannot be reached.
    """
    path, address = Path(name), ON_THE_HUB.get(str(name), str(name))
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+:.+", address):
        path = download_task(address)
    records = islice(read_records(path), limit or None)
    first = next(records, None)
    require(first, f"{path} has no items; each line must be one")
    fields = first[1].keys()
    found = [field for field in READERS if field in fields]
    require(found, f"{first[0]} has the fields {', '.join(fields)}, but none of {', '.join(READERS)}; rename them")
    items = [make_item(place, record, READERS[found[0]]) for place, record in [first, *records]]
    return ("last word" if found[0] == "text" else "choice"), items


def download_task(address):
    """Path of OWNER/NAME:PATH in downloads/, to which it is downloaded the first time."""
    kept = data_folder("downloads") / re.sub("[/:]", "--", address)
    if not kept.exists():
        repository, _, file_name = address.partition(":")
        find_file(repository, file_name).download().rename(kept)
    return kept


def read_records(path):
    """Yield (place, dict) of each line of a file with JSON lines, or row of a Parquet file."""
    lower = path.name.lower()
    require(
        lower.endswith(JSON_LINES + PARQUET),
        f"task {str(path)!r} must be {', '.join(ON_THE_HUB)}, or a file whose name ends in .jsonl or .parquet; "
        "OWNER/NAME:PATH is one on the hub",
    )
    require_file(path, f"--tasks needs a file, or one of {', '.join(ON_THE_HUB)}")
    if lower.endswith(PARQUET):
        pyarrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
        try:
            rows = parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged ({str(error).splitlines()[0]}); get the file again") from None
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    for block in read_blocks(path):
        for number, line in enumerate(block.texts, block.line):
            if line.strip():
                place = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{place} is not JSON ({error}); mend it or leave it out") from None
                require(isinstance(record, dict), f"{place} is no JSON object; mend it or leave it out")
                yield place, record


def make_item(place, record, reader):
    """The Item of a record; ValueError if a field is missing or wrong."""
    try:
        context, choices, label = reader(record)
        gold = int(str(label))  # HellaSwag's is text; int(1.5) would be 1
        texts = isinstance(choices, list) and all(isinstance(text, str) for text in [context, *choices])
        if not texts or not all(choices):
            raise TypeError("the context must be text, and the choices a list of texts that are not empty")
    except KeyError as error:
        raise ValueError(f"{place} has no field {error}; add it or leave the line out") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is wrong ({error}); mend it or leave it out") from None
    in_range = 0 <= gold < len(choices)
    require(in_range, f"{place} has the label {gold}, which must be from 0 to {len(choices) - 1}, as choices count")
    return Item(context, choices, gold, place)


def _choices(record):
    context = record["context" if "context" in record else "query"]
    return context, record["choices"], record["label" if "label" in record else "gold"]


def _hellaswag(record):
    """As lm-evaluation-harness prepares it."""
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return _clean(context), [_clean(ending) for ending in record["endings"]], record["label"]


def _clean(text):
    """A HellaSwag text without the markup left over from web pages."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _arc(record):
    """As lm-evaluation-harness prepares it."""
    choices = record["choices"]
    return f"Question: {record['question']}\nAnswer:", choices["text"], choices["label"].index(record["answerKey"])


def _last_word(record):
    context, _, word = record["text"].rpartition(" ")
    return context, [word], 0


READERS = {"answerKey": _arc, "choices": _choices, "endings": _hellaswag, "text": _last_word}  # by field
