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

from data.chat import KEYS, conversation_of
from data.files import optional
from data.tokenizer import CHUNK, chunks
from errors import UserError, quote, require

BLOCK_BYTES = 1 << 20
ROWS = 64  # of a parquet file that are a block: a row may be a whole book
MESSAGES = ("messages", "conversations")  # fields of conversations
SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")  # of files that are read in a folder
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet")  # of files whose lines or rows are documents or conversations
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}  # modules that read them
HEAD = 512  # bytes of a file that show what it is
PARQUET = "a Parquet file; end its name in .parquet"
BINARY = "a binary file or UTF-16; convert it to UTF-8 text"
KINDS = {  # by the first bytes: what a file is, and what to do
    rb"\x1f\x8b": "compressed by gzip; end its name in .gz",
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": "compressed by bzip2; end its name in .bz2",
    rb"\xfd7zXZ\0": "compressed by xz; end its name in .xz",
    rb"\x28\xb5\x2f\xfd": "compressed by zstd; end its name in .zst",
    rb".{257}ustar|PK[\3\5]|Rar!\x1a|7z\xbc\xaf": "an archive or an Office document; unpack it, or save it as text",
    rb"%PDF-": "a PDF document; convert it to text",
    rb"PAR1\x15|PARE": PARQUET,
    rb"version https://git-lfs": "a pointer of Git LFS; get the file by git lfs pull",
    rb"\xff\xfe|\xfe\xff": "UTF-16; convert it to UTF-8",
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
    if suffix == ".parquet":
        yield from _parsed(path, "row", _rows(path, fields, chat), fields, chat, skip_bad)
    elif suffix in RECORDS:
        yield from _parsed(path, "line", _lines(path), fields, chat, skip_bad)
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
            remedy = "get the file again, correct its suffix, or unpack it"
            raise UserError(f"{path} cannot be read ({error}); {remedy}") from None


def _refuse(path, head, *allowed):
    """UserError if these first bytes of a file are of one of KINDS that is not allowed."""
    for pattern, kind in KINDS.items():
        found = kind not in allowed and re.match(pattern, head, re.DOTALL)
        require(not found, f"{path} is {kind}")


def _whole(path, anywhere):
    """Blocks of a text file that is one document, which is read twice: first for its digest and length."""
    sha256, length, blank, offset = hashlib.sha256(), 0, True, 0
    for piece in read_text(path, anywhere):
        sha256.update(piece.encode())
        length += len(piece)
        blank = blank and not piece.strip()
    if blank:
        return
    for piece in read_text(path, anywhere):
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


class BadRecord(UserError):
    """A line or row without a text. options: of data.prepare, which help."""

    def __init__(self, rule, options):
        super().__init__(f"{rule}; mend it, or give {options}")
        self.rule, self.options = rule, options


def _parsed(path, kind, items, fields, chat, skip_bad):
    """Blocks of lines or rows. kind: line or row. items: ([bytes, or RecordBatch], bytes read) of each block."""
    number, text_of = 0, conversation_of if chat else _text_of
    for block, read in items:
        texts, bad = [], 0
        for item in block:
            number, row = number + 1, None
            if kind == "line" and not item.strip():
                continue
            try:
                row = json.loads(item) if kind == "line" else item.to_pylist()[0]
                text = text_of(row, fields)
                if text.strip():
                    texts.append(text)
            except (ValueError, RecursionError) as error:
                if number == 1 and kind == "line":
                    _require_lines(path, item, row)
                if not skip_bad:
                    rule = f"{path}, {kind} {number} has no {'conversation' if chat else 'UTF-8 text'} in {fields[0]!r}"
                    reason = "it is no JSON: " * isinstance(error, json.JSONDecodeError) + str(error)
                    option = _other_field(row, fields, chat) if number == 1 else None
                    raise BadRecord(f"{rule} ({reason})", option or "--skip_bad") from None
                bad += 1
        yield Block(texts, read, bad)


def _other_field(row, fields, chat):
    """The option that names the longest text or list of messages of a row without these fields, or None."""
    if isinstance(row, dict) and not row.keys() & {*fields}:
        sizes = {field: len(value) for field, value in row.items() if isinstance(value, list if chat else str)}
        return f"--text_field {quote(max(sizes, key=sizes.get))}" if sizes else None
    return None


def _text_of(row, fields):
    """The text of a row, "" for null."""
    require(isinstance(row, dict), "it is no JSON object")
    require(fields[0] in row, f"its fields are {', '.join(row)}")
    text = "" if row[fields[0]] is None else row[fields[0]]
    text = text.decode() if isinstance(text, bytes) else text
    require(isinstance(text, str), f"it is of the type {type(text).__name__}; for conversations take data.prepare chat")
    text.encode()  # UnicodeEncodeError for half a surrogate pair
    return text


def _require_lines(path, line, row):
    """UserError if the first line shows that a file is one JSON value, or has objects of several lines."""
    messages = isinstance(row, list) and row and isinstance(row[0], dict) and KEYS & row[0].keys()
    start = line.strip(b"\xef\xbb\xbf \t\r\n")
    lines = quote(f"{path.name.split('.')[0]}-lines.jsonl")
    command = f"zcat -f {quote(path)} | jq -c 'arrays[], objects' > {lines}"
    rule = f"{path} has not one JSON object per line"
    require(start != b"{" and (messages or start[:1] != b"["), f"{rule}; type {command}, and take that file")


def _lines(path):
    with _opened(path, is_text=False) as (file, raw):
        while lines := file.readlines(BLOCK_BYTES):
            yield lines, raw.tell()


def _rows(path, names, chat):
    """([RecordBatch of a row], bytes read) of blocks of rows, with those of these columns that a file has."""
    pyarrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
    options = dict(pre_buffer=False, buffer_size=BLOCK_BYTES, page_checksum_verification=True)
    with open(path, "rb") as file:
        _refuse(path, file.read(HEAD), PARQUET, BINARY)
    try:
        with parquet.ParquetFile(path, **options) as file:
            size, done, known = path.stat().st_size, 0, file.schema_arrow.names
            columns = [name for name in names if name in known]
            if chat:  # of a message only what is read: the rest may have types that Python lacks
                leaves = [file.schema.column(index).path for index in range(len(file.schema))]
                columns = [leaf for leaf in leaves if leaf.split(".")[0] in columns and KEYS & {*leaf.split(".")}]
            if not columns:
                rule = f"{path} has no {'conversations' if chat else 'text'} in a column {names[0]!r}"
                types = ", ".join(f"{column.name} ({column.type})" for column in file.schema_arrow)
                raise BadRecord(f"{rule}, only {types}", "--text_field COLUMN")
            for batch in file.iter_batches(ROWS, columns=columns):
                done += len(batch)
                yield [batch.slice(row, 1) for row in range(len(batch))], size * done // file.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); get the file again") from None
