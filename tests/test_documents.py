"""Files -> documents: every format, long files in pieces, and bad input."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shlex
import shutil
import subprocess
import tarfile
import zipfile

import pyarrow
import pytest
from pyarrow import parquet

from data import documents, files
from data.documents import read_blocks
from errors import UserError

LINES = "".join(f"The river bends at mile {mile}, and not before.\n\n" for mile in range(40))
TEXTS = [LINES, "naïve 東京 🦉\r\n\ttabs and\x00nul", '"quoted" \\ <|endoftext|>', "last"]
SUFFIXES = [".jsonl", ".NDJSON", ".json", ".jsonl.gz", ".ndjson.bz2", ".jsonl.XZ", ".ndjson.zst", ".parquet"]


@pytest.fixture
def small(monkeypatch):
    """Small blocks, so that short files have several."""
    chunks = documents.chunks
    monkeypatch.setattr(documents, "BLOCK_BYTES", 100)
    monkeypatch.setattr(documents, "CHUNK", 100)
    monkeypatch.setattr(documents, "ROWS", 2)
    monkeypatch.setattr(documents, "chunks", lambda pieces, **how: chunks(pieces, 100, **how))


PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda contents: pyarrow.compress(contents, "zstd", asbytes=True),
}


def write(path, texts):
    """Write a file of any format but plain text, one document a line or row."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path)
    else:
        lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
        path.write_bytes(PACK.get(path.suffix.lower(), bytes)(lines))
    return path


def blocks_of(path, *args):
    """The blocks of a file, after the checks that hold for any file."""
    blocks = list(read_blocks(path, *args))
    assert blocks == list(read_blocks(path, *args))
    reads = [block.read for block in blocks]
    assert reads == sorted(reads) and reads[-1:] in ([path.stat().st_size], [])
    return blocks


def read(path, *args):
    """The documents of a file, which is read in blocks of one document or more."""
    blocks = blocks_of(path, *args)
    assert all(block.last for block in blocks)
    return [text for block in blocks for text in block.texts]


def error_of(path, *args):
    """The message of the error that reading a file gives: one line that names the file."""
    with pytest.raises(UserError) as raised:
        list(read_blocks(path, *args))
    message = str(raised.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_lines_and_rows_are_documents(tmp_path, suffix, small):
    """Without the blank ones."""
    path = write(tmp_path / f"a{suffix}", ["", *TEXTS * 5, None, " \n\t"])
    assert read(path) == TEXTS * 5 and len(blocks_of(path)) > 4
    assert read(write(path, [])) == []


def test_another_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "one", "text": 5}\r\n\r\n  \n{"body": "two"}')
    assert read(path, "body") == ["one", "two"]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_parquet_columns(tmp_path, kind, small):
    types = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    texts = pyarrow.array([None, *TEXTS, None, "", *TEXTS], types.get(kind) or getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "body": texts}), tmp_path / "a", row_group_size=3)
    assert read((tmp_path / "a").rename(tmp_path / "a.parquet"), "body") == TEXTS * 2
    error = error_of(tmp_path / "a.parquet")
    assert all(word in error for word in ("'text'", "id (int64)", "body", "--text_field"))
    assert "row 1 has no UTF-8 text in 'id' (it is of the type int" in error_of(tmp_path / "a.parquet", "id")


@pytest.mark.parametrize("line_end, mark", [("\n", ""), ("\r\n", "\ufeff")])
@pytest.mark.parametrize("name", ["a.txt", "A.MD", "other", "a.txt.gz", "a.txt.bz2", "a.xz", "a.md.zst"])
def test_text_file_is_one_document_in_pieces(tmp_path, name, line_end, mark, small):
    path = tmp_path / name
    path.write_bytes(PACK.get(path.suffix, bytes)((mark + LINES.replace("\n", line_end)).encode()))
    blocks = blocks_of(path)
    pieces = [text for block in blocks for text in block.texts]
    assert len(pieces) == len(blocks) > 5 and "".join(pieces) == LINES
    assert [block.offset for block in blocks] == [sum(map(len, pieces[:n])) for n in range(len(pieces))]
    assert {block.digest for block in blocks} == {hashlib.sha256(LINES.encode()).digest()}
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True]


def test_blank_text_files(tmp_path, small):
    path = tmp_path / "a.txt"
    path.write_text(" \n")
    assert read(path) == []
    path.write_text("x" * 150 + "\n" * 9)  # the last piece ends the document, even if it is blank
    assert [block.texts for block in blocks_of(path)] == [["x" * 150], ["\n" * 9]]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_separator_lines(tmp_path, small, line_end):
    path, line = tmp_path / "a.md", "<|endoftext|>\n"
    texts = [
        "one\n\n",
        "says <|endoftext|>\n <|endoftext|>\n<|endoftext|> more\n",
        *(f"{LINES[:150]}{n}\n" for n in range(9)),
        "no end",
    ]
    contents = line + line.join([*texts[:2], "\n", *texts[2:]])  # with an empty and a blank document
    path.write_bytes(b"\xef\xbb\xbf" + contents.replace("\n", line_end).encode())
    assert read(path, "text", "<|endoftext|>") == texts
    assert len(blocks_of(path, "text", "<|endoftext|>")) > 3
    assert read(path, "text", "---") == [contents]


DAMAGES = {
    "cut": lambda contents: contents[: len(contents) // 2],
    "cut by a byte": lambda contents: contents[:-1],
    "garbage": lambda contents: bytes(range(256)) * 8,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".parquet"])
def test_damaged_file(tmp_path, suffix, damage):
    path = write(tmp_path / f"a{suffix}", [f"{number} {os.urandom(40).hex()}" for number in range(100)])
    path.write_bytes(damage(path.read_bytes()))
    assert "get the file again" in error_of(path)


def saved(write):
    """What write(file) writes to a binary file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def in_tar(file, **options):
    """A tar of one text."""
    with tarfile.open(fileobj=file, mode="w", **options) as tar:
        member = tarfile.TarInfo("book.txt")
        member.size = len(LINES)
        tar.addfile(member, io.BytesIO(LINES.encode()))


TABLE = pyarrow.table({"text": TEXTS})
FOREIGN = {  # contents, and a word of the error
    "tar": (saved(in_tar), "an archive"),
    "zip": (saved(lambda file: zipfile.ZipFile(file, "w").writestr("book.txt", LINES)), "an archive"),
    "pdf": (b"%PDF-1.4\n" + LINES.encode(), "PDF"),
    "parquet": (saved(lambda file: parquet.write_table(TABLE, file)), "Parquet"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "UTF-16": (LINES.encode("utf-16-le"), "binary"),
    "UTF-16 of PowerShell": (LINES.encode("utf-16"), "is UTF-16"),
    "arrow": (saved(lambda file: pyarrow.ipc.new_file(file, TABLE.schema).close()), "binary"),
    **{f"in {suffix}": (pack(LINES.encode()), "compressed by") for suffix, pack in PACK.items()},
}


@pytest.mark.parametrize("contents, word", FOREIGN.values(), ids=FOREIGN)
def test_another_format_is_refused_by_its_contents(tmp_path, contents, word):
    """Whatever its name says, also within a compressed file."""
    for name in ("a.txt", "a", "a.tar.gz", "a.md.xz", "a.jsonl", "a.parquet"):
        if name == f"a.{word.lower()}" or (word == "binary" and name in ("a.jsonl", "a.parquet")):
            continue  # as which it is read
        path = tmp_path / name
        path.write_bytes(PACK.get(path.suffix, bytes)(contents))
        assert word in error_of(path) and word in error_of(path, "text", "", True)


BAD_LINES = {
    "cut": b'{"text": "never ends',
    "list": b'["text"]',
    "no field": b'{"body": "a"}',
    "field is a number": b'{"text": 5}',
    "field is an object": b'{"text": {"encode": "a"}}',
    "half a surrogate pair": b'{"text": "\\ud83d"}',
    "not UTF-8": b'{"text": "Stra\xdfe"}',
    "nested too deep": b'{"text": "a", "b": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_bad_line(tmp_path, bad, small):
    lines = [b'{"text": "%s"}' % (b"one" * 50), b"", bad, b'{"text": "two"}', bad, b'{"text": ""}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    message = error_of(tmp_path / "a.jsonl")
    assert "line 3 has no UTF-8 text in 'text'" in message and message.endswith("--skip_bad")
    blocks = list(read_blocks(tmp_path / "a.jsonl", skip_bad=True))
    assert [text for block in blocks for text in block.texts] == ["one" * 50, "two"]
    assert sum(block.bad for block in blocks) == 2
    (tmp_path / "b.jsonl").write_bytes(bad)  # as the first line
    assert error_of(tmp_path / "b.jsonl")


TWO = [dict(text=text) for text in ("one", "two")]
ONE_VALUE = {
    "array": "\ufeff" + json.dumps(TWO),
    "indented array": json.dumps(TWO, indent=2),
    "indented objects": "\n".join(json.dumps(row, indent=1) for row in TWO),
}


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
@pytest.mark.parametrize("contents", ONE_VALUE.values(), ids=ONE_VALUE)
@pytest.mark.parametrize("name", ["a file.json", "a.jsonl.gz"])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_json_that_is_not_in_lines(tmp_path, contents, name, skip_bad):
    """The error has a command that turns it into lines."""
    path = tmp_path / name
    path.write_bytes(PACK.get(path.suffix, bytes)(contents.encode()))
    command = error_of(path, "text", "", skip_bad).split("; type ")[1].split(", and take")[0]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert read(tmp_path / shlex.split(command)[-1]) == ["one", "two"]


@pytest.mark.parametrize("kind", ["binary", "string", "dictionary"])
def test_row_that_is_not_utf8(tmp_path, kind, small):
    path, rows = tmp_path / "a.parquet", pyarrow.array([b"one", None, b"two", b"three", b"Stra\xdfe", b"four"])
    if kind == "dictionary":
        rows = rows.dictionary_encode()
    elif kind == "string":
        rows = rows.cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"body": rows}), path)
    message = error_of(path, "body")
    assert "row 5 has no UTF-8 text in 'body'" in message and "--skip_bad" in message
    blocks = list(read_blocks(path, "body", skip_bad=True))
    assert [text for block in blocks for text in block.texts] == ["one", "two", "three", "four"]
    assert sum(block.bad for block in blocks) == 1


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"instruction": "a", "output": "b"}', 'there are no messages, but instruction, output; write {"messages": ['),
        ('[{"role": "user", "content": "a"}]', 'it is no JSON object; write {"messages": ['),
        ('{"messages": []}', "there are no messages"),
        ('{"messages": [3]}', "message 1 is no object with role and content"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "message 1 has the role 'tool', which must be system,"),
        ('{"messages": [{"role": "user", "content": 1}]}', "message 1 has no text"),
        ('{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "message 1 has a list of parts"),
        ('{"messages": [{"role": "assistant", "content": " "}]}', "message 1 is an empty answer of the assistant"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message is of the assistant"),
        ("{", "has no conversation in 'messages' ("),
    ],
)
def test_bad_conversation(tmp_path, line, words):
    good = json.dumps({"messages": [dict(role="user", content="q"), dict(role="assistant", content="a")]})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n{good}")
    message = error_of(tmp_path / "a.jsonl", "text", "", False, True)
    assert words in message and "a.jsonl, line 2" in message and message.endswith("--skip_bad")
    [block] = read_blocks(tmp_path / "a.jsonl", skip_bad=True, chat=True)
    assert (len(block.texts), block.bad) == (2, 1)


def test_conversation_that_is_not_utf8(tmp_path):
    texts = [b"Stra\xdfe" if number == 7 else b"text %d" % number for number in range(60)]
    columns = pyarrow.array(["user", "assistant"] * 30), pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    turns = pyarrow.StructArray.from_arrays(columns, ["role", "content"])
    rows = pyarrow.ListArray.from_arrays(range(0, 61, 2), turns)
    parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "a.parquet")
    assert "row 4 has " in error_of(tmp_path / "a.parquet", "text", "", False, True)
    [block] = read_blocks(tmp_path / "a.parquet", skip_bad=True, chat=True)
    assert (len(block.texts), block.bad) == (29, 1)


@pytest.mark.parametrize("separator", ["", "---"])
def test_text_file_that_is_not_utf8(tmp_path, separator, small):
    (tmp_path / "a.txt").write_bytes(LINES.encode() + b"Stra\xdfe\n" + LINES.encode())
    message = error_of(tmp_path / "a.txt", "text", separator)
    assert "not UTF-8" in message and "iconv" in message


def test_missing_package(tmp_path, monkeypatch):
    paths = [write(tmp_path / f"a{suffix}", ["one"]) for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")]

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(files, "import_module", missing)
    assert read(paths[0]) == read(paths[1]) == ["one"]
    for path in paths[2:]:
        assert "package pyarrow" in error_of(path) and "pip install -e '.[hub]'" in error_of(path)
