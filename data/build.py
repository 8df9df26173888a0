"""Build a corpus: documents are read, tokenized by several threads, and written to shards.

manifest.json is written when everything else is complete. Until then progress.json has the same contents and a
position, [file, block], from which an interrupted preparation continues.
"""

import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
from tqdm import tqdm

from data.documents import digest_of, read_blocks, texts_of
from data.files import atomic_file, writing
from data.loader import map_ahead
from data.shards import PARTS, ShardWriter
from data.tokenizer import encode, end_of_text, from_state, make_tokenizer, to_state, tokenizer_name

VERSION = 3  # of the prepared files
FEW, FEW_SHARE, SHARE = 1000, 0.1, 0.005  # with fewer documents than FEW, the larger share is for validation
SAMPLE_BYTES = 250 * 10**6  # of text that bpe:N learns from: its distinct words must fit into memory
SAVE_SECONDS = 10
BETWEEN = "\n\n"  # documents, if the tokenizer has no end-of-text
LISTED = 1000  # files that the manifest names
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a corpus is prepared, besides its source and tokenizer."""

    tokens: str = "all"
    """Stop after this many tokens, such as 1B."""
    val_share: float | None = None
    """Share of the documents for validation; None takes 0.005, or 0.1 if there are fewer than 1,000."""
    text_field: str = "text"
    """Field of JSON lines, or column of Parquet files, that holds the text."""
    separator: str = ""
    """A line that separates the documents of a text file, such as '<|endoftext|>'."""
    skip_bad: bool = False
    """Leave out and count lines that are not a JSON object with a text."""
    sample: str = "10BT"
    """Sample of fineweb-edu: 10BT, 100BT or 350BT."""
    shard_tokens: str = "100M"
    """Tokens per shard."""

    def __post_init__(self):
        if self.val_share is not None and not 0 < self.val_share < 1:
            raise ValueError(f"val_share={self.val_share} must be between 0 and 1")
        if self.limit < 1:
            raise ValueError(f"tokens={self.tokens} must be at least 1, or all")
        if not 0 < self.shard < 2**31:
            raise ValueError(f"shard_tokens={self.shard_tokens} must be from 1 to 2^31 - 1")

    @property
    def limit(self):
        return math.inf if self.tokens == "all" else number(self.tokens)

    @property
    def shard(self):
        return number(self.shard_tokens)


def number(text):
    """An int from text such as 1B, 100M or 4096."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.upper())
    if not found:
        raise ValueError(f"{text!r} is no number of tokens; write it as 1B, 100M or 4096")
    return int(float(found[1]) * UNITS[found[2]])


def build(folder, source, tokenizer_spec, options, threads=None):
    """Write the shards and the manifest of a corpus to a folder, which may contain a part of it already.

    A document is for validation if its sha256 is small enough. A single document is cut after 90 % of its characters.

    Args:
        folder: for this corpus only; the caller holds its lock.
        source: Source. tokenizer_spec: see data.tokenizer.make_tokenizer. options: Options.
        threads: that tokenize; None = one for each core.

    Raises:
        ValueError: a file is damaged, a line is bad, or a part would be empty.
        OSError: a file cannot be read, downloaded or written.
    """
    request, progress = make_request(source, tokenizer_spec, options), folder / "progress.json"
    record, writers = read_record(progress), None
    if record and same_request(record["request"], request, "skip_bad", "tokens"):
        with suppress(ValueError):  # a shard is missing
            writers = _make_writers(folder, record, options)
    if writers is None:
        record = _new_record(source, tokenizer_spec, options)
        shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir()
        writers = _make_writers(folder, record, options)
    record["request"] = request
    for leftover in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
        leftover.unlink()

    def save():
        for writer in writers.values():
            writer.flush()
        write_record(progress, record)
        source.delete_downloads(slice(record["position"][0]))

    save()
    _write_all(source, options, record, writers, save, threads or cores())
    for part, writer in writers.items():
        if writer.record["tokens"] == 0:
            name = {"train": "training", "val": "validation"}[part]
            raise ValueError(
                f"{source.title} has no text for {name}; give more text or --tokens, or another --val_share"
            )
        writer.close()
    write_record(folder / "manifest.json", record)
    progress.unlink()
    source.delete_downloads(slice(None))


def _make_writers(folder, record, options):
    """A ShardWriter for each part; ValueError if shards that the record names are missing."""
    writers = {part: ShardWriter(folder, part, record["dtype"], options.shard, record.get(part)) for part in PARTS}
    record |= {part: writer.record for part, writer in writers.items()}
    return writers


def _write_all(source, options, record, writers, save, threads):
    """Tokenize the blocks from record["position"] on and write them in order."""
    saved, done = time.perf_counter(), source.offsets[record["position"][0]]
    bar = dict(total=source.offsets[-1], initial=done, unit="B", unit_scale=True, desc=source.title)
    with tqdm(**bar, disable=None, leave=False) as bar, ThreadPoolExecutor(threads) as pool:
        encoded = map_ahead(pool, Encoder(record, options), _blocks(source, options, record), 2 * threads)
        for (position, block), (ids, documents, text_bytes, bad) in encoded:
            if sum(writer.record["tokens"] for writer in writers.values()) >= options.limit:
                break
            filled = [writers[part].write(ids[part], documents[part], text_bytes[part]) for part in PARTS]
            record["position"] = position
            record["bad"] += bad
            bar.update(block.read - bar.n)
            if any(filled) or time.perf_counter() - saved > SAVE_SECONDS:
                save()
                saved = time.perf_counter()


class Encoder:
    """Encodes blocks, in several threads at once: tiktoken releases Python's lock."""

    def __init__(self, record, options):
        self.tokenizer, self.options = from_state(record["tokenizer"]), options
        self.dtype, self.threshold = record["dtype"], record["threshold"]
        several, end = record["cut"] is None, end_of_text(self.tokenizer)
        self.end = np.array([end] if several and end is not None else [], self.dtype)
        self.between = BETWEEN if several and end is None else ""

    def __call__(self, item):
        """(ids, documents and bytes of text, each by part; bad lines) of an item of _blocks()."""
        block = item[1]
        texts, bad = texts_of(block, self.options.text_field, self.options.skip_bad)
        ids, documents, text_bytes = {part: [] for part in PARTS}, Counter(), Counter()
        for text in texts:
            part = part_of(block, text, self.threshold)
            text += self.between * block.last
            try:
                ids[part].append(encode(self.tokenizer, text).astype(self.dtype))
            except ValueError as error:
                raise ValueError(f"{block.path}: {error}") from None
            if block.last:
                ids[part].append(self.end)
            documents[part] += block.last
            text_bytes[part] += len(text.encode())
        joined = {part: np.concatenate([np.empty(0, self.dtype), *arrays]) for part, arrays in ids.items()}
        return joined, documents, text_bytes, bad


def part_of(block, text, threshold):
    """The part to which a text of a block belongs."""
    return block.part or ("val" if number_of(block, text) < threshold else "train")


def number_of(block, text):
    """First 64 bits of the sha256 of the document to which a text of a block belongs."""
    return int.from_bytes((block.digest or digest_of([text]))[:8], "big")


def _blocks(source, options, record):
    """Yield (position after it, Block) for each block from record["position"] on; Block.read counts all files."""
    first, skip = record["position"]
    for index in range(first, len(source.files)):
        blocks = read_blocks(source.local(index), options.text_field, options.separator)
        if record["cut"] is not None:
            blocks = _cut(blocks, options, record["cut"])
        previous = None
        for number, block in islice(enumerate(blocks, 1), skip, None):
            if previous:
                yield previous
            previous = [index, number], block._replace(read=source.offsets[index] + block.read)
        if previous:  # at the end of a file the position is in the next file
            yield [index + 1, 0], previous[1]
        skip = 0


def _cut(blocks, options, train):
    """Blocks of a corpus of one document, whose first `train` characters are for training, as in nanoGPT."""
    for block in blocks:
        for text in texts_of(block, options.text_field, options.skip_bad)[0]:
            for part, piece in (("train", text[:train]), ("val", text[train:])):
                if piece:
                    yield block._replace(texts=[piece], line=0, part=part, last=block.last and part == "val")
            train = max(0, train - len(text))


def _new_record(source, tokenizer_spec, options):
    """Decide from the first documents how the corpus is split, and make its tokenizer."""
    record = {"position": [0, 0], "bad": 0, "cut": None, "threshold": 0}
    numbers, characters = [], 0
    for block, text in () if source.is_remote else _texts(source, options, record):
        characters += len(text)
        if block.last:
            numbers.append(number_of(block, text))
        if len(numbers) == FEW:
            break
    few = len(numbers) < FEW and not source.is_remote
    if few and not numbers:
        raise ValueError(f"{source.title} has no text; --input must be a text file, or a folder with some")
    share = options.val_share or (FEW_SHARE if few else SHARE)
    record["threshold"] = int(share * 2**64)
    if len(numbers) == 1:
        record["cut"] = int((1 - share) * characters)
    elif few:  # at least one document for each part
        record["threshold"] = min(max(record["threshold"], min(numbers) + 1), max(numbers))
    texts = _learned_texts(source, options, record, from_all=tokenizer_spec.startswith("char"))
    tokenizer = make_tokenizer(tokenizer_spec, texts, many_documents=record["cut"] is None)
    return record | {"dtype": "<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4", "tokenizer": to_state(tokenizer)}


def _texts(source, options, record):
    """Yield (Block, text) of all texts."""
    for _, block in _blocks(source, options, record):
        for text in texts_of(block, options.text_field, options.skip_bad)[0]:
            yield block, text


def _learned_texts(source, options, record, from_all):
    """Yield what a tokenizer learns from: the training text up to SAMPLE_BYTES, or all text."""
    size = 0
    for block, text in _texts(source, options, record):
        if from_all or part_of(block, text, record["threshold"]) == "train":
            yield text
            size += len(text.encode())
            if size >= SAMPLE_BYTES and not from_all:
                return
    if from_all and record["cut"] is None:
        yield BETWEEN


def make_request(source, tokenizer_spec, options):
    """What a corpus is prepared from, and how, for its manifest."""
    name = tokenizer_name(tokenizer_spec)
    about = dict(source=source.title, source_sha256=source.sha256, files=source.listing(LISTED))
    return dict(version=VERSION, tokenizer=name, options=asdict(options), **about)


def same_request(request, other, *ignored):
    """Whether two requests are for the same corpus, except for some options."""
    same = [r | {"options": r["options"] | dict.fromkeys(ignored)} for r in (request, other)]
    return same[0] == same[1]


def cores():
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def read_record(path):
    """The stored record, or None if there is none of this version."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads(path.read_text())
        if record["request"]["version"] == VERSION:
            return record
    return None


def write_record(path, record):
    with atomic_file(path) as file:
        file.write(json.dumps(record, indent=1).encode())
