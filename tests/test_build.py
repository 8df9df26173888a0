"""Corpora of many documents: splits, end-of-text, shards, limits, opening."""

import hashlib
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from data.build import Options
from data.corpus import open_corpus, prepare
from data.shards import HEADER_BYTES
from data.tokenizer import end_of_text

WORDS = ["the", "sea", "keeps", "what", "it", "has", "taken", "and", "gives", "back", "only", "sand"]


pytestmark = pytest.mark.usefixtures("data_root")


def make_documents(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) + f" {number}" for number in range(count)]


def write_lines(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def documents_of(part, tokenizer):
    """The documents of a part, cut at end-of-text."""
    ids = part.windows([0], len(part))[0]
    ends = np.flatnonzero(ids == end_of_text(tokenizer))
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(piece[piece != end_of_text(tokenizer)].tolist()) for piece in np.split(ids, ends)[:-1]]


def is_small(text, share):
    """Whether a document is for validation: its sha256 as a fraction of 1 is below the share."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256 < share


def shards_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def test_every_document_is_in_one_part_in_order(tmp_path):
    documents = make_documents(3000)
    found = prepare("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", documents))
    val = [text for text in documents if is_small(text, 0.005)]
    assert val and documents_of(found.val, found.tokenizer) == val
    assert documents_of(found.train, found.tokenizer) == [text for text in documents if text not in val]
    assert (found.train.documents, found.val.documents) == (3000 - len(val), len(val))
    assert found.val.text_bytes == sum(len(text.encode()) for text in val)


def test_new_documents_move_no_others(tmp_path):
    documents, more = make_documents(1500), make_documents(900, seed=1)
    path = write_lines(tmp_path / "x.jsonl", documents)
    before = prepare("text", "bytes+eot", path, Options(val_share=0.02))
    first = set(documents_of(before.val, before.tokenizer))
    write_lines(path, more + documents)
    after = open_corpus("text", "bytes+eot", path)  # with the same options
    assert first <= set(documents_of(after.val, after.tokenizer)) <= first | set(more)


@pytest.mark.parametrize("count", [2, 3, 40, 999])
def test_few_documents_are_split_by_hash_too(tmp_path, count):
    documents = make_documents(count, seed=count)
    found = prepare("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", documents))
    val = [text for text in documents if is_small(text, 0.1)]
    if count < 40:
        val = val or [min(documents, key=lambda text: hashlib.sha256(text.encode()).digest())]
    assert documents_of(found.val, found.tokenizer) == val
    assert found.train.documents + found.val.documents == count and found.train.documents > 0


def test_a_single_document_is_cut(tmp_path):
    """In whichever format; val_share moves the cut."""
    text = " ".join(make_documents(50))
    (tmp_path / "x.txt").write_text(text)
    write_lines(tmp_path / "y.jsonl", ["", text, "  "])
    for name in ("x.txt", "y.jsonl"):
        for share, options in ((0.1, Options()), (0.3, Options(val_share=0.3))):
            found = prepare("text", "bytes+eot", tmp_path / name, options)
            parts = [part.windows([0], len(part))[0].astype(np.uint8).tobytes() for part in (found.train, found.val)]
            cut = int((1 - share) * len(text))
            assert parts == [text[:cut].encode(), text[cut:].encode()]


def test_documents_without_end_of_text_are_separated(tmp_path):
    found = prepare("text", "char", write_lines(tmp_path / "x.jsonl", ["one", "two", "six"]), Options(val_share=0.5))
    texts = [found.tokenizer.decode(part.windows([0], len(part))[0].tolist()) for part in (found.train, found.val)]
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
    whole = prepare("text", "bytes+eot", path)
    ids = whole.train.windows([0], len(whole.train))[0]
    cut = prepare("text", "bytes+eot", path, Options(shard_tokens="1000"))
    assert {len(shard) for shard in cut.train.shards[:-1]} == {1000} and len(cut.train.shards) > 50
    assert np.array_equal(cut.train.windows([0], len(ids))[0], ids)
    starts = np.array([0, 999, 1000, 4321, len(ids) - 2500])
    assert np.array_equal(cut.train.windows(starts, 2500), [ids[start : start + 2500] for start in starts])
    header = np.fromfile(cut.folder / "train_000000.bin", "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 1000] and not header[3:].any()  # as llm.c writes it
    assert not list(cut.folder.glob("*.partial")) and not (cut.folder / "progress.json").exists()


def test_threads_do_not_change_the_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 2000)
    path = write_lines(tmp_path / "x.jsonl", make_documents(400))
    made = []
    for threads in (1, 5):
        folder = prepare("text", "bpe:300", path, Options(shard_tokens="5000"), threads).folder
        made.append(shards_of(folder))
        (folder / "manifest.json").unlink()
    assert made[0] == made[1]


def test_tokens_limits_a_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr("data.documents.BLOCK_BYTES", 2000)
    path = write_lines(tmp_path / "x.jsonl", make_documents(2000))
    found = prepare("text", "bytes+eot", path, Options(tokens="50000"))
    assert 50_000 <= len(found.train) + len(found.val) < 55_000
    documents = make_documents(2000)[: found.train.documents + found.val.documents]
    assert documents_of(found.train, found.tokenizer) == [text for text in documents if not is_small(text, 0.005)]


def test_a_part_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no text for validation.*val_share"):
        prepare("text", "bytes+eot", write_lines(tmp_path / "x.jsonl", ["the same"] * 5))
    with pytest.raises(ValueError, match=r"val_share=1\.5"):
        Options(val_share=1.5)


def test_opening_reads_no_text_and_no_tokens(tmp_path):
    """20 GB of shards, sparse files, beside a text that is too large to be compared by its contents."""
    path = write_lines(tmp_path / "x.jsonl", make_documents(100))
    found = prepare("text", "bytes+eot", path, Options(shard_tokens="1000"))
    manifest = found.folder / "manifest.json"
    record = json.loads(manifest.read_text())
    shards = [record["train"]["shards"][0] | {"file": f"train_{n:06}.bin", "tokens": 100_000_000} for n in range(100)]
    for shard in shards:
        with open(found.folder / shard["file"], "wb") as file:
            file.truncate(HEADER_BYTES + 200_000_000)
    record["train"] |= {"shards": shards, "tokens": 10_000_000_000}
    manifest.write_text(json.dumps(record))
    read, start = bytes_read(), time.perf_counter()
    opened = open_corpus("text", "bytes+eot", path)
    assert time.perf_counter() - start < 1 and len(opened.train) == 10**10
    assert bytes_read() - read < 5e6


def bytes_read():
    """Bytes that this process has read from files, from the page cache or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))
