"""Opening, finding and replacing corpora, and tiny Shakespeare (a server on loopback stands in for the internet)."""

import errno
import fcntl
import gzip
import hashlib
import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow
import pytest
from helpers import ROOT, one_sentence, run_script
from hub_server import running
from pyarrow import parquet
from test_build import ids_of, make_documents, shards_of, write_lines
from test_tokenizer import SPECS, VERSE, to_list

from data import sources
from data.build import Options
from data.corpus import corpus_folder, open_corpus, prepare
from data.loader import Batches, validation_batches
from data.prepare import main as prepare_main
from data.tokenizer import make_tokenizer, to_state
from errors import UserError, sentence_of

pytestmark = pytest.mark.usefixtures("data_root")


@pytest.fixture
def verse(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text(VERSE)
    return path


def text_of(found):
    return "".join(found.tokenizer.decode(ids_of(split).tolist()) for split in (found.train, found.val))


@pytest.mark.parametrize("spec", SPECS)
def test_prepare_and_open_text(verse, data_root, spec, capsys):
    found = open_corpus("text", spec, verse)
    assert "tokenizing text" in capsys.readouterr().err
    cut = int(0.9 * len(VERSE))
    assert found.tokenizer.decode(ids_of(found.train).tolist()) == VERSE[:cut]
    assert found.tokenizer.decode(ids_of(found.val).tolist()) == VERSE[cut:]
    assert found.val.text_bytes == len(VERSE) - cut
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


def test_bpe_learns_from_the_training_split_and_char_from_both(tmp_path):
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


def test_a_project_that_moved(tmp_path, verse, monkeypatch):
    """Its tokens are found even if the run is gone whose tokenizer they have."""
    before = open_corpus("text", "char", verse)
    (tmp_path / "root").rename(tmp_path / "after")
    monkeypatch.setenv("GPT_DATA", str(tmp_path / "after"))
    for spec in ("char", "run:gone"):
        assert text_of(open_corpus("text", spec, "elsewhere.txt", sha256=before.sha256)) == VERSE


def test_a_run_with_bytes_shares_its_corpus_with_bytes(tmp_path, verse):
    """Also with options that only its preparation was given; gpt2 likewise."""
    (tmp_path / "kestrel.json").write_text(json.dumps({"tokenizer": to_state(make_tokenizer("bytes"))}))
    found = prepare("text", f"run:{tmp_path}", verse, Options(val_share=0.3))
    assert open_corpus("text", "bytes", verse).sha256 == found.sha256


DAMAGES = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "no tokens": lambda folder: (folder / "val_000000.bin").unlink(),
    "truncated": lambda folder: os.truncate(folder / "train_000000.bin", 98),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_unusable_files_are_prepared_again(verse, damage):
    damage(open_corpus("text", "char", verse).folder)
    assert text_of(open_corpus("text", "char", verse)) == VERSE


def test_a_damaged_shard_is_noticed_by_its_hash(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", make_documents(100))
    found = prepare("text", "bytes+eot", path)
    whole = shards_of(found.folder)
    with open(found.folder / "train_000000.bin", "r+b") as file:
        file.seek(2000)
        file.write(b"\xff\x00")
    assert open_corpus("text", "bytes+eot", path).sha256 == found.sha256  # opening reads no tokens
    assert shards_of(open_corpus("text", "bytes+eot", path, verify=True).folder) == whole  # prepared again


def test_many_prepare_at_once(verse):
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: prepare("text", "char", verse), range(20)):
            assert text_of(found) == VERSE


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(verse, monkeypatch, capsys, number):
    """As some NFS and Lustre are."""

    def flock(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert text_of(prepare("text", "char", verse)) == VERSE
    assert f"warning: {os.strerror(number)}" in capsys.readouterr().err


def test_folder_of_texts(tmp_path, capsys):
    folder = tmp_path / ".texts"  # only hidden folders below it are left out
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    contents = {"b.txt": "bee\r\n", "a.md": "\ufeffay\n\n", "sub/c.TXT": "sea", "e.txt": " \n"}
    others = {"d.py": "code", "sub/e.py": "code", "data.json": "[]", "LICENSE": "MIT", ".git/f.txt": "hidden"}
    others |= {"books.tar.gz": "", ".notes.txt": "hidden"}
    for name, text in {**contents, **others}.items():
        (folder / name).write_bytes(text.encode())
    found = prepare("text", "char", folder, Options(val_share=0.4))
    assert "files of .texts that are left out: 6\n" in capsys.readouterr().err
    assert found.source == ".texts" and found.train.documents + found.val.documents == 3
    assert sorted(filter(None, text_of(found).split("\n"))) == ["ay", "bee", "sea"]
    files = [folder / "b.txt", folder / "sub" / "b.txt"]
    files[1].write_text("another b.txt")
    assert len({corpus_folder("text", "char", file) for file in files}) == 2


def test_links_in_a_folder(tmp_path, capsys):
    """To files, folders and folders above; a folder that is reached twice is read once."""
    folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    (folder / "sub").mkdir(parents=True)
    (elsewhere / "deep").mkdir(parents=True)
    paths = [folder / "a.txt", folder / "sub/b.txt", elsewhere / "c.txt", elsewhere / "deep/d.txt", tmp_path / "e.txt"]
    for path in paths:
        path.write_text(f"text of {path.name}")
    links = {"books": "../elsewhere", "deep": "../elsewhere/deep", "sub/up": "..", "again": ".", "e.txt": "../e.txt"}
    for name, place in links.items():
        (folder / name).symlink_to(place)
    found = open_corpus("text", "bytes+eot", folder)
    texts = "".join(sorted(text_of(found).replace("<|endoftext|>", "\n").splitlines(True)))
    assert texts.split("\n") == [*(f"text of {path.name}" for path in paths), ""]
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gone.txt", "gone", "loop.txt", "closed", "closed.txt"])
def test_what_cannot_be_read_in_a_folder_is_an_error(tmp_path, verse, name):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(VERSE)
    (folder / ".#a.txt").symlink_to("me@host.1")  # an editor's lock is hidden, and left out
    assert text_of(prepare("text", "bytes", folder)) == VERSE
    path = folder / name
    if "closed" in name:
        path.mkdir() if name == "closed" else path.write_text(VERSE)
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("root may read everything")
    else:
        path.symlink_to(name if name == "loop.txt" else "nowhere")
    with pytest.raises((UserError, OSError)) as raised:
        open_corpus("text", "bytes", folder)
    assert str(path) in sentence_of(raised.value, "")
    assert text_of(prepare("text", "bytes", folder / "a.txt")) == VERSE


@pytest.mark.parametrize("name", ["text", "chat"])
def test_the_card_of_a_data_set_is_left_out(tmp_path, capsys, name):
    """Of conversations, any text. A folder of texts keeps its README.md."""
    turns = [[dict(role="user", content=f"{n}"), dict(role="assistant", content="a")] for n in range(9)]
    files = {f"set/{n}.jsonl": json.dumps(dict(text=f"text {n}", messages=turns[n])) for n in range(9)}
    cards = ["README.md", "readme.txt.gz", "set/License-MIT.txt", "DATASET_CARD.md", "README_zh.md"]
    texts = ["notes/README.md", "book.txt", "sub/notes.md", "Licensed.txt"]
    for path, text in (files | dict.fromkeys(cards + texts, "a note")).items():
        (tmp_path / "x" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / path).write_bytes(gzip.compress(text.encode()) if path.endswith(".gz") else text.encode())
    found = open_corpus(name, "bytes", tmp_path / "x")
    count = len(cards) + len(texts) * (name == "chat")
    assert f"left out: {count}\n" in capsys.readouterr().err
    assert found.train.documents + found.val.documents == 9 + len(texts) * (name == "text")


@pytest.mark.parametrize("name, suffix", [("text", ".jsonl"), ("text", ".parquet"), ("chat", ".jsonl")])
def test_a_text_in_another_field(tmp_path, capsys, name, suffix):
    """The error of training has a command that prepares the text with an option, also for another tokenizer."""
    path, field = tmp_path / f"my texts{suffix}", "the 'body'"
    texts = make_documents(200)
    if name == "chat":
        texts = [[dict(role="user", content="q"), dict(role="assistant", content=text)] for text in texts]
    if suffix == ".parquet":
        parquet.write_table(pyarrow.table({"id": ["b"] * 200, field: texts}), path)
    else:
        path.write_text("".join(json.dumps({"id": "b", field: text}) + "\n" for text in texts))
    with pytest.raises(UserError) as error:
        open_corpus(name, "bytes+eot", path)
    words = shlex.split(str(error.value).split("type python -m data.prepare")[1])
    assert field in str(error.value) and words[-2:] == ["--text_field", "COLUMN" if suffix == ".parquet" else field]
    prepare_main([*words[:-1], field, "--val_share", "0.4"])
    for spec in ("bytes+eot", "bpe:300"):
        assert open_corpus(name, spec, path).val.documents > 50
    assert f"--val_share 0.4 --text_field {shlex.quote(field)}" in capsys.readouterr().err


def test_a_short_text_is_named(tmp_path):
    """Of a short validation text the windows are shorter."""
    found = prepare("text", "bytes", write_lines(tmp_path / "x.jsonl", ["one", "two"]))
    with pytest.raises(UserError, match=r"train of x\.jsonl has 9 tokens, .* block_size=16; .*--block_size"):
        Batches(found.train, 16, 1, seed=0)
    [[inputs, _]] = [batch() for batch in validation_batches(found.val, 16, 1)]
    assert inputs.shape == (1, len(found.val) - 1)


@pytest.mark.parametrize("name", ["text", "chat", "tokens"])
@pytest.mark.parametrize("place, words", [("vers.txt", r"perhaps verse\.txt"), ("books/train", r"docs/data\.md")])
def test_an_input_that_does_not_exist(tmp_path, monkeypatch, verse, capsys, name, place, words):
    """Whether it was prepared before or not; the error is all that is said."""
    monkeypatch.chdir(tmp_path)
    before = prepare("text", "bytes", verse)
    verse.rename("other.txt")
    assert open_corpus("text", "bytes", verse, sha256=before.sha256).sha256 == before.sha256
    for input in (place, verse):
        with pytest.raises(UserError, match=f"{input} does not exist.*--input"):
            open_corpus(name, "bytes", input)
    verse.touch()
    with pytest.raises(UserError, match=words):
        open_corpus(name, "bytes", place)
    assert capsys.readouterr().err == ""


def test_wrong_inputs(tmp_path, verse, capsys):
    (tmp_path / "blank.txt").write_text(" \n\n")
    wrong = {
        ("text", tmp_path / "blank.txt"): "no text",
        ("text", None): "--input",
        ("text", "/dev/null"): "no file, but a pipe or device",
        ("shakespere", None): "no corpus .* shakespeare",
        ("shakespeare", verse): r"no --input; .* text",
    }
    for (name, input), message in wrong.items():
        with pytest.raises(UserError, match=message):
            open_corpus(name, "bytes", input)
    (tmp_path / "tiny.txt").write_text("x")
    with pytest.raises(UserError, match=r"tiny\.txt has too little text for the split train"):
        open_corpus("text", "bytes", tmp_path / "tiny.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no file to read.*\.parquet"):
        open_corpus("text", "bytes", tmp_path / "empty")


@pytest.fixture
def server(data_root, monkeypatch):
    """It has VERSE in the place of tiny Shakespeare."""
    with running(monkeypatch, data_root, {"a/b": {"input.txt": VERSE.encode()}}) as server:
        url = f"http://127.0.0.1:{server.server_port}/a/b/resolve/main/input.txt"
        monkeypatch.setattr(sources, "SHAKESPEARE_URL", url)
        monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", hashlib.sha256(VERSE.encode()).hexdigest())
        yield server


def test_download(server, data_root, capsys):
    found = open_corpus("shakespeare", "char")
    assert found.source == "tiny Shakespeare" and text_of(found) == VERSE
    open_corpus("shakespeare", "bytes")
    assert len(server.downloads) == 1 and "NOTICE" not in capsys.readouterr().err
    (data_root / "downloads" / "tinyshakespeare.txt").write_text("broken by someone")
    assert text_of(open_corpus("shakespeare", "bpe:300")) == VERSE and len(server.downloads) == 2


def test_play_replaces_a_failed_download(server, capsys):
    server.mode, sha256 = "error", None
    for _ in range(3):  # at each start, the last one as of a resumed run
        found = open_corpus("shakespeare", "char", sha256=sha256)
        assert found.source == "the embedded play" and text_of(found) == sources.PLAY_FILE.read_text()
        *_, notice = capsys.readouterr().err.split("NOTICE: ")
        assert "data/play.txt" in notice and "data.prepare shakespeare --tokenizer char" in " ".join(notice.split())
        sha256 = found.sha256 if len(server.requests) == 0 else None
        server.requests.clear()
    assert sha256
    server.mode = "good"
    prepare("shakespeare", "char")  # downloads again, and replaces the play
    for spec in ("char", "bytes"):
        found = open_corpus("shakespeare", spec)
        assert text_of(found) == VERSE and found.source == "tiny Shakespeare"


def test_command(verse, data_root, monkeypatch, capsys):
    command = [monkeypatch, capsys, str(ROOT / "data/prepare.py"), "text", "--input", str(verse), "--tokenizer"]
    code, out, err = run_script(*command, "char+eot", "--val_share", "0.2", "--threads", "1")
    assert code == 0 and err == ""
    assert all(words in out for words in (f"verse.txt, {len(VERSE):,} bytes", "train ", "val ", str(data_root)))
    assert len(open_corpus("text", "char+eot", verse).val) == round(0.2 * len(VERSE))
    code, _, _ = run_script(*command, "bpe:12")  # sys.exit() prints the sentence
    one_sentence(f"{code}\n", "bpe:12")
