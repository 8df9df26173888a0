"""The token file: a header of 1024 bytes, then the ids.

bytes 0..7      b"GPTTOKEN"
bytes 8..1023   JSON, padded with spaces: version, dtype, count, and the fields of `Tokens` except ids
bytes 1024..    count ids, little-endian; uint16 for vocabularies up to 65,536 tokens, else uint32
"""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import atomic_file
from data.tokenizer import fingerprint

MAGIC = b"GPTTOKEN"
VERSION = 1
HEADER_BYTES = 1024


@dataclass(frozen=True)
class Tokens:
    """One tokenized text.

    Attributes:
        ids: [count] uint16 or uint32, read when they are asked for.
        vocab_size: number of tokens of the tokenizer; every id is below it.
        tokenizer: name of the tokenizer.
        tokenizer_sha256: its `fingerprint`.
        text_bytes: length of the text in UTF-8, for bits per byte.
        source: what the text is, for people.
        source_sha256: hex digest of the whole text it is a part of, in UTF-8.
    """

    ids: "FileArray"
    vocab_size: int
    tokenizer: str
    tokenizer_sha256: str
    text_bytes: int
    source: str
    source_sha256: str

    @property
    def bytes_per_token(self):
        return self.text_bytes / len(self.ids)

    def __len__(self):
        return len(self.ids)


class TokenFileError(ValueError):
    """A token file that is in use was changed, or can no longer be read."""


class FileArray:
    """A one-dimensional array in a file, which stays open; what is asked for is read then.

    No memory map: if somebody cuts the file short, by copying another one over it, a map ends the process (SIGBUS).

    Args:
        path, offset: the file, and at which of its bytes the array begins.
        dtype, count: of the array.

    Raises:
        TokenFileError: what is to be read is no longer there, or cannot be read.
    """

    def __init__(self, path, offset, dtype, count):
        self.path, self.offset, self.dtype, self.count = path, offset, dtype, count
        self.file, self.lock = open(path, "rb", buffering=0), threading.Lock()  # noqa: SIM115

    def __len__(self):
        return self.count

    def read(self, start, stop):
        """[stop - start]: the elements from start on, before stop and the end."""
        return self.windows([start], min(stop, self.count) - start)[0]

    def windows(self, starts, length):
        """[len(starts), length]: so many elements from each of the starts on."""
        found = np.empty((len(starts), length), self.dtype)
        with self.lock:  # two threads share one position
            for start, left in zip(starts, found.view(np.uint8), strict=True):
                try:
                    self.file.seek(self.offset + int(start) * self.dtype.itemsize)
                    while len(left):  # once, but for 2 GB and more
                        read = self.file.readinto(left)
                        if read == 0:
                            raise OSError("it was cut short")
                        left = left[read:]
                except OSError as error:
                    raise self._lost(error) from error
        return found

    def stamp(self):
        """(bytes, nanoseconds of the last write and change) of the file: others, once somebody has written to it."""
        try:
            status = os.fstat(self.file.fileno())
        except OSError as error:
            raise self._lost(error) from error
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _lost(self, error):
        return TokenFileError(f"{self.path} can no longer be read ({error.strerror or error}); {remedy(self.path)}")


def remedy(path):
    """What to do about a bad token file, in words."""
    return f"remove {path.parent} and prepare the corpus again"


def write_tokens(path, ids, tokenizer, *, text_bytes, source, source_sha256):
    """Write the token file `path`, whole or not at all.

    Args:
        path: where; replaced if it exists.
        ids: [count] integers, at least one.
        tokenizer: the tokenizer that made them.
        text_bytes, source, source_sha256: see `Tokens`; a long `source` is cut.

    Raises:
        ValueError: no ids, or an id that the tokenizer does not have.
    """
    ids = np.asarray(ids)
    vocab_size = tokenizer.n_vocab
    if len(ids) == 0:
        raise ValueError(f"no tokens to write to {path}; the text must not be empty")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"ids from {ids.min()} to {ids.max()} do not fit {tokenizer.name} with {vocab_size} tokens; "
            "write them with the tokenizer that made them"
        )
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    header = {
        "version": VERSION,
        "dtype": dtype,
        "count": len(ids),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": fingerprint(tokenizer),
        "text_bytes": text_bytes,
        "source": source[:48],  # at most 12 bytes a character in JSON, so that the header has room
        "source_sha256": source_sha256,
    }
    with atomic_file(path) as file:
        file.write((MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES))
        file.write(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())


def read_tokens(path):
    """Open the token file `path`: milliseconds, whatever its size.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no token file, one of another version, or damaged.
    """
    path = Path(path)
    advice = remedy(path)
    if not path.is_file():
        raise FileNotFoundError(f"token file {path} is missing; {advice}")
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    if not head.startswith(MAGIC[: len(head)]):
        raise ValueError(f"{path} is not a token file: it does not begin with {MAGIC.decode()}; {advice}")
    if len(head) < HEADER_BYTES:
        raise ValueError(f"token file {path} is truncated: {len(head)} bytes, less than its header; {advice}")
    try:
        header = json.loads(head[len(MAGIC) :])
        version = header.pop("version")
        if version != VERSION:
            raise ValueError(f"token file {path} has version {version}, not {VERSION}; {advice}")
        count = header.pop("count")
        dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[header.pop("dtype")]
        expected, found = HEADER_BYTES + count * dtype.itemsize, path.stat().st_size
        tokens = Tokens(FileArray(path, HEADER_BYTES, dtype, count), **header)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
        raise ValueError(f"token file {path} has a damaged header; {advice}") from None
    if found != expected or count < 1:
        state = "truncated" if found < expected else "damaged"
        raise ValueError(f"token file {path} is {state}: {found:,} bytes instead of {expected:,}; {advice}")
    return tokens


def check_tokenizer(tokens, tokenizer):
    """Raise ValueError unless `tokens` were made by `tokenizer`, before a wrong id becomes a CUDA assert."""
    digest = fingerprint(tokenizer)
    if tokens.tokenizer_sha256 != digest:
        raise ValueError(
            f"the tokens were made by tokenizer {tokens.tokenizer} ({tokens.tokenizer_sha256[:12]}..), not "
            f"{tokenizer.name} ({digest[:12]}..); prepare the corpus again or use the first tokenizer"
        )
