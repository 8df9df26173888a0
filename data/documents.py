"""Files -> documents, in blocks of about a megabyte.

.txt .md                      a file is a document, or several, separated by a line that the user names
.jsonl .jsonl.gz .jsonl.zst   a line is a document: a JSON object with its text in one field
.parquet                      a row is a document: its text is in one column
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

BLOCK_BYTES = 1 << 20
ROWS = 64  # of a parquet file that are read at once: rows may be whole books
TEXT, JSON_LINES, PARQUET = (".txt", ".md"), (".jsonl", ".jsonl.gz", ".jsonl.zst"), (".parquet",)
TEXT_TYPE = re.compile("(large_)?(string|binary)|dictionary<values=string|null")  # of a parquet column
FORMATS = TEXT + JSON_LINES + PARQUET


class Block(NamedTuple):
    """Documents that are tokenized together, or a piece of a long one.

    A block of JSON lines holds the lines, because parsing them is left to the threads that tokenize.
    """

    path: str
    texts: list[str] | list[bytes]
    line: int = 0  # number of the first JSON line
    digest: bytes | None = None  # of the document, if texts is a piece of one
    part: str | None = None  # of all texts; None if their sha256 decides
    last: bool = True  # whether the document ends here
    read: int = 0  # bytes of the file on the disk, up to the end of this block


def read_blocks(path, text_field="text", separator=""):
    """Yield the Blocks of a file. They depend only on its contents.

    Args:
        path: Path; a file with an unknown suffix is taken for text.
        text_field: field of JSON lines, or column of a parquet file, that holds the text.
        separator: a line that separates the documents of a text file; "" makes the file one document.

    Raises:
        ValueError: the file is damaged, not UTF-8, or a parquet file without the column, or the package that reads
            its format is not installed.
    """
    name = path.name.lower()
    if name.endswith(PARQUET):
        yield from _parquet(path, text_field)
    elif name.endswith(JSON_LINES):
        yield from _json_lines(path, name)
    else:
        yield from _separated(path, separator) if separator else _whole(path)


def texts_of(block, text_field="text", skip_bad=False):
    """The texts of a block that are not blank: (list of str, number of bad lines).

    Raises:
        ValueError: a line is not a JSON object with a text, unless skip_bad.
    """
    texts, bad = block.texts, 0
    if block.line:
        texts = []
        for number, line in enumerate(block.texts, block.line):
            try:
                text = json.loads(line)[text_field] if line.strip() else None
                text = "" if text is None else text
                text.encode()  # AttributeError if it is no str; UnicodeEncodeError for half a surrogate pair
                texts.append(text)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                bad += 1
                if not skip_bad:
                    reason = f"no field {error}" if isinstance(error, KeyError) else error
                    raise ValueError(
                        f"{block.path}, line {number} is no JSON object with a text in {text_field!r} ({reason}); "
                        "mend it, name another --text_field, or leave such lines out with --skip_bad"
                    ) from None
    return [text for text in texts if block.part or block.digest or text.strip()], bad


def digest_of(pieces):
    """sha256 of a document, an iterable of str, in UTF-8."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.encode())
    return digest.digest()


def read_text(path):
    """Yield a UTF-8 file in pieces of about a megabyte, with \\n as line ends and without a byte order mark."""
    with open_text(path) as file:
        yield from chunks(iter(partial(file.read, CHUNK), ""))


@contextmanager
def open_text(path):
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it, for example with iconv") from None


def _whole(path):
    pieces, size, read = read_text(path), path.stat().st_size, 0
    first, second = next(pieces, ""), next(pieces, None)
    if second is None:
        yield Block(str(path), [first], read=size)
        return
    digest, piece = digest_of(read_text(path)), first
    for following in chain([second], pieces, [None]):
        last = following is None
        read = size if last else read + len(piece.encode())  # less than the file's bytes if lines end in \r\n
        yield Block(str(path), [piece], digest=digest, last=last, read=min(read, size))
        piece = following


def _separated(path, separator):
    texts, lines, size, read = [], [], 0, 0
    with open_text(path) as file:
        for line in file:
            size += len(line)
            if line.rstrip("\n") != separator:
                lines.append(line)
                continue
            texts.append("".join(lines))
            lines = []
            if size >= BLOCK_BYTES:
                read += sum(len(text.encode()) for text in texts)
                yield Block(str(path), texts, read=read)
                texts, size = [], 0
    yield Block(str(path), [*texts, "".join(lines)], read=path.stat().st_size)


def _json_lines(path, name):
    line = 1
    with open(path, "rb") as raw:
        file = raw
        if name.endswith(".gz"):
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw))
        elif name.endswith(".zst"):
            pyarrow = optional("pyarrow", path)  # zstandard's own reader accepts a truncated file
            file = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"), BLOCK_BYTES)
        try:
            while lines := file.readlines(BLOCK_BYTES):
                yield Block(str(path), lines, line=line, read=raw.tell())
                line += len(lines)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged after line {line - 1} ({error}); get the file again") from None


def _parquet(path, column):
    pyarrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
    options = dict(pre_buffer=False, buffer_size=BLOCK_BYTES, page_checksum_verification=True)
    size, texts, length, row = path.stat().st_size, [], 0, 0
    try:
        with parquet.ParquetFile(path, **options) as file:
            columns = [field.name for field in file.schema_arrow if TEXT_TYPE.match(str(field.type))]
            if column not in columns:
                raise ValueError(f"{path} has no text in {column!r}; choose a --text_field: {', '.join(columns)}")
            for batch in file.iter_batches(ROWS, columns=[column]):
                row += batch.num_rows
                length += batch.nbytes
                texts += [text or "" for text in batch.column(0).cast(pyarrow.string()).to_pylist()]
                if length >= BLOCK_BYTES:
                    yield Block(str(path), texts, read=size * row // file.metadata.num_rows)
                    texts, length = [], 0
            if texts:
                yield Block(str(path), texts, read=size)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged ({str(error).splitlines()[0]}); get the file again") from None
