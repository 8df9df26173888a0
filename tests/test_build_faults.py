"""What can go wrong while a corpus is prepared, and how much memory that takes."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import ROOT, wait_for
from test_build import make_documents, shards_of, write_lines

from data import build
from data.build import Options
from data.corpus import building, corpus_folder, open_corpus, prepare
from data.shards import HEADER_BYTES

pytestmark = pytest.mark.usefixtures("data_root")


@pytest.mark.parametrize("stop", [0, 1, 7, 20, 35])
@pytest.mark.parametrize("every", [0, 1000], ids=["all saved", "full shards saved"])
def test_an_interrupted_preparation_goes_on(tmp_path, monkeypatch, stop, every):
    """Two files, small blocks; `stop` is the block at which it is interrupted."""
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 500)
    monkeypatch.setattr(build, "SAVE_SECONDS", every)
    (tmp_path / "in").mkdir()
    for name in "ab":
        write_lines(tmp_path / "in" / f"{name}.jsonl", make_documents(100, seed=ord(name)))
    options = Options(shard_tokens="900")
    done, encode_block = [], build.Encoder.__call__
    with monkeypatch.context() as patch:
        patch.setattr(build.Encoder, "__call__", lambda self, item: done.append(0) or encode_block(self, item))
        expected = shards_of(prepare("text", "bpe:300", tmp_path / "in", options).folder)
    assert len(expected) > 5 and (total := len(done)) > 35
    (corpus_folder("text", "bpe:300", tmp_path / "in") / "manifest.json").unlink()

    def encode(self, item):
        if stop is not None and len(done) == stop:
            raise KeyboardInterrupt
        done.append(item[0])
        return encode_block(self, item)

    monkeypatch.setattr(build.Encoder, "__call__", encode)
    done[:] = []
    with pytest.raises(KeyboardInterrupt):
        prepare("text", "bpe:300", tmp_path / "in", options, threads=1)
    before, stop, done[:] = len(done), None, []
    folder = prepare("text", "bpe:300", tmp_path / "in", options, threads=1).folder
    assert shards_of(folder) == expected
    if every == 0 and before > 10:
        assert 0 < len(done) <= total + 4 - before  # only what was in flight is encoded again


def interrupt(monkeypatch, after, *arguments):
    """Prepare a corpus, which is interrupted after a number of blocks."""
    done, encode_block = [], build.Encoder.__call__

    def encode(self, item):
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(item)
        return encode_block(self, item)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build.Encoder, "__call__", encode)
        prepare(*arguments, threads=1)


def test_a_limit_holds_for_an_interrupted_preparation_too(tmp_path, monkeypatch):
    """Whether it ends before the limit, or between the last block and the manifest; the limit may change."""
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 500)
    monkeypatch.setattr(build, "SAVE_SECONDS", 0)
    arguments = ("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", make_documents(2000)))
    whole = shards_of(prepare(*arguments, Options(tokens="20K", val_share=0.2)).folder)
    shutil.rmtree(corpus_folder(*arguments))
    interrupt(monkeypatch, 8, *arguments, Options(tokens="10K", val_share=0.2))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build.ShardWriter, "close", Mock(side_effect=KeyboardInterrupt))
        prepare(*arguments, Options(tokens="20K", val_share=0.2))
    assert shards_of(prepare(*arguments, Options(tokens="20K", val_share=0.2)).folder) == whole


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 3000), Path.unlink], ids=["short", "missing"])
@pytest.mark.parametrize("name", ["train_*.partial", "train_000001.bin"])
def test_an_interrupted_preparation_whose_files_are_damaged_begins_again(tmp_path, monkeypatch, name, damage):
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 500)
    monkeypatch.setattr(build, "SAVE_SECONDS", 0)
    arguments = ("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", make_documents(500)))
    options = Options(shard_tokens="4000")
    whole = shards_of(prepare(*arguments, options).folder)
    shutil.rmtree(corpus_folder(*arguments))
    interrupt(monkeypatch, 26, *arguments, options)
    [path] = building(corpus_folder(*arguments)).glob(name)
    assert path.stat().st_size > 3000
    damage(path)
    assert shards_of(prepare(*arguments, options).folder) == whole


def test_train_goes_on_with_the_options_of_an_interrupted_preparation(tmp_path, monkeypatch):
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 500)
    arguments = ("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", make_documents(500)))
    interrupt(monkeypatch, 10, *arguments, Options(val_share=0.3))
    assert open_corpus(*arguments).val.documents > 100


def test_a_wrong_option_does_not_cost_the_corpus_that_is_there(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", make_documents(1200))
    before = prepare("text", "bytes+eot", path)
    whole = shards_of(before.folder)
    for options in (Options(text_field="txt"), Options(val_share=1e-9)):
        with pytest.raises(ValueError):
            prepare("text", "bytes+eot", path, options)
    with open(path, "a") as file:
        file.write("no JSON\n")
    with pytest.raises(ValueError, match="line 1201"):
        open_corpus("text", "bytes+eot", path)
    assert shards_of(before.folder) == whole
    path.unlink()
    assert open_corpus("text", "bytes+eot", path).sha256 == before.sha256


def test_a_bad_line_is_named_and_can_be_left_out(tmp_path, monkeypatch):
    """The command with skip_bad goes on where the one without ended."""
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 500)
    monkeypatch.setattr(build, "SAVE_SECONDS", 0)
    documents = make_documents(1200)
    path = write_lines(tmp_path / "x.jsonl", documents)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:1100], '{"txt": "no text"}\n', *lines[1100:]]))
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1101 is no JSON object with a text in 'text'.*--skip_bad"):
        prepare("text", "bytes+eot", path, threads=1)
    position = json.loads((building(corpus_folder("text", "bytes+eot", path)) / "progress.json").read_text())[
        "position"
    ]
    assert position[1] > 250
    seen, encode_block = [], build.Encoder.__call__
    monkeypatch.setattr(build.Encoder, "__call__", lambda self, item: seen.append(item[0]) or encode_block(self, item))
    found = prepare("text", "bytes+eot", path, Options(skip_bad=True))
    assert found.bad_lines == 1 and found.train.documents + found.val.documents == 1200 and len(seen) < 100


def test_a_damaged_shard_is_noticed_by_its_hash(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", make_documents(100))
    found = prepare("text", "bytes+eot", path)
    whole = shards_of(found.folder)
    with open(found.folder / "train_000000.bin", "r+b") as file:
        file.seek(HEADER_BYTES + 50)
        file.write(b"\xff\x00")
    assert open_corpus("text", "bytes+eot", path).sha256 == found.sha256  # opening reads no tokens
    assert shards_of(open_corpus("text", "bytes+eot", path, verify=True).folder) == whole  # prepared again


def change(record, *path, to):
    for name in path[:-1]:
        record = record[name]
    record[path[-1]] = to


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda record: record["train"]["shards"].pop(), "lacks a shard"),
        (lambda record: record["val"]["shards"].clear(), "lacks a shard"),
        (lambda record: record.pop("val"), "is damaged"),
        (lambda record: change(record, "tokenizer", "name", to="gpt2"), "has the tokenizer gpt2, not bytes\\+eot"),
    ],
)
def test_a_manifest_that_does_not_fit_its_shards_is_not_used(tmp_path, damage, reason, capsys):
    path = write_lines(tmp_path / "x.jsonl", make_documents(100))
    found = prepare("text", "bytes+eot", path, Options(shard_tokens="1000"))
    record = json.loads((found.folder / "manifest.json").read_text())
    damage(record)
    (found.folder / "manifest.json").write_text(json.dumps(record))
    assert open_corpus("text", "bytes+eot", path).sha256 == found.sha256  # prepared again
    assert re.search(reason, capsys.readouterr().err)


def start_command(path, root, tokenizer, *flags, limit=None):
    def preexec():
        if limit:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "data.prepare", "text", "--input", path, "--tokenizer", tokenizer, *flags]
    variables = os.environ | {"GPT_DATA": str(root)}
    return subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=preexec
    )


def test_a_full_disk_is_one_sentence_and_full_shards_stay(tmp_path, data_root):
    """A limit on the size of files stands for a full disk."""
    path = write_lines(tmp_path / "x.jsonl", make_documents(3000))
    flags = ("--shard_tokens", "100000")
    process = start_command(path, data_root, "bytes+eot", *flags, limit=150_000)
    err = process.communicate()[1]
    assert process.returncode == 1 and "Traceback" not in err and err.count("\n") == 1, err
    assert "cannot write" in err and "make room" in err
    assert start_command(path, data_root, "bytes+eot", *flags).wait() == 0


@pytest.mark.slow
def test_kill_9_while_preparing(tmp_path, data_root, monkeypatch):
    path = write_lines(tmp_path / "x.jsonl", make_documents(60_000))
    flags = ("--shard_tokens", "80000")
    folder = corpus_folder("text", "bpe:400", path)
    assert start_command(path, data_root, "bpe:400", *flags).wait() == 0
    whole = shards_of(folder)
    assert len(whole) > 20
    shutil.rmtree(folder)
    for shards in (3, 11, 19):
        process = start_command(path, data_root, "bpe:400", *flags)
        wait_for(lambda shards=shards: len(list(building(folder).glob("train_*.bin"))) >= shards)
        assert process.poll() is None
        process.kill()
        process.wait()
        assert not folder.exists()
    times = {path.name: path.stat().st_mtime_ns for path in building(folder).glob("train_*.bin")}
    assert start_command(path, data_root, "bpe:400", *flags).wait() == 0
    assert shards_of(folder) == whole
    kept = [name for name, time in times.items() if (folder / name).stat().st_mtime_ns == time]
    assert len(kept) > 10  # complete shards


MEASURE = """
import os, re, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # prepare() starts a process for each CPU
from data.corpus import prepare
memory = lambda name: int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000
before = memory("VmRSS")
prepare("text", "char", sys.argv[1])
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "one text"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    """200 MB of text. benchmarks/data.py measures 1 GB."""
    text = "".join(make_documents(4000, seed=3))
    path = tmp_path / ("x.jsonl" if kind == "lines" else "x.txt")
    with open(path, "w") as file:
        for number in range(2 * 10**8 // len(text) + 1):
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n" if kind == "lines" else text + "\n")
    assert path.stat().st_size > 2 * 10**8
    run = subprocess.run([sys.executable, "-c", MEASURE, path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 150  # MB
