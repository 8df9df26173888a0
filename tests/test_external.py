"""Token files of nanoGPT, llm.c and modded-nanogpt, used as they are."""

import os
import pickle

import numpy as np
import pytest
from helpers import rank_file
from test_build import ids_of

from data import external
from data.corpus import open_corpus, prepare
from data.shards import header
from data.tokenizer import make_tokenizer
from errors import UserError

END = 256  # id of end-of-text with bytes+eot
TEXTS = [f"The river bends at mile {mile}, naïve 東京 🦉.\n" for mile in range(50)]
VAL = [*TEXTS[0].encode(), END, *TEXTS[1].encode(), END]
TRAIN = [index for text in TEXTS[2:] for index in [*text.encode(), END]]

pytestmark = pytest.mark.usefixtures("data_root")


def write(path, ids, dtype="<u2", plain=False):
    """Write a token file with the 1,024-byte header, or without it as nanoGPT does."""
    ids = np.array(ids, dtype)
    path.write_bytes((b"" if plain else header(dtype, len(ids))) + ids.tobytes())


def nanogpt(folder):
    folder.mkdir(exist_ok=True)
    write(folder / "train.bin", TRAIN, plain=True)
    write(folder / "val.bin", VAL, plain=True)


def modded(folder):
    """Three training shards of different lengths; they are read in the order of their names."""
    folder.mkdir()
    for number, (start, end) in {3: (1500, None), 1: (0, 700), 2: (700, 1500)}.items():
        write(folder / f"fineweb_train_{number:06}.bin", TRAIN[start:end])
    write(folder / "fineweb_val_000000.bin", VAL)


def large_ids(folder):
    """llm.c's files for Llama 3 have ids of 32 bits."""
    folder.mkdir()
    write(folder / "x_train_0.bin", TRAIN, "<u4")
    write(folder / "x_val_0.bin", VAL, "<u4")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tokens"


@pytest.mark.parametrize("program, count", [(nanogpt, 1), (modded, 3), (large_ids, 1)])
def test_files_are_used_as_they_are(folder, data_root, monkeypatch, capsys, program, count):
    program(folder)
    (folder / "meta.pkl").write_bytes(pickle.dumps(print))  # of nanoGPT; it may run any code when it is read
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(external, "CHUNK", 7)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    found = open_corpus("tokens", "bytes+eot", folder)
    assert "checking tokens" in capsys.readouterr().err
    assert ids_of(found.train).tolist() == TRAIN and ids_of(found.val).tolist() == VAL
    assert len(found.train.shards) == count and len(found.val.shards) == 1
    assert (found.train.documents, found.val.documents) == (48, 2) and found.source == "tokens"
    assert found.val.text_bytes == len("".join(TEXTS[:2]).encode()) == len(VAL) - 2
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    assert not list(data_root.rglob("*.bin"))  # no copies
    monkeypatch.setattr(external, "map_shard", None)  # opening reads no tokens
    again = open_corpus("tokens", "bytes+eot", folder, verify=True)
    assert again.sha256 == found.sha256 and capsys.readouterr().err == ""


def test_tokens_of_several_bytes(tmp_path, folder, monkeypatch):
    """With a small file in GPT-2's format, whose last id is end-of-text."""
    words = [b" ri", b" riv", b" rive", b" river", b"Th", b"The", b"\xe6\x9d", b"\xe6\x9d\xb1\xe4"]
    ranks = rank_file(monkeypatch, [*(bytes([value]) for value in range(256)), *words])
    (tmp_path / "ranks").write_bytes(ranks)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    spec = f"gpt2:{tmp_path / 'ranks'}"
    made = make_tokenizer(spec)
    ids = [index for text in TEXTS for index in [*made.encode_ordinary(text), made.eot_token]]
    nanogpt(folder)
    write(folder / "val.bin", ids, plain=True)
    found = prepare("tokens", spec, folder)
    assert found.val.text_bytes == len("".join(TEXTS).encode()) > len(ids)
    assert found.val.documents == len(TEXTS) and ids_of(found.val).tolist() == ids


FAULTS = {
    "no val": (lambda folder: (folder / "fineweb_val_000000.bin").unlink(), r"no val.bin and no \*_val_\*.bin"),
    "truncated": (lambda folder: os.truncate(folder / "fineweb_train_000002.bin", 1100), "000002.bin has 1,100 bytes"),
    "no header": (lambda folder: write(folder / "val.bin", [*VAL, 999], plain=True), "val.bin has the id 999, but"),
    "no tokens": (lambda folder: write(folder / "fineweb_val_000001.bin", []), "has no tokens"),
    "empty": (lambda folder: (folder / "val.bin").write_bytes(b""), "has no tokens"),
    "two types": (lambda folder: write(folder / "fineweb_train_000002.bin", TRAIN, "<u4"), "ids of another type"),
    "large id": (
        lambda folder: write(folder / "fineweb_val_000001.bin", [257]),
        "has the id 257, but bytes.eot has 257",
    ),
}


@pytest.mark.parametrize("damage, message", FAULTS.values(), ids=FAULTS)
def test_unusable_files(folder, data_root, damage, message):
    modded(folder)
    damage(folder)
    with pytest.raises(UserError, match=message):
        prepare("tokens", "bytes+eot", folder)
    assert not list(data_root.rglob("manifest.json"))


def test_wrong_arguments(folder):
    nanogpt(folder)
    for spec in ("char", "char+eot", "bpe:512"):
        with pytest.raises(UserError, match="name gpt2 or bytes"):
            prepare("tokens", spec, folder)
    with pytest.raises(UserError, match="has the id 256, but bytes has 256 tokens"):
        prepare("tokens", "bytes", folder)
    for input in (None, folder / "nowhere", folder / "val.bin"):
        with pytest.raises(UserError, match="--input"):
            prepare("tokens", "bytes+eot", input)
