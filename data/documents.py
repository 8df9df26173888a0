"""Files -> documents, in blocks of about a megabyte.

.txt .md          a file is a document, or several, separated by a line that the user names
.jsonl .ndjson    a line is a document: a JSON object with its text in one field
.parquet          a row is a document: its text is in one column

All but .parquet may be compressed and end in .gz or .zst.
"""

import gzip
import hashlib
import io
import json
import re
import zlib
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple

from data.files import optional
from data.tokenizer import CHUNK, chunks
from errors import UserError, require

BLOCK_BYTES = 1 << 20
TEXT_TYPE = re.compile("(dictionary<values=)?(large_)?(string|binary)|null")  # of a parquet column
ROWS = 64  # of a parquet file that are read at once: a row may be a whole book
SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")  # of files that are read in a folder


class Block(NamedTuple):
    """Documents that are tokenized together, or a piece of a long one."""

    texts: list[str]
    read: int  # bytes of the file on the disk, up to the end of this block
    bad: int = 0  # lines or rows that were left out
    digest: bytes | None = None  # sha256 of the document, if texts is a piece of one
    offset: int = 0  # characters of the document before this piece
    last: bool = True  # whether the document ends here


def suffix_of(path):
    """The suffix that tells the format of a file, in lower case and without .gz or .zst."""
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    return f".{name.rpartition('.')[2]}"


def read_blocks(path, text_field="text", separator="", skip_bad=False):
    """Yield the Blocks of a file, without blank documents. They depend only on its contents.

    Args:
        path: Path; .json is taken for JSON lines, and a file with an unknown suffix for text.
        text_field: field of JSON lines, or column of a parquet file, that holds the text.
        separator: a line that separates the documents of a text file; "" makes the file one document.
        skip_bad: leave out lines and rows without a text in UTF-8.
    """
    suffix = suffix_of(path)
    if suffix == ".parquet":
        yield from _parsed(path, "row", text_field, _rows(path, text_field), bytes.decode, skip_bad)
    elif suffix in (".jsonl", ".ndjson", ".json"):
        yield from _parsed(path, "line", text_field, _lines(path), lambda x: json.loads(x)[text_field], skip_bad)
    else:
        yield from _separated(path, separator) if separator else _whole(path)


def read_text(path):
    """Yield a UTF-8 file in pieces of about half a megabyte, with \\n as line ends and without a byte order mark."""
    with _opened(path) as (file, _):
        yield from _pieces(file)


def _pieces(file):
    return chunks(iter(partial(file.read, CHUNK), ""))


@contextmanager
def _opened(path, is_text=True):
    """(file without gzip or zstd, file on the disk); UserError if it is damaged or not UTF-8."""
    with open(path, "rb") as raw:
        file = raw
        if path.name.lower().endswith(".gz"):
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw))
        elif path.name.lower().endswith(".zst"):
            pyarrow = optional("pyarrow", path)  # zstandard's own reader accepts a truncated file
            file = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"), BLOCK_BYTES)
        try:
            yield io.TextIOWrapper(file, encoding="utf-8-sig") if is_text else file, raw
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text ({error}); convert it with iconv") from None
        except (OSError, EOFError, zlib.error) as error:
            wide = "too much memory" in str(error)  # of zstd, whose window is above 128 MB
            remedy = f"unpack it first: zstd -d --long=31 {path}" if wide else "get the file again"
            raise UserError(f"{path} cannot be read ({error}); {remedy}") from None


def _whole(path):
    """Blocks of a text file that is one document."""
    with _opened(path) as (file, raw):
        pieces, digest, offset = _pieces(file), None, 0
        piece = next(pieces, "")
        for following in chain(pieces, [None]):
            if following is not None and digest is None:
                sha256 = hashlib.sha256()
                for text in read_text(path):
                    sha256.update(text.encode())
                digest = sha256.digest()
            if digest or piece.strip():
                yield Block([piece], raw.tell(), 0, digest, offset, last=following is None)
            offset += len(piece)
            piece = following


def _separated(path, separator):
    """Blocks of a text file whose documents are separated by a line."""
    texts, lines, size = [], [], 0
    with _opened(path) as (file, raw):
        for line in chain(file, [separator]):
            size += len(line)
            if line.rstrip("\n") != separator:
                lines.append(line)
                continue
            text = "".join(lines)
            lines = []
            if text.strip():
                texts.append(text)
            if size >= BLOCK_BYTES:
                yield Block(texts, raw.tell())
                texts, size = [], 0
        yield Block(texts, raw.tell())


def _parsed(path, kind, field, items, text_of, skip_bad):
    """Blocks of lines or rows. kind: line or row. items: ([bytes or None], bytes read) of each block."""
    number = 0
    for block, read in items:
        texts, bad = [], 0
        for item in block:
            number += 1
            try:
                text = text_of(item) if item and item.strip() else None
                text = "" if text is None else text
                text.encode()  # AttributeError if it is no str; UnicodeEncodeError for half a surrogate pair
                if text.strip():
                    texts.append(text)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                reason = f"{path}, {kind} {number} has no UTF-8 text in {field!r} ({type(error).__name__}: {error})"
                require(skip_bad, f"{reason}; name another --text_field, or leave such {kind}s out with --skip_bad")
                bad += 1
        yield Block(texts, read, bad)


def _lines(path):
    with _opened(path, is_text=False) as (file, raw):
        while lines := file.readlines(BLOCK_BYTES):
            yield lines, raw.tell()


def _rows(path, column):
    pyarrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
    options = dict(pre_buffer=False, buffer_size=BLOCK_BYTES, page_checksum_verification=True)
    try:
        with parquet.ParquetFile(path, **options) as file:
            columns = [field.name for field in file.schema_arrow if TEXT_TYPE.match(str(field.type))]
            others = f"name a --text_field: {', '.join(columns)}" if columns else "other columns have none either"
            require(column in columns, f"{path} has no text in column {column!r}; {others}")
            size, count, rows, length, done = path.stat().st_size, file.metadata.num_rows, [], 0, 0
            for batch in file.iter_batches(ROWS, columns=[column]):
                length += batch.nbytes
                rows += batch.column(0).cast(pyarrow.large_binary()).to_pylist()  # text may be another than UTF-8
                done += len(batch)
                if length >= BLOCK_BYTES or done == count:
                    yield rows, size * done // count
                    rows, length = [], 0
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); get the file again") from None
