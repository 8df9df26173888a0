"""Files -> documents: every format, long files in pieces, and bad input."""

import gzip
import hashlib
import json
import os
import sys
from itertools import pairwise

import pyarrow
import pytest
from pyarrow import parquet

from data import documents, files
from data.documents import digest_of, read_blocks, texts_of

LINES = "".join(f"The river bends at mile {mile}, and not before.\n\n" for mile in range(40))
TEXTS = [LINES, "naïve 東京 🦉\r\n\ttabs and\x00nul", '"quoted" \\ <|endoftext|>', "last"]
JSON = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"]


@pytest.fixture
def small(monkeypatch):
    """Small blocks, so that short files have several."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 100)
    monkeypatch.setattr(documents, "CHUNK", 100)
    monkeypatch.setattr(documents, "ROWS", 2)
    monkeypatch.setattr(documents, "chunks", lambda pieces: CHUNKS(pieces, 100))


CHUNKS = documents.chunks


def zst(contents):
    """One frame of zstd."""
    return pyarrow.compress(contents, "zstd", asbytes=True)


def table(texts, kind=None, **others):
    return pyarrow.table({**others, "text": pyarrow.array(texts, kind)})


def write(path, texts):
    """Write a file of any format but plain text, one document a line or row."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        parquet.write_table(table(texts), path)
    else:
        path.write_bytes({".gz": gzip.compress, ".zst": zst}.get(path.suffix, bytes)(lines))
    return path


def blocks_of(path, *args, **options):
    """The blocks of a file, after the checks that hold for any file."""
    blocks = list(read_blocks(path, *args, **options))
    assert blocks == list(read_blocks(path, *args, **options))
    reads = [block.read for block in blocks]
    assert reads == sorted(reads) and reads[-1:] in ([path.stat().st_size], [])
    assert all(block.path == str(path) for block in blocks)
    return blocks


def read(path, text_field="text", separator=""):
    """The documents of a file, which is read in blocks of one document or more."""
    blocks = blocks_of(path, text_field, separator)
    assert all(block.last and block.digest is None for block in blocks)
    found = [texts_of(block, text_field) for block in blocks]
    assert not any(bad for _, bad in found)
    return [text for texts, _ in found for text in texts]


def error_of(path, *args, **options):
    """The message of the ValueError that reading a file gives: one line that names the file."""
    with pytest.raises(ValueError) as raised:
        for block in read_blocks(path, *args):
            texts_of(block, *args, **options)
    message = str(raised.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT"])
def test_text_file_is_one_document(tmp_path, name):
    (tmp_path / name).write_text(LINES)
    assert read(tmp_path / name) == [LINES]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_lines_and_rows_are_documents(tmp_path, suffix, small):
    path = write(tmp_path / f"a{suffix}", TEXTS * 5)
    assert read(path) == TEXTS * 5
    assert len(blocks_of(path)) > 4


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_blocks_are_about_a_megabyte(tmp_path, suffix):
    texts = [f"{number} " + "water " * 4_000 for number in range(200)]
    path = write(tmp_path / f"a{suffix}", texts)
    sizes = [sum(len(text) for text in block.texts) for block in blocks_of(path)]
    assert len(sizes) > 1 and max(sizes) < 10e6 and read(path) == texts


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_blank_documents_are_left_out(tmp_path, suffix):
    assert read(write(tmp_path / f"a{suffix}", ["", "one", " \n\t", "two", ""])) == ["one", "two"]


@pytest.mark.parametrize("compress", [gzip.compress, zst], ids=["gz", "zst"])
def test_several_frames_are_one_file(tmp_path, compress, small):
    """Frames end anywhere, also in the middle of a line."""
    path = tmp_path / f"a.jsonl.{'gz' if compress is gzip.compress else 'zst'}"
    cuts = [0, 1, 90, 1000, 1001, len(JSON)]
    path.write_bytes(b"".join(compress(JSON[a:b]) for a, b in pairwise(cuts)))
    assert read(path) == TEXTS


def test_json_lines_with_blank_lines_and_another_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "one", "text": 5}\r\n\r\n  \n{"body": "two"}')
    assert read(path, "body") == ["one", "two"]


def test_lines_are_numbered_from_one_through_all_blocks(tmp_path, small):
    (tmp_path / "a.jsonl").write_bytes(JSON * 5)
    blocks = blocks_of(tmp_path / "a.jsonl")
    assert [block.line for block in blocks][:2] == [1, 1 + len(blocks[0].texts)]
    assert blocks[-1].line + len(blocks[-1].texts) == 1 + 5 * len(TEXTS)


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_columns(tmp_path, kind, small):
    types = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    texts = [None, *TEXTS, None, "", *TEXTS]
    made = table(texts, types.get(kind) or getattr(pyarrow, kind)(), id=range(len(texts)))
    parquet.write_table(made, tmp_path / "a.parquet", row_group_size=3)
    assert read(tmp_path / "a.parquet") == TEXTS * 2
    parquet.write_table(made.rename_columns(["id", "body"]), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", "body") == TEXTS * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_file_without_documents(tmp_path, name):
    assert read(write(tmp_path / name, [])) == []


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_long_text_file_comes_in_pieces(tmp_path, small, line_end, mark):
    path = tmp_path / "long.txt"
    path.write_bytes((mark + LINES.replace("\n", line_end)).encode())
    blocks = blocks_of(path)
    pieces = [text for block in blocks for text in texts_of(block)[0]]
    assert len(pieces) == len(blocks) > 5 and "".join(pieces) == LINES
    assert {block.digest for block in blocks} == {hashlib.sha256(LINES.encode()).digest()} == {digest_of([LINES])}
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True]


def test_blank_piece_of_a_long_text_is_kept(tmp_path, small):
    """The last piece ends the document, even if it is blank."""
    (tmp_path / "long.txt").write_text("x" * 150 + "\n" * 9)
    blocks = blocks_of(tmp_path / "long.txt")
    assert [texts_of(block)[0] for block in blocks] == [["x" * 150], ["\n" * 9]]


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
    assert read(path, separator="<|endoftext|>") == texts
    assert len(blocks_of(path, separator="<|endoftext|>")) > 3
    joined = [text for block in blocks_of(path) for text in texts_of(block)[0]]
    assert "".join(joined) == contents  # without the option


DAMAGES = {
    "cut": lambda contents: contents[: len(contents) // 2],
    "cut by a byte": lambda contents: contents[:-1],
    "garbage": lambda contents: bytes(range(256)) * 8,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_damaged_file(tmp_path, suffix, damage):
    texts = [f"{number} {os.urandom(40).hex()}" for number in range(100)]
    path = write(tmp_path / f"a{suffix}", texts)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert "damaged" in error_of(path) and "get the file again" in error_of(path)


# What the command zstd makes of {"text": "the river bends"}: a frame with a checksum at its end.
FRAME = bytes.fromhex("28b52ffd241ce100007b2274657874223a20227468652072697665722062656e6473227d0aeb620f34")


@pytest.mark.parametrize("frame", [FRAME, gzip.compress(b'{"text": "the river bends"}\n')], ids=["zst", "gz"])
def test_checksums_are_compared(tmp_path, frame):
    path = tmp_path / ("a.jsonl.zst" if frame is FRAME else "a.jsonl.gz")
    path.write_bytes(frame)
    assert read(path) == ["the river bends"]
    path.write_bytes(frame[:-5] + bytes([frame[-5] ^ 1]) + frame[-4:])  # the text or the checksum
    assert "damaged" in error_of(path)


@pytest.mark.parametrize("compress", [gzip.compress, zst], ids=["gz", "zst"])
def test_blocks_before_the_damage_are_read(tmp_path, small, compress):
    texts = [f"{number} {os.urandom(40).hex()}" for number in range(8000)]
    path = write(tmp_path / f"a.jsonl.{'gz' if compress is gzip.compress else 'zst'}", texts)
    os.truncate(path, path.stat().st_size // 2)
    found = []
    with pytest.raises(ValueError, match="damaged after line") as raised:
        for block in read_blocks(path):
            found += texts_of(block)[0]
    assert len(found) > 100 and found == texts[: len(found)]
    assert f"after line {len(found)} (" in str(raised.value)


def test_null_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "one"}\n')
    assert read(tmp_path / "a.jsonl") == ["one"]


def test_parquet_without_the_column(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"], "url": ["y"]}), tmp_path / "a.parquet")
    message = error_of(tmp_path / "a.parquet")
    assert "no text in 'text'" in message and message.endswith("--text_field: body, url")


BAD_LINES = {
    "cut": b'{"text": "never ends',
    "plain text": b"once upon a time",
    "two objects": b'{"text": "a"} {"text": "b"}',
    "list": b'["text"]',
    "string": b'"text"',
    "number": b"5",
    "null": b"null",
    "no field": b'{"body": "a"}',
    "field is a number": b'{"text": 5}',
    "field is a list": b'{"text": ["a"]}',
    "field is an object": b'{"text": {"encode": "a"}}',
    "half a surrogate pair": b'{"text": "\\ud83d"}',
    "not UTF-8": b'{"text": "Stra\xdfe"}',
    "nested too deeply": b'{"text": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_bad_line(tmp_path, bad, suffix):
    lines = [b'{"text": "one"}', b"", bad, b'{"text": "two"}', bad, b'{"text": ""}']
    path = tmp_path / f"a{suffix}"
    path.write_bytes({".gz": gzip.compress, ".zst": zst}.get(path.suffix, bytes)(b"\n".join(lines)))
    message = error_of(path)
    assert "line 3 is no JSON object with a text in 'text'" in message and "--skip_bad" in message
    assert len(message) < 400 + len(str(path))
    (block,) = read_blocks(path)
    assert texts_of(block, skip_bad=True) == (["one", "two"], 2)


def test_missing_field_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    assert "a text in 'body' (no field 'body')" in error_of(tmp_path / "a.jsonl", "body")


@pytest.mark.parametrize("separator", ["", "---"])
@pytest.mark.parametrize("place", [0, 2000])
def test_text_file_that_is_not_utf8(tmp_path, separator, place, small):
    (tmp_path / "a.txt").write_bytes(LINES[:place].encode() + b"Stra\xdfe\n" + LINES.encode())
    message = error_of(tmp_path / "a.txt", "text", separator)
    assert "not UTF-8" in message and "iconv" in message


def test_parquet_that_is_not_utf8(tmp_path):
    parquet.write_table(pyarrow.table({"text": pyarrow.array([b"Stra\xdfe"])}), tmp_path / "a.parquet")
    assert "damaged" in error_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".parquet"])
def test_missing_package(tmp_path, monkeypatch, suffix):
    path = write(tmp_path / f"a{suffix}", TEXTS)

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(files, "import_module", missing)
    message = error_of(path)
    assert "package pyarrow" in message and "pip install -e '.[hub]'" in message


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_formats_that_need_no_package(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "import_module", None)
    path = tmp_path / name
    write(path, ["one"]) if "json" in name else path.write_text("one")
    assert read(path) == ["one"]


def test_missing_file(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        with pytest.raises(FileNotFoundError):
            list(read_blocks(tmp_path / name))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files in /proc")
def test_open_files_are_closed(tmp_path, small):
    """A reader that stops early, as with --tokens, leaves no open file."""
    before = len(os.listdir("/proc/self/fd"))
    for suffix in (".txt", *SUFFIXES):
        path = tmp_path / f"a{suffix}"
        path.write_text(LINES) if suffix == ".txt" else write(path, TEXTS * 5)
        blocks = read_blocks(path)
        next(blocks)
        blocks.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_digest_of_pieces():
    assert digest_of(iter(["na", "ïve"])) == digest_of(["naïve"]) == hashlib.sha256("naïve".encode()).digest()
