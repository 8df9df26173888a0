"""Shards: files of tokens in the format of llm.c, which a run reads as one long array.

bytes 0..1023    256 little-endian int32: magic number, version, number of tokens, zeros
bytes 1024..     the ids, little-endian: uint16 for vocabularies of up to 65,536 tokens, otherwise uint32
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.files import publish, writing

HEADER_BYTES = 1024
PARTS = ("train", "val")
FORMATS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}  # magic number and version by dtype


@dataclass(frozen=True)
class Tokens:
    """The tokens of the training or validation part, in one or more shards.

    Attributes:
        shards: [count] uint16 or uint32 arrays, memory-mapped.
        sha256: hex digest of the shards' digests.
        documents, text_bytes: number of documents, and length of their text in UTF-8.
    """

    shards: tuple[np.ndarray, ...]
    sha256: str
    documents: int
    text_bytes: int

    @cached_property
    def ends(self):
        """[shards] int64: position after the last token of each shard."""
        return np.cumsum([len(shard) for shard in self.shards])

    @property
    def bytes_per_token(self):
        return self.text_bytes / len(self)

    def __len__(self):
        return int(self.ends[-1])

    def windows(self, starts, length):
        """[len(starts), length] array of the ids from each of these positions on; a window may span several shards."""
        windows = np.empty((len(starts), length), self.shards[0].dtype)
        first = np.searchsorted(self.ends, starts, side="right")
        for window, start, shard in zip(windows, starts, first, strict=True):
            done = 0
            while done < length:
                offset = start + done - (self.ends[shard] - len(self.shards[shard]))
                part = self.shards[shard][offset : offset + length - done]
                window[done : done + len(part)] = part
                done += len(part)
                shard += 1
        return windows


def token_files(folder, part):
    """The files of a part: nanoGPT's PART.bin, or else those with a header; ValueError if there are none."""
    plain = folder / f"{part}.bin"
    files = [plain] if plain.is_file() else sorted({*folder.glob(f"*_{part}*.bin"), *folder.glob(f"{part}_*.bin")})
    if not files:
        raise ValueError(f"{folder} has no {part}.bin and no *_{part}_*.bin; nanoGPT and llm.c write such files")
    return files


def map_shard(path, dtype, tokens, offset=HEADER_BYTES):
    """[tokens] array of the ids in a shard; ValueError if the file is missing or has another size."""
    size = path.stat().st_size if path.is_file() else None
    expected = offset + tokens * np.dtype(dtype).itemsize
    if size != expected:
        found = "is missing" if size is None else f"has {size:,} bytes, not {expected:,}"
        raise ValueError(f"{path} {found}; it is incomplete")
    return np.asarray(np.memmap(path, dtype, "r", offset, tokens))  # slices of a memmap are slow


def header(dtype, tokens):
    values = np.zeros(HEADER_BYTES // 4, "<i4")
    values[:3] = *FORMATS[dtype], tokens
    return values.tobytes()


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardWriter:
    """Writes one part of a corpus into shards.

    A shard that is not full has a name that ends in .partial. `record` always describes what has been written; if it is
    stored after flush(), a new process can continue from it.

    Args:
        folder, part: the shards are FOLDER/PART_000000.bin and so on.
        dtype: "<u2" or "<u4".
        shard_tokens: tokens of a full shard.
        record: of an earlier writer, or None.

    Raises:
        ValueError: shards that the record names are missing or too short.
    """

    def __init__(self, folder, part, dtype, shard_tokens, record=None):
        self.folder, self.part, self.dtype, self.shard_tokens = folder, part, dtype, shard_tokens
        self.record = record or {"shards": [], "tokens": 0, "documents": 0, "text_bytes": 0}
        self.file = None
        for shard in self.record["shards"]:
            map_shard(folder / shard["file"], dtype, shard["tokens"])
        full = sum(shard["tokens"] for shard in self.record["shards"])
        if self.record["tokens"] > full:
            self._open(self.record["tokens"] - full)

    def _open(self, tokens=0):
        """Open the next shard, which has a number of tokens already; anything after them is cut off."""
        self.path = self.folder / f"{self.part}_{len(self.record['shards']):06}.bin"
        self.partial, self.tokens = self.path.with_suffix(".partial"), tokens
        if tokens and self.path.exists():
            self.path.rename(self.partial)  # the process was killed after renaming the shard
        size = HEADER_BYTES + tokens * np.dtype(self.dtype).itemsize
        if tokens and not (self.partial.exists() and self.partial.stat().st_size >= size):
            raise ValueError(f"{self.partial} is missing or too short")
        with writing(self.path):
            self.file = open(self.partial, "r+b" if tokens else "wb")  # noqa: SIM115, it stays open
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    def write(self, ids, documents, text_bytes):
        """Append ids [count] of a number of documents; returns whether a shard has become full."""
        self.record["documents"] += documents
        self.record["text_bytes"] += text_bytes
        self.record["tokens"] += len(ids)
        filled = False
        while len(ids):
            if self.file is None:
                self._open()
            now, ids = np.split(ids, [self.shard_tokens - self.tokens])
            with writing(self.path):
                self.file.write(now)
            self.tokens += len(now)
            if self.tokens == self.shard_tokens:
                self.close()
                filled = True
        return filled

    def flush(self):
        if self.file:
            with writing(self.path):
                self.file.flush()
                os.fsync(self.file.fileno())

    def close(self):
        """Give the open shard, if any, its header and its name."""
        if self.file:
            with writing(self.path):
                self.file.seek(0)
                self.file.write(header(self.dtype, self.tokens))
                self.file.close()
                publish(self.partial, self.path)
            shard = {"file": self.path.name, "tokens": self.tokens, "sha256": file_sha256(self.path)}
            self.record["shards"].append(shard)
            self.file = None
