"""Data sets of the Hugging Face hub: the whole path, with a server on loopback in the place of the hub."""

import hashlib
import io

import numpy as np
import pyarrow
import pytest
from helpers import flags
from hub_server import running
from pyarrow import parquet
from test_build import ids_of

from data import build, documents
from data.build import Options
from data.corpus import open_corpus, prepare
from data.prepare import main
from data.shards import header
from errors import UserError

FINEWEB, OPENWEBTEXT = "HuggingFaceFW/fineweb-edu", "Skylion007/openwebtext"
END = 256  # id of end-of-text with bytes+eot
SHARD_TOKENS = 1000


def texts_of_file(number):
    return [f"File {number}: the river bends at mile {mile}, naïve 東京.\n" * 3 for mile in range(10)]


def file_of(texts):
    """Contents of a parquet file like those of FineWeb-Edu, with other columns beside the text."""
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": [str(i) for i in range(len(texts))], "text": texts}), file)
    return file.getvalue()


FILES = [file_of([None, *texts_of_file(number), ""]) for number in range(3)]
TEXTS = [text for number in range(len(FILES)) for text in texts_of_file(number)]


@pytest.fixture(autouse=True)
def server(data_root, monkeypatch):
    """A hub with FILES, not in the order of their names. Each is a group of several blocks."""
    monkeypatch.setattr(build, "GROUP_BYTES", 1)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1)
    monkeypatch.setattr(documents, "ROWS", 2)
    names = {f"sample/10BT/{number:03}_00000.parquet": FILES[number] for number in (2, 0, 1)}
    names |= {"sample/10BT/README.md": b"no", "sample/9BT/data.csv": b"text"}
    with running(monkeypatch, data_root / "downloads", {FINEWEB: names, OPENWEBTEXT: {}}) as server:
        yield server


def make(name="fineweb-edu", spec="bytes+eot", **options):
    options = Options(**{"val_share": 0.2, "shard_tokens": str(SHARD_TOKENS)} | options)
    return prepare(name, spec, options=options, threads=1)


def expected(texts, encode=lambda text: [*text.encode(), END], share=0.2):
    """(training, validation) tokens of documents."""
    splits = [], []
    for text in texts:
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        splits[number < share * 2**64].extend(encode(text))
    return splits


def check(corpus, server, data_root):
    """The shards are those of a preparation of all TEXTS, interrupted or not; each file was downloaded once."""
    contents = {}
    for index, split in enumerate(("train", "val")):
        groups = [expected(texts_of_file(number))[index] for number in range(len(FILES))]
        pieces = [ids[start : start + SHARD_TOKENS] for ids in groups for start in range(0, len(ids), SHARD_TOKENS)]
        for number, ids in enumerate(pieces):
            contents[f"{split}_{number:06}.bin"] = header("<u2", len(ids)) + np.array(ids, "<u2").tobytes()
    assert {path.name: path.read_bytes() for path in corpus.folder.glob("*.bin")} == contents and len(contents) > 4
    assert server.downloads == sorted(name for name in server.repositories[FINEWEB] if "parquet" in name)
    assert nothing_left(data_root)


def nothing_left(data_root):
    """Neither parquet files nor unfinished downloads."""
    return not [path for path in data_root.rglob("*") if path.suffix in (".parquet", ".incomplete")]


def test_tokens_are_the_documents(server, data_root):
    found = make()
    check(found, server, data_root)
    assert max(map(len, server.present)) <= 1  # one file at a time: when one is downloaded, only that before is there
    assert found.train.documents + found.val.documents == len(TEXTS) and 0 < found.val.documents < 15
    assert found.val.text_bytes == len(found.val) - found.val.documents and found.source == "fineweb-edu 10BT"
    assert open_corpus("fineweb-edu", "bytes+eot", verify=True).sha256 == found.sha256
    assert make().sha256 == found.sha256 and len(server.downloads) == 3  # nothing is downloaded again


def test_bpe_learns_from_the_downloaded_text():
    found = make(spec="bpe:270")
    _, val = expected(TEXTS, lambda text: [*found.tokenizer.encode_ordinary(text), 269])
    assert found.tokenizer.n_vocab == 270 and ids_of(found.val).tolist() == val


def test_few_documents_get_the_share_of_many(server):
    """A data set is large: its share is 0.005, although the first file may have few documents."""
    texts = [f"document {number}" for number in range(400)]
    server.repositories[FINEWEB] = {"sample/10BT/a.parquet": file_of(texts)}
    found = make(val_share=None)
    train, val = expected(texts, share=0.005)
    assert val and ids_of(found.train).tolist() == train and ids_of(found.val).tolist() == val


def test_only_the_files_that_tokens_needs(server, data_root):
    size = sum(len(text.encode()) + 1 for text in texts_of_file(0))
    found = make(tokens=str(size // 2), val_share=0.5)
    tokens = ids_of(found.train).tolist(), ids_of(found.val).tolist()
    assert size // 2 <= len(tokens[0]) + len(tokens[1]) < size * 0.7
    assert all(ids == all_[: len(ids)] for ids, all_ in zip(tokens, expected(TEXTS, share=0.5), strict=True))
    assert server.downloads == ["sample/10BT/000_00000.parquet"] and nothing_left(data_root)


def test_other_samples_and_data_sets(server):
    server.repositories[FINEWEB]["sample/100BT/000_00000.parquet"] = FILES[1]
    server.repositories[OPENWEBTEXT] = {"other/a.parquet": FILES[0], "plain_text/train-0-of-1.parquet": FILES[1]}
    train, _ = expected(texts_of_file(1))
    for found, title in ((make(sample="100BT"), "fineweb-edu 100BT"), (make("openwebtext"), "openwebtext")):
        assert ids_of(found.train).tolist() == train and found.source == title
    assert make().source == "fineweb-edu 10BT"  # replaces the other sample


def test_any_data_set(server):
    """By its name and perhaps a folder: texts, or messages; two with the same names of files stay apart."""
    words = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}] for n in range(20)]
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"source": ["x"] * 20, "messages": words}), file)
    server.repositories |= {"a/b": {"data/x.parquet": FILES[0], "more/small.PARQUET": FILES[1]}, "a/chat": {}}
    server.repositories["a/chat"] = {"data/x.parquet": file.getvalue()}
    for place, numbers in (("hub:a/b", (0, 1)), ("hub:a/b/more", (1,)), ("hub:a/b/more/", (1,))):
        train, _ = expected([text for number in numbers for text in texts_of_file(number)])
        assert ids_of(prepare("text", "bytes+eot", place, Options(val_share=0.2)).train).tolist() == train
    options = dict(text_field="messages", tokenizer="bytes", val_share=0.3)
    main(flags(["hub:a/chat"], options))
    found = open_corpus("chat", "bytes", "hub:a/chat")
    assert found.train.turns and found.train.documents + found.val.documents == 20
    with pytest.raises(UserError, match=r"data\.prepare text --input hub:a/c --tokenizer bytes \(--tokens 1B"):
        open_corpus("text", "bytes", "hub:a/c")
    with pytest.raises(UserError, match=r"a/b has no parquet files; name a folder .* --sample"):
        prepare("text", "bytes", "hub:a/b/none")
    with pytest.raises(UserError, match="must be hub:OWNER/NAME or"):
        prepare("text", "bytes", "hub:b")


def test_training_does_not_wait_for_the_hub(server):
    with pytest.raises(UserError, match=r"not prepared.*data\.prepare fineweb-edu --tokenizer gpt2 .*--tokens 1B"):
        open_corpus("fineweb-edu", "gpt2")
    assert server.requests == []
    (make().folder / "val_000000.bin").unlink()
    server.requests.clear()
    with pytest.raises(UserError, match=r"val_000000\.bin is missing.*data\.prepare fineweb-edu"):
        open_corpus("fineweb-edu", "bytes+eot")
    assert server.requests == []


FAULTS = {
    "error": "cannot list sample/10BT of HuggingFaceFW/fineweb-edu",
    "001_00000.parquet": "cannot download sample/10BT/001_00000.parquet",
    "changed": "cannot download sample/10BT/000_00000.parquet of HuggingFaceFW/fineweb-edu (its sha256 is",
}


@pytest.mark.parametrize("mode, message", FAULTS.items(), ids=FAULTS)
def test_failed_download_keeps_the_files_before_it(server, data_root, mode, message):
    server.mode = mode
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value) and "\n" not in str(error.value)
    server.mode = "good"
    if mode == "changed":
        server.downloads.clear()  # the changed file is not used
    check(make(), server, data_root)
