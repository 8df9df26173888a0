"""Preparing a corpus: splits, end-of-text, shards, interruptions, memory."""

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
from helpers import ROOT, flags, wait_for

from data import build
from data.build import Options
from data.corpus import open_corpus, prepare
from data.files import data_folder
from data.prepare import main
from data.tokenizer import end_of_text
from errors import UserError

WORDS = ["the", "sea", "keeps", "what", "it", "has", "taken", "and", "gives", "back", "only", "sand"]

pytestmark = pytest.mark.usefixtures("data_root")


def make_documents(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) + f" {number}" for number in range(count)]


def write_lines(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def ids_of(split):
    return split.windows([0], len(split))[0]


def documents_of(split, tokenizer):
    """The documents of a split, cut at end-of-text."""
    ids = ids_of(split)
    ends = np.flatnonzero(ids == end_of_text(tokenizer))
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(piece[piece != end_of_text(tokenizer)].tolist()) for piece in np.split(ids, ends)[:-1]]


def interrupt(*_):
    raise KeyboardInterrupt


def shards_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


@pytest.mark.parametrize("count, share", [(999, 0.1), (3000, 0.005)])
def test_every_document_is_in_one_split_in_order(tmp_path, count, share):
    documents = make_documents(count, seed=count)
    found = prepare("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", documents))
    # those whose sha256, as a fraction of 1, is below the share
    val = [text for text in documents if int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256 < share]
    assert val and documents_of(found.val, found.tokenizer) == val
    assert documents_of(found.train, found.tokenizer) == [text for text in documents if text not in val]
    assert (found.train.documents, found.val.documents) == (count - len(val), len(val)) and count > len(val)
    assert found.val.text_bytes == sum(len(text.encode()) for text in val)


@pytest.mark.parametrize("sizes", [[90, 60, 120], range(100, 112), [9000, *[40] * 40], [40] * 9], ids=str)
@pytest.mark.parametrize("share", [None, 0.3])
def test_of_few_documents_a_share_of_the_text_is_for_validation(tmp_path, sizes, share):
    """By whole documents, of which one may be cut."""
    text = " ".join(make_documents(500))
    texts = [text[number * 97 :][:size] for number, size in enumerate(sizes)]
    found = prepare("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", texts), Options(val_share=share))
    train, val = (documents_of(split, found.tokenizer) for split in (found.train, found.val))
    share = share or 0.1
    assert share <= len("".join(val)) / len("".join(texts)) <= 2 * share
    whole, cut = ([piece for piece in train + val if (piece in texts) == is_whole] for is_whole in (True, False))
    assert sorted(filter(None, [*whole, "".join(cut)])) == sorted(texts)


def test_new_documents_move_no_others(tmp_path):
    documents, more = make_documents(1500), make_documents(900, seed=1)
    path = write_lines(tmp_path / "x.jsonl", documents)
    before = prepare("text", "bytes+eot", path, Options(val_share=0.02))
    first = set(documents_of(before.val, before.tokenizer))
    write_lines(path, more + documents)
    after = open_corpus("text", "bytes+eot", path)  # with the same options
    assert first <= set(documents_of(after.val, after.tokenizer)) <= first | set(more)


@pytest.mark.parametrize("name", ["x.txt", "y.jsonl"])
@pytest.mark.parametrize("share, options", [(0.1, Options()), (0.3, Options(val_share=0.3))])
def test_a_single_document_is_cut(tmp_path, monkeypatch, name, share, options):
    """Also one that is read in several pieces."""
    text = " ".join(make_documents(50))
    monkeypatch.setattr("data.documents.CHUNK", 1000)
    monkeypatch.setattr("data.tokenizer.chunks.__defaults__", (1000, False))
    path = tmp_path / name
    path.write_text(text) if name == "x.txt" else write_lines(path, ["", text, "  "])
    found = prepare("text", "bytes+eot", path, options)
    cut = int((1 - share) * len(text))
    assert ids_of(found.train).astype(np.uint8).tobytes() == text[:cut].encode()
    assert ids_of(found.val).astype(np.uint8).tobytes() == text[cut:].encode()


def test_documents_without_end_of_text_are_separated(tmp_path):
    found = prepare("text", "char", write_lines(tmp_path / "x.jsonl", ["one", "two", "six"]), Options(val_share=0.5))
    texts = [found.tokenizer.decode(ids_of(split).tolist()) for split in (found.train, found.val)]
    assert sorted("".join(texts).split("\n\n")) == ["", "one", "six", "two"]


def test_bpe_counts_end_of_text_among_its_tokens(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", make_documents(200))
    found = prepare("text", "bpe:300", path)
    assert found.tokenizer.n_vocab == 300 and end_of_text(found.tokenizer) == 299
    assert len(documents_of(found.train, found.tokenizer)) == found.train.documents
    path.write_text(json.dumps({"text": " ".join(make_documents(200))}))
    assert end_of_text(open_corpus("text", "bpe:300", path).tokenizer) is None


def test_shards_have_a_fixed_size_and_are_read_as_one(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", make_documents(500))
    ids = ids_of(prepare("text", "bytes+eot", path).train)
    cut = prepare("text", "bytes+eot", path, Options(shard_tokens="1000"))
    assert {len(shard) for shard in cut.train.shards[:-1]} == {1000} and len(cut.train.shards) > 50
    assert np.array_equal(ids_of(cut.train), ids)
    starts = np.array([0, 999, 1000, 4321, len(ids) - 2500])
    assert np.array_equal(cut.train.windows(starts, 2500), [ids[start : start + 2500] for start in starts])
    header = np.fromfile(cut.folder / "train_000000.bin", "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 1000] and not header[3:].any()  # as llm.c writes it


def test_a_failed_preparation_does_not_cost_the_corpus_that_is_there(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", make_documents(1200))
    before = prepare("text", "bytes+eot", path)
    whole = shards_of(before.folder)
    with pytest.raises(UserError, match=r"'txt'.*--text_field"):
        prepare("text", "bytes+eot", path, Options(text_field="txt"))
    with pytest.raises(UserError, match=r"split val; give more text, or .*--val_share"):
        prepare("text", "bytes+eot", path, Options(val_share=1e-9))
    with open(path, "a") as file:
        file.write("no JSON\n")
    with pytest.raises(UserError, match="line 1201"):
        open_corpus("text", "bytes+eot", path)
    assert shards_of(before.folder) == whole
    found = prepare("text", "bytes+eot", path, Options(skip_bad=True))
    assert found.sha256 == before.sha256 and found.bad_lines == 1


CHANGES = dict(
    tokens="1K", val_share=0.3, separator="---", text_field="a", skip_bad=True, sample="1BT", shard_tokens="1K"
)


@pytest.mark.parametrize("finished", [1, 2])
@pytest.mark.parametrize("option", CHANGES)
def test_prepared_tokens_are_replaced_only_by_force(tmp_path, monkeypatch, capsys, option, finished):
    """Whether all files are finished, or the preparation was interrupted after one of two, perhaps by a bad line."""
    for name in "ab":
        lines = "".join(json.dumps(dict(text=text, a=text)) + "\n" for text in make_documents(50, ord(name)))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    monkeypatch.setattr(build, "GROUP_BYTES", 1)
    typed = dict(input=tmp_path, tokenizer="bytes+eot")

    def write_manifest(folder, manifest, write=build.write_manifest):
        write(folder, manifest)
        if manifest["finished"] == finished == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(build, "write_manifest", write_manifest)
        main(flags(["text"], typed))
    [folder] = (path.parent for path in data_folder("prepared").rglob("manifest.json"))
    assert folder.name.endswith(".building") == (finished == 1)
    before, manifest = shards_of(folder), build.read_manifest(folder)
    typed[option] = CHANGES[option]
    if (option, finished) != ("skip_bad", 1):
        with pytest.raises(UserError, match=f"{option}=.*--force") as error:
            main(flags(["text"], typed))
        assert f"{manifest['train']['tokens'] + manifest['val']['tokens']:,} tokens" in str(error.value)
        assert shards_of(folder) == before
        typed["force"] = True
    main(flags(["text"], typed))
    assert build.read_manifest(open_corpus("text", "bytes+eot", tmp_path).folder)["request"] != manifest["request"]


def test_training_continues_an_interrupted_preparation(tmp_path, monkeypatch):
    """With its options, which only data.prepare has."""
    path = write_lines(tmp_path / "x.jsonl", make_documents(100))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "encode_block", interrupt)
        prepare("text", "bytes+eot", path, Options(val_share=0.4))
    assert open_corpus("text", "bytes+eot", path).val.documents > 25


@pytest.mark.parametrize("stop", [0, 7, 20, 40, 60])
def test_an_interrupted_preparation_goes_on(tmp_path, monkeypatch, stop):
    """After the last finished input file, with the same shards; so does one with another number of threads."""
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 500)
    monkeypatch.setattr(build, "GROUP_BYTES", 1)  # each file is a group of several blocks and shards
    seen, limit, encode_block = [], [None], build.encode_block

    def encode(tokenizer, manifest, block):
        if len(seen) == limit[0]:
            raise KeyboardInterrupt
        seen.append(block.texts[0])
        return encode_block(tokenizer, manifest, block)

    monkeypatch.setattr(build, "encode_block", encode)
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", make_documents(100, seed=ord(name)))
    arguments = ("text", "bpe:300", tmp_path, Options(shard_tokens="900"))
    expected = prepare(*arguments, threads=1)
    blocks, whole = seen[:], shards_of(expected.folder)
    assert len(blocks) > stop and len(whole) > 9
    shutil.rmtree(expected.folder)
    seen.clear()
    limit[0] = stop
    with pytest.raises(KeyboardInterrupt):
        prepare(*arguments, threads=1)
    assert not expected.folder.exists()
    seen.clear()
    limit[0] = None
    assert shards_of(prepare(*arguments, threads=5).folder) == whole
    firsts = [blocks.index(make_documents(100, seed=ord(name))[0]) for name in "abc"]  # blocks that begin a file
    assert set(seen) == set(blocks[max(first for first in firsts if first <= stop) :])


def test_a_full_disk_is_one_sentence(tmp_path):
    """A limit on the size of files stands for a full disk."""
    path = write_lines(tmp_path / "x.jsonl", make_documents(1000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*; make room"):
            prepare("text", "bytes+eot", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def start_command(path, root):
    """Start data.prepare; each input file is a group of its own."""
    module = "import data.build, runpy; data.build.GROUP_BYTES = 1; runpy.run_module('data.prepare', {}, '__main__')"
    flags = ["text", "--input", path, "--tokenizer", "bpe:400", "--shard_tokens", "80000"]
    options = dict(cwd=ROOT, env=os.environ | {"GPT_DATA": str(root)}, stdout=subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, "-c", module, *flags], stderr=subprocess.DEVNULL, **options)


@pytest.mark.slow
def test_kill_9_while_preparing(tmp_path, data_root):
    """What is half-written is not taken for whole, and finished files stay."""
    (tmp_path / "in").mkdir()
    for number in range(6):
        write_lines(tmp_path / "in" / f"{number}.jsonl", make_documents(10_000, seed=number))
    arguments = (tmp_path / "in", data_root)
    assert start_command(*arguments).wait() == 0
    [folder] = (path.parent for path in data_root.rglob("manifest.json"))
    unfinished = folder.with_name(f"{folder.name}.building")
    whole = shards_of(folder)
    assert len(whole) > 20
    shutil.rmtree(folder)
    for shards in (3, 11, 19):
        process = start_command(*arguments)
        wait_for(lambda shards=shards: len(list(unfinished.glob("train_*.bin"))) >= shards)
        assert process.poll() is None
        process.kill()
        process.wait()
        assert not folder.exists()
    times = {path.name: path.stat().st_mtime_ns for path in unfinished.glob("train_*.bin")}
    assert start_command(*arguments).wait() == 0
    assert shards_of(folder) == whole
    kept = [name for name, time in times.items() if (folder / name).stat().st_mtime_ns == time]
    assert len(kept) > 10


MEASURE = """
import re, sys
from data.corpus import prepare
memory = lambda name: int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000
before = memory("VmRSS")
prepare("text", "char", sys.argv[1], threads=2)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "one text", "one line"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    """200 MB of text; 1 GB took 77 MB (benchmarks/LOG.md)."""
    text = "".join(make_documents(4000, seed=3))
    text = "".join(filter(str.isalpha, text)) if kind == "one line" else f"{text}\n"
    path = tmp_path / ("x.jsonl" if kind == "lines" else "x.txt")
    with open(path, "w") as file:
        for number in range(2 * 10**8 // len(text) + 1):
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n" if kind == "lines" else text)
    assert path.stat().st_size > 2 * 10**8
    run = subprocess.run([sys.executable, "-c", MEASURE, path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 150  # MB
