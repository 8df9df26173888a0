"""Data: pytest tests/test_data.py (CPU; no internet: downloads come from a server of ours on loopback)."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from test_tokenizer import BPE, BYTES, SPECS, VERSE, to_list

from data import corpus, files, prepare, sources, tokenizer, tokens
from data.corpus import open_corpus
from data.loader import Batches
from data.tokenizer import fingerprint, make_tokenizer
from data.tokens import check_tokenizer, read_tokens, write_tokens

ROOT = Path(__file__).parent.parent
ABOUT = {"text_bytes": 5, "source": "a test", "source_sha256": "0" * 64}


@pytest.fixture(autouse=True)
def data_root(tmp_path, monkeypatch):
    """Every test has prepared corpora and downloads of its own, and reaches loopback without a proxy."""
    monkeypatch.setenv("GPT_DATA", str(tmp_path / "root"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "root"


@pytest.fixture
def verse(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text(VERSE)
    return path


def leftovers(root):
    """Temporary files and folders that a failure left behind."""
    return [path for path in root.rglob("*") if path.name.startswith(".")] if root.exists() else []


def token_file(path, count=5, spec="bytes"):
    write_tokens(path, np.arange(count), make_tokenizer(spec, VERSE), **ABOUT)
    return path


# Token files


@pytest.mark.parametrize("vocabulary, dtype", [(65536, np.uint16), (65537, np.uint32)])
def test_token_file_round_trip(tmp_path, vocabulary, dtype):
    made = tokenizer.CharTokenizer("".join(map(chr, range(0xE000, 0xE000 + vocabulary))))
    ids = np.array([0, 1, vocabulary - 1])
    write_tokens(tmp_path / "x.bin", ids, made, text_bytes=9, source="é" * 99, source_sha256="f" * 64)
    found = read_tokens(tmp_path / "x.bin")
    assert found.ids.dtype == dtype and np.array_equal(found.ids.read(0, 3), ids)
    assert (found.vocab_size, found.tokenizer) == (vocabulary, "char")
    assert (found.tokenizer_sha256, found.source_sha256) == (fingerprint(made), "f" * 64)
    assert (found.text_bytes, found.bytes_per_token, found.source) == (9, 3.0, "é" * 48)
    assert (tmp_path / "x.bin").stat().st_size == 1024 + 3 * np.dtype(dtype).itemsize


def test_token_file_refuses_foreign_ids(tmp_path):
    for ids in ([256], [-1], []):
        with pytest.raises(ValueError, match="tokens"):
            write_tokens(tmp_path / "x.bin", ids, BYTES, **ABOUT)
    assert list(tmp_path.iterdir()) == []


def damage(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new))


DAMAGES = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "empty": (lambda path: os.truncate(path, 0), "truncated"),
    "half a header": (lambda path: os.truncate(path, 500), "truncated"),
    "no ids": (lambda path: os.truncate(path, 1024), "truncated: 1,024 bytes instead of 1,034"),
    "half an id": (lambda path: os.truncate(path, 1033), "truncated"),
    "too long": (lambda path: os.truncate(path, 1036), "damaged"),
    "foreign": (lambda path: path.write_bytes(b"\x93NUMPY" * 400), "not a token file"),
    "version": (lambda path: damage(path, b'"version": 1', b'"version": 9'), "version 9, not 1"),
    "not JSON": (lambda path: damage(path, b"{", b"["), "damaged header"),
    "not text": (lambda path: damage(path, b"version", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9"), "damaged header"),
    "dtype": (lambda path: damage(path, b"uint16", b"int999"), "damaged header"),
    "field": (lambda path: damage(path, b'"count"', b'"caunt"'), "damaged header"),
    "type": (lambda path: damage(path, b'"count": 5', b'"count":""'), "damaged header"),
}


@pytest.mark.parametrize("break_it, message", DAMAGES.values(), ids=DAMAGES)
def test_damaged_token_files(tmp_path, break_it, message):
    path = token_file(tmp_path / "x.bin")
    break_it(path)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{message}.*prepare the corpus again"):
        read_tokens(path)


def test_tokens_of_another_tokenizer(tmp_path):
    found = read_tokens(token_file(tmp_path / "x.bin"))
    check_tokenizer(found, BYTES)
    with pytest.raises(ValueError, match=r"made by tokenizer bytes .*, not bpe:300"):
        check_tokenizer(found, BPE)


def test_tokens_are_read_from_their_file(tmp_path):
    path = token_file(tmp_path / "x.bin", count=200)
    found = read_tokens(path)
    batches = Batches(found, 16, 4, seed=0)
    inputs, targets = batches.batch(0)
    assert torch.equal(targets, inputs + 1)
    assert len(found.ids.read(150, 300)) == 50 and len(found.ids.read(7, 7)) == 0
    stamp = found.ids.stamp()
    os.truncate(path, tokens.HEADER_BYTES + 20)
    assert found.ids.stamp() != stamp and len(found.ids.read(0, 10)) == 10
    with pytest.raises(ValueError, match=r"x\.bin can no longer be read \(it was cut short\); remove"):
        batches.batch(0)


def test_atomic_file_keeps_the_old_one(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(RuntimeError), files.atomic_file(path) as file:
        file.write(b"half of the n")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and path.read_text() == "old"


# Corpora


@pytest.mark.parametrize("spec", SPECS)
def test_prepare_and_open_text(verse, data_root, spec, capsys):
    found = open_corpus("text", spec, verse)
    assert capsys.readouterr().err.startswith("preparing text")
    split = int(0.9 * len(VERSE))
    assert found.tokenizer.decode(found.train.ids.read(0, len(found.train)).tolist()) == VERSE[:split]
    assert found.tokenizer.decode(found.val.ids.read(0, len(found.val)).tolist()) == VERSE[split:]
    assert found.bytes_per_token == (len(VERSE) - split) / len(found.val)
    assert found.source == "verse.txt" and found.folder.parent == data_root / "prepared"
    assert {path.name for path in found.folder.iterdir()} == {"train.bin", "val.bin", "tokenizer.json"}

    since = time.perf_counter()
    again = open_corpus("text", spec, verse)
    assert time.perf_counter() - since < 1.0 and capsys.readouterr().err == ""
    assert np.array_equal(again.train.ids.read(0, len(again.train)), found.train.ids.read(0, len(found.train)))
    assert leftovers(data_root) == []


def test_bpe_learns_from_the_training_part_only(tmp_path):
    (tmp_path / "x").write_text("aaaa " * 90 + "zq" * 25)
    assert b"zq" not in to_list(open_corpus("text", "bpe:260", tmp_path / "x").tokenizer)


def test_char_knows_the_validation_part(tmp_path):
    (tmp_path / "x").write_text("a" * 90 + "z" * 10)
    assert open_corpus("text", "char", tmp_path / "x").tokenizer.n_vocab == 2


def test_changed_text_is_prepared_again(verse):
    before = open_corpus("text", "char", verse)
    verse.write_text(VERSE + "CODA\n" * 50)
    after = open_corpus("text", "char", verse)
    assert after.folder == before.folder and len(after.train) > len(before.train)
    assert before.tokenizer.decode(before.train.ids.read(0, 5).tolist()) == "ANNE:"  # the old one is still readable


def test_two_files_of_one_name_are_two_corpora(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder * 100)
    folders = {open_corpus("text", "char", tmp_path / folder / "x.txt").folder for folder in ("a", "b")}
    assert len(folders) == 2


def test_folder_of_texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    contents = {"b.txt": "bee\r\n", "a.md": "\ufeffay\n\n", "sub/c.TXT": "sea", "e.txt": " \n"}
    for name, text in {**contents, "d.py": "code", ".git/f.txt": "hidden"}.items():
        (folder / name).write_bytes(text.encode())
    assert sources.read_text(folder).text == "ay\n\nbee\n\nsea\n"


BAD_TEXTS = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "latin-1": ("Straße".encode("latin-1"), r"not UTF-8 text: byte 4 is 0xdf.*iconv"),
    "utf-16": ("text".encode("utf-16"), "not UTF-8 text: byte 0"),
}


@pytest.mark.parametrize("contents, message", BAD_TEXTS.values(), ids=BAD_TEXTS)
@pytest.mark.parametrize("inside_folder", [False, True])
def test_bad_texts(tmp_path, data_root, contents, message, inside_folder):
    path = tmp_path / "in" / "bad.txt"
    path.parent.mkdir()
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        open_corpus("text", "bytes", path.parent if inside_folder else path)
    assert not data_root.exists()


def test_wrong_inputs(tmp_path, verse):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_corpus("text", "bytes", tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"no \*.txt"):
        open_corpus("text", "bytes", tmp_path / "none")
    with pytest.raises(ValueError, match="needs --input"):
        open_corpus("text", "bytes")
    with pytest.raises(ValueError, match="did you mean 'shakespeare'"):
        open_corpus("shakespere", "bytes")
    with pytest.raises(ValueError, match=r"not tiny Shakespeare.*text --input"):
        open_corpus("shakespeare", "bytes", verse)


def test_damaged_folders(verse):
    folder = open_corpus("text", "char", verse).folder
    other = open_corpus("text", "bytes", verse).folder
    (folder / "train.bin").write_bytes((other / "train.bin").read_bytes())
    with pytest.raises(ValueError, match="made by tokenizer bytes"):
        open_corpus("text", "char", verse)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is damaged.*prepare the corpus again"):
        open_corpus("text", "char", verse)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing.*prepare the corpus again"):
        open_corpus("text", "char", verse)
    (other / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"val.bin is missing"):
        open_corpus("text", "bytes", verse)
    corpus.prepare("text", "char", verse)  # replaces whatever is there
    open_corpus("text", "char", verse)


def test_failure_leaves_the_old_folder(verse, data_root, monkeypatch):
    before = open_corpus("text", "char", verse)

    def full_disk(path, *args, **kwargs):
        if path.name == "val.bin":
            raise OSError("No space left on device")
        write_tokens(path, *args, **kwargs)

    monkeypatch.setattr(corpus, "write_tokens", full_disk)
    with pytest.raises(OSError, match="No space"):
        corpus.prepare("text", "char", verse)
    assert len(open_corpus("text", "char", verse).val) == len(before.val)
    with pytest.raises(OSError, match="No space"):
        corpus.prepare("text", "bytes", verse)
    assert [path.name for path in (data_root / "prepared").iterdir()] == [before.folder.name]


def test_many_prepare_at_once(verse, data_root):
    errors = []

    def work():
        try:
            for _ in range(5):
                corpus.prepare("text", "char", verse)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and leftovers(data_root) == []
    assert open_corpus("text", "char", verse).source == "verse.txt"


def test_a_place_that_cannot_be_written(tmp_path, verse, monkeypatch):
    monkeypatch.setenv("GPT_DATA", str(verse))  # a file where a folder is needed
    with pytest.raises(OSError, match=r"cannot write to .*set GPT_DATA"):
        open_corpus("text", "char", verse)


# Tiny Shakespeare: a server on loopback holds a small text that takes its place


def closed_url():
    """An address where nobody listens: the port was ours a moment ago."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_port}/input.txt"


@pytest.fixture
def server():
    """A web server that answers as `server.mode` says and counts the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests += 1
            mode, contents = self.server.mode, VERSE.encode()
            if mode == "silent":
                return self.server.closing.wait(10)
            self.send_response({"missing": 404, "error": 500, "partial": 206}.get(mode, 200))
            if mode != "endless":
                self.send_header("Content-Length", str(len(contents)))
            self.end_headers()
            if mode == "changed":
                contents = contents.swapcase()
            if mode == "cut":
                contents = contents[:-10]
            if mode == "trickle":
                for byte in contents:
                    self.wfile.write(bytes([byte]))
                    if self.server.closing.wait(0.02):
                        return
            while mode == "endless" and not self.server.closing.is_set():
                self.wfile.write(contents)
            self.wfile.write(contents)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *args: None  # a client that gave up is what some tests are about
        server.mode, server.requests, server.closing = "good", 0, threading.Event()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


@pytest.fixture
def shakespeare(server, tmp_path, monkeypatch):
    """sources.py with the loopback server's text for tiny Shakespeare and another for the play."""
    (tmp_path / "play.txt").write_text("BEATRIX:\nNo line of this is anyone's.\n" * 30)
    monkeypatch.setattr(sources, "PLAY_FILE", tmp_path / "play.txt")
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", f"http://127.0.0.1:{server.server_port}/input.txt")
    monkeypatch.setattr(sources, "SHAKESPEARE_BYTES", len(VERSE))
    monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", hashlib.sha256(VERSE.encode()).hexdigest())
    monkeypatch.setattr(sources, "DOWNLOAD_SECONDS", 0.5)
    return server


def test_download(shakespeare, data_root, capsys):
    assert open_corpus("shakespeare", "char").source == "tiny Shakespeare"
    assert (data_root / "downloads" / "tinyshakespeare.txt").read_text() == VERSE
    open_corpus("shakespeare", "bytes")
    assert shakespeare.requests == 1 and "NOTICE" not in capsys.readouterr().err
    (data_root / "downloads" / "tinyshakespeare.txt").write_text("broken by someone")
    open_corpus("shakespeare", "bpe:300")
    assert shakespeare.requests == 2 and leftovers(data_root) == []


REASONS = {
    "missing": "404",
    "error": "500",
    "partial": "status 206",
    "changed": "another sha256",
    "cut": "another sha256",
    "endless": "more than",
    "silent": "0.5 s|timed out",
    "trickle": "not complete after 0.5 s",
}


@pytest.mark.parametrize("mode, reason", REASONS.items(), ids=REASONS)
def test_bad_servers(shakespeare, mode, reason):
    shakespeare.mode = mode
    since = time.perf_counter()
    with pytest.raises(files.DownloadError, match=reason):
        files.download(
            sources.SHAKESPEARE_URL,
            size=sources.SHAKESPEARE_BYTES,
            sha256=sources.SHAKESPEARE_SHA256,
            timeout=0.5,
        )
    assert time.perf_counter() - since < 2


def test_offline_uses_the_play_and_says_so(shakespeare, data_root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", closed_url())
    assert open_corpus("shakespeare", "char").source == "the embedded play"
    remedy = "python -m data.prepare shakespeare --input FILE --tokenizer char"
    notice = capsys.readouterr().err.splitlines()
    assert len(notice) == 2 and notice[1].startswith("NOTICE") and "data/play.txt" in notice[1]
    assert "refused" in notice[1] and notice[1].endswith(remedy)

    # Opening it again repeats the notice and leaves the network alone, also when it is back.
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", f"http://127.0.0.1:{shakespeare.server_port}/input.txt")
    assert open_corpus("shakespeare", "char").source == "the embedded play"
    notice = capsys.readouterr().err.splitlines()
    assert len(notice) == 1 and notice[0].endswith(remedy) and shakespeare.requests == 0
    open_corpus("shakespeare", "char", quiet=True)
    assert capsys.readouterr().err == ""

    # The command tries again, and replaces the play.
    assert prepare.main(["shakespeare", "--tokenizer", "char"]) == 0
    assert shakespeare.requests == 1
    assert open_corpus("shakespeare", "char").source == "tiny Shakespeare"
    assert capsys.readouterr().err == ""


def test_local_copy_replaces_the_play(shakespeare, data_root, verse, monkeypatch, capsys):
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", closed_url())
    assert open_corpus("shakespeare", "char").source == "the embedded play"
    assert prepare.main(["shakespeare", "--tokenizer", "char", "--input", str(verse)]) == 0
    capsys.readouterr()
    assert open_corpus("shakespeare", "char").source == "tiny Shakespeare"
    assert open_corpus("shakespeare", "bytes").source == "tiny Shakespeare"  # the copy serves the others too
    assert "NOTICE" not in capsys.readouterr().err


def test_gpt2_needs_the_right_rank_file(tmp_path, monkeypatch):
    path = tmp_path / "ranks"
    with pytest.raises(FileNotFoundError, match=r"cannot read rank file .*r50k_base"):
        make_tokenizer(f"gpt2:{path}", "")
    path.write_bytes(b"aGk= 0\n")
    with pytest.raises(ValueError, match=r"sha256 .* give the r50k_base.tiktoken"):
        make_tokenizer(f"gpt2:{path}", "")
    monkeypatch.setattr(tokenizer, "GPT2_URL", closed_url())
    with pytest.raises(OSError, match="--tokenizer gpt2:FILE"):
        make_tokenizer("gpt2", "")


# The command line


def command(*args):
    process = [sys.executable, "-m", "data.prepare", *map(str, args)]
    return subprocess.run(process, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_command_reports_what_it_made(verse, data_root):
    done = command("text", "--input", verse, "--tokenizer", "char")
    assert done.returncode == 0 and done.stderr == ""
    for piece in ("verse.txt", f"{len(VERSE):,} bytes", "char, vocabulary of", "val", str(data_root)):
        assert piece in done.stdout


def test_command_fails_in_one_line(verse, data_root):
    done = command("text", "--input", verse, "--tokenizer", "bpe:12")
    assert done.returncode == 1 and done.stdout == "" and not data_root.exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


BAD_COMMANDS = {
    "no name": [],
    "unknown name": ["shakespere"],
    "unknown option": ["text", "--tokeniser", "char"],
    "no input": ["text"],
    "missing input": ["text", "--input", "nowhere/at/all.txt"],
    "tokenizer": ["text", "--input", __file__, "--tokenizer", "words"],
    "rank file": ["text", "--input", __file__, "--tokenizer", "gpt2:nowhere"],
}


@pytest.mark.parametrize("args", BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_bad_commands(args, data_root, capsys):
    assert prepare.main(args) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert not (data_root / "prepared").exists() or list((data_root / "prepared").iterdir()) == []
