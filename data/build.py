"""Build a corpus: documents are read, tokenized by several threads, and written to shards.

Its folder gets manifest.json when everything is written. Until then progress.json has the same contents, and the
position up to which the sources are done, so that an interrupted preparation goes on from there.
"""

import json
import math
import os
import re
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
from data.files import atomic_file
from data.loader import map_ahead
from data.shards import ShardWriter
from data.tokenizer import encode, end_of_text, from_state, make_tokenizer, to_state, tokenizer_name

VERSION = 3  # of the prepared files
PARTS = ("train", "val")
FEW, FEW_SHARE, SHARE = 1000, 0.1, 0.005  # with fewer documents than FEW, the larger share is for validation
SAMPLE_BYTES = 10**9  # of text that bpe:N learns from
SAVE_SECONDS = 10
BETWEEN = "\n\n"  # documents, if the tokenizer has no end-of-text
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
    """Leave out lines that are no JSON object with a text, and count them."""
    sample: str = "10BT"
    """Of fineweb-edu: 10BT, 100BT or 350BT."""
    shard_tokens: str = "100M"
    """Tokens of a shard, a file."""

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
    """Write the shards and the manifest of a corpus to a folder, in place of all that is in it.

    The first documents decide how the rest is split: a single document is cut after 90 % of its characters, of fewer
    than FEW documents a tenth is for validation, and of more 0.5 %. A document is for validation if its sha256 is
    small enough, so that new documents do not move others.

    Args:
        folder: of this corpus; the caller holds its lock.
        source: Source. tokenizer_spec: see data.tokenizer.make_tokenizer. options: Options.
        threads: that tokenize; None = one for each core.

    Raises:
        ValueError: a file is damaged, a line is bad, or a part would be empty.
        OSError: a file cannot be read, downloaded or written.
    """
    request, progress = make_request(source, tokenizer_spec, options), folder / "progress.json"
    record = read_record(progress)
    if not record or not same_request(record["request"], request):
        record = {"request": request, **_plan(source, tokenizer_spec, options)}
        for path in folder.iterdir():  # only now, because a wrong option must not cost a finished corpus
            path.unlink()
    writers = {part: ShardWriter(folder, part, record["dtype"], options.shard, record.get(part)) for part in PARTS}
    record |= {part: writer.record for part, writer in writers.items()}

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
            raise ValueError(f"{source.title} has no text for {name}; give more text, or another --val_share")
        writer.close()
    write_record(folder / "manifest.json", record)
    progress.unlink()
    source.delete_downloads(slice(None))


def _write_all(source, options, record, writers, save, threads):
    """Tokenize the blocks from record["position"] on and write them in order."""
    encoder = Encoder(record, options)
    saved, done = time.perf_counter(), sum(source.sizes[: record["position"][0]])
    bar = dict(total=sum(source.sizes), initial=done, unit="B", unit_scale=True, desc=source.title)
    with tqdm(**bar, disable=None, leave=False) as bar, ThreadPoolExecutor(threads) as pool:
        blocks = _blocks(source, options, record)
        for (position, read, *_), (ids, documents, text_bytes, bad) in map_ahead(pool, encoder, blocks, 2 * threads):
            if sum(writer.record["tokens"] for writer in writers.values()) >= options.limit:
                break
            filled = [writers[part].write(ids[part], documents[part], text_bytes[part]) for part in PARTS]
            record["position"] = position
            record["bad"] += bad
            bar.update(read - bar.n)
            if any(filled) or time.perf_counter() - saved > SAVE_SECONDS:
                save()
                saved = time.perf_counter()


class Encoder:
    """Encodes blocks. Threads do it side by side: tiktoken releases Python's lock."""

    def __init__(self, record, options):
        self.tokenizer, self.options = from_state(record["tokenizer"]), options
        self.dtype, self.threshold = record["dtype"], record["threshold"]
        many = record["single"] is None
        end = end_of_text(self.tokenizer)
        self.end = np.array([end] if many and end is not None else [], self.dtype)
        self.between = BETWEEN if many and end is None else ""

    def __call__(self, item):
        """(ids, documents, bytes of text, each by part, bad lines) of an item of _blocks()."""
        _, _, block, part = item
        texts, bad = texts_of(block, self.options.text_field, self.options.skip_bad)
        ids, documents, text_bytes = {part: [] for part in PARTS}, Counter(), Counter()
        for text in texts:
            place = part or ("val" if number_of(block.digest or digest_of([text])) < self.threshold else "train")
            text += self.between * block.last
            try:
                ids[place].append(encode(self.tokenizer, text).astype(self.dtype))
            except ValueError as error:
                raise ValueError(f"{block.path}: {error}") from None
            if block.last:
                ids[place].append(self.end)
            documents[place] += block.last
            text_bytes[place] += len(text.encode())
        joined = {part: np.concatenate([np.empty(0, self.dtype), *arrays]) for part, arrays in ids.items()}
        return joined, documents, text_bytes, bad


def _blocks(source, options, record):
    """Yield (position after it, bytes read, Block, part or None) of all blocks from record["position"] on."""
    first, skip = record["position"]
    for index in range(first, len(source.files)):
        before, held = sum(source.sizes[:index]), None
        path = source.local(index)
        blocks = read_blocks(path, options.text_field, options.separator)
        parts = _cut(blocks, options, record["single"]) if record["single"] else ((block, None) for block in blocks)
        for number, (block, part) in islice(enumerate(parts, 1), skip, None):
            if held:
                yield held
            held = [index, number], before + block.read, block, part
        if held:  # the last of the file: it need not be read again
            yield [index + 1, 0], *held[1:]
        skip = 0


def _cut(blocks, options, characters):
    """(block, part) of a corpus of one document: its beginning is for training, as in nanoGPT."""
    share = options.val_share or FEW_SHARE
    left = int((1 - share) * characters)
    for block in blocks:
        for text in texts_of(block, options.text_field, options.skip_bad)[0]:
            for part, piece in (("train", text[:left]), ("val", text[left:])):
                if piece:
                    last = block.last and part == "val"
                    yield block._replace(texts=[piece], line=0, digest=b"not needed", last=last), part
            left = max(0, left - len(text))


def _plan(source, tokenizer_spec, options):
    """How the corpus is split and tokenized: a new record."""
    digests, characters = ([], 0) if source.is_remote else _survey(source, options)
    single = characters if len(digests) == 1 else None
    few = len(digests) < FEW and not source.is_remote
    threshold = int((options.val_share or (FEW_SHARE if few else SHARE)) * 2**64)
    if few and digests:  # at least one document for each part
        threshold = min(max(threshold, min(digests) + 1), max(digests))
    plan = {"position": [0, 0], "bad": 0, "single": single, "threshold": threshold}
    texts = _sample(source, options, plan, everything=tokenizer_spec.startswith("char"))
    tokenizer = make_tokenizer(tokenizer_spec, texts, many_documents=single is None)
    return plan | {"tokenizer": to_state(tokenizer), "dtype": "<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4"}


def _survey(source, options):
    """(numbers of the first FEW documents at most, characters of them all)."""
    digests, characters = [], 0
    for path in source.files:
        for block in read_blocks(path, options.text_field, options.separator):
            for text in texts_of(block, options.text_field, options.skip_bad)[0]:
                characters += len(text)
                if block.last:
                    digests.append(number_of(block.digest or digest_of([text])))
                if len(digests) == FEW:
                    return digests, characters
    if not digests:
        raise ValueError(f"{source.title} has no text; --input must be a text file, or a folder with some")
    return digests, characters


def _sample(source, options, plan, everything):
    """Yield what a tokenizer learns from: the training text, at most SAMPLE_BYTES; or everything."""
    size = 0
    for _, _, block, part in _blocks(source, options, plan):
        for text in texts_of(block, options.text_field, options.skip_bad)[0]:
            number = number_of(block.digest or digest_of([text]))
            if everything or (part or ("val" if number < plan["threshold"] else "train")) == "train":
                yield text
                size += len(text.encode())
                if size >= SAMPLE_BYTES and not everything:
                    return
    if everything and plan["single"] is None:
        yield BETWEEN


def number_of(digest):
    """The first 64 bits of a digest."""
    return int.from_bytes(digest[:8], "big")


def make_request(source, tokenizer_spec, options):
    """What a corpus is prepared from, and how, for its manifest."""
    name = tokenizer_name(tokenizer_spec)
    return dict(
        version=VERSION, source=source.title, source_sha256=source.sha256, tokenizer=name, options=asdict(options)
    )


def same_request(request, other):
    """Whether two requests are for the same corpus; skip_bad makes no difference to the lines before a bad one."""
    without = [r | {"options": r["options"] | {"skip_bad": None}} for r in (request, other)]
    return without[0] == without[1]


def cores():
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def read_record(path):
    """A stored record; None if there is none of this version."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads(path.read_text())
        if record["request"]["version"] == VERSION:
            return record
    return None


def write_record(path, record):
    with atomic_file(path) as file:
        file.write(json.dumps(record, indent=1).encode())
