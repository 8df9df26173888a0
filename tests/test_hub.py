"""Data sets of the Hugging Face hub: the whole path, with a server on loopback in the place of the hub."""

import base64
import hashlib
import io

import numpy as np
import pyarrow
import pytest
from hub_server import running, use
from pyarrow import parquet

from data import build, documents, hub, tokenizer
from data import files as data_files
from data.build import Options
from data.corpus import corpus_folder, open_corpus, prepare
from data.shards import header

FINEWEB, OPENWEBTEXT = "HuggingFaceFW/fineweb-edu", "Skylion007/openwebtext"
END = 256  # id of end-of-text with bytes+eot
DOCUMENTS = 10  # of a file; with its empty rows it has 6 blocks
SHARD_TOKENS = 1000


def texts_of_file(number):
    return [f"File {number}: the river bends at mile {mile}, naïve 東京.\n" * 3 for mile in range(DOCUMENTS)]


def file_of(texts):
    """Contents of a parquet file like those of FineWeb-Edu, with other columns beside the text."""
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": [str(i) for i in range(len(texts))], "text": texts}), file)
    return file.getvalue()


FILES = [file_of([None, *texts_of_file(number), ""]) for number in range(3)]
TEXTS = [text for number in range(len(FILES)) for text in texts_of_file(number)]


pytestmark = pytest.mark.usefixtures("data_root")


@pytest.fixture(autouse=True)
def server(data_root, monkeypatch):
    """A hub with FILES, not in the order of their names."""
    names = {f"sample/10BT/{number:03}_00000.parquet": FILES[number] for number in (2, 0, 1)}
    with running(monkeypatch, data_root / "downloads", {FINEWEB: names, OPENWEBTEXT: {}}) as server:
        yield server


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in each file."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1)
    monkeypatch.setattr(documents, "ROWS", 2)


def make(name="fineweb-edu", spec="bytes+eot", **options):
    return prepare(
        name, spec, options=Options(**{"val_share": 0.2, "shard_tokens": str(SHARD_TOKENS)} | options), threads=1
    )


def ids_of(part):
    return part.windows(np.array([0]), len(part))[0].tolist()


def expected(texts, encode=lambda text: [*text.encode(), END], share=0.2):
    """(training, validation) tokens of documents."""
    parts = [], []
    for text in texts:
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        parts[number < share * 2**64].extend(encode(text))
    return parts


def shards_of(corpus):
    """sha256 of each file of tokens."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in corpus.folder.glob("*.bin")}


def expected_shards():
    """shards_of() a preparation of all TEXTS, interrupted or not."""
    shards = {}
    for part, ids in zip(("train", "val"), expected(TEXTS), strict=True):
        for number, start in enumerate(range(0, len(ids), SHARD_TOKENS)):
            shard = np.array(ids[start : start + SHARD_TOKENS], "<u2")
            contents = header("<u2", len(shard)) + shard.tobytes()
            shards[f"{part}_{number:06}.bin"] = hashlib.sha256(contents).hexdigest()
    return shards


def left_behind(data_root):
    """Parquet files and unfinished downloads."""
    return [path.name for path in data_root.rglob("*") if path.suffix in (".parquet", ".incomplete")]


def unprepared(error, name="fineweb-edu"):
    """Check that an error is one line, and that nothing counts as prepared; returns its message."""
    assert not (corpus_folder(name, "bytes+eot", None) / "manifest.json").exists()
    with pytest.raises(ValueError, match="cannot be used"):
        open_corpus(name, "bytes+eot")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_tokens_are_the_documents(server, data_root):
    found = make()
    train, val = expected(TEXTS)
    assert ids_of(found.train) == train and ids_of(found.val) == val
    assert (found.train.documents, found.val.documents) == (train.count(END), val.count(END))
    assert found.train.documents + found.val.documents == len(TEXTS) and 0 < found.val.documents < 15
    assert found.val.text_bytes == len(val) - val.count(END)
    assert len(found.train.shards) > 2 and shards_of(found) == expected_shards()
    assert found.source == "fineweb-edu 10BT"
    assert server.downloads == sorted(server.repositories[FINEWEB])  # each once
    assert left_behind(data_root) == []
    again = open_corpus("fineweb-edu", "bytes+eot", verify=True)
    assert again.sha256 == found.sha256


def test_gpt2(tmp_path, monkeypatch):
    """With a small rank file in GPT-2's format, whose last id is end-of-text."""
    tokens = [*(bytes([value]) for value in range(256)), b"Fi", b"Fil", b"File", b" r", b" ri", b" riv"]
    path = tmp_path / "ranks"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    monkeypatch.setattr(tokenizer, "GPT2_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    found = make(spec=f"gpt2:{path}")
    made = found.tokenizer
    train, val = expected(TEXTS, lambda text: [*made.encode_ordinary(text), made.eot_token])
    assert ids_of(found.train) == train and ids_of(found.val) == val
    assert made.eot_token == 262 and train.count(262) == found.train.documents and 258 in train


def test_few_documents_get_the_share_of_many(server, monkeypatch):
    """A data set is large: its share is 0.005, although the first file may have few documents."""
    texts = [f"document {number}" for number in range(400)]
    server.repositories[FINEWEB] = {"sample/10BT/a.parquet": file_of(texts)}
    monkeypatch.setattr(documents, "ROWS", 64)
    found = make(val_share=None)
    train, val = expected(texts, share=0.005)
    assert val and ids_of(found.train) == train and ids_of(found.val) == val


def test_one_file_at_a_time(server):
    """When a file is downloaded, at most the one before it is still there."""
    make()
    assert len(server.present) == len(FILES) and max(map(len, server.present)) <= 1


def test_only_the_files_that_tokens_needs(server):
    size = sum(len(text.encode()) + 1 for text in texts_of_file(0))
    found = make(tokens=str(size // 2), val_share=0.5)
    tokens = ids_of(found.train), ids_of(found.val)
    assert size // 2 <= len(tokens[0]) + len(tokens[1]) < size * 0.7
    assert all(part == all_[: len(part)] for part, all_ in zip(tokens, expected(TEXTS, share=0.5), strict=True))
    assert server.downloads == ["sample/10BT/000_00000.parquet"]
    server.downloads.clear()
    more = make(tokens=str(size + size // 2), val_share=0.5)
    assert len(more.train) + len(more.val) >= size + size // 2
    assert server.downloads[-1] == "sample/10BT/001_00000.parquet"


def test_no_file_stays_when_tokens_are_enough(data_root):
    make(tokens="2000")
    assert left_behind(data_root) == []


def test_bpe_learns_from_the_downloaded_text():
    found = make(spec="bpe:270")
    _, val = expected(TEXTS, lambda text: [text])
    assert found.tokenizer.n_vocab == 270
    assert found.tokenizer.decode(ids_of(found.val)) == "".join(text + "<|endoftext|>" for text in val)


def test_the_folder_of_a_sample(server):
    other = file_of([f"{number} of the larger sample" for number in range(50)])
    server.repositories[FINEWEB]["sample/100BT/000_00000.parquet"] = other
    found = make(sample="100BT", val_share=0.5)
    assert server.downloads == ["sample/100BT/000_00000.parquet"] and found.source == "fineweb-edu 100BT"
    assert found.train.documents + found.val.documents == 50
    assert make().source == "fineweb-edu 10BT"  # replaces it
    assert open_corpus("fineweb-edu", "bytes+eot").source == "fineweb-edu 10BT"


def test_openwebtext(server):
    names = [f"plain_text/train-0000{number}-of-00002.parquet" for number in range(2)]
    server.repositories[OPENWEBTEXT] = {"other/a.parquet": FILES[0], **dict(zip(names, FILES[1:], strict=True))}
    found = make("openwebtext")
    assert ids_of(found.train) == expected(TEXTS[DOCUMENTS:])[0] and server.downloads == names
    assert found.source == "openwebtext"


def test_not_prepared(server):
    with pytest.raises(ValueError) as error:
        open_corpus("fineweb-edu", "gpt2")
    message = str(error.value)
    assert "python -m data.prepare fineweb-edu --tokenizer gpt2 " in message and "\n" not in message
    assert "not prepared" in message and "28 GB" in message
    assert server.requests == []  # training does not wait for the hub


def test_a_missing_shard_is_not_downloaded_by_training(server):
    (make().folder / "val_000000.bin").unlink()
    server.requests.clear()
    with pytest.raises(ValueError, match=r"val_000000\.bin is missing.*data\.prepare fineweb-edu"):
        open_corpus("fineweb-edu", "bytes+eot")
    assert server.requests == []


def test_preparing_again_downloads_nothing(server):
    before = make()
    server.downloads.clear()
    assert make().sha256 == before.sha256 and server.downloads == []


class Interrupted(build.Encoder):
    """Raises KeyboardInterrupt when it gets block number `count`."""

    count = 0

    def __call__(self, item):
        type(self).count -= 1
        if self.count < 0:
            raise KeyboardInterrupt
        return super().__call__(item)


def interrupt_after(monkeypatch, blocks):
    """Prepare until a number of blocks is encoded, and then stop as with Ctrl-C."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "Encoder", Interrupted)
        patch.setattr(Interrupted, "count", blocks)
        patch.setattr(build, "SAVE_SECONDS", -1)  # progress is stored after each block
        make()


@pytest.mark.parametrize("blocks", [0, 1, 5, 6, 8, 11, 17])
def test_interrupted_preparation_goes_on(server, data_root, monkeypatch, blocks):
    interrupt_after(monkeypatch, blocks)
    with pytest.raises(ValueError, match="cannot be used"):
        open_corpus("fineweb-edu", "bytes+eot")
    assert shards_of(make()) == expected_shards()
    assert server.downloads == sorted(server.repositories[FINEWEB])  # none of them twice
    assert left_behind(data_root) == []


def test_interrupted_many_times(monkeypatch):
    for _ in range(5):
        interrupt_after(monkeypatch, 3)
    assert shards_of(make()) == expected_shards()


def test_failed_download_keeps_the_files_before_it(server, data_root):
    server.mode = "001_00000.parquet"
    with pytest.raises(OSError, match="cannot download sample/10BT/001_00000") as error:
        make()
    unprepared(error)
    server.mode = "good"
    assert shards_of(make()) == expected_shards()
    assert server.downloads == sorted(server.repositories[FINEWEB])
    assert left_behind(data_root) == []


def test_connection_that_breaks_off_is_taken_up(server, data_root):
    server.mode = "breaks off"
    found = make()
    assert ids_of(found.train) == expected(TEXTS)[0]
    names = sorted(server.repositories[FINEWEB])
    assert server.downloads == [name for name in names for _ in range(2)]
    assert left_behind(data_root) == []


def test_file_with_another_sha256(server, data_root):
    server.mode = "changed"
    with pytest.raises(OSError) as error:
        make()
    message = unprepared(error)
    assert "cannot download sample/10BT/000_00000.parquet of HuggingFaceFW/fineweb-edu (its sha256 is" in message
    assert left_behind(data_root) == []
    server.mode = "good"
    assert ids_of(make().train) == expected(TEXTS)[0]  # the damaged file is not used


def test_a_damaged_download_is_not_used(server, data_root):
    """A file that is already in downloads/, but has changed there."""
    name = sorted(server.repositories[FINEWEB])[0]
    hub.dataset_files("fineweb-edu", "10BT")[0].download()
    path = data_root / "downloads" / name
    path.write_bytes(FILES[0][:-1] + b"x")
    with pytest.raises(OSError):
        make()
    assert ids_of(make().train) == expected(TEXTS)[0]


def test_finished_download_is_used(server):
    hub.dataset_files("fineweb-edu", "10BT")[0].download()
    make()
    assert server.downloads == sorted(server.repositories[FINEWEB])


def test_changed_data_set_is_prepared_again(server):
    before = make()
    server.repositories[FINEWEB]["sample/10BT/001_00000.parquet"] = file_of(["new " * 9])
    after = make()
    assert after.sha256 != before.sha256
    assert ids_of(after.train) == expected([*texts_of_file(0), "new " * 9, *TEXTS[2 * DOCUMENTS :]])[0]


@pytest.mark.parametrize("mode", ["error", "000_00000.parquet"])
def test_server_error(server, data_root, mode):
    server.mode = mode
    with pytest.raises(OSError) as error:
        make()
    message = unprepared(error)
    assert ("cannot list sample/10BT" if mode == "error" else "cannot download sample/10BT/000_00000") in message
    assert left_behind(data_root) == []
    server.mode = "good"
    assert ids_of(make().train) == expected(TEXTS)[0]


def test_server_that_is_not_there(monkeypatch):
    use(monkeypatch, "http://127.0.0.1:9")  # nobody listens on the discard port
    with pytest.raises(OSError) as error:
        make()
    assert "cannot list sample/10BT of HuggingFaceFW/fineweb-edu" in unprepared(error)


@pytest.mark.parametrize("files", [{}, {"sample/9BT/data.csv": b"text"}], ids=["missing", "without parquet"])
def test_empty_folder(server, files):
    server.repositories[FINEWEB] |= files
    with pytest.raises(ValueError) as error:
        make(sample="9BT")
    assert "sample/9BT of HuggingFaceFW/fineweb-edu has no parquet files; name another --sample" in unprepared(error)


def test_data_set_that_is_not_there(server):
    del server.repositories[OPENWEBTEXT]
    with pytest.raises(OSError) as error:
        make("openwebtext")
    assert "cannot list plain_text of Skylion007/openwebtext (" in unprepared(error, "openwebtext")


def test_file_without_the_column(server):
    with pytest.raises(ValueError) as error:
        make(text_field="body")
    assert "no text in 'body'; choose a --text_field: id, text" in unprepared(error)


def test_missing_package(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(data_files, "import_module", missing)
    with pytest.raises(ValueError) as error:
        make()
    message = unprepared(error)
    assert "package huggingface_hub" in message and "pip install -e '.[hub]'" in message
