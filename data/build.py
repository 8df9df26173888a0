"""Build a corpus: documents are read, tokenized by several threads, and written to shards.

Input files are read in groups, and shards end with the group. Then manifest.json names these shards and the number of
input files that are finished, after which an interrupted preparation goes on.
"""

import hashlib
import json
import math
import os
import shutil
import sys
from bisect import bisect
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from data.chat import ASSISTANT, encode_turns, with_turns
from data.documents import read_blocks
from data.files import atomic_file, read_json
from data.loader import map_ahead
from data.shards import SPLITS, ShardWriter
from data.tokenizer import encode, end_of_text, from_state, make_tokenizer, never_merges, to_state
from errors import UserError, require
from flags import count_of

VERSION = 3  # of the prepared files
FEW, FEW_SHARE, SHARE = 1000, 0.1, 0.005  # with fewer documents than FEW, the larger share is for validation
SHORT = 100_000  # characters; of a shorter text, half of the share for validation may be less than a context
SAMPLE_BYTES = 250 * 10**6  # of text that bpe:N learns from: its distinct words must fit into memory
GROUP_BYTES = 1 << 28  # of input files that are finished together; a larger file is a group of its own
BETWEEN = "\n\n"  # documents, if the tokenizer has no end-of-text


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a corpus is prepared, besides its source and tokenizer."""

    tokens: str = "all"
    """Stop after this many tokens, such as 1B."""
    val_share: float | None = None
    """Share for validation: of the documents, or of the text if there are few; None takes 0.005, or 0.1 if there are
    fewer than 1,000 documents."""
    text_field: str = "text"
    """Field of JSON lines, or column of Parquet files, that holds the text or the messages. In conversations, the
    default takes the field messages or conversations."""
    separator: str = ""
    """A line that separates the documents of a text file, such as '<|endoftext|>'."""
    skip_bad: bool = False
    """Leave out and count lines that are not a JSON object with a text, and rows that are not UTF-8."""
    sample: str = "10BT"
    """Sample of fineweb-edu: 10BT, 100BT or 350BT."""
    shard_tokens: str = "100M"
    """Tokens per shard."""

    def __post_init__(self):
        share = self.val_share
        require(share is None or 0 < share < 1, f"val_share={share} must be between 0 and 1")
        rule = f"tokens={self.tokens} and shard_tokens={self.shard_tokens} must be positive, the latter below 2^31"
        require(parse_tokens(self.tokens) > 0 and 0 < parse_tokens(self.shard_tokens) < 2**31, rule)


def parse_tokens(text):
    """The number of tokens in text such as 1B, 100M, 4096 or all."""
    if text == "all":
        return math.inf
    number = count_of(text)
    require(number is not None, f"{text!r} is no number of tokens; write it as 1B, 100M or 4096")
    return number


def build(folder, source, request, tokenizer_spec, options, threads):
    """Write the shards and the manifest of a corpus to a folder, which may contain a part of it already.

    A document is for validation if its sha256 is small enough; see also _divide(). The caller holds the folder's lock.
    request: what the corpus is made from, and how.
    """
    if source.others:
        print(f"files of {source.title} that are left out: {source.others:,}", file=sys.stderr)
    offsets, anywhere = source.offsets, never_merges(request["tokenizer"])

    def read(numbers):
        """Yield the Blocks of some files; Block.read counts all files."""
        how = options.text_field, options.separator, options.skip_bad, source.chat, anywhere
        for number in numbers:
            for block in read_blocks(source.path(number), *how):
                yield block._replace(read=offsets[number] + block.read)

    manifest = read_manifest(folder)
    if not manifest or manifest["request"] != request:
        manifest = {"request": request} | _new_manifest(source, tokenizer_spec, options.val_share, read)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for path in folder.glob(".*.tmp"):  # of a process that was killed
        path.unlink()
    threads, first = threads or os.cpu_count(), manifest["finished"]
    encoder = partial(encode_block, from_state(manifest["tokenizer"]), manifest)
    limit, size = parse_tokens(options.tokens), parse_tokens(options.shard_tokens)
    writers = {split: ShardWriter(folder, split, manifest["dtype"], size, manifest[split]) for split in SPLITS}
    bar = dict(total=offsets[-1], initial=offsets[first], unit="B", unit_scale=True, desc=source.title)
    with tqdm(**bar, disable=None, leave=False) as bar, ThreadPoolExecutor(threads) as pool:
        while True:
            write_manifest(folder, manifest)
            source.delete_downloads(first)
            if first == len(source.names):
                break
            last = max(first + 1, bisect(offsets, offsets[first] + GROUP_BYTES) - 1)
            for block, (ids, documents, text_bytes) in map_ahead(pool, encoder, read(range(first, last)), 2 * threads):
                if sum(manifest[split]["tokens"] for split in SPLITS) >= limit:
                    last = len(source.names)
                    break
                for split, writer in writers.items():
                    writer.write(ids[split], documents[split], text_bytes[split])
                manifest["bad"] += block.bad
                bar.update(block.read - bar.n)
            for writer in writers.values():
                writer.close()
            first = manifest["finished"] = last
    remedy = "give more text, or data.prepare other --tokens or --val_share"
    for split in SPLITS:
        require(manifest[split]["tokens"] > 1, f"{source.title} has too little text for the split {split}; {remedy}")


def encode_block(tokenizer, manifest, block):
    """(ids, documents, bytes of text) of a block, each by split.

    Threads can do this at the same time, since tiktoken releases Python's lock.
    """
    end, ends = end_of_text(tokenizer), block.last and manifest["cut"] is None  # nothing follows a single document
    ids, documents, text_bytes = {split: [[]] for split in SPLITS}, Counter(), Counter()
    for split, text in split_texts(block, manifest):
        if manifest.get("chat"):
            turns = json.loads(text)
            ids[split] += encode_turns(tokenizer, turns)
            text = "".join(said for role, said in turns if role == ASSISTANT)
        else:
            text += BETWEEN if ends and end is None else ""
            ids[split].append(encode(tokenizer, text))
        if ends and end is not None:
            ids[split].append([end])
        documents[split] += block.last
        text_bytes[split] += len(text.encode())
    how = dict(dtype=manifest["dtype"], casting="unsafe")
    return {split: np.concatenate(arrays, **how) for split, arrays in ids.items()}, documents, text_bytes


def split_texts(block, manifest):
    """Yield (split, text) of the texts of a block. manifest: see _divide()."""
    edge, cut = manifest.get("edge", (None, manifest["cut"]))
    for text in block.texts:
        number = hash_of(block, text)
        if number == edge or (edge is None and cut is not None):
            train = max(0, cut - block.offset)
            yield from (("train", text[:train]), ("val", text[train:]))
        else:
            yield "val" if number < manifest["threshold"] else "train", text


def hash_of(block, text):
    """First 64 bits of the sha256 of the document to which a text of a block belongs."""
    digest = block.digest or hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _new_manifest(source, tokenizer_spec, val_share, read):
    """Decide from the first documents how the corpus is split, and make its tokenizer."""
    every_file, many = range(len(source.names)), bool(source.fetch)  # a data set of the hub is large
    documents, bad = [], 0
    for block in () if many else read(every_file):
        bad += block.bad
        documents += [(hash_of(block, text), block.offset + len(text)) for text in block.texts if block.last]
        many = len(documents) >= FEW
        if many:
            break
    rule = f"{source.title} has no text{f', only {bad:,} bad lines or rows' if bad else ''}"
    require(many or documents, f"{rule}; --input must be a text file, or a folder with some")
    share = val_share or (SHARE if many else FEW_SHARE)
    how = dict(cut=None, threshold=int(share * 2**64))
    how |= {} if many else _divide(documents, share, not source.chat)
    if tokenizer_spec.startswith("bpe"):
        megabytes = min(source.offsets[-1], SAMPLE_BYTES) / 1e6
        print(f"learning {tokenizer_spec} from {megabytes:,.1f} MB of text ...", file=sys.stderr)
    from_all = tokenizer_spec.startswith("char") and not source.chat
    texts = _learned_texts(read(every_file), how, from_all)
    if source.chat:
        texts = ("\n".join(said for _, said in json.loads(text)) for text in texts)
    tokenizer = make_tokenizer(tokenizer_spec, texts, many_documents=how["cut"] is None)
    if source.chat:
        tokenizer = with_turns(tokenizer)
    dtype = "<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4"
    manifest = dict(finished=0, bad=0) | how | dict(dtype=dtype, tokenizer=to_state(tokenizer))
    for split in SPLITS:
        manifest[split] = dict(shards=[], tokens=0, documents=0, text_bytes=0)
    return manifest | {"chat": source.chat}


def _divide(documents, share, may_cut):
    """How a manifest splits few documents, (hash, characters) each.

    threshold: documents whose hash is below it are for validation, and at least one is for each split. If this gives
    validation less than half or more than twice its share of the text, or less than its share of a SHORT text, then
    those with the lowest hashes that have its share. edge: if these have too much, the last hash and the characters for
    training of each document with it. cut: these of a single document, as in nanoGPT.
    """
    sizes, count = Counter(), Counter(number for number, _ in documents)  # equal documents have one hash
    for number, size in documents:
        sizes[number] += size

    def part(end):
        return sum(size for number, size in sizes.items() if number < end) / sizes.total()

    threshold = min(max(int(share * 2**64), min(sizes) + 1), max(sizes))
    least, most = share if sizes.total() < SHORT else share / 2, min(2 * share, (1 + share) / 2)
    if least <= part(threshold) <= most or not may_cut:
        return dict(threshold=threshold)
    left = (1 - share) * sizes.total()  # characters for training
    for edge in sorted(sizes, reverse=True):
        if left <= sizes[edge]:
            break
        left -= sizes[edge]
    if part(edge + 1) <= most:
        return dict(threshold=edge + 1)
    cut = int(left / count[edge])
    return dict(threshold=edge, edge=(edge, cut)) if len(documents) > 1 else dict(cut=cut)


def _learned_texts(blocks, manifest, from_all):
    """Yield what a tokenizer learns from: the training text up to SAMPLE_BYTES, or all text."""
    size = 0
    for block in blocks:
        for split, text in split_texts(block, manifest):
            if from_all or split == "train":
                yield text
                size += len(text.encode())
                if size >= SAMPLE_BYTES and not from_all:
                    return
    if from_all and manifest["cut"] is None:
        yield BETWEEN


def read_manifest(folder):
    """The manifest in a folder, or None if there is none of this version."""
    with suppress(UserError):
        manifest = read_json(folder / "manifest.json")
        if manifest["request"]["version"] == VERSION:
            return manifest
    return None


def write_manifest(folder, manifest):
    with atomic_file(folder / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode())
