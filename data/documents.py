"""Files -> documents, in blocks of about a megabyte.

.txt .md          a file is a document, or several, separated by a line that the user names
.jsonl .ndjson    a line is a document: a JSON object with its text in one field
.parquet          a row is a document: its text is in one column

Of conversations (see data.chat) the last two have messages in place of a text; the document is then the turns in JSON.

All but .parquet may be compressed and end in .gz, .bz2, .xz or .zst. The first bytes of a file show if it is none of
these, such as an archive or a PDF.
"""

import hashlib
import io
import json
import re
import zlib
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from data.chat import conversation_of
from data.files import optional
from data.tokenizer import CHUNK, chunks
from errors import UserError, require

BLOCK_BYTES = 1 << 20
ROWS = 64  # of a parquet file that are a block: a row may be a whole book
MESSAGES = ("messages", "conversations")  # fields of conversations
SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")  # of files that are read in a folder
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet")  # of files whose lines or rows are documents or conversations
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}  # modules that read them
HEAD = 512  # bytes of a file that show what it is
PARQUET, BINARY = "a Parquet file", "a binary file or UTF-16"
KINDS = {  # by the first bytes
    rb"\x1f\x8b": "compressed by gzip",
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": "compressed by bzip2",
    rb"\xfd7zXZ\0": "compressed by xz",
    rb"\x28\xb5\x2f\xfd": "compressed by zstd",
    rb".{257}ustar": "a tar archive",
    rb"PK[\3\5]": "a ZIP archive or an Office document",
    rb"Rar!\x1a|7z\xbc\xaf": "an archive",
    rb"%PDF-": "a PDF document",
    rb"PAR1\x15|PARE": PARQUET,
    rb"ARROW1\0|\xff{4}": "an Arrow file",
    rb"\x93NUMPY": "a NumPy array",
    rb"version https://git-lfs": "a pointer of Git LFS, whose file git lfs pull gets",
    rb"[^\0]*\0": BINARY,
}


class Block(NamedTuple):
    """Documents that are tokenized together, or a piece of a long one."""

    texts: list[str]
    read: int  # bytes of the file on the disk, up to the end of this block
    bad: int = 0  # lines or rows that were left out
    digest: bytes | None = None  # sha256 of the document, if texts is a piece of one
    offset: int = 0  # characters of the document before this piece
    last: bool = True  # whether the document ends here


def suffix_of(path):
    """The suffix that tells the format of a file, in lower case and without that of a compression."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in PACKED else name.suffix


def read_blocks(path, text_field="text", separator="", skip_bad=False, chat=False, anywhere=False):
    """Yield the Blocks of a file, without blank documents. They depend only on its contents.

    Args:
        path: Path; .json is taken for JSON lines, and a file with an unknown suffix for text.
        text_field: field of JSON lines, or column of a parquet file, that holds the text.
        separator: a line that separates the documents of a text file; "" makes the file one document.
        skip_bad: leave out lines and rows without a text in UTF-8.
        chat: whether the field holds messages; "text" then stands for MESSAGES.
        anywhere: whether a long text may be cut after any character.
    """
    suffix = suffix_of(path)
    fields = MESSAGES if chat and text_field == "text" else (text_field,)
    text_of = partial(conversation_of, fields=fields) if chat else lambda line: json.loads(line)[text_field]
    if suffix == ".parquet":
        text_of = text_of if chat else bytes.decode
        yield from _parsed(path, "row", fields[0], _rows(path, fields, chat), text_of, skip_bad)
    elif suffix in RECORDS:
        yield from _parsed(path, "line", fields[0], _lines(path), text_of, skip_bad)
    else:
        require(not chat, f"{path} is no file of conversations; its name must end in .jsonl or .parquet")
        yield from _separated(path, separator) if separator else _whole(path, anywhere)


def read_text(path, anywhere=False):
    """Yield a UTF-8 file in pieces of about half a megabyte, with \\n as line ends and without a byte order mark."""
    with _opened(path) as (file, _):
        yield from chunks(iter(partial(file.read, CHUNK), ""), anywhere=anywhere)


@contextmanager
def _opened(path, is_text=True):
    """(uncompressed file, file on the disk); UserError if it is damaged, of another format or not UTF-8."""
    with open(path, "rb") as raw:
        suffix, file, damaged = path.suffix.lower(), raw, [OSError, EOFError, zlib.error]
        try:
            if suffix == ".zst":
                pyarrow = optional("pyarrow", path)  # zstandard's own reader accepts a truncated file
                stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
                file = io.BufferedReader(stream, BLOCK_BYTES)
            elif suffix in PACKED:
                module = import_module(PACKED[suffix])  # here, since a Python may have been built without lzma
                damaged += [getattr(module, "LZMAError", EOFError)]
                file = io.BufferedReader(module.open(raw))
            _refuse(path, file.peek(HEAD)[:HEAD], None if is_text else BINARY)
            yield io.TextIOWrapper(file, encoding="utf-8-sig") if is_text else file, raw
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text ({error}); convert it with iconv") from None
        except tuple(damaged) as error:
            raise UserError(f"{path} cannot be read ({error}); get the file again") from None


def _refuse(path, head, *allowed):
    """UserError if these first bytes of a file are of one of KINDS that is not allowed."""
    for pattern, kind in KINDS.items():
        found = kind not in allowed and re.match(pattern, head, re.DOTALL)
        require(not found, f"{path} is {kind}; unpack it, convert it (text with iconv) or correct its suffix")


def _whole(path, anywhere):
    """Blocks of a text file that is one document, which is read twice: first for its digest and length."""
    sha256, length, blank, offset = hashlib.sha256(), 0, True, 0
    for piece in read_text(path, anywhere):
        sha256.update(piece.encode())
        length += len(piece)
        blank &= not piece.strip()
    for piece in () if blank else read_text(path, anywhere):
        end = offset + len(piece)
        yield Block([piece], path.stat().st_size * end // length, 0, sha256.digest(), offset, end == length)
        offset = end


def _separated(path, separator):
    """Blocks of a text file whose documents are separated by a line."""
    texts, size = [], 0
    with _opened(path) as (file, raw):
        for is_separator, lines in groupby(file, lambda line: line.rstrip("\n") == separator):
            text = "".join(lines)
            size += len(text)
            if text.strip() and not is_separator:
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
                text = (text_of(item) if item and item.strip() else None) or ""
                rule = "messages are conversations, for which type python -m data.prepare chat"
                require(not isinstance(text, list), rule)
                text.encode()  # AttributeError if it is no str; UnicodeEncodeError for half a surrogate pair
                if text.strip():
                    texts.append(text)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                reason = f" has no UTF-8 text in {field!r} ({type(error).__name__}: {error}); name another --text_field"
                reason = f": {error}; mend it" if isinstance(error, UserError) else reason
                remedy = f"leave such {kind}s out by python -m data.prepare ... --skip_bad"
                require(skip_bad, f"{path}, {kind} {number}{reason}, or {remedy}")
                bad += 1
        yield Block(texts, read, bad)


def _lines(path):
    with _opened(path, is_text=False) as (file, raw):
        while lines := file.readlines(BLOCK_BYTES):
            yield lines, raw.tell()


def _rows(path, names, chat):
    """([bytes or None], bytes read) of blocks of rows, of the first of these columns that a file has."""
    pyarrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
    options = dict(pre_buffer=False, buffer_size=BLOCK_BYTES, page_checksum_verification=True)
    with open(path, "rb") as file:
        _refuse(path, file.read(HEAD), PARQUET, BINARY)
    try:
        with parquet.ParquetFile(path, **options) as file:
            columns, size, done = file.schema_arrow.names, path.stat().st_size, 0
            column = next((name for name in names if name in columns), None)
            require(column, f"{path} has no column {names[0]!r}; name a --text_field: {', '.join(columns)}")
            for batch in file.iter_batches(ROWS, columns=[column]):
                rows, done = batch.column(0), done + len(batch)
                if chat:
                    rows = [json.dumps({column: messages}).encode() for messages in rows.to_pylist()]
                else:  # text may be another than UTF-8
                    rows = rows.cast(pyarrow.large_binary()).to_pylist()
                yield rows, size * done // file.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); get the file again") from None
