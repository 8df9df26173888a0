"""Shards: files of tokens in the format of llm.c, which a run reads as one long array.

bytes 0..1023    256 little-endian int32: magic number, version, number of tokens, zeros
bytes 1024..     the ids, little-endian: uint16 for vocabularies of up to 65,536 tokens, otherwise uint32
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data.files import writing
from errors import require

HEADER_BYTES = 1024
SPLITS = ("train", "val")
FORMATS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}  # magic number and version by dtype


class Turns(NamedTuple):
    """The tokens at the borders of turns and conversations."""

    assistant: int
    end: int
    end_of_text: int
    system: int


@dataclass(frozen=True)
class Tokens:
    """The tokens of the training or validation split, in one or more shards."""

    shards: tuple[np.ndarray, ...]  # [count] uint16 or uint32 each, memory-mapped
    documents: int
    text_bytes: int  # of the documents, in UTF-8; of conversations, only of the answers
    turns: Turns | None = None  # of conversations
    about: str = "a text"  # which split of which sizes it is, for errors

    @cached_property
    def borders(self):
        """[shards + 1] int64: position of the first token of each shard, then the number of tokens."""
        return np.cumsum([0, *map(len, self.shards)])

    def __len__(self):
        return int(self.borders[-1])

    @cached_property
    def answers(self):
        """[answers, 4] int64: where the conversation of an answer begins, where its first system messages end, and
        where the answer begins and ends."""
        begins, ends, closed, systems = (
            np.concatenate([self.borders[i] + np.flatnonzero(shard == x) for i, shard in enumerate(self.shards)])
            for x in self.turns
        )
        starts = np.append(0, closed + 1)
        bodies = starts.copy()
        while (more := np.isin(bodies, systems)).any():
            bodies[more] = ends[np.searchsorted(ends, bodies[more])] + 1
        which = np.searchsorted(closed, begins)
        return np.stack([starts[which], bodies[which], begins + 1, ends[np.searchsorted(ends, begins)] + 1], 1)

    @property
    def counted(self):
        """Number of tokens that the loss counts: all, or those of the answers."""
        return int(np.diff(self.answers[:, 2:]).sum()) if self.turns else len(self)

    def __getitem__(self, span):
        """The ids from span.start to span.stop, as an array; they may lie in several shards."""
        at, parts = span.start, [np.empty(0, self.shards[0].dtype)]
        while at < span.stop:
            shard = np.searchsorted(self.borders, at, side="right") - 1
            first = self.borders[shard]
            parts.append(self.shards[shard][at - first : span.stop - first])
            at += len(parts[-1])
        return np.concatenate(parts)

    def windows(self, starts, length):
        """[len(starts), length] array of the ids from each of these positions on."""
        return np.stack([self[start : start + length] for start in starts])


def map_shard(path, dtype, tokens, offset=HEADER_BYTES):
    """[tokens] array of the ids in a shard; UserError if the file is missing or has another size."""
    size = path.stat().st_size if path.is_file() else None
    expected = offset + tokens * np.dtype(dtype).itemsize
    found = "is missing" if size is None else f"has {size:,} bytes, not {expected:,}"
    require(size == expected, f"{path} {found}; it is incomplete")
    return np.asarray(np.memmap(path, dtype, "r", offset, tokens))  # slices of a memmap are slow


def header(dtype, tokens):
    values = np.zeros(HEADER_BYTES // 4, "<i4")
    values[:3] = *FORMATS[dtype], tokens
    return values.tobytes()


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardWriter:
    """Writes one split of a corpus into shards, FOLDER/SPLIT_000000.bin and so on.

    entry: what the manifest says of this split. It is kept up to date and names only complete shards, so that another
    process can go on with it if it is stored after close().
    """

    def __init__(self, folder, split, dtype, shard_tokens, entry):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.entry, self.file = entry, None

    def write(self, ids, documents, text_bytes):
        """Append ids [count] of a number of documents."""
        self.entry["documents"] += documents
        self.entry["text_bytes"] += text_bytes
        self.entry["tokens"] += len(ids)
        with writing(self.folder):
            while len(ids):
                if self.file is None:
                    self.path, self.tokens = self.folder / f"{self.split}_{len(self.entry['shards']):06}.bin", 0
                    self.file = open(self.path, "wb")  # noqa: SIM115, it stays open
                    self.file.write(bytes(HEADER_BYTES))
                now, ids = np.split(ids, [self.shard_tokens - self.tokens])
                self.file.write(now)
                self.tokens += len(now)
                if self.tokens == self.shard_tokens:
                    self.close()

    def close(self):
        """Finish the open shard, if any, and name it in the entry."""
        if self.file:
            with writing(self.path), self.file:
                self.file.seek(0)
                self.file.write(header(self.dtype, self.tokens))
                self.file.flush()
                os.fsync(self.file.fileno())
            shard = {"file": self.path.name, "tokens": self.tokens, "sha256": file_sha256(self.path)}
            self.entry["shards"].append(shard)
            self.file = None
