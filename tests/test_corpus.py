"""Corpora and downloads (CPU, no internet: a server on loopback stands in for it)."""

import base64
import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from test_tokenizer import BPE, ODD, SPECS, VERSE, to_list

from data import files, sources, tokenizer
from data.corpus import open_corpus, prepare
from data.tokenizer import from_state, make_tokenizer, to_state

pytestmark = pytest.mark.usefixtures("data_root")


@pytest.fixture
def verse(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text(VERSE)
    return path


def ids_of(part):
    return part.windows([0], len(part))[0]


def text_of(found):
    return "".join(found.tokenizer.decode(ids_of(part).tolist()) for part in (found.train, found.val))


def test_atomic_file_replaces_only_on_success(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(RuntimeError), files.atomic_file(path) as file:
        file.write(b"half of the n")
        assert len(list(tmp_path.glob(".x.*.tmp"))) == 1
        raise RuntimeError
    assert path.read_text() == "old"
    with files.atomic_file(path) as file:
        file.write(b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and path.read_text() == "new"


@pytest.mark.parametrize("spec", SPECS)
def test_prepare_and_open_text(verse, data_root, spec, capsys):
    found = open_corpus("text", spec, verse)
    assert "preparing text" in capsys.readouterr().err
    split = int(0.9 * len(VERSE))
    assert found.tokenizer.decode(ids_of(found.train).tolist()) == VERSE[:split]
    assert found.tokenizer.decode(ids_of(found.val).tolist()) == VERSE[split:]
    assert found.bytes_per_token == (len(VERSE) - split) / len(found.val)
    assert found.source == "verse.txt" and found.folder.parent == data_root / "prepared"
    again = open_corpus("text", spec, verse)
    assert np.array_equal(ids_of(again.train), ids_of(found.train)) and again.sha256 == found.sha256
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("vocabulary, dtype", [(65536, np.uint16), (65537, np.uint32)])
def test_large_vocabularies(tmp_path, vocabulary, dtype):
    text = "".join(map(chr, range(0xE000, 0xE000 + vocabulary)))
    (tmp_path / "x").write_text(text, encoding="utf-8")
    found = open_corpus("text", "char", tmp_path / "x")
    assert ids_of(found.train).dtype == ids_of(found.val).dtype == dtype and text_of(found) == text


def test_bpe_learns_from_the_training_part_and_char_from_both(tmp_path):
    (tmp_path / "x").write_text("aaaa " * 90 + "zq" * 25)
    assert b"zq" not in to_list(open_corpus("text", "bpe:260", tmp_path / "x").tokenizer)
    assert open_corpus("text", "char", tmp_path / "x").tokenizer.n_vocab == 4


def test_changed_text_is_prepared_again(verse, capsys):
    before = open_corpus("text", "char", verse)
    capsys.readouterr()
    os.utime(verse, (0, 0))
    assert open_corpus("text", "char", verse).sha256 == before.sha256 and capsys.readouterr().err == ""
    verse.write_text(VERSE + "CODA\n" * 50)
    assert text_of(open_corpus("text", "char", verse)) == VERSE + "CODA\n" * 50
    assert text_of(before) == VERSE  # a run that has opened the old tokens keeps them


def test_known_tokens_are_opened_without_their_text(verse):
    before = open_corpus("text", "char", verse)
    verse.write_text("EDITED")
    assert text_of(open_corpus("text", "char", verse, sha256=before.sha256)) == VERSE
    assert text_of(open_corpus("text", "char", verse)) == "EDITED"
    verse.unlink()  # a text may be deleted once it is prepared
    assert text_of(open_corpus("text", "char", verse)) == "EDITED"
    with pytest.raises(FileNotFoundError, match=r"verse\.txt"):
        open_corpus("text", "bytes", verse)


DAMAGES = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "no JSON": lambda folder: os.truncate(folder / "manifest.json", 98),
    "other version": lambda folder: (folder / "manifest.json").write_text('{"request": {"version": 1}}'),
    "no tokens": lambda folder: (folder / "val_000000.bin").unlink(),
    "truncated": lambda folder: os.truncate(folder / "train_000000.bin", 98),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_unusable_files_are_prepared_again(verse, damage):
    damage(open_corpus("text", "char", verse).folder)
    assert text_of(open_corpus("text", "char", verse)) == VERSE


def test_many_prepare_at_once(verse):
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: prepare("text", "char", verse), range(20)):
            assert text_of(found) == VERSE
    assert text_of(open_corpus("text", "char", verse)) == VERSE


def test_folder_of_texts(tmp_path):
    folder = tmp_path / ".texts"  # only hidden folders below it are left out
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    contents = {"b.txt": "bee\r\n", "a.md": "\ufeffay\n\n", "sub/c.TXT": "sea", "e.txt": " \n"}
    for name, text in {**contents, "d.py": "code", ".git/f.txt": "hidden"}.items():
        (folder / name).write_bytes(text.encode())
    found = open_corpus("text", "char", folder)
    assert found.source == ".texts" and found.train.documents + found.val.documents == 3
    assert sorted(filter(None, text_of(found).split("\n"))) == ["ay", "bee", "sea"]
    files = [folder / "b.txt", folder / "sub" / "b.txt"]
    files[1].write_text("another b.txt")
    assert len({open_corpus("text", "char", file).folder for file in files}) == 2


@pytest.mark.parametrize("inside_folder", [False, True])
@pytest.mark.parametrize("contents, message", [(b" \n\n", "no text"), (b"Stra\xdfe", r"bad\.txt is not UTF-8.*iconv")])
def test_bad_texts(tmp_path, contents, message, inside_folder):
    path = tmp_path / "in" / "bad.txt"
    path.parent.mkdir()
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        open_corpus("text", "bytes", path.parent if inside_folder else path)


def test_wrong_inputs(tmp_path, verse, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_corpus("text", "bytes", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="--input"):
        open_corpus("text", "bytes")
    with pytest.raises(ValueError, match="must be shakespeare"):
        open_corpus("shakespere", "bytes")
    with pytest.raises(ValueError, match=r"not tiny Shakespeare.*text --input"):
        open_corpus("shakespeare", "bytes", verse)
    monkeypatch.setenv("GPT_DATA", str(verse))  # a file where a folder is needed
    with pytest.raises(OSError, match=r"verse\.txt"):
        open_corpus("text", "char", verse)


class Handler(BaseHTTPRequestHandler):
    """A server on loopback that has VERSE in the place of tiny Shakespeare, and answers as `mode` says."""

    def do_GET(self):
        self.server.requests += 1
        mode, contents = self.server.mode, self.server.contents
        if mode == "silent":
            self.server.closing.wait(10)
            return
        self.send_response(404 if mode == "missing" else 200)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        self.wfile.write({"changed": contents.swapcase(), "cut": contents[:-10]}.get(mode, contents))

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.mode, server.contents, server.requests, server.closing = "good", VERSE.encode(), 0, threading.Event()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setattr(sources, "SHAKESPEARE_URL", f"http://127.0.0.1:{server.server_port}/input.txt")
        monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", hashlib.sha256(VERSE.encode()).hexdigest())
        monkeypatch.setattr(files, "TIMEOUT", (0.5, 0.5))
        yield server
        server.closing.set()
        server.shutdown()


def test_download(server, data_root, capsys):
    found = open_corpus("shakespeare", "char")
    assert found.source == "tiny Shakespeare" and text_of(found) == VERSE
    open_corpus("shakespeare", "bytes")
    assert server.requests == 1 and "NOTICE" not in capsys.readouterr().err
    (data_root / "downloads" / "tinyshakespeare.txt").write_text("broken by someone")
    assert text_of(open_corpus("shakespeare", "bpe:300")) == VERSE and server.requests == 2


@pytest.mark.parametrize("mode", ["missing", "changed", "cut", "silent"])
def test_play_replaces_a_failed_download(server, data_root, mode, capsys):
    server.mode = mode
    since = time.perf_counter()
    found = open_corpus("shakespeare", "char")
    assert time.perf_counter() - since < 5 and list((data_root / "downloads").iterdir()) == []
    assert found.source == "the embedded play" and text_of(found) == sources.PLAY_FILE.read_text()
    notice = capsys.readouterr().err.splitlines()[-1]
    assert notice.startswith("NOTICE") and "data.prepare shakespeare --input FILE --tokenizer char" in notice

    # Opening it again repeats the notice and does not use the network, even if it works now.
    server.mode, server.requests = "good", 0
    assert open_corpus("shakespeare", "char").source == "the embedded play"
    assert "NOTICE" in capsys.readouterr().err and server.requests == 0
    open_corpus("shakespeare", "char", quiet=True)
    assert capsys.readouterr().err == ""
    prepare("shakespeare", "char")  # downloads again, and replaces the play
    assert server.requests == 1 and open_corpus("shakespeare", "char").source == "tiny Shakespeare"


def test_local_copy_replaces_the_play(server, verse, monkeypatch, capsys):
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", "http://127.0.0.1:9/")  # nobody listens on the discard port
    assert open_corpus("shakespeare", "char").source == "the embedded play"
    capsys.readouterr()
    assert text_of(open_corpus("shakespeare", "char", verse)) == VERSE
    assert open_corpus("shakespeare", "bytes").source == "tiny Shakespeare"  # from the copy in downloads/
    assert "NOTICE" not in capsys.readouterr().err


def test_gpt2_rank_file(tmp_path, server, monkeypatch):
    """GPT-2's own file is too large to keep here: the server has a small one in its format."""
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(to_list(BPE))]
    server.contents = b"".join(lines)
    monkeypatch.setattr(tokenizer, "GPT2_URL", f"http://127.0.0.1:{server.server_port}/")
    with pytest.raises(OSError, match=r"r50k_base.tiktoken"):  # its sha256 is not that of GPT-2's file
        make_tokenizer("gpt2")
    monkeypatch.setattr(tokenizer, "GPT2_SHA256", hashlib.sha256(server.contents).hexdigest())
    made = from_state(to_state(make_tokenizer("gpt2")))
    assert (made.name, made.n_vocab, made.eot_token) == ("gpt2", 301, 300)
    assert made.decode(made.encode_ordinary(ODD)) == ODD and 300 not in made.encode_ordinary("<|endoftext|>")
    path = tmp_path / "ranks"
    path.write_bytes(server.contents)
    assert to_state(make_tokenizer(f"gpt2:{path}")) == to_state(made)
    path.write_bytes(lines[0])
    with pytest.raises(ValueError, match=r"not GPT-2's rank file.*r50k_base.tiktoken"):
        make_tokenizer(f"gpt2:{path}")


def test_command(verse, data_root):
    command = [sys.executable, "-m", "data.prepare", "text", "--input", verse, "--tokenizer"]
    options = dict(cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    done = subprocess.run([*command, "char"], **options)
    assert done.returncode == 0 and done.stderr == ""
    assert all(piece in done.stdout for piece in (f"verse.txt, {len(VERSE):,} bytes", "val", str(data_root)))
    done = subprocess.run([*command, "bpe:12"], **options)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
